"""What can be done with one checkpoint: describe, publish, age, copy, download, delete."""

import secrets
import time
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import FileResponse

from ...schemas.checkpoints import (
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUrls,
    TtlRequest,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from ..auth import Tenant, TenantDependency
from ..checkpoints import SignedFile
from ..services import Services, ServicesDependency
from ..store import CheckpointRecord, SessionRecord
from .examples import CHECKPOINT, KindPath, NamePath, RunIdPath, body_example

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])

_ONE = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


async def _owned(
    run_id: RunIdPath, kind: KindPath, name: NamePath, services: ServicesDependency, tenant: TenantDependency
) -> CheckpointRecord:
    return await services.checkpoints.owned(tenant, run_id, f"{kind}/{name}")


async def _readable(
    run_id: RunIdPath, kind: KindPath, name: NamePath, services: ServicesDependency, tenant: TenantDependency
) -> CheckpointRecord:
    return await services.checkpoints.resolve(tenant, f"tinker://{run_id}/{kind}/{name}")


OwnedDependency = Annotated[CheckpointRecord, Depends(_owned)]
ReadableDependency = Annotated[CheckpointRecord, Depends(_readable)]


@router.delete(_ONE, status_code=204)
async def delete_checkpoint(checkpoint: OwnedDependency, services: ServicesDependency) -> None:
    """At once, with its files."""
    await services.checkpoints.delete(checkpoint)


@router.post(f"{_ONE}/publish", status_code=204)
async def publish_checkpoint(checkpoint: OwnedDependency, services: ServicesDependency) -> None:
    """Every tenant of this server may then load, sample from, copy and download it."""
    await services.checkpoints.set_public(checkpoint, True)


@router.delete(f"{_ONE}/publish", status_code=204)
async def unpublish_checkpoint(checkpoint: OwnedDependency, services: ServicesDependency) -> None:
    """Nobody else reads it from now on; copies that others made stay theirs."""
    await services.checkpoints.set_public(checkpoint, False)


@router.put(f"{_ONE}/ttl", status_code=204, openapi_extra=body_example({"ttl_seconds": 86400}))
async def set_checkpoint_ttl(checkpoint: OwnedDependency, request: TtlRequest, services: ServicesDependency) -> None:
    """Counted from now; null: it stays for ever."""
    await services.checkpoints.set_ttl(checkpoint, request.ttl_seconds)


@router.get(f"{_ONE}/external_weights_urls")
async def external_weights_urls(
    checkpoint: ReadableDependency, request: Request, services: ServicesDependency
) -> ExternalWeightsUrls:
    """Works for checkpoints of every kind. The URLs need no key until they expire."""
    signed = await services.checkpoints.sign_files(checkpoint)
    place = {"run_id": checkpoint.run_id, "kind": checkpoint.kind, "name": checkpoint.name}
    urls = {
        one.name: request.url_for("download_file", **place, file=one.name).include_query_params(
            expires=one.expires, signature=one.signature
        )
        for one in signed
    }
    return ExternalWeightsUrls(
        urls={name: str(url) for name, url in urls.items()},
        expires=datetime.fromtimestamp(min(one.expires for one in signed), UTC),
    )


@router.api_route("/downloads/{run_id}/{kind}/{name}/{file:path}", methods=["GET", "HEAD"], include_in_schema=False)
async def download_file(
    run_id: str,
    kind: str,
    name: str,
    file: str,
    services: ServicesDependency,
    expires: Annotated[int, Query()],
    signature: Annotated[str, Query()],
) -> FileResponse:
    path = f"tinker://{run_id}/{kind}/{name}"
    return FileResponse(await services.checkpoints.signed_file(path, SignedFile(file, expires, signature)))


@router.post("/weights_info", response_model_exclude_none=True, openapi_extra=body_example({"tinker_path": CHECKPOINT}))
async def weights_info(
    request: WeightsInfoRequest, services: ServicesDependency, tenant: TenantDependency
) -> WeightsInfoResponse:
    """What a checkpoint was trained on, and the shape of its adapter."""
    checkpoint = await services.checkpoints.resolve(tenant, request.tinker_path)
    return WeightsInfoResponse(
        base_model=checkpoint.base_model,
        is_lora=True,
        lora_rank=checkpoint.lora.rank,
        train_unembed=checkpoint.lora.train_unembed,
        train_mlp=checkpoint.lora.train_mlp,
        train_attn=checkpoint.lora.train_attn,
    )


@router.post("/copy_weights", openapi_extra=body_example({"source_path": CHECKPOINT}))
async def copy_weights(
    request: CopyWeightsRequest,
    services: ServicesDependency,
    tenant: TenantDependency,
    access_token: Annotated[str | None, Header(alias="X-Tinker-Weights-Access-Token")] = None,
    idempotency_key: Annotated[str | None, Header(alias="X-Idempotency-Key")] = None,
) -> CopyWeightsResponse:
    """The copy is the tenant's own, in the project asked for, and outlives its source."""
    token = access_token or request.weights_access_token
    source = await services.checkpoints.resolve(tenant, request.source_path, token)
    project_id = await _destination(services, tenant, request)
    copy = await services.checkpoints.copy(
        source, _ended_session(tenant, project_id, idempotency_key), request.ttl_seconds
    )
    return CopyWeightsResponse(tinker_path=copy.tinker_path)


async def _destination(services: Services, tenant: Tenant, request: CopyWeightsRequest) -> str | None:
    """A copy for a session goes into that session's project."""
    if request.session_id is None:
        return request.destination_project_id
    return (await services.sessions.require_open(tenant, request.session_id)).project_id


def _ended_session(tenant: Tenant, project_id: str | None, idempotency_key: str | None) -> SessionRecord:
    now = time.time()
    return SessionRecord(
        session_id=secrets.token_hex(8),
        tenant_id=tenant.id,
        created_at=now,
        last_heartbeat_at=now,
        finished_at=now,
        end="success",
        end_detail="made by copy_weights",
        project_id=project_id,
        idempotency_key=None if idempotency_key is None else f"copy_weights:{idempotency_key}",
    )
