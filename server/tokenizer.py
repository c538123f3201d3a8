"""Tokenizer: a base model's text and chats to tokens, and the bytes of a token; Tokenizers: those of all base models.

Exactly as transformers' AutoTokenizer does it, without transformers: see read_tokenizer.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ParamSpec, TypeVar

import tokenizers
from jinja2 import TemplateError
from pydantic import JsonValue

from ..schemas.errors import RequestError
from ..workers.config import ServedModel
from .chat_template import ChatTemplate, Message

_LONG_TEXT = 8192
"""Characters; what is longer is tokenized off the event loop."""

_READ_SECONDS = 120.0
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class TokenizerFacts:
    """What transformers makes of a tokenizer's files.

    backend: JSON of the tokenizers library. special_tokens: name, such as bos_token -> its text.
    chat_templates: name -> Jinja; empty for a model that does not chat.
    """

    backend: str
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]


@dataclass(frozen=True)
class Chat:
    """What a chat template turns into a prompt. variables: what else the template may read."""

    messages: Sequence[Message]
    tools: Sequence[JsonValue] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, JsonValue] | None = None


class Tokenizer:
    """marks_spaces: words begin with their space, the first of a text with one that the text does not have."""

    def __init__(self, facts: TokenizerFacts) -> None:
        self._backend = tokenizers.Tokenizer.from_str(facts.backend)
        self._templates = {
            name: ChatTemplate(source, facts.special_tokens) for name, source in facts.chat_templates.items()
        }
        decoders = _decoder_types(facts.backend)
        self._spells_bytes = "ByteLevel" in decoders
        self._falls_back_to_bytes = "ByteFallback" in decoders
        self.marks_spaces = not self._spells_bytes and bool(decoders & {"Metaspace", "Replace"})
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    async def encode(self, text: str) -> list[int]:
        """With the tokens that begin every text of the model, such as BOS."""
        return await _off_the_loop_if(len(text) > _LONG_TEXT, self._encode, text, True)

    async def encode_chat(self, chat: Chat) -> list[int]:
        """As `AutoTokenizer.apply_chat_template`. Raises RequestError: no chat template, or it refuses the chat."""
        return await _off_the_loop_if(_length((chat.messages, chat.tools)) > _LONG_TEXT, self._encode_chat, chat)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Of a token within a text, UTF-8 once they are joined; of ids that the tokenizer does not know, none."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._read_bytes(token_id)
        return self._bytes[token_id]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _encode_chat(self, chat: Chat) -> list[int]:
        template = self._template(chat)
        try:
            text = template.render(chat.messages, chat.tools, chat.add_generation_prompt, chat.variables or {})
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RequestError(f"the model's chat template does not take these messages: {error}") from None
        return self._encode(text, False)

    def _template(self, chat: Chat) -> ChatTemplate:
        names = ("tool_use", "default") if chat.tools is not None else ("default",)
        found = next((self._templates[name] for name in names if name in self._templates), None)
        if found is None:
            raise RequestError("the model has no chat template: send a prompt to /v1/completions")
        return found

    def _read_bytes(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._spells_bytes:
            table = _byte_of_letter()
            return bytes(table[letter] for letter in piece) if all(one in table for one in piece) else piece.encode()
        if self._falls_back_to_bytes and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if self.marks_spaces:
            return piece.replace(_SPACE, " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


class Tokenizers:
    """By base model, read when first asked for."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {model.name: model for model in models}
        self._reading: dict[str, asyncio.Task[Tokenizer]] = {}

    async def get(self, base_model: str) -> Tokenizer:
        """Raises RequestError when the model has none."""
        if base_model not in self._reading:
            reading = asyncio.to_thread(_read, self._models[base_model])
            self._reading[base_model] = asyncio.create_task(reading)
        try:
            return await asyncio.shield(self._reading[base_model])
        except Exception:
            self._reading.pop(base_model, None)  # it may go better next time
            raise


def _read(model: ServedModel) -> Tokenizer:
    """In a process of its own, in seconds."""
    program = [sys.executable, "-m", f"{__package__}.read_tokenizer", model.source]
    done = subprocess.run(program, capture_output=True, text=True, timeout=_READ_SECONDS, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RequestError(f"text needs the tokenizer of {model.name}, which {model.source} does not have: {reason}")
    return Tokenizer(TokenizerFacts(**json.loads(done.stdout)))


async def _off_the_loop_if(
    long: bool, function: Callable[Parameters, Answer], *arguments: Parameters.args, **options: Parameters.kwargs
) -> Answer:
    return await asyncio.to_thread(function, *arguments, **options) if long else function(*arguments, **options)


def _length(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(_length(part) for part in parts)


def _decoder_types(backend: str) -> set[str]:
    decoder = json.loads(backend)["decoder"] or {}
    return {one["type"] for one in (decoder, *decoder.get("decoders", ()))} if decoder else set()


@cache
def _byte_of_letter() -> Mapping[str, int]:
    """The alphabet in which byte-level tokenizers spell bytes: printable ones as they are, the others from 256 on."""
    printable = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
