"""Shared code of the routes that submit operations: reserve room, decode, submit, and write the response."""

import contextlib
import re
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from ...schemas.codec import peek_operation
from ...schemas.errors import RequestError
from ...schemas.futures import SubmitResponse
from ...schemas.verbs import Verb
from ...workers.protocol.plugins import plugin_rows
from ..http.bodies import Body, Decoded, Decoder, RunRequest, decode_body, decoder_of, receive_body, size_of
from ..operations.operation import Operation, RefusedOperation
from ..operations.registry import TAINTING_KINDS, operation_of
from ..tenants.auth import Tenant, TenantDependency
from ..tenants.quotas import UNORDERED, QueuePosition, Reservation
from .futures import result_response
from .gate import Endpoint
from .services import Services, ServicesDependency

SUBMIT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": SubmitResponse,
        "description": "Accepted: poll retrieve_future. With `Prefer: wait=SECONDS`: the result, if ready in time.",
    }
}


async def receive_unordered(
    request: Request,
    services: Services,
    reservation: Reservation,
    decoder: Decoder[Decoded],
    is_numbered: bool = False,
) -> Decoded:
    """Receives a request that has no order but holds a reservation until it is answered.

    Args:
        is_numbered: it has a number, by which a retry is recognized.
    Raises:
        RequestError: the request is refused or throttled.
    """
    body: Body = request.state.body
    reservation.claim(body.most_bytes, UNORDERED)
    await receive_body(request)
    reservation.grow(await size_of(body), UNORDERED)
    content = await decode_body(body, decoder, is_numbered)
    await services.auth.confirm(request)
    return content


async def receive(
    request: Request, services: Services, tenant: Tenant, verb: Verb, reservation: Reservation
) -> tuple[RunRequest, Operation]:
    """Receives an operation of a run.

    A refused operation still uses up its seq_id, so that the run does not wait for it; a throttled one (429, 503) does
    not, because the client will retry it.

    Raises:
        RequestError: the operation is refused or throttled.
    """
    body: Body = request.state.body

    async def claim(beginning: bytes) -> None:
        position = await _queue_position(services, tenant, beginning, body.content_type)
        reservation.claim(body.most_bytes, position)

    await receive_body(request, None if reservation.try_claim(body.most_bytes) else claim)
    try:
        if (num_bytes := await size_of(body)) > reservation.num_bytes:
            position = await _queue_position(services, tenant, body.received, body.content_type)
            reservation.grow(num_bytes, position)
        content = await decode_body(body, decoder_of(verb, body.content_type), is_numbered=True)
        operation = operation_of(content)
        await services.auth.confirm(request)  # decoding may have taken long
    except RequestError as error:
        await services.auth.confirm(request)
        await count_as_refused(services, tenant, verb.name, body, error)
        raise
    return content, operation


def submitting(verb: Verb) -> Endpoint:
    """Returns the endpoint that handles an operation of a live run from the request to the response."""

    async def submit(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
        with Reservation(services.quotas, tenant.id) as reservation:
            content, operation = await receive(request, services, tenant, verb, reservation)
            if operation.stores_features:
                reserve = plugin_rows("server.drafts.rows", "RESERVATIONS")["features"]
                await reserve(services, tenant, content, request.state.body, operation, reservation)
                await services.auth.confirm(request)
            run = await services.runs.get(tenant, content.model_id or "")
            submitted = await run.submit(content.seq_id or 0, operation, request.state.body, reservation)
        return await submit_response(request, services, tenant, submitted)

    return submit


async def _queue_position(services: Services, tenant: Tenant, beginning: bytes, content_type: str) -> QueuePosition:
    operation = peek_operation(beginning, content_type)
    if operation.model_id is None:
        return UNORDERED
    run = await services.runs.get(tenant, operation.model_id)
    return run.queue.position_of(operation.seq_id or 0)


async def count_as_refused(services: Services, tenant: Tenant, kind: str, body: Body, error: RequestError) -> None:
    """Uses up the operation's seq_id, unless it is throttled."""
    if error.status in (429, 503):
        return
    operation = peek_operation(body.received, body.content_type)
    if operation.model_id is None or not operation.seq_id:
        return
    with contextlib.suppress(RequestError):  # the model does not exist; the client receives `error` in any case
        run = await services.runs.get(tenant, operation.model_id)
        await run.refuse(operation.seq_id, RefusedOperation(kind, error.message, taints=kind in TAINTING_KINDS))


async def submit_response(request: Request, services: Services, tenant: Tenant, submitted: SubmitResponse) -> Response:
    """Returns the submit response, or the result itself if `Prefer: wait=SECONDS` is sent and it is ready in time."""
    preferred = re.search(r"\bwait=\"?([0-9]{1,6})", request.headers.get("prefer", ""))  # RFC 7240
    if preferred and (seconds := float(preferred[1])):
        seconds = min(seconds, services.config.network.long_poll_seconds)
        try:
            response = await result_response(request, services, tenant, submitted.request_id, seconds)
        except RequestError as error:
            if error.status != 429:
                raise
            # The operation is accepted: a 429 would make the client submit it twice if it sends no seq_id.
            response = None
        if isinstance(response, Response):
            response.headers["Preference-Applied"] = f"wait={seconds:g}"
            response.headers["X-Request-Id"] = submitted.request_id
            if submitted.seq_id is not None:
                response.headers["X-Seq-Id"] = str(submitted.seq_id)
            return response
    return JSONResponse(submitted.model_dump(exclude_none=True))
