"""Answer: writes what OpenAI's clients are answered, but for the choices, which each kind of completion has of its own.

JSON is put together of pieces: of what a sample has, large as it may be, only its own JSON is kept.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import JsonValue
from pydantic_core import to_json

from ...schemas.openai import Asking
from ...schemas.openai_answers import Usage
from ..sampling.prompts import Prompt
from ..text.tokenizer import Tokenizer
from .choices import Echo, Fragment, Scored


@dataclass(frozen=True)
class Told:
    """Of all samples of a prompt: the prompt in front of each, and the rest, one fragment a sample."""

    echo: Echo
    fragments: Iterable[Fragment]


class Answer(ABC):
    """kind and chunk_kind: the `object` of an answer and of a chunk of a stream. id_prefix: of their ids."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, asked: Asking, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> None:
        self.asked = asked
        self.tokenizer = tokenizer
        self.prompts = prompts
        self._id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._head, self._chunk_head = self._begin(self.kind), self._begin(self.chunk_kind)

    @abstractmethod
    def choices(self, told: Told) -> Iterator[object]:
        """Those of a whole answer."""

    @abstractmethod
    def part(self, fragment: Fragment) -> object:
        """The choice of a chunk."""

    def beside(self, first: bool) -> dict[str, JsonValue]:
        """Fields beside the choices. first: of a whole answer, or of the first chunk of a choice."""
        return {}

    def whole(self, told: Iterable[Told], usage: Usage) -> bytes:
        choices = b",".join(json_of(choice) for one in told for choice in self.choices(one))
        return self._body(self._head, choices, {**self.beside(first=True), "usage": usage})

    def chunk(self, fragment: Fragment) -> bytes:
        return self._body(self._chunk_head, json_of(self.part(fragment)), self.beside(fragment.first))

    def last_chunk(self, usage: Usage) -> bytes:
        """The one without a choice."""
        return self._body(self._chunk_head, b"", {"usage": usage})

    def _begin(self, kind: str) -> bytes:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self.asked.model}
        return to_json(head)[:-1] + b',"choices":['

    def _body(self, head: bytes, choices: bytes, beside: Mapping[str, object]) -> bytes:
        return head + choices + (b"]," + json_of(beside)[1:] if beside else b"]}")


def json_of(value: object) -> bytes:
    return to_json(value, inf_nan_mode="null")


def alternatives(scored: Scored) -> Iterator[dict[int, float]]:
    """By token: those asked for, id -> log-probability, the likeliest first."""
    if scored.top is None:
        yield from ({} for _ in scored.token_ids)
        return
    for token_ids, logprobs in zip(scored.top.token_ids.tolist(), scored.top.logprobs.tolist(), strict=True):
        yield dict(zip(token_ids, logprobs, strict=True))
