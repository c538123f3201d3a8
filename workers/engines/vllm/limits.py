"""Refuses requests that vLLM does not support, and those that would crash it for all tenants."""

from ....schemas.errors import OperationError
from ...protocol.calls import SampleJob
from .api import SAID_PARAMS, VllmModel

_HIGHEST_TEMPERATURE = 2.0

# vLLM 0.32 on GPUs crashes with more.
_MOST_BIASES = 1024

# With min_tokens it crashes if there are more than 128, including the model's own end-of-sequence tokens.
_MOST_STOPS = 120

# The native engine's limit for one sample. vLLM holds those of all samples of a request at the same time.
_MOST_CELLS = 1 << 24


def max_tokens_of(job: SampleJob, model: VllmModel) -> int:
    """Returns the most tokens of a sample, bounded by the context. Raises OperationError if the prompt fills it."""
    room = model.max_length - len(job.prompt)
    if room < 1:
        raise OperationError(
            f"the prompt has {len(job.prompt)} tokens, and vLLM's context of {model.max_length} must hold one more:"
            " shorten it"
        )
    return min(job.params.max_tokens or room, room)


def num_cells(job: SampleJob, max_tokens: int) -> int:
    """Returns the number of top log-probabilities of all samples."""
    return job.topk_sample_logprobs * job.num_samples * max_tokens


def check_size(job: SampleJob, max_tokens: int) -> None:
    """Raises OperationError if the top log-probabilities would need too much memory."""
    if num_cells(job, max_tokens) > _MOST_CELLS:
        raise OperationError(
            f"topk_sample_logprobs {job.topk_sample_logprobs} of {job.num_samples} samples of {max_tokens} tokens makes"
            f" more than {_MOST_CELLS} cells: lower it or max_tokens, or split the request"
        )


def check_supported(job: SampleJob) -> None:
    """Raises OperationError if vLLM does not support the request, or would answer wrongly or crash."""
    for name in _unavailable(job):
        raise OperationError(
            f"{name} is not supported by vLLM: leave it out, or start the server with --sampler native"
        )
    if job.params.temperature > _HIGHEST_TEMPERATURE:
        raise OperationError(
            f"temperature {job.params.temperature:g} exceeds vLLM's {_HIGHEST_TEMPERATURE:g}: lower it, or start the"
            " server with --sampler native"
        )
    if len(job.params.logit_bias or {}) > _MOST_BIASES:
        raise OperationError(
            f"logit_bias has {len(job.params.logit_bias or {})} tokens, vLLM takes {_MOST_BIASES}: leave some out, or"
            " start the server with --sampler native"
        )
    if job.params.min_tokens and len(set(job.stop_token_ids)) > _MOST_STOPS:
        raise OperationError(
            f"{len(set(job.stop_token_ids))} stop tokens with min_tokens exceed vLLM's limit of {_MOST_STOPS}: leave"
            " out min_tokens, or start the server with --sampler native"
        )
    if not len(job.prompt):
        raise OperationError("the prompt is empty: give at least one token, such as the model's BOS token")
    if "" in job.stop_strings:
        raise OperationError("a stop string is empty, which would stop every sample at once: leave it out")


def _unavailable(job: SampleJob) -> list[str]:
    """Returns the parameters that the job sets and that we do not send to vLLM."""
    fields = type(job.params).model_fields.items()
    return [name for name, field in fields if name not in SAID_PARAMS and getattr(job.params, name) != field.default]
