"""The content of a checkpoint's row in its manifest, from which a row that the database has lost is restored."""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from ...schemas.errors import RequestError
from ...schemas.models import training_of
from ..store import CheckpointRecord, RunRecord, SessionRecord, Store, TenantRecord
from .checkpoint_paths import parse_path

_MANIFEST_FORMAT = 1


async def manifest_entries(
    store: Store, checkpoint: CheckpointRecord, request_id: str | None = None
) -> Mapping[str, object]:
    """Returns what the manifest records in addition to the files: the content of the row, in case the row is lost."""
    tenant = await store.tenants.get(checkpoint.tenant_id)
    return {
        "format": _MANIFEST_FORMAT,
        "tinker_path": checkpoint.tinker_path,
        "tenant_id": checkpoint.tenant_id,
        "tenant_name": checkpoint.tenant_id if tenant is None else tenant.name,
        "base_model": checkpoint.base_model,
        "training": checkpoint.training.model_dump(),
        "role": checkpoint.role,
        "target_path": checkpoint.target_path,
        "has_optimizer": checkpoint.has_optimizer,
        "user_metadata": checkpoint.user_metadata,
        "created_at": checkpoint.created_at,
        "expires_at": checkpoint.expires_at,
        "request_id": request_id,
    }


async def path_of_lost_row(
    store: Store, directory: str, manifest: Mapping[str, Any], is_ours_alone: bool
) -> str | None:
    """Returns the path of a complete checkpoint whose row the database has lost, so that `restore_row` can restore it.
    None if the manifest does not name the owner, if the name is in use, or if the run is unknown and other servers use
    the same place (not `is_ours_alone`)."""
    try:
        run_id, kind, name = parse_path(manifest["tinker_path"])
        training_of(manifest["training"] if "training" in manifest else manifest["lora"])
    except (RequestError, KeyError, AttributeError, ValueError):
        return None
    is_elsewhere = run_id.replace(":", "_") != PurePosixPath(directory).parts[-3]
    if is_elsewhere or await store.checkpoints.get(run_id, kind, name):
        return None
    is_known = await store.runs.get(run_id) is not None or (is_ours_alone and "tenant_id" in manifest)
    return manifest["tinker_path"] if is_known else None


async def restore_row(store: Store, directory: str, manifest: Mapping[str, Any]) -> str:
    """Restores the row of a checkpoint that has a `path_of_lost_row`, which it returns, and the rows it depends on. It
    is private: the manifest does not record whether it was public."""
    run_id, kind, name = parse_path(manifest["tinker_path"])
    run = await store.runs.get(run_id) or await _restore_run_row(store, run_id, manifest)
    record = CheckpointRecord(
        run_id=run_id,
        tenant_id=run.tenant_id,
        kind=kind,
        name=name,
        directory=directory,
        size_bytes=sum(listed["size_bytes"] for listed in manifest["files"].values()),
        created_at=manifest["created_at"],
        expires_at=manifest.get("expires_at"),
        public=False,
        user_metadata=manifest.get("user_metadata"),
        base_model=manifest["base_model"],
        training=run.training,
        has_optimizer=manifest["has_optimizer"],
        role=run.role,
        target_path=manifest.get("target_path"),
    )
    await store.checkpoints.put(record, overwrite=False)
    return record.tinker_path


async def _restore_run_row(store: Store, run_id: str, manifest: Mapping[str, Any]) -> RunRecord:
    """Restores a run that can no longer be trained, with its session and its tenant."""
    created_at = manifest["created_at"]
    named = TenantRecord(manifest["tenant_id"], manifest["tenant_name"], created_at)
    tenant = await store.tenants.get(named.tenant_id) or await store.tenants.find(named.name)
    if tenant is None:
        await store.tenants.ensure(tenant := named)
    session_id = run_id.partition(":")[0]
    if await store.sessions.get(session_id) is None:
        ended = {"finished_at": created_at, "end": "interrupted", "end_detail": "the database had lost it"}
        await store.sessions.insert(SessionRecord(session_id, tenant.tenant_id, created_at, created_at, **ended))
    training = training_of(manifest["training"])
    run = RunRecord(
        *(run_id, session_id, tenant.tenant_id, manifest["base_model"], training, created_at, created_at),
        role=manifest["role"],
        target_path=manifest["target_path"],
    )
    await store.runs.insert(run)
    return run
