"""Validates a sampling request against its model and translates it into the worker's SampleJob."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from ...schemas.codec import CsrLayout, csr_layout_from_json, tensor_from_json
from ...schemas.errors import OperationError, RequestError
from ...schemas.sampling import ALTERNATIVES, Constraint, SampleRequest
from ...workers.protocol.calls import ModelInfo, SampleJob
from ..journal.journal import Header, draw_seed
from ..journal.strikes import Strikes
from ..store import CheckpointRecord
from .sampler import Sampler

MAX_SAMPLES = 4096

_MAX_TOPK_CELLS = 1 << 24
"""Limit on the top log-probabilities of a request."""

_MAX_TARGET_BYTES = 32 << 20
"""Limit on a sparse target_prompt_logprobs after conversion to a dense int64 array."""

_TOKEN_BYTES = 8
"""Size of a token id, sampled or alternative, with its log-probability."""

_LIKELY_TOKENS = 4096
"""Length of a sample assumed for reservations: few get longer, since each token costs a decode step."""


@dataclass(frozen=True)
class Stops:
    """The tokens and strings that end a sample before max_tokens. Strings match across token boundaries."""

    token_ids: tuple[int, ...]
    strings: tuple[str, ...] = ()


class SamplingJob:
    """A validated sampling request with its seed."""

    def __init__(
        self,
        request: SampleRequest,
        request_id: str,
        sampler: Sampler,
        model: ModelInfo,
        stops: Stops | None = None,
        seed: int | None = None,
    ) -> None:
        """Validates the request. `stops` replace its own; `seed` was drawn earlier if it has none. Raises RequestError
        if it does not fit the model."""
        self.request = request
        self.request_id = request_id
        self.sampler = sampler
        self.prompt = _prompt(request, model)
        self.stops = stops or _stops(request, model)
        drawn = draw_seed() if seed is None else seed
        self._seed = drawn if request.sampling_params.seed is None else request.sampling_params.seed
        _check_counts(request, model, len(self.prompt))
        self._targets = _targets(request, len(self.prompt))
        self._model = model
        self.strikes = Strikes("this request")
        self.draft: CheckpointRecord | None = None
        """The draft model that speculates for it."""
        self.was_begun = False
        """A worker crashed or the server restarted during the job, which continues without a draft that is lost."""
        self._max_tokens = request.sampling_params.max_tokens or model.max_context_length - len(self.prompt)
        self.target_layout: CsrLayout | None = None
        if request.target_prompt_logprobs is not None:
            self.target_layout = csr_layout_from_json(request.target_prompt_logprobs)

    @classmethod
    def resumed(cls, request: SampleRequest, header: Header, sampler: Sampler, model: ModelInfo) -> Self:
        """Returns the job of a journaled request, by the rules of the version that accepted it. Raises RequestError."""
        stops = None
        if header.sampling_rules == 1:
            stops = Stops(model.eos_token_ids) if request.sampling_params.stop is None else _own_stops(request)
            request = _with_any_white_space(request)
        job = cls(request, header.request_id, sampler, model, stops, header.drawn.get("seed"))
        job.was_begun = True
        return job

    @property
    def drawn_seed(self) -> int | None:
        """The seed drawn for the request, to be journaled; None if the request has its own."""
        return self._seed if self.request.sampling_params.seed is None else None

    @property
    def result_bytes(self) -> int:
        """Estimates the bytes of the result: all that is requested about the prompt and, up to max_tokens, alternatives
        to sampled tokens; sampled tokens themselves only up to a likely length."""
        request = self.request
        num_alternatives = request.topk_prompt_logprobs + request.prompt_alt_tokens_k
        of_token = 4 * request.prompt_logprobs + _TOKEN_BYTES * num_alternatives
        of_targets = 0 if self._targets is None else 4 * self._targets.size
        of_sample = min(self._max_tokens, _LIKELY_TOKENS) + self._max_tokens * request.topk_sample_logprobs
        return of_token * len(self.prompt) + of_targets + _TOKEN_BYTES * request.num_samples * of_sample

    @property
    def num_bytes(self) -> int:
        """Estimates the memory of the job and its result in bytes."""
        of_targets = 0 if self._targets is None else self._targets.nbytes
        return self.prompt.nbytes + of_targets + self.result_bytes

    def for_worker(self, streams: bool = False) -> SampleJob:
        """Returns the job. Raises OperationError if the request has what is refused only after it was accepted."""
        request, params = self.request, self.request.sampling_params
        self._check_sizes()
        _check_tokens("logit_bias", np.array(list(params.logit_bias or {}), np.int64), 0, self._model)
        if self._targets is not None:
            _check_tokens("target_prompt_logprobs", self._targets, -1, self._model)
        if "" in self.stops.strings:
            raise OperationError("a stop string is empty, which would stop every sample at once: leave it out")
        return SampleJob(
            job_id=self.request_id,
            adapter_id=self.sampler.adapter_id,
            prompt=self.prompt,
            params=params.model_copy(update={"seed": self._seed, "max_tokens": self._max_tokens}),
            stop_token_ids=self.stops.token_ids,
            stop_strings=self.stops.strings,
            num_samples=request.num_samples,
            prompt_logprobs=request.prompt_logprobs,
            prompt_logprobs_last_n=request.prompt_logprobs_last_n,
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            topk_sample_logprobs=request.topk_sample_logprobs,
            target_prompt_tokens=self._targets,
            prompt_alt_tokens_k=request.prompt_alt_tokens_k,
            streams=streams,
            tenant_id=self.sampler.record.tenant_id,
            num_draft_tokens=request.num_draft_tokens,
            seed_is_drawn=self.drawn_seed is not None,
            fills_context=params.max_tokens is None,
        )

    def _check_sizes(self) -> None:
        request, num_prompt, last_n = self.request, len(self.prompt), self.request.prompt_logprobs_last_n
        for name, num_tokens, kind in (
            ("topk_prompt_logprobs", num_prompt, "prompt"),
            ("prompt_alt_tokens_k", num_prompt, "prompt"),
            ("topk_sample_logprobs", self._max_tokens, "sampled"),
        ):
            if (k := getattr(request, name)) * num_tokens > _MAX_TOPK_CELLS:
                raise OperationError(
                    f"{name} {k} at {num_tokens} {kind} tokens makes more than {_MAX_TOPK_CELLS} cells: lower it or"
                    " split the request"
                )
        if last_n is not None and not request.prompt_logprobs:
            bounds = f"must be between 1 and len(prompt) - 1 = {num_prompt - 1}"
            raise OperationError(f"prompt_logprobs_last_n {last_n} needs prompt_logprobs and {bounds}")


def _stops(request: SampleRequest, model: ModelInfo) -> Stops:
    """Returns the model's end tokens and the request's own stops; no stops at all for an empty list."""
    if request.sampling_params.stop == []:
        return Stops(())
    own = _own_stops(request)
    return Stops((*model.eos_token_ids, *own.token_ids), own.strings)


def _own_stops(request: SampleRequest) -> Stops:
    stop = request.sampling_params.stop
    stops = [stop] if isinstance(stop, str) else stop or []
    token_ids = tuple(one for one in stops if isinstance(one, int))
    return Stops(token_ids, tuple(one for one in stops if isinstance(one, str)))


def _with_any_white_space(request: SampleRequest) -> SampleRequest:
    """Returns the request with the JSON of sampling rules 1."""
    params = request.sampling_params
    if params.constraint is None or (schema := params.constraint.json_schema) is None:
        return request
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        return request
    schema = schema | {"x-guidance": {"whitespace_flexible": True} | own}
    params = params.model_copy(update={"constraint": Constraint(json_schema=schema)})
    return request.model_copy(update={"sampling_params": params})


def _prompt(request: SampleRequest, model: ModelInfo) -> np.ndarray:
    """Returns the prompt's token ids, int32 [T], T >= 1. Raises RequestError."""
    # Before anything that reads each of them: this runs on the event loop, and a body has room for millions.
    num_tokens = sum(len(chunk.tokens) for chunk in request.prompt.chunks)
    if not num_tokens:
        raise RequestError("the prompt is empty: send at least one token")
    if num_tokens >= model.max_context_length:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, but prompt and sample together must fit into the context of "
            f"{model.name}, {model.max_context_length} tokens: shorten the prompt"
        )
    tokens = request.prompt.to_ints()
    if wrong := next((token for token in tokens if not 0 <= token < model.vocab_size), None):
        raise RequestError(
            f"prompt token {wrong} is not in the vocabulary of {model.name}: token ids are 0 to {model.vocab_size - 1}"
        )
    return np.asarray(tokens, np.int32)


