"""Directories of checkpoints that have no row: which are removed, which are kept and for how long, and which get their
row back from the copy of it in their manifest."""

import logging
import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ...schemas.errors import RequestError
from ...schemas.models import TrainingConfig, training_of
from ..files.directories import STAGING, remove_tree
from ..files.manifest import MANIFEST, check_directory
from ..store import CheckpointRecord, RunRecord, SessionRecord, Store, TenantRecord
from .checkpoint_paths import parse_path

logger = logging.getLogger(__name__)

UNLISTED_DAYS = 30
_UNLISTED = ".unlisted"
"""Marks a complete checkpoint without a row; the file's mtime is when that was first noticed."""
DELETED = ".deleted"
"""Marks a checkpoint whose row is about to be deleted, so that leftovers are not restored after a crash."""
NEW_RUN = ".new"
"""Mark of a run's directory while its first checkpoint and its rows are written (CheckpointFiles.marking_new_run)."""
_MANIFEST_FORMAT = 1


def remove_now(*directories: Path) -> None:
    """Removes what can be removed now. The rest (a worker may still be writing) is swept at the next start."""
    for directory in directories:
        remove_tree(directory, ignore_errors=True)


def sweep_leftovers(root: Path, found: Collection[Path], runs: Collection[str], published: Collection[str]) -> None:
    for mark in root.glob(f"*/{NEW_RUN}"):
        remove_now(mark if mark.parent.name in runs else mark.parent)
    for directory in found:
        if str(directory) in published:
            _unmark(directory / _UNLISTED)
            _unmark(directory / DELETED)
        elif directory.name.startswith(STAGING) or (directory.parent.parent.name in runs and not _must_keep(directory)):
            logger.info("removing %s: it was never published, or was deleted", directory)
            remove_now(directory)


def find_unlisted(found: Collection[Path], published: Collection[str]) -> list[Path]:
    """Returns those found that are complete, have no row and were not deleted; oldest first."""
    unlisted = [path for path in found if str(path) not in published and not path.name.startswith(STAGING)]
    kept = [path for path in unlisted if not ((path / DELETED).exists() or (path.parents[1] / NEW_RUN).exists())]
    return sorted(filter(has_complete_files, kept), key=lambda path: (path / MANIFEST).stat().st_mtime)


def set_mark(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:  # lost files or a full disk: the deletion continues
        logger.info("%s cannot be written: %s", path, error)


def _unmark(mark: Path) -> None:
    """Removes the mark of a checkpoint that has a row again."""
    try:
        if mark.exists():  # checked first, since the file system may be read-only
            mark.unlink(missing_ok=True)
    except OSError as error:
        logger.error("%s cannot be removed: %s", mark, error)


def _must_keep(unlisted: Path) -> bool:
    """True if a checkpoint without a row must be kept for now. The first call starts its UNLISTED_DAYS."""
    if (unlisted / DELETED).exists() or not has_complete_files(unlisted):
        return False
    mark = unlisted / _UNLISTED
    try:
        if not mark.exists():
            mark.touch()
        days = (time.time() - mark.stat().st_mtime) / 86400
    except OSError as error:
        logger.error("%s cannot be written: %s", mark, error)
        return True
    if days > UNLISTED_DAYS:
        return False
    logger.warning(
        "%s is complete but has no row in the database: an older database was restored, or a crash left it. "
        "`trainhouse verify --repair` restores its row if its manifest names the owner; a start in %d days removes it",
        unlisted,
        math.ceil(UNLISTED_DAYS - days),
    )
    return True


def has_complete_files(directory: Path) -> bool:
    """True if all files of the manifest have the right size. Hashes are not checked."""
    try:
        check_directory(directory, hashes=False)
    except ValueError:
        return False
    return True


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
        _training_in(manifest)
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


def _training_in(manifest: Mapping[str, Any]) -> TrainingConfig:
    """Returns the run's training; manifests of earlier versions name only LoRA."""
    return training_of(manifest["training"] if "training" in manifest else manifest["lora"])


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
    training = _training_in(manifest)
    run = RunRecord(
        *(run_id, session_id, tenant.tenant_id, manifest["base_model"], training, created_at, created_at),
        role=manifest["role"],
        target_path=manifest["target_path"],
    )
    await store.runs.insert(run)
    return run
