"""Texts and chats get the same tokens as from transformers' AutoTokenizer, without loading transformers or torch."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from psutil import Process
from tokenizers.processors import TemplateProcessing
from trainhouse.schemas.chats import template as template_module
from trainhouse.schemas.chats.messages import Chat, ChatError
from trainhouse.schemas.errors import OperationError, RequestError
from trainhouse.server.text import tokenizer as tokenizer_module
from trainhouse.server.text.read_tokenizer import read
from trainhouse.server.text.tokenizer import Tokenizer, Tokenizers
from trainhouse.workers.protocol.worker_config import ServedModel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ...letters import letter_tokenizer
from ..api import Clock

pytestmark = pytest.mark.anyio

CONTEXT = 100_000
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What is the weather in a city? <b>& more</b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "  Hello 😀 </s> "}],
    "turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?", "name": "ann"},
        {"role": "assistant", "content": "Because.", "thinking": "Hm.", "tool_calls": None},
        {"role": "user", "content": "日本語\n"},
    ],
    "tools": [
        {"role": "user", "content": "And the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": '{"sun": true}'},
        {"role": "tool", "tool_call_id": "2", "content": ""},
    ],
}
LOOPS = """{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}
    {# nothing of this #}{{ message['role'] | upper }}: {{ message.content or dict(a=1)['a'] }}
{% endfor %}{{ tools | length if tools else strftime_now('%Y') }}{{ documents is none }}{{ eos_token }}"""


def plain(tokenizer: PreTrainedTokenizerFast) -> None:
    """Leaves the tokenizer unchanged."""


def loops(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = LOOPS


def two_templates(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ tools | tojson }}"}


def begins_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])


def cuts_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=8)


@pytest.fixture(params=[plain, loops, two_templates, begins_texts, cuts_texts], ids=lambda change: change.__name__)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    change: Callable[[PreTrainedTokenizerFast], None] = request.param
    tokenizer = letter_tokenizer()
    change(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["", "with tools"])
@pytest.mark.parametrize("prompts", [True, False])
async def test_a_chat_has_the_tokens_that_transformers_gives_it(
    saved: Path, chat: str, tools: list | None, prompts: bool
) -> None:
    messages = CHATS[chat]
    expected = AutoTokenizer.from_pretrained(saved).apply_chat_template(
        messages, tools=tools, add_generation_prompt=prompts, return_dict=False, brief=True
    )
    asked = Chat(messages, tools, prompts, {"brief": True})
    assert Tokenizer(read(str(saved))).encode_chat(asked, CONTEXT) == expected


@pytest.mark.parametrize("text", ["", "Hello </s> 😀", "long " * 5000])
async def test_a_text_has_the_tokens_that_transformers_gives_it(saved: Path, text: str) -> None:
    assert Tokenizer(read(str(saved))).encode(text, CONTEXT) == AutoTokenizer.from_pretrained(saved).encode(text)


async def test_a_refusal_by_the_chat_template_is_reported_with_its_reason(tmp_path: Path) -> None:
    letter_tokenizer().save_pretrained(tmp_path)
    tokenizer = Tokenizer(read(str(tmp_path)))
    with pytest.raises(ChatError, match="no role judge"):
        tokenizer.encode_chat(Chat([{"role": "judge", "content": "x"}]), CONTEXT)
    with pytest.raises(ChatError, match="does not accept these messages"):
        tokenizer.encode_chat(Chat([{"role": "assistant", "tool_calls": 5}]), CONTEXT)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__init__=1) }}",
        "{% set a = namespace() %}{% set a._b = 1 %}",
        "{{ dict.__call__.__globals__ }}",
    ],
)
async def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, template: str) -> None:
    saved = letter_tokenizer()
    saved.chat_template = template
    saved.save_pretrained(tmp_path)
    with pytest.raises(ChatError, match="does not accept these messages"):
        Tokenizer(read(str(tmp_path))).encode_chat(Chat([{"role": "user", "content": "x"}]), CONTEXT)


async def test_without_a_chat_template_only_texts_work(tmp_path: Path) -> None:
    saved = letter_tokenizer()
    saved.chat_template = None
    saved.save_pretrained(tmp_path)
    tokenizer = Tokenizer(read(str(tmp_path)))
    assert tokenizer.encode("x", CONTEXT)
    with pytest.raises(ChatError, match="no chat template"):
        tokenizer.encode_chat(Chat([{"role": "user", "content": "x"}]), CONTEXT)


@pytest.mark.slow
async def test_a_missing_tokenizer_is_reported_and_retried_after_a_minute(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    clock = Clock()
    tokenizers = Tokenizers([ServedModel("tiny", str(tmp_path))], clock)
    (tmp_path / "config.json").write_text((tiny_models["llama"] / "config.json").read_text())
    with pytest.raises(RequestError, match="needs the tokenizer of tiny"):
        await tokenizers.get("tiny")
    letter_tokenizer().save_pretrained(tmp_path)
    clock.now += 59
    with pytest.raises(RequestError, match="needs the tokenizer of tiny"):
        await tokenizers.get("tiny")
    clock.now += 1
    tokenizer = await tokenizers.get("tiny")
    clock.now += 100
    assert tokenizer is await tokenizers.get("tiny")


async def test_a_tokenizer_that_is_not_read_in_time_is_a_server_error(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "_READ_SECONDS", 0.01)
    with pytest.raises(OperationError, match="not read within") as failed:
        await Tokenizers([ServedModel("tiny", str(saved))]).get("tiny")
    assert failed.value.category == "server"


async def test_a_killed_tokenizer_reader_is_a_server_error(saved: Path) -> None:
    """Ctrl-C or the out-of-memory killer may end the reader; that does not mean that the model has no tokenizer."""
    getting = asyncio.create_task(Tokenizers([ServedModel("tiny", str(saved))]).get("tiny"))
    while not (readers := [one for one in Process().children() if str(saved) in one.cmdline()]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    readers[0].kill()
    with pytest.raises(OperationError, match="ended by SIGKILL: try again") as failed:
        await getting
    assert failed.value.category == "server"


async def test_tokenizing_a_long_text_does_not_block_the_event_loop(tmp_path: Path) -> None:
    letter_tokenizer().save_pretrained(tmp_path)
    tokenizer, tokenizers = Tokenizer(read(str(tmp_path))), Tokenizers([])
    text = "the model is here and " * 40_000
    tokenizing = asyncio.create_task(tokenizers.run_in_thread("t", lambda: tokenizer.encode(text, len(text))))
    num_turns = 0
    while not tokenizing.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 10, "tokenizing must release the interpreter lock"
    assert len(await tokenizing) > 100_000


async def test_long_texts_of_a_tenant_leave_a_thread_to_the_others() -> None:
    tokenizers, may_end = Tokenizers([]), threading.Event()
    crowd = [asyncio.create_task(tokenizers.run_in_thread("a", lambda: may_end.wait(60))) for _ in range(5)]
    try:
        async with asyncio.timeout(30):
            assert await tokenizers.run_in_thread("b", lambda: "done") == "done"
            crowd[0].cancel()  # its thread continues, and counts
            crowd[1].cancel()
            assert await tokenizers.run_in_thread("b", lambda: "done") == "done"
            assert [each.done() for each in crowd] == [True, True, False, False, False]
    finally:
        may_end.set()
    assert await asyncio.gather(*crowd[2:]) == [True] * 3


async def test_text_that_cannot_fit_the_context_is_refused_before_tokenizing(tmp_path: Path) -> None:
    letter_tokenizer().save_pretrained(tmp_path)
    tokenizer = Tokenizer(read(str(tmp_path)))
    longest = max(letter_tokenizer().get_vocab(), key=len)
    assert tokenizer.encode("a" * 10 * len(longest), most_tokens=10)
    with pytest.raises(RequestError, match="shorten it"):
        tokenizer.encode("a" * (10 * len(longest) + 1), most_tokens=10)
    with pytest.raises(RequestError, match="shorten it"):
        tokenizer.encode_chat(Chat([{"role": "user", "content": "a" * 10 * len(longest)}]), most_tokens=10)


@pytest.mark.slow
def test_reading_and_using_a_tokenizer_loads_no_torch(tmp_path: Path) -> None:
    letter_tokenizer().save_pretrained(tmp_path)
    code = f"""
import asyncio, json, sys
from trainhouse.schemas.chats.messages import Chat
from trainhouse.server.text.tokenizer import Tokenizers
from trainhouse.workers.protocol.worker_config import ServedModel
async def main():
    tokenizer = await Tokenizers([ServedModel("tiny", {str(tmp_path)!r})]).get("tiny")
    return tokenizer.encode_chat(Chat([{{"role": "user", "content": "Hello"}}]), 100)
tokens = asyncio.run(main())
print(json.dumps([tokens, sorted({{"torch", "transformers"}} & set(sys.modules))]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    tokens, loaded = json.loads(done.stdout)
    assert loaded == []
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_dict=False
    )
    assert tokens == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes longer than"),
        ("{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}", "recursion depth"),
        ("{% set text = 'a' * 1000000 %}{% for i in range(99999) %}{{ text }}{% endfor %}", "writes more than"),
    ],
)
def test_a_chat_template_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, reason: str
) -> None:
    monkeypatch.setattr(template_module, "_RENDER_SECONDS", 0.5 if "takes" in reason else 60)
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ChatError, match=reason):
        Tokenizer(read(str(tmp_path))).encode_chat(Chat([{"role": "user", "content": "a"}]), CONTEXT)
