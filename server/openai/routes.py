"""Routes of the OpenAI-compatible API: text and chat completions of any weights that can be sampled, and their list."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from ...schemas.chats.openai import (
    AnyCompletion,
    BaseCompletionRequest,
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    ErrorBody,
    Model,
    ModelList,
    OpenAiError,
    decoder,
)
from ...schemas.errors import OperationError, RequestError
from ...schemas.verbs import BASE_MODEL
from ..config.base_model_lookup import require_served
from ..http.bodies import Decoder, json_body
from ..http.event_stream import EventStream
from ..routes.examples import ModelPath
from ..routes.services import Services, ServicesDependency
from ..routes.submission import receive_unordered
from ..sampling.draft_loader import DraftNotFound
from ..sampling.sampler import Sampler
from ..sampling.sampling_job import SamplingJob, Stops
from ..store import CheckpointRecord
from ..tenants.auth import Tenant, TenantDependency
from ..tenants.quotas import UNORDERED, Reservation
from ..text.tokenizer import Tokenizer
from .chats import CHATS
from .choices import ChoiceDelta, RequestChoices
from .completions import COMPLETIONS
from .prompts import Prompt
from .response_writer import CompletionKind, PromptOutput, ResponseWriter
from .sample_batch import JobProgress, JobResult, SampleBatch
from .translation import check_alternatives, merge_stops, openai_error, sample_requests

router = APIRouter(prefix="/v1", tags=["OpenAI"])

_MAX_LISTED = 1000
_LARGE_REQUEST_BYTES = 8192
_MANY_PROMPTS = 8
_MANY_NUMBERS = 10_000
"""Above these sizes, work moves off the event loop. Numbers are tokens and the alternatives to them."""

_PIECE_BYTES = 16384

Worked = TypeVar("Worked")


@router.get("/models")
async def list_models(services: ServicesDependency, tenant: TenantDependency) -> ModelList:
    """Lists values for `model`: the base models, and your sampler checkpoints, newest first.

    Any other checkpoint's path and the id of a live sampling session are accepted, too.
    """
    base = [_base_model(services, name) for name in services.dispatch.models]
    saved = [_checkpoint(services, record, tenant) for record in await _saved_for_sampling(services, tenant)]
    return ModelList(data=[*base, *saved])


async def _saved_for_sampling(services: Services, tenant: Tenant) -> list[CheckpointRecord]:
    """Returns the tenant's newest sampler checkpoints of base models that are served, at most _MAX_LISTED."""
    saved, offset, served = [], 0, services.dispatch.models
    now = services.checkpoints.now()
    while len(saved) < _MAX_LISTED:
        records, _ = await services.store.checkpoints.list_of_tenant(tenant.id, now, offset, _MAX_LISTED)
        if not records:
            break
        saved += [one for one in records if one.kind == "sampler_weights" and one.base_model in served]
        offset += len(records)
    return saved[:_MAX_LISTED]


@router.get("/models/{name:path}")
async def retrieve_model(name: ModelPath, services: ServicesDependency, tenant: TenantDependency) -> Model:
    """Describes a value for `model`; 404 if it cannot be sampled."""
    if name in services.dispatch.models:
        return _base_model(services, name)
    try:
        if name.startswith("tinker://"):
            record = await services.checkpoints.resolve(tenant, name)
            require_served(services.dispatch, record.base_model)
            return _checkpoint(services, record, tenant)
        sampler = await services.samplers.find_by_name(tenant, name)
        return _model(services, name, sampler.record.created_at, tenant.name, sampler.record.base_model)
    except RequestError as error:
        raise _no_model(services, name, error) from None


