"""Translates OpenAI's requests into SampleRequests, and sampling errors into OpenAI's errors.

To accept another parameter of OpenAI's or vLLM's clients, add its field in `schemas/chats/openai.py`, remove it from
the table of unsupported fields there, and add a line to `sampling_params`.
"""

import re
from collections.abc import Iterable, Sequence

from ...schemas.chats.openai import BaseCompletionRequest, ChatCompletionRequest, OpenAiError, ResponseFormat
from ...schemas.errors import OperationError, RequestError
from ...schemas.sampling import Constraint, ModelInput, SampleRequest, SamplingParams
from ..sampling.draft_loader import DraftNotFound, DraftNotLoaded
from ..sampling.sampling_job import Stops
from .prompts import Prompt

MAX_ECHOED_TOKENS = 1 << 21
"""Most echoed prompt tokens in one response, counting each token's alternatives."""

MAX_REPEATED_TOKENS = 1 << 20
"""Most tokens of logit_bias, or of stop_token_ids, times the prompts that they are for."""


def sampling_params(request: BaseCompletionRequest) -> SamplingParams:
    """Returns all sampling parameters but max_tokens, which depends on the length of each prompt."""
    return SamplingParams(
        seed=request.seed,
        temperature=request.temperature,
        top_k=request.top_k or -1,  # vLLM's clients disable top_k with 0, too
        top_p=request.top_p,
        min_p=request.min_p,
        min_tokens=request.min_tokens,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias or None,
        constraint=_constraint(request.response_format),
    )


def _constraint(answer: ResponseFormat) -> Constraint | None:
    match answer.type:
        case "text":
            return None
        case "json_object":
            return Constraint(json_schema={"type": "object"})
        case "json_schema":
            if answer.json_schema is None:
                raise OpenAiError("response_format.json_schema is missing", param="response_format.json_schema")
            return Constraint(json_schema=answer.json_schema.json_schema)


def sample_requests(request: BaseCompletionRequest, prompts: Sequence[Prompt], context: int) -> list[SampleRequest]:
    """Returns one request per prompt; their params are shallow copies, so that a large logit_bias exists once.

    Args:
        context: the model's context length in tokens.
    Raises:
        OpenAiError: the echo would be too large, or the parameters of all prompts together.
    """
    _check_echo(request, prompts)
    _check_repeated(request, len(prompts))
    params = sampling_params(request)
    scores_prompt = request.echoes and request.num_top_logprobs is not None
    num_top = request.num_top_logprobs or 0
    return [
        SampleRequest(
            prompt=ModelInput.from_ints(prompt.token_ids),
            sampling_params=params.model_copy(update={"max_tokens": _max_tokens(request, prompt, context)}),
            num_samples=request.n,
            draft_path=request.draft_path,
            num_draft_tokens=request.num_draft_tokens,
            topk_sample_logprobs=num_top,
            prompt_logprobs=scores_prompt,
            topk_prompt_logprobs=num_top if scores_prompt else 0,
        )
        for prompt in prompts
    ]


def check_alternatives(request: BaseCompletionRequest, most: int) -> None:
    """Raises OpenAiError if the request wants more alternatives per token than --max-logprobs allows."""
    if (count := request.num_top_logprobs or 0) > most:
        param = "top_logprobs" if isinstance(request, ChatCompletionRequest) else "logprobs"
        raise OpenAiError(
            f"{param} {count} exceeds the {most} that this server reports per token: lower it, or start the server "
            f"with --max-logprobs {count}",
            param=param,
        )


def _check_echo(request: BaseCompletionRequest, prompts: Sequence[Prompt]) -> None:
    num_tokens = request.n * sum(len(prompt.token_ids) for prompt in prompts)
    num_echoed = num_tokens * (1 + (request.num_top_logprobs or 0)) if request.echoes else 0
    if num_echoed > MAX_ECHOED_TOKENS:
        raise OpenAiError(
            f"echo of {num_tokens} tokens, each with {request.num_top_logprobs or 0} alternatives, makes "
            f"{num_echoed} entries; "
            f"the maximum is {MAX_ECHOED_TOKENS}: lower n or logprobs, or send several requests",
            param="echo",
        )


def _check_repeated(request: BaseCompletionRequest, num_prompts: int) -> None:
    """A rank reads these tokens for each prompt: the body has them once, and many prompts would hold it for seconds."""
    for param, tokens in (("logit_bias", request.logit_bias or ()), ("stop_token_ids", request.stop_token_ids)):
        if num_prompts * len(tokens) > MAX_REPEATED_TOKENS:
            raise OpenAiError(
                f"{param} of {len(tokens)} tokens for {num_prompts} prompts makes {num_prompts * len(tokens)}; the "
                f"maximum is {MAX_REPEATED_TOKENS}: send the prompts in several requests",
                param=param,
            )


def _max_tokens(request: BaseCompletionRequest, prompt: Prompt, context: int) -> int | None:
    most = request.max_sample_tokens(context - len(prompt.token_ids))
    # Samplers draw at least one token; a request that only scores its prompt drops it.
    return None if most is None else max(1, most)


def openai_error(request: BaseCompletionRequest, error: OperationError | RequestError) -> OpenAiError:
    """Translates the error of a sampling job.

    Sets `param` to the request field at fault: a draft error names draft_path, what workers call a constraint is
    response_format here, and a refused job names its field first.
    """
    if isinstance(error, RequestError):
        named = (word for word in re.findall(r"\w+", error.message) if word in type(request).model_fields)
        param = "draft_path" if isinstance(error, DraftNotFound) else next(named, None)
        return OpenAiError(error.message, error.status, param)
    status = 400 if error.category == "user" else 503
    if request.response_format.type != "text" and "constraint" in error.message:
        return OpenAiError(f"response_format: {error.message}", status, "response_format")
    return OpenAiError(error.message, status, "draft_path" if isinstance(error, DraftNotLoaded) else None)


def merge_stops(request: BaseCompletionRequest, end_token_ids: Iterable[int]) -> Stops:
    """Returns what ends a sample: the end tokens unless ignore_eos is set, and the request's own stops."""
    ends = () if request.ignore_eos else tuple(dict.fromkeys(end_token_ids))
    return Stops((*ends, *request.stop_token_ids), request.stop_strings)