def check_alternatives(request: SampleRequest, most: int) -> None:
    """Raises RequestError if the request wants more alternatives per token than --max-logprobs allows."""
    for name in ALTERNATIVES:
        if (count := getattr(request, name)) > most:
            raise RequestError(
                f"{name} {count} exceeds the {most} that this server reports per token: lower it, or start the server "
                f"with --max-logprobs {count}"
            )


def _check_counts(request: SampleRequest, model: ModelInfo, num_prompt: int) -> None:
    if request.num_samples > MAX_SAMPLES:
        raise RequestError(f"num_samples {request.num_samples} exceeds {MAX_SAMPLES}: split it into several requests")
    for name in ALTERNATIVES:
        if (count := getattr(request, name)) > model.vocab_size:
            raise RequestError(
                f"{name} {count} exceeds the vocabulary of {model.name}, {model.vocab_size} tokens: lower it"
            )
    room, max_tokens = model.max_context_length - num_prompt, request.sampling_params.max_tokens
    if max_tokens is not None and max_tokens > room:
        raise RequestError(
            f"max_tokens {max_tokens} exceeds the {room} tokens that a prompt of {num_prompt} leaves in the context of "
            f"{model.name}: lower it, or leave it out to sample until the context is full"
        )
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and last_n > num_prompt - 1:
        raise RequestError(
            f"prompt_logprobs_last_n {last_n} exceeds the {num_prompt - 1} scored positions of the prompt: lower it"
        )


def _targets(request: SampleRequest, num_prompt: int) -> np.ndarray | None:
    """Returns the target tokens to score, int64 [T - 1, K], -1 for none. Raises RequestError."""
    if request.target_prompt_logprobs is None:
        return None
    targets = tensor_from_json(
        request.target_prompt_logprobs, fill=-1, name="target_prompt_logprobs", max_dense_bytes=_MAX_TARGET_BYTES
    )
    if targets.ndim != 2 or len(targets) != num_prompt - 1 or targets.dtype.kind != "i":
        raise RequestError(
            f"target_prompt_logprobs is {targets.dtype} {list(targets.shape)}: it must be int64 [{num_prompt - 1}, K], "
            "one row fewer than the prompt has tokens"
        )
    return targets


def _check_tokens(name: str, tokens: np.ndarray, lowest: int, model: ModelInfo) -> None:
    wrong = tokens[(tokens < lowest) | (tokens >= model.vocab_size)]
    if len(wrong):
        raise OperationError(
            f"{name} holds token id {int(wrong[0])}, outside the model's vocabulary of {model.vocab_size}: use the"
            " tokenizer of this base model"
        )
