"""The route that releases captured features; the routes of draft operations are made from drafts/verbs.py."""

from typing import Annotated

from fastapi import APIRouter

from ...schemas.drafts import DRAFT_ID, ReleaseFeaturesRequest, ReleaseFeaturesResponse
from ..http.bodies import json_body, json_parameter
from ..routes.services import ServicesDependency
from ..routes.submission import SUBMIT_RESPONSES
from ..tenants.auth import TenantDependency
from .feature_store import store_of

router = APIRouter(prefix="/api/v1", tags=["training"], responses=SUBMIT_RESPONSES)


@router.post("/release_features", openapi_extra=json_body(ReleaseFeaturesRequest, {"model_id": DRAFT_ID}))
async def release_features(
    request: Annotated[ReleaseFeaturesRequest, json_parameter(ReleaseFeaturesRequest)],
    services: ServicesDependency,
    tenant: TenantDependency,
) -> ReleaseFeaturesResponse:
    """Releases features captured for this model, all or `feature_refs`; immediately, out of the order of operations.

    Features that an accepted operation still needs are deleted after the optimizer step that follows it.
    """
    run = await services.runs.get(tenant, request.model_id)
    num_released = await store_of(services.context.features).release(run.record, request.feature_refs)
    return ReleaseFeaturesResponse(num_released=num_released)
