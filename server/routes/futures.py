"""Routes that retrieve results of accepted operations and cancel sampling requests."""

import random

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ...schemas.futures import (
    CancelFutureRequest,
    Pending,
    RetrieveFutureRequest,
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
)
from ...schemas.verbs import MODEL_ID
from ..http.bodies import json_body, receive_json
from ..tenants.auth import TenantDependency
from .examples import SAMPLER_ID
from .services import ServicesDependency
from .submission import result_response

router = APIRouter(prefix="/api/v1", tags=["futures"])

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