@router.post(
    "/completions",
    response_model=Completion,
    openapi_extra=json_body(CompletionRequest, {"model": BASE_MODEL, "prompt": "Once upon a time", "max_tokens": 16}),
)
async def create_completion(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Continues one or several prompts. With `stream`, the response is a stream of server-sent events."""
    return await _complete(request, services, tenant, COMPLETIONS)


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    openapi_extra=json_body(
        ChatCompletionRequest,
        {"model": BASE_MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 16},
    ),
)
async def create_chat_completion(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Generates the assistant's next message, using the model's chat template.

    With `stream`, the response is a stream of server-sent events.
    """
    return await _complete(request, services, tenant, CHATS)


async def _complete(
    request: Request, services: Services, tenant: Tenant, kind: CompletionKind[AnyCompletion]
) -> Response:
    with ExitStack() as stack:
        reservation = stack.enter_context(Reservation(services.quotas, tenant.id))
        completion = await receive_unordered(request, services, reservation, Decoder(decoder(kind.request)))
        kind.check(completion)
        check_alternatives(completion, services.config.limits.max_logprobs)
        try:
            prepared = await _prepare(services, tenant, kind, completion, reservation.num_bytes)
            await services.auth.confirm(request)
            _admit(services, tenant, stack, reservation, prepared, len(request.state.body.received))
            batch = SampleBatch(
                services.sampling, prepared.jobs, reservation, completion.stream and not completion.wants_prompt_only
            )
            stack.callback(batch.close)
            writer = kind.writer(completion, prepared.tokenizer, prepared.prompts)
            choices = RequestChoices(completion, prepared.tokenizer, prepared.stops, prepared.prompts)
            if not completion.stream:
                results = await _while_connected(request, _collect_results(batch))
                return await _whole_response(writer, choices, results)
            # Waits for the first event, so that an early failure is answered with its own HTTP status.
            events = batch.events()
            events = _prepend(await _while_connected(request, anext(events)), events)
        except (OperationError, DraftNotFound) as error:
            raise openai_error(completion, error) from None
        closing = stack.pop_all()
    return EventStream(_stream(completion, writer, choices, prepared.prompts, events), closing.close)


@dataclass(frozen=True)
class _PreparedRequest:
    """A request translated for the samplers, one job per prompt. sizes: bytes to reserve for each job."""

    tokenizer: Tokenizer
    stops: Stops
    prompts: list[Prompt]
    jobs: list[SamplingJob]
    sizes: list[int]


async def _prepare(
    services: Services, tenant: Tenant, kind: CompletionKind[AnyCompletion], completion: AnyCompletion, num_bytes: int
) -> _PreparedRequest:
    """Finds the sampler, tokenizes and validates; off the event loop if large. Raises RequestError, OperationError."""
    sampler = await _sampler(services, tenant, completion.model)
    model = services.dispatch.models[sampler.record.base_model]
    tokenizer = await services.tokenizers.get(model.name)

    def prepare() -> _PreparedRequest:
        # A tokenizer may have more tokens than the model.
        stops = merge_stops(completion, (one for one in kind.ends(tokenizer, model) if one < model.vocab_size))
        prompts = kind.prompts(completion, tokenizer, model.max_context_length)
        requests = sample_requests(completion, prompts, model.max_context_length)
        try:
            jobs = [services.sampling.job_for_sample_now(sampler, one, stops) for one in requests]
        except RequestError as error:
            raise openai_error(completion, error) from None
        sizes = [job.num_bytes for job in jobs]
        return _PreparedRequest(tokenizer, stops, prompts, jobs, sizes)

    # A chat template is a program of the model's repository. It also says how answers end.
    is_chat = isinstance(completion, ChatCompletionRequest)
    large = num_bytes > _LARGE_REQUEST_BYTES or completion.num_prompts > _MANY_PROMPTS
    return await services.tokenizers.run_in_thread(tenant.id, prepare) if is_chat or large else prepare()


def _admit(
    services: Services, tenant: Tenant, stack: ExitStack, first: Reservation, prepared: _PreparedRequest, num_bytes: int
) -> None:
    """Makes one reservation per job; closing the stack releases them.

    Args:
        first: the reservation that the request already has.
        num_bytes: size of the body.
    Raises:
        RequestError: 400 if the request can never fit the tenant's limits, 429 if it does not fit now.
    """
    sizes = [max(num_bytes, prepared.sizes[0]), *prepared.sizes[1:]]
    config, most_bytes = services.config, services.quotas.max_request_bytes
    if len(sizes) > config.limits.tenant_queued_operations or sum(sizes) > most_bytes:
        raise OpenAiError(
            f"{len(sizes)} prompts and their samples, at their maximum length, may take {sum(sizes)} bytes; the limits "
            f"are {config.limits.tenant_queued_operations} prompts and {most_bytes} bytes: lower n, logprobs or "
            "max_tokens, or send several requests"
        )
    first.grow(sizes[0], UNORDERED)
    others = [stack.enter_context(Reservation(services.quotas, tenant.id)) for _ in sizes[1:]]
    for reservation, size in zip(others, sizes[1:], strict=True):
        reservation.claim(size, UNORDERED)
    for reservation, size, job in zip((first, *others), sizes, prepared.jobs, strict=True):
        stack.callback(reservation.release)
        reservation.keep(size, len(job.prompt))


async def _sampler(services: Services, tenant: Tenant, name: str) -> Sampler:
    try:
        return await services.samplers.find_by_name(tenant, name)
    except RequestError as error:
        raise _no_model(services, name, error) from None


async def _collect_results(batch: SampleBatch) -> list[JobResult]:
    """Waits for all results and returns them in the order of the jobs."""
    results = [event async for event in batch.events() if isinstance(event, JobResult)]
    return sorted(results, key=lambda event: event.job)


async def _whole_response(writer: ResponseWriter, choices: RequestChoices, results: list[JobResult]) -> Response:
    def make() -> bytes:
        outputs = [PromptOutput(choices.echo(event.job, event.response), choices.finish(event)) for event in results]
        return writer.encode(outputs, choices.usage())

    num_numbers = sum(map(choices.count_numbers, results))
    body = await _offload_if(num_numbers > _MANY_NUMBERS, make)
    return Response(body, media_type="application/json")


async def _prepend(
    first: JobProgress | JobResult, rest: AsyncIterator[JobProgress | JobResult]
) -> AsyncIterator[JobProgress | JobResult]:
    yield first
    async for event in rest:
        yield event


async def _stream(
    completion: BaseCompletionRequest,
    writer: ResponseWriter,
    choices: RequestChoices,
    prompts: Sequence[Prompt],
    events: AsyncIterator[JobProgress | JobResult],
) -> AsyncIterator[bytes]:
    """Yields the server-sent events of a response; if a job fails, the last event is an error."""
    try:
        for job, prompt in enumerate(prompts if completion.echoes else ()):
            echo = await _offload_if(len(prompt.token_ids) > _MANY_NUMBERS, partial(choices.echo, job))
            async for piece in _pieces(writer, choices.echo_choices(job, echo)):
                yield piece
        async for event in events:
            if isinstance(event, JobProgress):
                pieces = _pieces(writer, choices.grow(event))
            else:
                pieces = _pieces(writer, choices.finish(event), choices.count_numbers(event) > _MANY_NUMBERS)
            async for piece in pieces:
                yield piece
        if completion.stream_options.include_usage:
            yield _event(writer.encode_usage_chunk(choices.usage()))
        yield b"data: [DONE]\n\n"
    except (OperationError, DraftNotFound) as error:
        yield _error_event(openai_error(completion, error))
    except RequestError as error:
        yield _error_event(OpenAiError(error.message, error.status))


async def _pieces(writer: ResponseWriter, deltas: Iterator[ChoiceDelta], large: bool = False) -> AsyncIterator[bytes]:
    """Yields server-sent events, several per piece, and lets other tasks run in between.

    Args:
        large: True if a delta may be so large that it must be encoded off the event loop.
    """
    while piece := await _offload_if(large, partial(_piece, writer, deltas)):
        yield piece
        await asyncio.sleep(0)


def _piece(writer: ResponseWriter, deltas: Iterator[ChoiceDelta]) -> bytes:
    """Returns the next piece of server-sent events; empty when there are no more deltas."""
    events, num_bytes = [], 0
    for delta in deltas:
        if delta.has_content:
            events.append(_event(writer.encode_chunk(delta)))
            num_bytes += len(events[-1])
            if num_bytes > _PIECE_BYTES:
                break
    return b"".join(events)


async def _offload_if(large: bool, work: Callable[[], Worked]) -> Worked:
    return await asyncio.to_thread(work) if large else work()


def _event(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"


def _error_event(error: OpenAiError) -> bytes:
    return _event(ErrorBody.of(error.message, error.status, error.param).model_dump_json().encode())


async def _while_connected(request: Request, work: Awaitable[Worked]) -> Worked:
    """Runs the work; cancels it and raises ClientDisconnect if the client disconnects first."""
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _base_model(services: Services, name: str) -> Model:
    return _model(services, name, services.started_at, "trainhouse", None)


def _checkpoint(services: Services, record: CheckpointRecord, tenant: Tenant) -> Model:
    owner = tenant.name if record.tenant_id == tenant.id else "another tenant"
    return _model(services, record.tinker_path, record.created_at, owner, record.base_model)


def _model(services: Services, name: str, created_at: float, owner: str, parent: str | None) -> Model:
    base = services.dispatch.models.get(parent or name)
    return Model(
        id=name,
        created=int(created_at),
        owned_by=owner,
        root=name,
        parent=parent,
        max_model_len=base and base.max_context_length,
    )


def _no_model(services: Services, name: str, error: RequestError) -> OpenAiError:
    message = error.message
    if error.status == 404 and not name.startswith("tinker://"):
        message = (
            f"model {name} does not exist: use one of {', '.join(services.dispatch.models)}, the tinker:// path of one "
            "of your checkpoints, or the id of a live sampling session"
        )
    return OpenAiError(message, 404, "model", "model_not_found")
