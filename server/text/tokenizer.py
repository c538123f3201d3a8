"""Encodes texts and chats of a base model as tokens, and gives the bytes of a token.

Results are those of transformers' AutoTokenizer, without importing transformers: see read_tokenizer.
"""

import asyncio
import json
import math
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
from weakref import WeakValueDictionary

import tokenizers

from ...schemas.chats.messages import Chat
from ...schemas.chats.template import ChatTemplates
from ...schemas.chats.tokenizer import ChatTokenizer
from ...schemas.errors import OperationError, RequestError
from ...workers.protocol.worker_config import ServedModel

_NUM_THREADS = 2
_READ_SECONDS = 120.0
_REFUSED_SECONDS = 60.0
_LARGEST_ID = 2**32 - 1
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

T = TypeVar("T")


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer's files as transformers reads them."""

    backend: str
    """JSON of the tokenizers library."""
    special_tokens: dict[str, str]
    """Name, such as bos_token -> its text."""
    chat_templates: dict[str, str]
    """Name -> Jinja source; empty for a model without a chat template."""


class Tokenizer:
    """The tokenizer of one base model."""

    chats: ChatTokenizer
    """Writes and tokenizes chats and rows of datasets."""
    num_prefix_spaces: int
    """Spaces that the tokenizer prepends to a text, and removes when it decodes tokens as a whole text."""

    def __init__(self, facts: TokenizerFacts) -> None:
        self._backend = tokenizers.Tokenizer.from_str(facts.backend)
        decoder = json.loads(facts.backend)["decoder"] or {}
        decoders = {one["type"] for one in (decoder, *decoder.get("decoders", ())) if one}
        self._spells_bytes = "ByteLevel" in decoders
        self._falls_back_to_bytes = "ByteFallback" in decoders
        self._marks_spaces = not self._spells_bytes and bool(decoders & {"Metaspace", "Replace"})
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        end_token = facts.special_tokens.get("eos_token")
        self.chats = ChatTokenizer(
            encode=self._encode,
            encode_whole=lambda text: self._backend.encode(text).ids,
            added_tokens={token.content: token_id for token_id, token in added.items()},
            end_token_id=None if end_token is None else self._backend.token_to_id(end_token),
            templates=ChatTemplates(facts.chat_templates, facts.special_tokens),
        )
        self._longest_token = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, str] = {}
        self.num_prefix_spaces = self._count_marks()

    def encode(self, text: str, most_tokens: int) -> list[int]:
        """Encodes a text, with the tokens that begin every text of the model, such as BOS, and without end token.

        Args:
            most_tokens: size of the context. A text that is returned may exceed it.
        Raises:
            RequestError: the text is so long that it must exceed the context; it is not encoded then.
        """
        self._check_length(len(text), most_tokens)
        return self.chats.encode_text(text)

    def encode_chat(self, chat: Chat, most_tokens: int) -> list[int]:
        """Encodes a chat like `AutoTokenizer.apply_chat_template`.

        Raises:
            RequestError: the text is too long (see `encode`), already by the contents of the messages.
            ChatError: see ChatTemplates.render.
        """
        # Before the template runs, which takes seconds over texts as long as a body may be.
        self._check_length(sum(len(str(message.get("content"))) for message in chat.messages), most_tokens)
        text = self.chats.templates.render(chat)
        self._check_length(len(text), most_tokens)
        return self._encode(text)

    def backend(self) -> str:
        """Returns JSON of the tokenizers library."""
        return self._backend.to_str()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the token's bytes within a text. Joined they are UTF-8; an unknown id has none."""
        if (spelled := self._bytes.get(token_id)) is None:
            spelled = self._read_bytes(token_id) if 0 <= token_id <= _LARGEST_ID else b""
            if spelled:  # others are as many as clients send
                self._bytes[token_id] = spelled
        return spelled

    def name_of(self, token_id: int) -> str:
        """Returns the token's text; its escaped bytes after `bytes:` if they are not whole characters; its id if
        unknown.
        """
        if (name := self._names.get(token_id)) is None:
            name = _name(token_id, spelled := self.token_bytes(token_id))
            if spelled:
                self._names[token_id] = name
        return name

    def _check_length(self, num_characters: int, most_tokens: int) -> None:
        most_characters = most_tokens * self._longest_token
        if num_characters > most_characters:
            raise RequestError(
                f"the prompt has {num_characters} characters, but the model's context of {most_tokens} tokens holds at "
                f"most {most_characters}: shorten it"
            )

    def _encode(self, text: str) -> list[int]:
        # `encode` would hold the GIL, and so block the event loop; encode_batch releases it.
        return self._backend.encode_batch([text], add_special_tokens=False)[0].ids

    def _count_marks(self) -> int:
        tokens = self._backend.encode("a", add_special_tokens=False).ids
        spelled = b"".join(map(self.token_bytes, tokens)).decode(errors="replace")
        return len(spelled) - len(self._backend.decode(tokens)) if spelled.startswith(" ") else 0

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
    """The tokenizers of all base models, each read when first requested. `clock` gives monotonic seconds."""

    def __init__(self, models: Sequence[ServedModel], clock: Callable[[], float] = time.monotonic) -> None:
        self._models = {model.name: model for model in models}
        self._clock = clock
        self._reading: dict[str, asyncio.Task[Tokenizer]] = {}
        self._refused_at: dict[str, float] = {}
        # A separate pool, since long texts would block other work in threads.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "tokenizer")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def get(self, base_model: str) -> Tokenizer:
        """Returns the tokenizer of a base model, reading it if needed. Errors are remembered for a minute, since
        reading one costs seconds of a core.

        Raises:
            RequestError: the model has no usable tokenizer.
            OperationError: it could not be read.
        """
        may_have_changed = self._refused_at.get(base_model, math.inf) + _REFUSED_SECONDS <= self._clock()
        if base_model not in self._reading or may_have_changed:
            self._refused_at.pop(base_model, None)
            self._reading[base_model] = asyncio.create_task(self._read(base_model))
        return await asyncio.shield(self._reading[base_model])

    async def run_in_thread(self, tenant_id: str, work: Callable[[], T]) -> T:
        """Runs `work` on a long text in a thread. Each tenant has one thread at a time: else its long texts, which take
        up to ten seconds each, would keep both from all others."""
        turn = self._turns.setdefault(tenant_id, asyncio.Lock())
        await turn.acquire()
        working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        working.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(working)  # a thread cannot be cancelled

    async def _read(self, base_model: str) -> Tokenizer:
        try:
            facts = await _read(self._models[base_model])
            return await asyncio.to_thread(lambda: Tokenizer(TokenizerFacts(**json.loads(facts))))
        except Exception:
            self._refused_at[base_model] = self._clock()
            raise


async def _read(model: ServedModel) -> bytes:
    """Returns JSON of TokenizerFacts, read in a separate process, which takes seconds."""
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
    if process.returncode and process.returncode < 0:  # out of memory, or Ctrl-C, which reaches all processes
        message = f"reading the tokenizer of {model.name} was ended by {signal.Signals(-process.returncode).name}"
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


@cache
def _byte_of_letter() -> Mapping[str, int]:
    """Returns the alphabet of byte-level tokenizers: printable bytes map to themselves, the others to characters from
    256 on.
    """
    printable = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
