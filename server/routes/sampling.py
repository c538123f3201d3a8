"""Routes that create sampling sessions and accept sampling requests."""

from functools import partial

from fastapi import APIRouter, Request, Response

from ...schemas.codec import decode_model
from ...schemas.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SampleRequest,
    SamplerInfo,
)
from ...schemas.verbs import BASE_MODEL, SESSION_ID
from ..http.bodies import Decoder, json_body, receive_json
from ..tenants.auth import TenantDependency
from ..tenants.quotas import Reservation
from .examples import SAMPLER_ID, SamplerIdPath
from .services import ServicesDependency
from .submission import SUBMIT_RESPONSES, receive_unordered, submit_response

router = APIRouter(prefix="/api/v1", tags=["sampling"])

_SAMPLE: dict[str, object] = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
    "sampling_params": {"max_tokens": 16, "temperature": 0.7},
    "num_samples": 2,
}
_DECODER = Decoder(partial(decode_model, SampleRequest))


@router.post(
    "/create_sampling_session",
    openapi_extra=json_body(
        CreateSamplingSessionRequest,
        {"session_id": SESSION_ID, "sampling_session_seq_id": 0, "base_model": BASE_MODEL},
    ),
)
async def create_sampling_session(
    request: Request, services: ServicesDependency, tenant: TenantDependency
) -> CreateSamplingSessionResponse:
    """Creates a sampler of a base model or of a checkpoint (`model_path`); its weights are loaded at the first sample.

    `draft_path` names a draft of the same base model for speculative sampling.
    """
    body = await receive_json(request, CreateSamplingSessionRequest)
    return CreateSamplingSessionResponse(sampling_session_id=await services.samplers.create(tenant, body))


@router.get("/samplers/{sampler_id}", response_model_exclude_none=True)
async def get_sampler(sampler_id: SamplerIdPath, services: ServicesDependency, tenant: TenantDependency) -> SamplerInfo:
    """Returns the base model, checkpoint and draft of a sampling session."""
    record = (await services.samplers.get(tenant, sampler_id)).record
    return SamplerInfo(
        sampler_id=record.sampler_id,
        base_model=record.base_model,
        model_path=record.model_path,
        draft_path=record.draft_path,
    )


@router.post(
    "/join_sampling_session",
    openapi_extra=json_body(JoinSamplingSessionRequest, {"sampling_session_id": SAMPLER_ID}),
)
async def join_sampling_session(
    request: Request, services: ServicesDependency, tenant: TenantDependency
) -> JoinSamplingSessionResponse:
    """Returns a number for another client of a sampling session, unique within the session."""
    body = await receive_json(request, JoinSamplingSessionRequest)
    sampler = await services.samplers.get(tenant, body.sampling_session_id)
    return JoinSamplingSessionResponse(client_counter=sampler.join())


@router.post(
    "/sample", openapi_extra=json_body(SampleRequest, {"base_model": BASE_MODEL, **_SAMPLE}), responses=SUBMIT_RESPONSES
)
@router.post(
    "/asample",
    openapi_extra=json_body(SampleRequest, {"sampling_session_id": SAMPLER_ID, **_SAMPLE}),
    responses=SUBMIT_RESPONSES,
)
async def sample(request: Request, services: ServicesDependency, tenant: TenantDependency) -> Response:
    """Samples `num_samples` continuations of a prompt, with their log-probabilities at temperature 1.

    The weights are those of `sampling_session_id` or, for a single request, of `base_model` or `model_path` (a
    checkpoint). `draft_path` names a draft that proposes `num_draft_tokens` tokens at a time; `guesses` of the result
    counts the proposed and the accepted ones.
    """
    with Reservation(services.quotas, tenant.id) as reservation:
        wanted = await receive_unordered(request, services, reservation, _DECODER, is_numbered=True)
        submitted = await services.sampling.submit(tenant, wanted, request.state.body, reservation)
    return await submit_response(request, services, tenant, submitted)
