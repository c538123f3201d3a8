"""The life of a client: its configuration, its session, its heartbeats, its telemetry (which is dropped)."""

from typing import Annotated

from fastapi import APIRouter, Header, Request

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
    TelemetryResponse,
)
from ..auth import TenantDependency
from ..services import ServicesDependency

router = APIRouter(prefix="/api/v1", tags=["sessions"])


@router.get("/healthz")
async def healthz() -> Health:
    return Health()


@router.post("/client/config")
async def client_config(services: ServicesDependency, tenant: TenantDependency) -> ClientConfig:
    config = services.config
    return ClientConfig(
        fwdbwd_max_chunk_len=config.sdk_max_chunk_datums,
        fwdbwd_max_chunk_bytes_count=config.sdk_max_chunk_bytes,
        proto_compress_fwdbwd=config.sdk_compression == "zstd",
    )


@router.post("/client/dynamic_config")
async def client_dynamic_config(tenant: TenantDependency) -> ClientDynamicConfig:
    return ClientDynamicConfig()


@router.post("/create_session")
async def create_session(
    request: CreateSessionRequest,
    services: ServicesDependency,
    tenant: TenantDependency,
    idempotency_key: Annotated[str | None, Header(alias="X-Idempotency-Key")] = None,
) -> CreateSessionResponse:
    record = await services.sessions.create(tenant, request, idempotency_key)
    return CreateSessionResponse(session_id=record.session_id)


@router.post("/session_heartbeat")
async def session_heartbeat(
    request: HeartbeatRequest, services: ServicesDependency, tenant: TenantDependency
) -> HeartbeatResponse:
    """410 once the session has ended: the SDK stops beating then."""
    await services.sessions.require_open(tenant, request.session_id)
    return HeartbeatResponse()


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish_session(
    session_id: str, request: FinishSessionRequest, services: ServicesDependency, tenant: TenantDependency
) -> None:
    await services.sessions.finish(tenant, session_id, request)


@router.put("/sessions/{session_id}/project", status_code=204)
async def assign_session_project(
    session_id: str, request: AssignProjectRequest, services: ServicesDependency, tenant: TenantDependency
) -> None:
    await services.sessions.set_project(tenant, session_id, request.project_id)


@router.post("/telemetry")
async def telemetry(request: Request, tenant: TenantDependency) -> TelemetryResponse:
    """Events may hold tracebacks and data of users: none is kept."""
    async for _ in request.stream():
        pass
    return TelemetryResponse()
