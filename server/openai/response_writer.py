"""Writes OpenAI's response bodies and stream chunks; the subclasses in completions.py and chats.py write the choices.

Each choice is encoded to JSON as it is produced, so the Python objects of a large sample are never held all at once.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic

from pydantic import JsonValue
from pydantic_core import to_json

from ...schemas.chats.openai import AnyCompletion, BaseCompletionRequest, Usage
from ...workers.protocol.calls import ModelInfo
from ..text.tokenizer import Tokenizer
from .choices import ChoiceDelta, Echo, TokenScores
from .prompts import Prompt


@dataclass(frozen=True)
class PromptOutput:
    """Everything that a whole response contains about one prompt: the echoed prompt, and one delta per sample."""

    echo: Echo
    deltas: Iterable[ChoiceDelta]


class ResponseWriter(ABC):
    """Writes the response to one request, as one body or as the chunks of a stream.

    kind, chunk_kind: the `object` field of a whole response and of a stream chunk. id_prefix: prefix of the `id` field.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, request: BaseCompletionRequest, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> None:
        self.request = request
        self.tokenizer = tokenizer
        self.prompts = prompts
        self._id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._head, self._chunk_head = self._begin(self.kind), self._begin(self.chunk_kind)

    @abstractmethod
    def choices(self, output: PromptOutput) -> Iterator[object]:
        """Returns the choices of a whole response."""

    @abstractmethod
    def chunk_choice(self, delta: ChoiceDelta) -> object:
        """Returns the choice of one stream chunk."""

    def extra_fields(self, first: bool) -> dict[str, JsonValue]:
        """Returns the fields that follow `choices`.

        Args:
            first: True for a whole response and for the first chunk of a choice.
        """
        return {}

    def encode(self, outputs: Iterable[PromptOutput], usage: Usage) -> bytes:
        choices = b",".join(encode_json(choice) for output in outputs for choice in self.choices(output))
        return self._body(self._head, choices, {**self.extra_fields(first=True), "usage": usage})

    def encode_chunk(self, delta: ChoiceDelta) -> bytes:
        return self._body(self._chunk_head, encode_json(self.chunk_choice(delta)), self.extra_fields(delta.first))

    def encode_usage_chunk(self, usage: Usage) -> bytes:
        """Returns the chunk that carries the usage and no choice."""
        return self._body(self._chunk_head, b"", {"usage": usage})

    def _begin(self, kind: str) -> bytes:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self.request.model}
        return to_json(head)[:-1] + b',"choices":['

    def _body(self, head: bytes, choices: bytes, beside: Mapping[str, object]) -> bytes:
        return head + choices + (b"]," + encode_json(beside)[1:] if beside else b"]}")


@dataclass(frozen=True)
class CompletionKind(Generic[AnyCompletion]):
    """One of OpenAI's two kinds of completion.

    check: validates combinations of fields; raises OpenAiError. prompts: tokenizes the prompts, given the context
    length in tokens; raises RequestError; slow for long texts. ends: the tokens that end a completion.
    """

    request: type[AnyCompletion]
    check: Callable[[AnyCompletion], None]
    prompts: Callable[[AnyCompletion, Tokenizer, int], list[Prompt]]
    ends: Callable[[Tokenizer, ModelInfo], Sequence[int]]
    writer: type[ResponseWriter]


def encode_json(value: object) -> bytes:
    return to_json(value, inf_nan_mode="null")


def top_logprobs_of(scored: TokenScores) -> Iterator[dict[int, float]]:
    """Yields for each token its requested alternatives as {token id: log-probability}, the likeliest first."""
    if scored.top is None:
        yield from ({} for _ in scored.token_ids)
        return
    for token_ids, logprobs in zip(scored.top.token_ids.tolist(), scored.top.logprobs.tolist(), strict=True):
        yield dict(zip(token_ids, logprobs, strict=True))
