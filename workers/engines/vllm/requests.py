"""Requests to vLLM: how a job is split into them, their bodies, and what is refused instead.

A job is refused if vLLM does not support it, would answer it wrongly, or would crash, which hits all tenants.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from ....schemas.errors import OperationError
from ...protocol.calls import SampleJob

_COPIED_PARAMS = ("top_p", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")
# The fields of SamplingParams that reach vLLM.
_SENT_PARAMS = frozenset({"max_tokens", "seed", "stop", "temperature", "top_k", "logit_bias", *_COPIED_PARAMS})

# Both native sampling and vLLM are greedy below this.
_LOWEST_TEMPERATURE = 1e-5
_HIGHEST_TEMPERATURE = 2.0

# vLLM 0.32 on GPUs crashes with more.
_MAX_BIASES = 1024

# With min_tokens it crashes if there are more than 128, including the model's own end-of-sequence tokens.
_MAX_STOPS = 120

# The native engine's limit of top log-probabilities for one sample. vLLM holds those of all samples of a request at the
# same time.
_MAX_CELLS = 1 << 24

# Top log-probabilities in one response, about 40 bytes each. Larger responses are streamed.
_MAX_CELLS_AT_ONCE = 1 << 18

# Samples of one request to vLLM, which runs at most --max-num-seqs at a time.
_MAX_SAMPLES = 64


@dataclass(frozen=True)
class VllmModel:
    """The base model under the name that the server uses."""

    name: str
    max_length: int


@dataclass(frozen=True)
class VllmRequest:
    """A request for some of a job's samples.

    model: the name of the adapter or base model.
    max_tokens: of a sample, bounded by the context.
    """

    job: SampleJob
    samples: range
    model: str
    max_tokens: int

    @property
    def streams(self) -> bool:
        return self.job.streams or _num_cells(self.job, self.max_tokens) > _MAX_CELLS_AT_ONCE

    def body(self) -> dict[str, object]:
        """Sends every parameter explicitly: vLLM may take missing ones from its own configuration."""
        job, params = self.job, self.job.params
        return {
            "model": self.model,
            "prompt": job.prompt.tolist(),
            "add_special_tokens": False,
            "n": len(self.samples),
            # vLLM adds the index of the sample within the request.
            "seed": _hash_seed(job.seed) + self.samples.start,
            "max_tokens": self.max_tokens,
            "temperature": 0.0 if is_greedy(job) else params.temperature,
            "top_k": max(0, params.top_k),
            "logit_bias": {str(token): bias for token, bias in (params.logit_bias or {}).items()},
            **{name: getattr(params, name) for name in _COPIED_PARAMS},
            "stop": list(job.stop_strings),
            "stop_token_ids": list(job.stop_token_ids),
            # The stop tokens include the model's end-of-sequence tokens if these must stop the sample.
            "ignore_eos": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "logprobs": job.topk_sample_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            # Without a salt, response times and cached-token counts would reveal other tenants' prompts.
            **({"cache_salt": job.tenant_id} if job.tenant_id else {}),
        }


def split(job: SampleJob, model: VllmModel, adapter: str | None) -> list[VllmRequest]:
    """Splits the job into requests. Greedy samples are all equal, and vLLM refuses more than one. Draft tokens are
    counted only for requests of one sample.

    Raises OperationError if the prompt fills the context, or top log-probabilities would need too much memory.
    """
    if len(job.prompt) >= model.max_length:
        raise OperationError(
            f"the prompt has {len(job.prompt)} tokens, and vLLM's context of {model.max_length} must hold one more:"
            " shorten it"
        )
    max_tokens = min(job.max_tokens, model.max_length - len(job.prompt))
    if _num_cells(job, max_tokens) > _MAX_CELLS:
        raise OperationError(
            f"topk_sample_logprobs {job.topk_sample_logprobs} of {job.num_samples} samples of {max_tokens} tokens makes"
            f" more than {_MAX_CELLS} cells: lower it or max_tokens, or split the request"
        )
    samples = range(1 if is_greedy(job) else job.num_samples)
    most = 1 if job.draft_id is not None else _MAX_SAMPLES
    parts = (samples[start : start + most] for start in samples[::most])
    return [VllmRequest(job, part, adapter or model.name, max_tokens) for part in parts]


def is_greedy(job: SampleJob) -> bool:
    return job.params.temperature < _LOWEST_TEMPERATURE


def check_supported(job: SampleJob, has_drafts: bool) -> None:
    """Raises OperationError if vLLM does not support the job, or would answer wrongly or crash.

    Args:
        has_drafts: whether vLLM has started with a draft.
    """
    if reason := next(_obstacles(job, has_drafts), None):
        raise OperationError(f"{reason}, or start the server with --sampler native")


def _obstacles(job: SampleJob, has_drafts: bool) -> Iterator[str]:
    """Yields what the native sampler could do, and how to do without it."""
    params, num_stops = job.params, len(set(job.stop_token_ids))
    for name, field in type(params).model_fields.items():
        if name not in _SENT_PARAMS and getattr(params, name) != field.default:
            yield f"{name} is not supported by vLLM: leave it out"
    if params.temperature > _HIGHEST_TEMPERATURE:
        yield f"temperature {params.temperature:g} exceeds vLLM's {_HIGHEST_TEMPERATURE:g}: lower it"
    if (num_biases := len(params.logit_bias or {})) > _MAX_BIASES:
        yield f"logit_bias has {num_biases} tokens, vLLM takes {_MAX_BIASES}: leave some out"
    if params.min_tokens and num_stops > _MAX_STOPS:
        yield f"{num_stops} stop tokens with min_tokens exceed vLLM's limit of {_MAX_STOPS}: leave out min_tokens"
    for name in ("min_p", "logit_bias"):
        if has_drafts and getattr(params, name):
            yield f"{name} is not supported by a vLLM with drafts (--vllm-draft): leave it out"


def _num_cells(job: SampleJob, max_tokens: int) -> int:
    """Returns the number of top log-probabilities of all samples."""
    return job.topk_sample_logprobs * job.num_samples * max_tokens


def _hash_seed(seed: int) -> int:
    """Maps the seed to 62 bits, far from the next seed's, because sample i uses seed + i.

    Else the samples of seed 1 would be those of seed 0, shifted by one.
    """
    return int.from_bytes(blake2b(str(seed).encode(), digest_size=8).digest()) >> 2
