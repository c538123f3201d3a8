"""Sampling: what can be asked of a sampler and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from .bounds import MOST_CONSTRAINT_BYTES, MOST_TOKEN_IDS, ConstraintSchema, FirstOnly, Id, Path, first_only_of
from .training import MOST_INTEGER, Integer, Natural, Positive, Seed, Strict, Wire

ALTERNATIVES = ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
"""What of a request multiplies the tokens of its result."""


class Constraint(Wire):
    """What a sample must be, exactly one of these; it ends where nothing more may follow.

    json_schema: the text conforms to this JSON schema. regex: it matches as a whole (the syntax of Rust's regex).
    grammar: the start rule derives it (Lark's syntax, as llguidance reads it).
    """

    json_schema: ConstraintSchema | None = None
    regex: Annotated[str, Field(max_length=MOST_CONSTRAINT_BYTES)] | None = None
    grammar: Annotated[str, Field(max_length=MOST_CONSTRAINT_BYTES)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of json_schema, regex and grammar makes a constraint, got {given}")
        return self


# Of a logit: beyond this it would decide anyway.
Shift = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(ge=1e-3, le=1e3, allow_inf_nan=False)]
LogitBias = Annotated[dict[Integer, Shift], Field(max_length=MOST_TOKEN_IDS), first_only_of(MOST_TOKEN_IDS)]

# Each token of a sample is searched for all of them.
StopString = Annotated[str, Field(max_length=1000)]
MOST_STOP_STRINGS = 64

NumDraftTokens = Annotated[int, Field(ge=1, le=63)]


class SamplingParams(Strict):
    """stop: a string, strings, or token ids; absent = the model's end tokens; [] = nothing stops but max_tokens. A
    string has up to 1000 characters, and there are up to 64 of them.

    max_tokens absent = until the context ends. temperature 0 = greedy. top_k -1 = off.

    Ours, beyond the SDK's: min_p, the least probability of a token relative to the likeliest; min_tokens, before which
    nothing stops a sample; repetition_penalty divides the positive and multiplies the negative logits of tokens in
    prompt or sample (Keskar et al., https://arxiv.org/abs/1909.05858), presence_penalty and frequency_penalty are
    subtracted once and per occurrence in the sample; logit_bias is added, by token id; constraint. Log-probabilities
    stay those of the model without any of them.
    """

    meant = {  # noqa: RUF012
        "temp": "temperature",
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        **dict.fromkeys(("stop_sequences", "stop_strings", "stop_token_ids"), "stop"),
        **dict.fromkeys(("n", "num_samples"), "num_samples of the request, beside sampling_params"),
    }

    max_tokens: Positive | None = None
    seed: Seed | None = None
    stop: (
        StopString
        | Annotated[list[StopString], Field(max_length=MOST_STOP_STRINGS), FirstOnly()]
        | Annotated[list[Integer], Field(max_length=MOST_TOKEN_IDS), FirstOnly()]
        | None
    ) = None
    temperature: Temperature = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MOST_INTEGER)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    min_tokens: Natural = 0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Shift = 0.0
    frequency_penalty: Shift = 0.0
    logit_bias: LogitBias | None = None
    constraint: Constraint | None = None


class TokenChunk(Wire):
    """A piece of a model input. Types other than encoded_text are known by name only and refused by it."""

    type: Literal["encoded_text", "image", "image_asset_pointer", "dmel"]
    tokens: Annotated[tuple[Integer, ...], FirstOnly()] = ()


class ModelInput(Wire):
    chunks: Annotated[list[TokenChunk], FirstOnly()]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> Self:
        return cls(chunks=[TokenChunk(type="encoded_text", tokens=tuple(tokens))])

    def to_ints(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class SampleRequest(Wire):
    """sampling_session_id, or else (ours) base_model or model_path, for a single request without a sampling session.

    draft_path (ours): of a draft's checkpoint, which guesses num_draft_tokens at a time, None = as many as usual; in
    place of the session's, "" = without one.
    target_prompt_logprobs: JSON TensorData, int64 [len(prompt) - 1, K]; row i scores position i + 1, -1 none.
    """

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


class CreateSamplingSessionRequest(Wire):
    """draft_path (ours): of a draft's checkpoint, which guesses what all requests to it sample that name no other."""

    session_id: Id
    sampling_session_seq_id: Natural
    base_model: Path | None = None
    model_path: Path | None = None
    draft_path: Path | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Wire):
    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(Wire):
    sampling_session_id: Id
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Wire):
    """client_counter: from 1, unique in the sampling session."""

    client_counter: int


class SamplerInfo(Wire):
    sampler_id: str
    base_model: str
    model_path: str | None = None
    draft_path: str | None = None


EMPTY_LOGPROB = -99999.0


@dataclass(frozen=True, slots=True, eq=False)
class TopkLogprobs:
    """token_ids int32 [n, k], logprobs float32 [n, k]; an empty cell is id 0, logprob EMPTY_LOGPROB."""

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequence:
    """tokens int32 [n], the matched stop token included; logprobs float32 [n] under the model at temperature 1.

    sequence_id: what provenance spans call it; the submit's answer names it, so only the client fills it in.
    """

    stop_reason: Literal["stop", "length"]
    tokens: np.ndarray
    logprobs: np.ndarray
    topk_logprobs: TopkLogprobs | None = None
    sequence_id: str | None = None


@dataclass(frozen=True)
class GuessCounts:
    """How the guesses of a draft fared in a request. passes: of the model, each over some guesses and giving a token
    more. drafted, accepted: tokens. by_accepted: passes by how many guesses were accepted at once, from 0."""

    passes: int
    drafted: int
    accepted: int
    by_accepted: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens that a pass gave."""
        return 1.0 + self.accepted / max(self.passes, 1)


@dataclass(frozen=True, slots=True, eq=False)
class SampleResponse:
    """prompt_logprobs float32 [len(prompt)], NaN where unscored (always at 0).

    target_prompt_logprobs float32 [len(prompt) - 1, K], 0.0 where nothing was asked.
    prompt_alt_tokens int32 and prompt_alt_logprobs float32 [len(prompt) - 1, k]. guesses: where a draft made any.
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
        """Bytes of its arrays."""
        tops = [self.topk_prompt_logprobs, *(sequence.topk_logprobs for sequence in self.sequences)]
        arrays = [self.prompt_logprobs, self.target_prompt_logprobs, self.prompt_alt_tokens, self.prompt_alt_logprobs]
        arrays += [array for sequence in self.sequences for array in (sequence.tokens, sequence.logprobs)]
        arrays += [array for top in tops if top is not None for array in (top.token_ids, top.logprobs)]
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def num_tokens(self) -> int:
        """Sampled."""
        return sum(len(sequence.tokens) for sequence in self.sequences)
