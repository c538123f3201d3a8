"""Routes that retrieve results of accepted operations and cancel sampling requests, and the responses with results."""

import asyncio
import random
from collections.abc import Iterable, Iterator, Mapping

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...schemas.codec import (
    JSON,
    PROTOBUF,
    decode_forward_backward_output,
    decode_sample_response,
    dense_target_bytes,
    encode_forward_backward_output_json,
    encode_sample_response_json,
    forward_backward_output_json_pieces,
    sample_response_json_pieces,
)
from ...schemas.futures import (
    CancelFutureRequest,
    Pending,
    RetrieveFutureRequest,
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
)
from ...schemas.verbs import MODEL_ID
from ..http.bodies import LARGE_BYTES, json_body, receive_json
from ..journal.futures import Result
from ..tenants.auth import Tenant, TenantDependency
from ..tenants.quotas import Reservation
from .examples import SAMPLER_ID
from .services import Services, ServicesDependency

router = APIRouter(prefix="/api/v1", tags=["futures"])

_SLICE_BYTES = 1 << 18
_JSON_TIMES = 3
"""Memory that sending a result as JSON takes, in multiples of its size: it is decoded, then encoded piece by piece."""

_MULTI_POLL_SECONDS = 30.0
_POLL_SPREAD = 0.2
"""Long polls are shortened by a random share of up to this, so that clients do not all return at the same moment."""


@router.post(
    "/retrieve_future",
    openapi_extra=json_body(RetrieveFutureRequest, {"request_id": f"{MODEL_ID}:1"}),
    responses={408: {"model": Pending, "description": "Not ready yet: repeat the request at once; it is a long poll."}},
)
async def retrieve_future(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Waits for the result of an accepted operation and returns it.

    A failed operation answers 200 with `error` and `category`. Results of forward_backward and sample are protobuf if
    `Accept` names application/x-protobuf, else JSON.
    """
    body = await receive_json(request, RetrieveFutureRequest)
    seconds = services.config.network.long_poll_seconds * random.uniform(1 - _POLL_SPREAD, 1)
    response = await result_response(request, services, tenant, body.request_id, seconds)
    # A poll counts as a sign of life, for clients that send no heartbeats; a request id begins with its session's id.
    services.sessions.touch(body.request_id.partition(":")[0])
    return JSONResponse(response.model_dump(exclude_none=True), 408) if isinstance(response, Pending) else response


async def result_response(
    request: Request, services: Services, tenant: Tenant, request_id: str, seconds: float
) -> Response | Pending:
    """Waits for a result and returns it: protobuf if the client accepts it and the result is stored so, else JSON.

    Raises:
        RequestError: 404 if the request id is unknown, 429 if too many large results are being sent to the tenant.
    """
    as_it_is = PROTOBUF in request.headers.get("accept", "")
    sending, times = Reservation(services.quotas, tenant.id), 1 if as_it_is else _JSON_TIMES
    try:
        claim = sending.claim_result
        result = await services.futures.wait(request_id, tenant.id, seconds, lambda num_bytes: claim(times * num_bytes))
        if isinstance(result, Pending):
            return result
        is_json, body = result.is_json, result.body
        num_bytes, media_type = len(body), PROTOBUF if as_it_is and not is_json else JSON
        as_it_is = as_it_is or is_json
        if not as_it_is and result.encoding == "sample":
            num_bytes = max(num_bytes, dense_target_bytes(body))
        if num_bytes < LARGE_BYTES:
            sending.release()
            return Response(body, media_type=media_type) if as_it_is else _as_json(result)
        if as_it_is:
            pieces = (body[start : start + _SLICE_BYTES] for start in range(0, len(body), _SLICE_BYTES))
            return _LargeResponse(pieces, media_type, sending, {"Content-Length": str(len(body))})
        async with services.futures.large_result_lock:
            pieces = await asyncio.to_thread(_json_pieces, result)
        return _LargeResponse(pieces, media_type, sending)
    except BaseException:
        sending.release()
        raise


class _LargeResponse(StreamingResponse):
    """Streams a large result.

    A thread produces each piece after the client has read the one before. `sending` is released at the end, also if the
    client disconnects.
    """

    def __init__(
        self,
        pieces: Iterable[bytes],
        media_type: str,
        sending: Reservation,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(pieces, headers=headers, media_type=media_type)
        self._sending = sending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._sending.release()


def _as_json(result: Result) -> Response:
    if result.encoding == "sample":
        return JSONResponse(encode_sample_response_json(decode_sample_response(result.body)))
    return JSONResponse(encode_forward_backward_output_json(decode_forward_backward_output(result.body)))


def _json_pieces(result: Result) -> Iterator[bytes]:
    if result.encoding == "sample":
        return sample_response_json_pieces(decode_sample_response(result.body))
    return forward_backward_output_json_pieces(decode_forward_backward_output(result.body))


@router.post(
    "/retrieve_futures",
    openapi_extra=json_body(
        RetrieveFuturesRequest, {"target": {"sampling_session_id": SAMPLER_ID}, "prev_cursor": 0, "timeout": 0}
    ),
    response_model_exclude_none=True,
)
async def retrieve_futures(
    request: Request, services: ServicesDependency, tenant: TenantDependency
) -> RetrieveFuturesResponse:
    """Lists which sampling requests of a session have ended, so that one poll covers many; retrieve_future returns each
    result.

    Results are kept until they expire, regardless of `retrieved_request_ids`.
    """
    body = await receive_json(request, RetrieveFuturesRequest)
    seconds = _MULTI_POLL_SECONDS if body.timeout is None else body.timeout
    seconds = min(seconds, services.config.network.long_poll_seconds)
    return await services.sampling.retrieve_completed(tenant, body, seconds)


@router.post(
    "/cancel_future",
    status_code=204,
    openapi_extra=json_body(CancelFutureRequest, {"request_id": f"{SAMPLER_ID}:0"}),
)
async def cancel_future(request: Request, services: ServicesDependency, tenant: TenantDependency) -> None:
    """Cancels a running sampling request. Operations of a training run are never cancelled, to keep their order."""
    body = await receive_json(request, CancelFutureRequest)
    await services.futures.require(body.request_id, tenant.id)
    services.dispatch.cancel(body.request_id)
