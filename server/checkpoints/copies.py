"""Checkpoints of new runs that cannot be trained: copies of others, and imported ones."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...schemas.errors import OperationError, RequestError
from ...schemas.models import TrainingConfig
from ..store import CheckpointRecord, RunRecord, SessionRecord
from ..tenants.auth import Tenant
from .checkpoint_files import link_files
from .checkpoint_paths import check_name
from .checkpoints import Checkpoints, as_request_errors


async def copy_checkpoint(
    checkpoints: Checkpoints, source: CheckpointRecord, to: SessionRecord, ttl_seconds: int | None
) -> CheckpointRecord:
    """Copies the checkpoint into a new run that cannot be trained, in the session `to`, which has ended and is not yet
    in the store. Files are shared if the file system can; a repeated idempotency key of the same tenant returns the
    same copy. Raises RequestError: 503 if a file cannot be read or written, 400 if the key was used for another
    request."""
    asked = _hash("copy_weights", source.tinker_path, ttl_seconds, to.project_id)
    if known := await _find_copied(checkpoints, to, asked):
        return known
    now = checkpoints.now()
    run = RunRecord(
        run_id=f"{to.session_id}:train:0",
        session_id=to.session_id,
        tenant_id=to.tenant_id,
        base_model=source.base_model,
        training=source.training,
        role=source.role,
        target_path=source.target_path,
        created_at=now,
        last_request_at=now,
        user_metadata={"copied_from": source.tinker_path},
        asked=asked,
    )
    checkpoint = checkpoints.new_checkpoint(
        run, source.kind, source.name, ttl_seconds, source.user_metadata, source.has_optimizer
    )
    with as_request_errors():
        await _copy(checkpoints, source, checkpoint, partial(checkpoints.store.checkpoints.insert_copied, to, run))
    return await checkpoints.resolve(Tenant(to.tenant_id, ""), checkpoint.tinker_path)


async def create_checkpoint(
    checkpoints: Checkpoints,
    run: RunRecord,
    session: SessionRecord,
    name: str,
    ttl_seconds: int | None,
    write: Callable[[Path], Awaitable[TrainingConfig]],
) -> CheckpointRecord:
    """Creates a checkpoint, without optimizer state, of a new run that cannot be trained; idempotent like a copy.

    Args:
        run: not yet in the store; `asked`: a hash of what `write` writes.
        session: already ended, and not yet in the store.
        write: fills an empty directory and returns the training configuration of its content.
    Raises:
        OperationError: the name is not allowed, the checkpoint could not be saved, or `write` raised it.
    """
    run = replace(run, asked=_hash("import_weights", run.asked, name, ttl_seconds, run.base_model))
    if known := await _find_copied(checkpoints, session, run.asked):
        return known
    checkpoint = checkpoints.new_checkpoint(run, "weights", check_name(name), ttl_seconds, None, has_optimizer=False)
    await checkpoints.publication.require_room(checkpoint)
    files = checkpoints.files
    new_run, staging = files.marking_new_run(checkpoint.directory), files.staging(checkpoint.directory)
    async with new_run, staging as staging:
        try:
            training = await write(staging)
        except OperationError:
            await files.discard_new_run(checkpoint.directory)
            raise
        checkpoint, run = replace(checkpoint, training=training), replace(run, training=training)
        move = partial(files.publish, staging, checkpoint.directory)
        insert = partial(checkpoints.store.checkpoints.insert_copied, session, run)
        await checkpoints.publication.publish(checkpoint, move, insert)
    return await checkpoints.resolve(Tenant(session.tenant_id, ""), checkpoint.tinker_path)


async def _find_copied(checkpoints: Checkpoints, session: SessionRecord, asked: str | None) -> CheckpointRecord | None:
    """Returns what was made under the session's idempotency key. Raises RequestError 400 if by another request."""
    if (known := await checkpoints.store.checkpoints.find_copied(session)) is None:
        return None
    run = await checkpoints.store.runs.get(known.run_id)
    if run is None or run.asked in (None, asked):
        return known
    raise RequestError(
        f"the X-Idempotency-Key of this request was used to make {known.tinker_path} by a different request: use a "
        "new key for each request"
    )


async def _copy(
    checkpoints: Checkpoints,
    source: CheckpointRecord,
    checkpoint: CheckpointRecord,
    insert: Callable[[CheckpointRecord], Awaitable[None]],
) -> None:
    files = checkpoints.files
    await checkpoints.publication.require_room(replace(checkpoint, size_bytes=source.size_bytes))
    if files.can_copy_remotely(source.directory, checkpoint.directory):
        move = partial(files.copy_remotely, source.directory, checkpoint.directory)
        await checkpoints.publication.publish(checkpoint, move, insert)
        return
    new_run, staging = files.marking_new_run(checkpoint.directory), files.staging(checkpoint.directory)
    async with new_run, staging as staging, checkpoints.reading(source) as here:
        await asyncio.to_thread(link_files, here, staging)
        await checkpoints.publication.publish(checkpoint, partial(files.publish, staging, checkpoint.directory), insert)


def _hash(*asked: object) -> str:
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()
