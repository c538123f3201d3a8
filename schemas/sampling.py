"""Messages about sampling: requests, sampling sessions and results."""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from .bounds import (
    MAX_CONSTRAINT_BYTES,
    MAX_TOKEN_IDS,
    ConstraintSchema,
    FirstErrorOnly,
    Id,
    Path,
    first_error_only,
    one_of,
)
from .errors import OperationError, ReadableErrors
from .training import MAX_INTEGER, TENSOR_FIELDS, Integer, Natural, Positive, Request, Seed, Strict, Wire

ALTERNATIVES = ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
"""Fields of a request that ask for several alternatives per token, and so multiply the size of the result."""


class Constraint(Request):
    """Constrains a sample, by exactly one of its fields. The sample ends when the constraint allows no more tokens.

    json_schema: the text conforms to this JSON schema, without white space outside of strings unless the schema has
    {"x-guidance": {"whitespace_flexible": true}}. regex: the whole text matches it (the syntax of Rust's regex).
    grammar: its start rule derives the text (Lark's syntax, as llguidance reads it).
    """

    is_about_results = True

    json_schema: ConstraintSchema | None = None
    regex: Annotated[str, Field(max_length=MAX_CONSTRAINT_BYTES)] | None = None
    grammar: Annotated[str, Field(max_length=MAX_CONSTRAINT_BYTES)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a constraint needs exactly one of json_schema, regex and grammar, got {given}")
        return self

    @cached_property
    def digest(self) -> str:
        """Identifies the constraint. Computed once for all prompts of a request, since pickles and copies keep it.

        Raises OperationError if the constraint is nested too deeply.
        """
        try:
            return hashlib.sha256(self.model_dump_json().encode()).hexdigest()
        except (ValueError, RecursionError) as error:
            raise OperationError(f"the constraint is invalid: {str(error)[:1000]}") from error


# A number added to a logit; larger ones have the same effect.
Shift = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(ge=1e-3, le=1e3, allow_inf_nan=False)]
LogitBias = Annotated[dict[Integer, Shift], Field(max_length=MAX_TOKEN_IDS), first_error_only(MAX_TOKEN_IDS)]

# After each sampled token the text is searched for all of them.
MAX_STOP = 1000
StopString = Annotated[str, Field(max_length=MAX_STOP)]
MAX_STOP_STRINGS = 64

NumDraftTokens = Annotated[int, Field(ge=1, le=63)]


class SamplingParams(Strict):
    """Controls how tokens are sampled.

    stop: a string, up to 64 strings, or token ids, which end a sample in addition to the model's end tokens; [] for no
    stops, not even these, so that only max_tokens ends a sample. A string has up to 1000 characters.
    max_tokens: absent for the rest of the context.
    temperature: 0 for greedy. top_k: -1 for off.

    Ours, in addition to the SDK's: min_p, the least probability of a token relative to the likeliest; min_tokens, the
    number of tokens before which nothing stops a sample; repetition_penalty, which divides the positive and multiplies
    the negative logits of tokens in prompt or sample (Keskar et al., https://arxiv.org/abs/1909.05858);
    presence_penalty and frequency_penalty, which are subtracted once and per occurrence in the sample; logit_bias,
    which is added, by token id; constraint. Log-probabilities are those of the model without any of them.
    """

    is_about_results = True
    synonyms: ClassVar[Mapping[str, str]] = {
        "temp": "temperature",
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        **dict.fromkeys(("stop_sequences", "stop_strings", "stop_token_ids"), "stop"),
        **dict.fromkeys(("n", "num_samples"), "num_samples of the request, next to sampling_params"),
    }

    max_tokens: Positive | None = None
    seed: Seed | None = None
    stop: Annotated[
        StopString
        | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), FirstErrorOnly()]
        | Annotated[list[Integer], Field(max_length=MAX_TOKEN_IDS), FirstErrorOnly()]
        | None,
        one_of(f"a string or up to {MAX_STOP_STRINGS} strings, of at most {MAX_STOP} characters each, or token ids"),
    ] = None
    temperature: Temperature = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    min_tokens: Natural = 0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Shift = 0.0
    frequency_penalty: Shift = 0.0
    logit_bias: LogitBias | None = None
    constraint: Constraint | None = None


class TokenChunk(Request):
    """Holds a part of a model input. SDKs up to 0.16 leave the type out."""

    is_about_results = True

    type: Literal["encoded_text"] = "encoded_text"
    tokens: Annotated[tuple[Integer, ...], FirstErrorOnly()]


def refuse_mapping(value: object, name: str) -> None:
    """Raises ValueError for a dict, which a tokenizer of transformers returns unless it is asked for a list."""
    if isinstance(value, Mapping):
        remedy = "pass a list or an array of numbers"
        if "input_ids" in value:
            remedy = 'pass its ["input_ids"], or call apply_chat_template with return_dict=False'
        raise ValueError(f"{name} is a dict of {', '.join(map(str, value))[:80]}: {remedy}")


