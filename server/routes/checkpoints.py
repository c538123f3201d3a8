"""Routes for one checkpoint: describe, publish, expire, copy, import, download, delete."""

import math
import secrets
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...schemas.bounds import MAX_ID, MAX_PATH, MAX_TEXT
from ...schemas.checkpoints import (
    ArchiveUrl,
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUrls,
    ImportWeightsResponse,
    TtlRequest,
    TtlSeconds,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from ...schemas.models import lora_of
from ...schemas.training import Natural
from ...schemas.verbs import CHECKPOINT
from ..checkpoints.archive import Archive
from ..checkpoints.copies import copy_checkpoint
from ..checkpoints.download_urls import SignedFile
from ..checkpoints.downloads import sign_archive, sign_files, signed_archive, signed_file
from ..checkpoints.importing import ImportRequest, import_checkpoint, read_upload
from ..http.bodies import Decoder, json_body, json_parameter
from ..store import CheckpointRecord, SessionRecord, checkpoint_path
from ..tenants.auth import Tenant, TenantDependency
from ..tenants.quotas import Reservation
from .examples import IDEMPOTENCY_KEY, FilePath, KindPath, NamePath, RunIdPath
from .services import ServicesDependency
from .submission import receive_unordered

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])

_MAX_CONFIG_BYTES = 1 << 20
_IMPORT_BODY: dict[str, object] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_TAR = "application/x-tar"
_ONE = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


async def _owned(
    run_id: RunIdPath, kind: KindPath, name: NamePath, services: ServicesDependency, tenant: TenantDependency
) -> CheckpointRecord:
    return await services.checkpoints.resolve_owned(tenant, checkpoint_path(run_id, kind, name))


async def _readable(
    run_id: RunIdPath, kind: KindPath, name: NamePath, services: ServicesDependency, tenant: TenantDependency
) -> CheckpointRecord:
    return await services.checkpoints.resolve(tenant, checkpoint_path(run_id, kind, name))


OwnedDependency = Annotated[CheckpointRecord, Depends(_owned)]
ReadableDependency = Annotated[CheckpointRecord, Depends(_readable)]


@router.delete(_ONE, status_code=204)
async def delete_checkpoint(checkpoint: OwnedDependency, services: ServicesDependency) -> None:
    """Deletes the checkpoint and its files immediately."""
    await services.checkpoints.delete(checkpoint)


@router.post(f"{_ONE}/publish", status_code=204)
async def publish_checkpoint(checkpoint: OwnedDependency, services: ServicesDependency) -> None:
    """Makes the checkpoint public: every tenant of this server can load, sample, copy and download it."""
    await services.checkpoints.set_public(checkpoint, True)


@router.delete(f"{_ONE}/publish", status_code=204)
async def unpublish_checkpoint(checkpoint: OwnedDependency, services: ServicesDependency) -> None:
    """Makes the checkpoint private again; copies that other tenants have made are kept."""
    await services.checkpoints.set_public(checkpoint, False)


@router.put(f"{_ONE}/ttl", status_code=204, openapi_extra=json_body(TtlRequest, {"ttl_seconds": 86400}))
async def set_checkpoint_ttl(
    checkpoint: OwnedDependency,
    request: Annotated[TtlRequest, json_parameter(TtlRequest)],
    services: ServicesDependency,
) -> None:
    """Sets the time after which the checkpoint is deleted, counted from now; null keeps it forever."""
    await services.checkpoints.set_ttl(checkpoint, request.ttl_seconds)


@router.get(f"{_ONE}/external_weights_urls")
async def external_weights_urls(
    checkpoint: ReadableDependency, request: Request, services: ServicesDependency
) -> ExternalWeightsUrls:
    """Returns signed URLs of the checkpoint's files, for any kind of checkpoint. They need no key until they expire."""
    signed = await sign_files(services.checkpoints, checkpoint)
    place = {"run_id": checkpoint.run_id, "kind": checkpoint.kind, "name": checkpoint.name}
    urls = {
        one.name: request.url_for("download_file", **place, file=one.name).include_query_params(
            expires=one.expires, signature=one.signature
        )
        for one in signed
    }
    return ExternalWeightsUrls(
        urls={str(name): str(url) for name, url in urls.items()},
        expires=datetime.fromtimestamp(min(one.expires for one in signed), UTC),
    )


