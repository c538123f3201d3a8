"""Tokenizer: a base model's text and chats to tokens, and the bytes of a token; Tokenizers: those of all base models.

Exactly as transformers' AutoTokenizer does it, without transformers: see read_tokenizer.
"""

import asyncio
import json
import re
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import tokenizers
from jinja2 import TemplateError
from pydantic import JsonValue

from ...schemas.errors import OperationError, RequestError
from ...workers.protocol.config import ServedModel
from .chat_template import ChatTemplate, Message

_NUM_THREADS = 2
_READ_SECONDS = 120.0
_REFUSED_SECONDS = 60.0
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

Result = TypeVar("Result")


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


class UnreadTools(Exception):
    """A chat has tools, and the model's chat template has no place for them."""


class Tokenizer:
    """num_marks: spaces that texts are given in front and lose when tokens are read as a text of their own."""

    def __init__(self, facts: TokenizerFacts) -> None:
        self._backend = tokenizers.Tokenizer.from_str(facts.backend)
        self._templates = {
            name: ChatTemplate(source, facts.special_tokens) for name, source in facts.chat_templates.items()
        }
        decoders = _decoder_types(facts.backend)
        self._spells_bytes = "ByteLevel" in decoders
        self._falls_back_to_bytes = "ByteFallback" in decoders
        self._marks_spaces = not self._spells_bytes and bool(decoders & {"Metaspace", "Replace"})
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._longest_token = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, str] = {}
        self.num_marks = self._count_marks()

    def encode(self, text: str, most_tokens: int) -> list[int]:
        """With the tokens that begin every text of the model, such as BOS.

        most_tokens: of the context. A text that is longer whatever its tokens is refused with RequestError, before it
        has taken its time; others may have more tokens, too.
        """
        return self._encode(text, most_tokens, add_special_tokens=True)

    def encode_chat(self, chat: Chat, most_tokens: int) -> list[int]:
        """As `AutoTokenizer.apply_chat_template`.

        Raises RequestError: no chat template, or it refuses the chat, or what comes of it is too long as in `encode`;
        UnreadTools where it would leave out the tools.
        """
        template = self._template(chat)
        try:
            if chat.tools is not None and not template.reads_tools:
                raise UnreadTools
            text = template.render(chat.messages, chat.tools, chat.add_generation_prompt, chat.variables or {})
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RequestError(f"the model's chat template does not take these messages: {error}") from None
        return self._encode(text, most_tokens, add_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Of a token within a text, UTF-8 once they are joined; of ids that the tokenizer does not know, none."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._read_bytes(token_id)
        return self._bytes[token_id]

    def name_of(self, token_id: int) -> str:
        """Its text; of one that is not whole characters `bytes:\\xe2\\x82`; of one that is not known its number."""
        if token_id not in self._names:
            self._names[token_id] = _name(token_id, self.token_bytes(token_id))
        return self._names[token_id]

    def _encode(self, text: str, most_tokens: int, add_special_tokens: bool) -> list[int]:
        most_characters = most_tokens * self._longest_token
        if len(text) > most_characters:
            raise RequestError(
                f"the prompt has {len(text)} characters, and the context of the model, {most_tokens} tokens, has no "
                f"more than {most_characters}: shorten it"
            )
        # `encode` would keep the interpreter, and so the event loop, waiting until it is done.
        return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def _count_marks(self) -> int:
        tokens = self._backend.encode("a", add_special_tokens=False).ids
        spelled = b"".join(map(self.token_bytes, tokens)).decode(errors="replace")
        return len(spelled) - len(self._backend.decode(tokens)) if spelled.startswith(" ") else 0

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
        if self._marks_spaces:
            return piece.replace(_SPACE, " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


class Tokenizers:
    """By base model, read when first asked for. `clock`: monotonic seconds."""

    def __init__(self, models: Sequence[ServedModel], clock: Callable[[], float] = time.monotonic) -> None:
        self._models = {model.name: model for model in models}
        self._clock = clock
        self._reading: dict[str, asyncio.Task[Tokenizer]] = {}
        self._refused_at: dict[str, float] = {}
        # Their own: long texts would keep the other work of threads waiting.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "tokenizer")

    async def get(self, base_model: str) -> Tokenizer:
        """Raises RequestError when the model has none, OperationError when it could not be read.

        Both are remembered for a minute: reading one costs seconds of a core.
        """
        if base_model not in self._reading or self._may_have_changed(base_model):
            self._refused_at.pop(base_model, None)
            self._reading[base_model] = asyncio.create_task(self._read(base_model))
        return await asyncio.shield(self._reading[base_model])

    async def apart(self, work: Callable[[], Result]) -> Result:
        """For long texts: done in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _may_have_changed(self, base_model: str) -> bool:
        refused_at = self._refused_at.get(base_model)
        return refused_at is not None and refused_at + _REFUSED_SECONDS <= self._clock()

    async def _read(self, base_model: str) -> Tokenizer:
        try:
            facts = await _read(self._models[base_model])
            return await asyncio.to_thread(lambda: Tokenizer(TokenizerFacts(**json.loads(facts))))
        except Exception:
            self._refused_at[base_model] = self._clock()
            raise


async def _read(model: ServedModel) -> bytes:
    """JSON of TokenizerFacts, made in a process of its own, in seconds."""
    program = (sys.executable, "-m", f"{__package__}.read_tokenizer", str(model.source))
    process = await asyncio.create_subprocess_exec(*program, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(_READ_SECONDS):
            facts, errors = await process.communicate()
    except TimeoutError:
        message = f"the tokenizer of {model.name} was not read within {_READ_SECONDS:g} s: try again in a minute"
        raise OperationError(message, "server") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode and process.returncode < 0:  # memory ran out, or Ctrl-C reached all processes
        message = f"the tokenizer of {model.name} was not read: {signal.Signals(-process.returncode).name} ended that"
        raise OperationError(f"{message}: try again in a minute", "server")
    if process.returncode:
        reason = (errors.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise RequestError(f"text needs the tokenizer of {model.name}, which {model.source} does not have: {reason}")
    return facts


def _name(token_id: int, spelled: bytes) -> str:
    if not spelled:
        return f"token_id:{token_id}"
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _decoder_types(backend: str) -> set[str]:
    decoder = json.loads(backend)["decoder"] or {}
    return {one["type"] for one in (decoder, *decoder.get("decoders", ()))} if decoder else set()


@cache
def _byte_of_letter() -> Mapping[str, int]:
    """The alphabet in which byte-level tokenizers spell bytes: printable ones as they are, the others from 256 on."""
    printable = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
