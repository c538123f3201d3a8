"""Chats become prompts with everything in their messages, or are refused."""

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from trainhouse.schemas.chats.openai import ChatCompletionRequest, OpenAiError
from trainhouse.schemas.errors import RequestError
from trainhouse.server.openai.chats import render_prompts
from trainhouse.server.text.tokenizer import Tokenizer, TokenizerFacts

USER = {"role": "user", "content": "Rain?"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "weather"}}

JOINS = "{% for message in messages %}{{ '<' + message['role'] + ':' + message['content'] + '>' }}{% endfor %}"
"""SmolLM2's way: content must be a string, and everything else is ignored."""
SETS_TOOLS = "{% if tools is not defined %}{% set tools = none %}{% endif %}{{ tools | length if tools }}" + JOINS
NAMES_ANOTHER = "{% for tools in messages[0].tools %}{{ 'tools' }}{% endfor %}" + JOINS


def tokenizer(**templates: str) -> Tokenizer:
    """Returns a tokenizer with one token per character, whose id is the character code."""
    backend = Backend(models.BPE({chr(code): code for code in range(128)}, []))
    return Tokenizer(TokenizerFacts(backend.to_str(), {}, templates))


def rendered(reader: Tokenizer, messages: list[Any], **fields: Any) -> str:
    (prompt,) = render_prompts(ChatCompletionRequest(model="m", messages=messages, **fields), reader, 1000)
    return "".join(map(chr, prompt.token_ids))


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_tool_call_without_content_renders_as_empty(content: dict[str, Any]) -> None:
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]} | content, {"role": "tool", "content": "no"}]
    assert rendered(tokenizer(default=JOINS), messages) == "<user:Rain?><assistant:><tool:no>"


def test_half_a_surrogate_pair_in_the_arguments_of_a_call_is_refused() -> None:
    """The body is checked for them, but not what a string of the body spells."""
    call = CALL | {"function": {"name": "weather", "arguments": '{"city": "\\ud800"}'}}
    reads_calls = JOINS + "{{ messages[1].tool_calls[0].function.arguments.city }}"
    with pytest.raises(OpenAiError, match=r"messages.1.tool_calls has arguments that are not valid JSON"):
        rendered(tokenizer(default=reads_calls), [USER, {"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("template", [JOINS, NAMES_ANOTHER])
def test_tools_that_the_template_ignores_are_refused(template: str) -> None:
    reader = tokenizer(default=template)
    with pytest.raises(OpenAiError, match=r"m: the chat template ignores tools.*leave them out") as refused:
        rendered(reader, [USER], tools=[TOOL])
    assert (refused.value.status, refused.value.param) == (400, "tools")
    for nothing in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
        assert rendered(reader, [USER], **nothing) == "<user:Rain?>"


@pytest.mark.parametrize("templates", [{"default": SETS_TOOLS}, {"default": JOINS, "tool_use": SETS_TOOLS}])
def test_tools_that_the_template_reads_are_accepted(templates: dict[str, str]) -> None:
    assert rendered(tokenizer(**templates), [USER], tools=[TOOL]) == "1<user:Rain?>"


@pytest.mark.parametrize(
    ("messages", "words"),
    [([USER] * 1001, "has 1001 messages"), ([USER | {"content": "a" * 600}] * 2, "the prompt has 1200 characters")],
    ids=["many", "long"],
)
def test_a_chat_that_cannot_fit_the_context_is_refused_before_its_template_runs(
    messages: list[Any], words: str
) -> None:
    reader = tokenizer(default="{{ raise_exception('it ran') }}")
    with pytest.raises(RequestError, match=words):
        rendered(reader, messages)
    with pytest.raises(OpenAiError, match="it ran"):
        rendered(reader, messages[:1])