@router.get(f"{_ONE}/archive", response_model=ArchiveUrl, responses={302: {"description": "The URL, as Location."}})
async def checkpoint_archive(
    checkpoint: ReadableDependency, request: Request, services: ServicesDependency
) -> Response | ArchiveUrl:
    """Redirects to a signed URL of a tar archive with the checkpoint's files, or returns it if JSON is accepted.

    SDKs up to 0.35 download checkpoints so. Adapters have the form that PEFT loads.
    """
    signed = sign_archive(services.checkpoints, checkpoint)
    place = {"run_id": checkpoint.run_id, "kind": checkpoint.kind, "name": checkpoint.name}
    url = request.url_for("download_archive", **place).include_query_params(
        expires=signed.expires, signature=signed.signature
    )
    accepted = ",".join(request.headers.getlist("accept"))  # SDKs to 0.25 send JSON, too, and follow only a redirect
    if "application/json" in accepted and "application/gzip" not in accepted:
        return ArchiveUrl(url=str(url), expires=datetime.fromtimestamp(signed.expires, UTC))
    headers = {"Location": str(url), "Expires": formatdate(signed.expires, usegmt=True)}
    return Response(status_code=302, headers=headers)


@router.api_route("/archives/{run_id}/{kind}/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def download_archive(
    run_id: RunIdPath,
    kind: KindPath,
    name: NamePath,
    request: Request,
    services: ServicesDependency,
    expires: Annotated[Natural, Query()],
    signature: Annotated[str, Query(max_length=MAX_TEXT)],
) -> Response:
    signed = SignedFile(None, expires, signature)
    async with AsyncExitStack() as kept:
        reading = signed_archive(services.checkpoints, checkpoint_path(run_id, kind, name), signed)
        archive = await kept.enter_async_context(reading)
        headers = {"Content-Length": str(archive.num_bytes), "Content-Disposition": "attachment"}
        if request.method == "HEAD":
            return Response(headers=headers, media_type=_TAR)
        return _ArchiveResponse(archive, headers, kept.pop_all())


class _KeepingFiles(Response):
    """Keeps what it sends until the end, also if the client disconnects."""

    kept: AsyncExitStack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.kept:
            await super().__call__(scope, receive, send)


class _ArchiveResponse(_KeepingFiles, StreamingResponse):
    """Streams an archive in a thread."""

    def __init__(self, archive: Archive, headers: dict[str, str], kept: AsyncExitStack) -> None:
        super().__init__(archive.pieces(), headers=headers, media_type=_TAR)
        self.kept = kept


class _CheckpointFileResponse(_KeepingFiles, FileResponse):
    def __init__(self, file: Path, kept: AsyncExitStack) -> None:
        super().__init__(file)
        self.kept = kept


@router.api_route("/downloads/{run_id}/{kind}/{name}/{file:path}", methods=["GET", "HEAD"], include_in_schema=False)
async def download_file(
    run_id: RunIdPath,
    kind: KindPath,
    name: NamePath,
    file: FilePath,
    services: ServicesDependency,
    expires: Annotated[Natural, Query()],
    signature: Annotated[str, Query(max_length=MAX_TEXT)],
) -> FileResponse:
    signed = SignedFile(file, expires, signature)
    kept = AsyncExitStack()
    reading = signed_file(services.checkpoints, checkpoint_path(run_id, kind, name), signed)
    path = await kept.enter_async_context(reading)
    return _CheckpointFileResponse(path, kept)


