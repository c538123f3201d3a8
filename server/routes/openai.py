"""OpenAI's API: completions and chats of whatever can be sampled, for the programs that are written on it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ...schemas.errors import OperationError, RequestError
from ...schemas.openai import (
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
from ..auth import Tenant, TenantDependency
from ..bodies import json_body
from ..draws import Drawn, Draws, Grown
from ..openai import AnyRequest, Choices, Envelope, Fragment, check, prompts_of, sample_request, stops_of
from ..samplers import Sampler
from ..services import Services, ServicesDependency
from .examples import BASE_MODEL, ModelPath
from .submitting import receive_unordered

router = APIRouter(prefix="/v1", tags=["OpenAI"])

_MOST_LISTED = 1000
_MANY_TOKENS = 10_000
"""The text of more of them is made off the event loop."""

Worked = TypeVar("Worked")


@router.get("/models")
async def list_models(services: ServicesDependency, tenant: TenantDependency) -> ModelList:
    """What `model` can be: the base models, and your sampler checkpoints, newest first.

    Any checkpoint's path and the id of a live sampling session are taken, too.
    """
    base = [_base_model(name) for name in services.dispatch.models]
    now = services.checkpoints.now()
    records, _ = await services.store.list_checkpoints(tenant.id, now, 0, _MOST_LISTED)
    saved = [record for record in records if record.kind == "sampler_weights"]
    return ModelList(data=[*base, *(_model(one.tinker_path, one.created_at, tenant) for one in saved)])


@router.get("/models/{name:path}")
async def retrieve_model(name: ModelPath, services: ServicesDependency, tenant: TenantDependency) -> Model:
    """Whether `model` can be this."""
    if name in services.dispatch.models:
        return _base_model(name)
    try:
        if name.startswith("tinker://"):
            return _model(name, (await services.checkpoints.resolve(tenant, name)).created_at, tenant)
        return _model(name, (await services.samplers.get(tenant, name)).record.created_at, tenant)
    except RequestError as error:
        raise _no_model(services, name, error) from None


@router.post(
    "/completions",
    response_model=Completion,
    openapi_extra=json_body(CompletionRequest, {"model": BASE_MODEL, "prompt": "Once upon a time", "max_tokens": 16}),
)
async def create_completion(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Continuations of one or several prompts. With `stream` they come as server-sent events."""
    return await _complete(request, services, tenant, decoder(CompletionRequest))


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    openapi_extra=json_body(
        ChatCompletionRequest,
        {"model": BASE_MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 16},
    ),
)
async def create_chat_completion(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """The assistant's next message, by the model's chat template. With `stream` it comes as server-sent events."""
    return await _complete(request, services, tenant, decoder(ChatCompletionRequest))


async def _complete(
    request: Request, services: Services, tenant: Tenant, decode: Callable[[bytes], AnyRequest]
) -> Response:
    with services.quotas.admission(tenant.id) as admission:
        submit = await receive_unordered(request, services, admission, decode)
        asked = submit.content
        check(asked)
        sampler = await _sampler(services, tenant, asked.model)
        tokenizer = await services.tokenizers.get(sampler.record.base_model)
        prompts = await prompts_of(asked, tokenizer)
        stops = stops_of(asked, services.dispatch.models[sampler.record.base_model].eos_token_ids)
        jobs = [services.samplers.drawing(sampler, sample_request(asked, prompt), stops) for prompt in prompts]
        choices, envelope = Choices(asked, tokenizer, stops, prompts), Envelope(asked, tokenizer, prompts)
        draws = Draws(services.samplers, jobs, admission, asked.stream, len(submit.received.body))
    with ExitStack() as stack:
        stack.callback(draws.close)
        try:
            if not asked.stream:
                drawn = await _while_connected(request, _all(draws))
                return await _whole(envelope, choices, drawn)
            events = draws.events()
            # What fails before anything comes is answered with its status.
            events = _chained(await _while_connected(request, anext(events)), events)
        except OperationError as error:
            raise OpenAiError(error.message, 400 if error.category == "user" else 503) from None
        closing = stack.pop_all()
    return _EventStream(_stream(asked, envelope, choices, events), closing.close)


async def _sampler(services: Services, tenant: Tenant, name: str) -> Sampler:
    try:
        return await services.samplers.named(tenant, name)
    except RequestError as error:
        raise _no_model(services, name, error) from None


async def _all(draws: Draws) -> list[Drawn]:
    """In the order of the jobs."""
    drawn = [event async for event in draws.events() if isinstance(event, Drawn)]
    return sorted(drawn, key=lambda event: event.job)


async def _whole(envelope: Envelope, choices: Choices, drawn: list[Drawn]) -> Response:
    def make() -> str:
        fragments = [fragment for event in drawn for fragment in choices.whole(event)]
        return envelope.answer(fragments, choices.usage()).model_dump_json()

    num_tokens = sum(len(sequence.tokens) for event in drawn for sequence in event.response.sequences)
    body = await asyncio.to_thread(make) if num_tokens > _MANY_TOKENS else make()
    return Response(body, media_type="application/json")


async def _chained(first: Grown | Drawn, rest: AsyncIterator[Grown | Drawn]) -> AsyncIterator[Grown | Drawn]:
    yield first
    async for event in rest:
        yield event


async def _stream(
    asked: AnyRequest, envelope: Envelope, choices: Choices, events: AsyncIterator[Grown | Drawn]
) -> AsyncIterator[str]:
    """Server-sent events; the last of a stream that broke off is an error."""
    try:
        for fragment in choices.echoes():
            yield _event(envelope.chunk([fragment]))
        async for event in events:
            for fragment in _fragments(asked, choices, event):
                yield _event(envelope.chunk([fragment]))
        if asked.stream_options.include_usage:
            yield _event(envelope.chunk([], choices.usage()))
        yield "data: [DONE]\n\n"
    except OperationError as error:
        yield _event(ErrorBody.of(error.message, 400 if error.category == "user" else 503))
    except RequestError as error:
        yield _event(ErrorBody.of(error.message, error.status))


def _fragments(asked: AnyRequest, choices: Choices, event: Grown | Drawn) -> list[Fragment]:
    """Those that tell something: text may be held back."""
    fragments = choices.grow(event) if isinstance(event, Grown) else choices.finish(event)
    shows_tokens = asked.return_token_ids or asked.num_top is not None
    return [one for one in fragments if one.first or one.text or one.finish_reason or shows_tokens]


def _event(content: BaseModel) -> str:
    return f"data: {content.model_dump_json()}\n\n"


class _EventStream(StreamingResponse):
    """close: called when it is over, also when the client left before."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _while_connected(request: Request, work: Awaitable[Worked]) -> Worked:
    """Raises ClientDisconnect, the work being cancelled, when the client leaves before it is done."""
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _base_model(name: str) -> Model:
    return Model(id=name, created=0, owned_by="trainhouse")


def _model(name: str, created_at: float, tenant: Tenant) -> Model:
    return Model(id=name, created=int(created_at), owned_by=tenant.name)


def _no_model(services: Services, name: str, error: RequestError) -> OpenAiError:
    message = error.message
    if error.status == 404 and not name.startswith("tinker://"):
        message = (
            f"there is no model {name}: take one of {', '.join(services.dispatch.models)}, the tinker:// path of a "
            "checkpoint of yours, or the id of a live sampling session"
        )
    return OpenAiError(message, 404, "model", "model_not_found")