class ModelInput(Request, metaclass=ReadableErrors):
    is_about_results = True

    chunks: Annotated[list[TokenChunk], FirstErrorOnly()]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> Self:
        refuse_mapping(tokens, "tokens")
        return cls(chunks=[TokenChunk(type="encoded_text", tokens=tuple(tokens))])

    def to_ints(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class SampleRequest(Request):
    """Samples from the weights of a sampling session, or (ours) from base_model or model_path without a session.

    draft_path (ours): checkpoint of a draft that predicts num_draft_tokens at a time, null for the draft's default; it
    replaces the session's draft, and "" turns that off.
    target_prompt_logprobs: token ids to score, as JSON TensorData, int64 [len(prompt) - 1, K]; row i is for position
    i + 1, and -1 for no token.
    """

    is_about_results = True
    synonyms: ClassVar[Mapping[str, str]] = {
        "n": "num_samples",
        "logprobs": "prompt_logprobs",
        "draft": "draft_path",
        "model": "base_model for a served name, or model_path for a checkpoint",
    }

    prompt: ModelInput
    sampling_params: SamplingParams = SamplingParams()
    num_samples: Positive = 1
    sampling_session_id: Id | None = None
    seq_id: Natural | None = None
    base_model: Path | None = None
    model_path: Path | None = None
    draft_path: Path | None = None
    num_draft_tokens: NumDraftTokens | None = None
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: Positive | None = None
    topk_prompt_logprobs: Natural = 0
    topk_sample_logprobs: Natural = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: Natural = 0
    record_stability_info: bool = False
    type: Literal["sample"] = "sample"

    @property
    def unknown_names(self) -> Iterable[str]:
        of_tensor = (name for name in self.target_prompt_logprobs or () if name not in TENSOR_FIELDS)
        return itertools.chain(super().unknown_names, (f"target_prompt_logprobs.{name}" for name in of_tensor))


class CreateSamplingSessionRequest(Request):
    """Creates a sampling session. draft_path (ours): checkpoint of the draft for all requests that name no other."""

    session_id: Id
    sampling_session_seq_id: Natural
    base_model: Path | None = None
    model_path: Path | None = None
    draft_path: Path | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Wire):
    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(Request):
    sampling_session_id: Id
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Wire):
    """Names a new client of a sampling session. client_counter: from 1, unique in the session."""

    client_counter: int


class SamplerInfo(Wire):
    sampler_id: str
    base_model: str
    model_path: str | None = None
    draft_path: str | None = None


EMPTY_LOGPROB = -99999.0


@dataclass(frozen=True, slots=True, eq=False)
class TopkLogprobs:
    """The likeliest tokens at n positions.

    token_ids: int32 [n, k]. logprobs: float32 [n, k]. Empty cells have id 0 and log-probability EMPTY_LOGPROB.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequence:
    """A sampled sequence.

    tokens: int32 [n], including the matched stop token. logprobs: float32 [n], of the model at temperature 1.
    sequence_id: its name in provenance spans. Only the client fills it in, from the response to the submitted request.
    """

    stop_reason: Literal["stop", "length"]
    tokens: np.ndarray
    logprobs: np.ndarray
    topk_logprobs: TopkLogprobs | None = None
    sequence_id: str | None = None


@dataclass(frozen=True)
class GuessCounts:
    """Counts the draft tokens of a request.

    passes: verifications by the model, each of which samples one token after the accepted ones.
    drafted, accepted: draft tokens. by_accepted: number of passes by the number of tokens that they accepted, from 0.
    """

    passes: int
    drafted: int
    accepted: int
    by_accepted: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """The mean number of tokens per pass."""
        return 1.0 + self.accepted / max(self.passes, 1)


@dataclass(frozen=True, slots=True, eq=False)
class SampleResponse:
    """The result of a sampling request.

    prompt_logprobs: float32 [len(prompt)], NaN where not scored (always at 0).
    target_prompt_logprobs: float32 [len(prompt) - 1, K], 0.0 where no token was given.
    prompt_alt_tokens, prompt_alt_logprobs: int32 and float32 [len(prompt) - 1, k]. guesses: set if a draft was used.
    """

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: np.ndarray | None = None
    prompt_alt_tokens: np.ndarray | None = None
    prompt_alt_logprobs: np.ndarray | None = None
    prompt_cache_hit_tokens: int = 0
    guesses: GuessCounts | None = None

    @property
    def num_bytes(self) -> int:
        """The size of its arrays in bytes."""
        tops = [self.topk_prompt_logprobs, *(sequence.topk_logprobs for sequence in self.sequences)]
        arrays = [self.prompt_logprobs, self.target_prompt_logprobs, self.prompt_alt_tokens, self.prompt_alt_logprobs]
        arrays += [array for sequence in self.sequences for array in (sequence.tokens, sequence.logprobs)]
        arrays += [array for top in tops if top is not None for array in (top.token_ids, top.logprobs)]
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(len(sequence.tokens) for sequence in self.sequences)