@router.post(
    "/weights_info",
    response_model_exclude_none=True,
    openapi_extra=json_body(WeightsInfoRequest, {"tinker_path": CHECKPOINT}),
)
async def weights_info(
    request: Annotated[WeightsInfoRequest, json_parameter(WeightsInfoRequest)],
    services: ServicesDependency,
    tenant: TenantDependency,
) -> WeightsInfoResponse:
    """Returns the base model of a checkpoint, its role and, for an adapter, its shape."""
    checkpoint = await services.checkpoints.resolve(tenant, request.tinker_path)
    lora = lora_of(checkpoint.training)
    return WeightsInfoResponse(
        base_model=checkpoint.base_model,
        is_lora=lora is not None,
        lora_rank=lora and lora.rank,
        train_unembed=lora and lora.train_unembed,
        train_mlp=lora and lora.train_mlp,
        train_attn=lora and lora.train_attn,
        model_role=checkpoint.role,
    )


@router.post("/copy_weights", openapi_extra=json_body(CopyWeightsRequest, {"source_path": CHECKPOINT}))
async def copy_weights(
    request: Annotated[CopyWeightsRequest, json_parameter(CopyWeightsRequest)],
    services: ServicesDependency,
    tenant: TenantDependency,
    access_token: Annotated[str | None, Header(alias="X-Tinker-Weights-Access-Token", max_length=MAX_TEXT)] = None,
    idempotency_key: Annotated[str | None, IDEMPOTENCY_KEY] = None,
) -> CopyWeightsResponse:
    """Copies a checkpoint. The copy belongs to the caller, in the requested project, and outlives its source."""
    token = access_token or request.weights_access_token
    source = await services.checkpoints.resolve(tenant, request.source_path, token)
    project_id = request.destination_project_id
    if request.session_id is not None:
        project_id = (await services.sessions.require_open(tenant, request.session_id)).project_id
    session = _closed_session_record(tenant, project_id, idempotency_key, "copy_weights")
    copy = await copy_checkpoint(services.checkpoints, source, session, request.ttl_seconds)
    return CopyWeightsResponse(tinker_path=copy.tinker_path)


@router.post("/import_weights", openapi_extra=_IMPORT_BODY)
async def import_weights(
    request: Request,
    services: ServicesDependency,
    tenant: TenantDependency,
    config_bytes: Annotated[int, Query(ge=2, le=_MAX_CONFIG_BYTES, description="size of adapter_config.json")],
    base_model: Annotated[
        str | None, Query(max_length=MAX_PATH, description="default: the one that adapter_config.json names")
    ] = None,
    name: Annotated[str, Query(max_length=MAX_ID, description="name of the new checkpoint")] = "imported",
    ttl_seconds: Annotated[TtlSeconds | None, Query()] = None,
    idempotency_key: Annotated[str | None, IDEMPOTENCY_KEY] = None,
) -> ImportWeightsResponse:
    """Imports an adapter saved by PEFT as a checkpoint that can be loaded and sampled; it has no optimizer state.

    The body is adapter_config.json followed by adapter_model.safetensors.
    """
    with Reservation(services.quotas, tenant.id) as reservation:
        decoder = Decoder(partial(read_upload, config_bytes=config_bytes), math.inf)
        upload = await receive_unordered(request, services, reservation, decoder)
        imported = ImportRequest(upload, base_model, name, ttl_seconds)
        session = _closed_session_record(tenant, None, idempotency_key, "import_weights")
        checkpoint = await import_checkpoint(services.dispatch, services.checkpoints, tenant, imported, session)
    lora = lora_of(checkpoint.training)
    assert lora is not None, "only adapters are imported"
    return ImportWeightsResponse(tinker_path=checkpoint.tinker_path, base_model=checkpoint.base_model, lora=lora)


def _closed_session_record(
    tenant: Tenant, project_id: str | None, idempotency_key: str | None, by: str
) -> SessionRecord:
    now = time.time()
    return SessionRecord(
        session_id=secrets.token_hex(8),
        tenant_id=tenant.id,
        created_at=now,
        last_heartbeat_at=now,
        finished_at=now,
        end="success",
        end_detail=f"made by {by}",
        project_id=project_id,
        idempotency_key=None if idempotency_key is None else f"{by}:{idempotency_key}",
    )
