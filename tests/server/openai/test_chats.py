"""A chat becomes a prompt with all that was said in it, or is refused."""

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from trainhouse.schemas.openai import ChatCompletionRequest, OpenAiError
from trainhouse.server.openai.chats import prompts_of
from trainhouse.server.text.tokenizer import Tokenizer, TokenizerFacts

USER = {"role": "user", "content": "Rain?"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "weather"}}

JOINS = "{% for message in messages %}{{ '<' + message['role'] + ':' + message['content'] + '>' }}{% endfor %}"
"""As of SmolLM2: content is taken for a text, and nothing else is looked at."""
SETS_TOOLS = "{% if tools is not defined %}{% set tools = none %}{% endif %}{{ tools | length if tools }}" + JOINS
NAMES_ANOTHER = "{% for tools in messages[0].tools %}{{ 'tools' }}{% endfor %}" + JOINS


def tokenizer(**templates: str) -> Tokenizer:
    """A token a character, whose id is its code."""
    backend = Backend(models.BPE({chr(code): code for code in range(128)}, []))
    return Tokenizer(TokenizerFacts(backend.to_str(), {}, templates))


def rendered(reader: Tokenizer, messages: list[Any], **fields: Any) -> str:
    (prompt,) = prompts_of(ChatCompletionRequest(model="m", messages=messages, **fields), reader, 1000)
    return "".join(map(chr, prompt.token_ids))


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_call_without_content_has_an_empty_one(content: dict[str, Any]) -> None:
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]} | content, {"role": "tool", "content": "no"}]
    assert rendered(tokenizer(default=JOINS), messages) == "<user:Rain?><assistant:><tool:no>"


@pytest.mark.parametrize("template", [JOINS, NAMES_ANOTHER])
def test_tools_that_a_template_does_not_read_are_refused(template: str) -> None:
    reader = tokenizer(default=template)
    with pytest.raises(OpenAiError, match=r"the chat template of m ignores tools.*leave them out") as refused:
        rendered(reader, [USER], tools=[TOOL])
    assert (refused.value.status, refused.value.param) == (400, "tools")
    for nothing in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
        assert rendered(reader, [USER], **nothing) == "<user:Rain?>"


@pytest.mark.parametrize("templates", [{"default": SETS_TOOLS}, {"default": JOINS, "tool_use": SETS_TOOLS}])
def test_tools_that_a_template_reads_are_taken(templates: dict[str, str]) -> None:
    assert rendered(tokenizer(**templates), [USER], tools=[TOOL]) == "1<user:Rain?>"
