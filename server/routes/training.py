"""Routes that create models and submit operations to their runs; submission.py has the code that they share."""

from collections.abc import Mapping
from functools import partial
from inspect import cleandoc
from typing import Annotated

from fastapi import APIRouter, Request, Response

from ...schemas.checkpoints import LoadWeightsRequest
from ...schemas.codec import decode_model
from ...schemas.futures import SubmitResponse
from ...schemas.models import CreateModelRequest, UnloadModelRequest
from ...schemas.training import MAX_INTEGER, ForwardBackwardRequest
from ...schemas.verbs import CREATE_MODEL, LOAD_WEIGHTS, MODEL_ID, Verb
from ..http.bodies import (
    Body,
    Decoder,
    json_body,
    json_or_protobuf_body,
    json_parameter,
)
from ..http.verbs import VERBS
from ..operations.loading import LoadWeights
from ..tenants.auth import TenantDependency
from ..tenants.quotas import Reservation
from .gate import Endpoint
from .services import ServicesDependency
from .submission import (
    SUBMIT_RESPONSES,
    receive,
    receive_unordered,
    submit_response,
    submitting,
)

router = APIRouter(prefix="/api/v1", tags=["training"], responses=SUBMIT_RESPONSES)

_PASS_SCHEMA: dict[str, object] = {
    "type": "object",
    "required": ["model_id", "data", "loss_fn"],
    "properties": {
        "model_id": {"type": "string"},
        "seq_id": {
            "type": "integer",
            "minimum": 0,
            "maximum": MAX_INTEGER,
            "description": "1, 2, 3, ...; default: the next one",
        },
        "loss_fn": {"type": "string", "description": "cross_entropy, importance_sampling, ppo, cispo, dro, gspo, ..."},
        "loss_fn_config": {"type": "object", "additionalProperties": {"type": ["number", "string"]}},
        "forward_only": {"type": "boolean", "default": False},
        "loss_weight": {"type": "number", "default": 1.0},
        "capture_for": {"type": "string", "description": "policies only: the draft that will learn from this pass"},
        "evaluation": {
            "type": "object",
            "description": "create_evaluation only",
            "required": ["name", "every"],
            "properties": {
                "name": {"type": "string"},
                "every": {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER},
            },
        },
        "data": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "model_input": {
                        "description": 'token ids, or {"chunks": [{"type": "encoded_text", "tokens": [...]}]}',
                        "type": "array",
                        "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
                    },
                    "loss_fn_inputs": {
                        "type": "object",
                        "description": "name -> numbers, or {data, dtype, shape}",
                        "additionalProperties": {"type": "array", "items": {"type": "number"}},
                    },
                    "feature_ref": {"type": "string", "description": "drafts only: the reference from capture"},
                },
            },
        },
    },
}


def _body_of(verb: Verb) -> dict[str, object]:
    if not issubclass(verb.request, ForwardBackwardRequest):
        return json_body(verb.request, verb.example)
    return json_or_protobuf_body(_PASS_SCHEMA, verb.example, "trainhouse.wire.ForwardBackwardRequest; may be zstd")


async def _create_model(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    with Reservation(services.quotas, tenant.id) as reservation:
        decoder = Decoder(partial(decode_model, CreateModelRequest))
        model = await receive_unordered(request, services, reservation, decoder)
        created = await services.runs.create(tenant, model, request.state.body, reservation)
    return await submit_response(request, services, tenant, SubmitResponse(request_id=created.request_id))


async def _load_weights(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    with Reservation(services.quotas, tenant.id) as reservation:
        load, operation = await receive(request, services, tenant, LOAD_WEIGHTS, reservation)
        assert isinstance(load, LoadWeightsRequest) and isinstance(operation, LoadWeights)
        body, token = request.state.body, load.weights_access_token
        if token is not None:
            # It is another tenant's API key, and bodies are journaled as received.
            shown = load.model_copy(update={"weights_access_token": None})
            body = Body(shown.model_dump_json(exclude_none=True).encode(), body.limits, digest=body.digest)
        if load.model_id is not None:
            operation.reader = await services.checkpoints.reader_id(token)
            run = await services.runs.get(tenant, load.model_id)
            submitted = await run.submit(load.seq_id or 0, operation, body, reservation)
        else:
            created = await services.runs.create(tenant, load, body, reservation)
            submitted = SubmitResponse(request_id=created.request_id)
    return await submit_response(request, services, tenant, submitted)


_ENDPOINTS: Mapping[str, Endpoint] = {CREATE_MODEL.name: _create_model, LOAD_WEIGHTS.name: _load_weights}
"""Verbs that also create runs, which no run orders."""

# Every verb, forward_backward included, is served by `submitting` in submission.py, but for those of `_ENDPOINTS`. The
# gate calls the endpoints of busy paths directly, see `_BUSY` in serving/app.py.
for _verb in VERBS.values():
    for _path in _verb.paths:
        router.add_api_route(
            f"/{_path}",
            _ENDPOINTS.get(_verb.name) or submitting(_verb),
            methods=["POST"],
            name=_verb.name,
            description=cleandoc(_verb.description),
            openapi_extra=_body_of(_verb),
        )


@router.post("/unload_model", openapi_extra=json_body(UnloadModelRequest, {"model_id": MODEL_ID}))
async def unload_model(
    request: Annotated[UnloadModelRequest, json_parameter(UnloadModelRequest)],
    http_request: Request,
    services: ServicesDependency,
    tenant: TenantDependency,
) -> Response:
    """Ends a live model and frees its memory. Its checkpoints stay, and so do the samplers and models of its session.

    Operations that have not begun fail. SDKs up to 0.25 can send this.
    """
    request_id = await services.runs.unload(tenant, request.model_id)
    submitted = SubmitResponse(request_id=request_id, model_id=request.model_id)
    return await submit_response(http_request, services, tenant, submitted)
