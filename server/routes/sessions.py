"""Routes for health checks, client configuration, sessions, heartbeats and telemetry (which is discarded)."""

from typing import Annotated

from fastapi import APIRouter, Request, Response

from ...schemas.models import (
    AssignProjectRequest,
    ClientConfig,
    ClientDynamicConfig,
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    Health,
    HeartbeatRequest,
    HeartbeatResponse,
    Readiness,
    TelemetryResponse,
)
from ...schemas.verbs import SESSION_ID
from ...workers.protocol.plugins import plugin_rows
from ..http.bodies import json_body, json_parameter
from ..http.sdk_version import NEWEST_TESTED, is_newer_than_tested, parse_version
from ..tenants.auth import OperatorDependency, TenantDependency
from .examples import IDEMPOTENCY_KEY, SessionIdPath
from .services import ServicesDependency

router = APIRouter(prefix="/api/v1", tags=["sessions"])

_MAX_VERSION = 20
_PLACES = plugin_rows("server.console.paths", "PLACES")


@router.get("/healthz")
async def healthz() -> Health:
    """Answers 200 while the process responds. Needs no key."""
    return Health()


@router.get("/readyz", responses={503: {"model": Readiness}})
async def readyz(services: ServicesDependency, is_operator: OperatorDependency, response: Response) -> Readiness:
    """Answers 200 if the server accepts new work, else 503; for operators also with the progress of recovery.

    Needs no key.
    """
    is_stopping, dispatch = services.quotas.is_closed, services.dispatch
    reason = services.live.outage() or await services.journal.check_writable()
    response.status_code = 200 if reason is None and not is_stopping else 503
    return Readiness(
        status="stopping" if is_stopping else "ready" if reason is None else "unavailable",
        reason=reason,
        base_models={name: "up" if dispatch.is_up(name) else "restarting" for name in dispatch.models},
        runs=services.runs.num_live() if is_operator else None,
        runs_to_make_again=services.runs.num_lost if is_operator else None,
    )


@router.post("/client/config")
async def client_config(services: ServicesDependency, tenant: TenantDependency) -> ClientConfig:
    """Returns how clients must split and encode their batches; the SDK requests this first."""
    config = services.config
    return ClientConfig(
        fwdbwd_max_chunk_len=config.sdk.sdk_max_chunk_datums,
        fwdbwd_max_chunk_bytes_count=config.sdk.sdk_max_chunk_bytes,
        proto_compress_fwdbwd=config.sdk.sdk_compression == "zstd",
        sample_use_retrieve_futures=config.sdk.sdk_sample_polling == "together",
    )


@router.post("/client/dynamic_config")
async def client_dynamic_config(tenant: TenantDependency) -> ClientDynamicConfig:
    """Returns the settings that clients refresh periodically."""
    return ClientDynamicConfig()


@router.post(
    "/create_session",
    response_model_exclude_none=True,
    openapi_extra=json_body(CreateSessionRequest, {"sdk_version": "curl", "display_name": "first steps"}),
)
async def create_session(
    request: Annotated[CreateSessionRequest, json_parameter(CreateSessionRequest)],
    services: ServicesDependency,
    tenant: TenantDependency,
    http_request: Request,
    idempotency_key: Annotated[str | None, IDEMPOTENCY_KEY] = None,
) -> CreateSessionResponse:
    """Creates a session, which owns models and samplers. It ends by `finish` or after some minutes of silence.

    The SDK logs `info_message`, the address of the session in the console, and `warning_message`, which an SDK newer
    than those that this version was tested with gets.
    """
    record = await services.sessions.create(tenant, request, idempotency_key)
    place = _PLACES.get("session")
    page = place and f"console: {str(http_request.base_url).rstrip('/')}{place.format(session_id=record.session_id)}"
    return CreateSessionResponse(
        session_id=record.session_id, info_message=page, warning_message=_warning(request.sdk_version)
    )


def _warning(sdk: str) -> str | None:
    if not is_newer_than_tested(parse_version(sdk)):
        return None
    newest = ".".join(map(str, NEWEST_TESTED))
    return (
        f"this server was tested with SDKs up to {newest}, and this is {sdk[:_MAX_VERSION]}: it refuses fields that it "
        "does not know in data, losses, optimizers and sampling, and ignores others; upgrade the server, or pin "
        f"tinker=={newest}.*"
    )


@router.post("/session_heartbeat", openapi_extra=json_body(HeartbeatRequest, {"session_id": SESSION_ID}))
async def session_heartbeat(
    request: Annotated[HeartbeatRequest, json_parameter(HeartbeatRequest)],
    services: ServicesDependency,
    tenant: TenantDependency,
) -> HeartbeatResponse:
    """Keeps a session alive. Answers 410 if it has ended, whereupon the SDK stops its heartbeats."""
    await services.sessions.require_open(tenant, request.session_id)
    return HeartbeatResponse()


@router.post(
    "/sessions/{session_id}/finish",
    status_code=204,
    openapi_extra=json_body(FinishSessionRequest, {"reason": {"type": "success"}}),
)
async def finish_session(
    session_id: SessionIdPath,
    request: Annotated[FinishSessionRequest, json_parameter(FinishSessionRequest)],
    services: ServicesDependency,
    tenant: TenantDependency,
) -> None:
    """Ends a session and releases its models and samplers; checkpoints are kept. Only the first call has an effect."""
    await services.sessions.finish(tenant, session_id, request)


@router.put(
    "/sessions/{session_id}/project",
    status_code=204,
    openapi_extra=json_body(AssignProjectRequest, {"project_id": "my-project"}),
)
async def assign_session_project(
    session_id: SessionIdPath,
    request: Annotated[AssignProjectRequest, json_parameter(AssignProjectRequest)],
    services: ServicesDependency,
    tenant: TenantDependency,
) -> None:
    """Assigns a session to a project, by which its training runs can be listed."""
    await services.sessions.set_project(tenant, session_id, request.project_id)


@router.post("/telemetry")
async def telemetry(request: Request, tenant: TenantDependency) -> TelemetryResponse:
    """Discards telemetry events, which may contain tracebacks and data of users."""
    async for _ in request.stream():
        pass
    return TelemetryResponse()
