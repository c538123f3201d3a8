"""Publishes checkpoints: a row and its directory are created and removed together."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from sqlalchemy.exc import IntegrityError

from ...schemas.errors import OperationError
from ..files.object_store import ObjectStoreError
from ..files.storage_config import CheckpointStorageConfig
from ..store import CheckpointRecord, DatabaseUnreachable, Store
from .checkpoint_files import CheckpointFiles
from .leftovers import manifest_entries
from .mirror import CheckpointMirrors

logger = logging.getLogger(__name__)


class CheckpointPublication:
    """Brings the files of a checkpoint into place, inserts its row, and has its copies made."""

    def __init__(
        self, store: Store, files: CheckpointFiles, mirror: CheckpointMirrors, config: CheckpointStorageConfig
    ) -> None:
        self._store = store
        self._config = config
        self._inserting = asyncio.Lock()
        self._files = files
        self._mirror = mirror

    async def publish(
        self,
        checkpoint: CheckpointRecord,
        move_files: Callable[[Mapping[str, object]], Awaitable[int]],
        insert: Callable[[CheckpointRecord], Awaitable[None]],
        request_id: str | None = None,
    ) -> None:
        """Publishes the checkpoint, to the end even if the caller is cancelled. Raises OperationError: (user) the name
        is in use, or the tenant would have too many; (server) the files cannot be stored.

        Args:
            move_files: gets the manifest's entries, moves the files into place, and returns their bytes.
            insert: inserts the row.
        """
        entries = await manifest_entries(self._store, checkpoint, request_id)
        await _shielded(self._publish(checkpoint, partial(move_files, entries), insert))

    async def require_room(self, checkpoint: CheckpointRecord) -> None:
        """Raises OperationError (user) if the tenant would have too many checkpoints or bytes with this one, which
        replaces that of the same name."""
        config, tenant_id, now = self._config, checkpoint.tenant_id, checkpoint.created_at
        num, num_bytes = await self._store.checkpoints.stock_of_tenant(tenant_id, now, checkpoint)
        num_bytes += checkpoint.size_bytes
        if num >= config.tenant_checkpoints:
            found, option = f"you have {num} checkpoints, and the limit is {config.tenant_checkpoints}", ""
        elif num_bytes > config.tenant_checkpoint_bytes:
            found = f"your checkpoints would take {num_bytes} bytes, and the limit is {config.tenant_checkpoint_bytes}"
            option = "-bytes"
        else:
            return
        raise OperationError(
            f"{found}: delete those you no longer need (`trainhouse checkpoints list`), give them a ttl_seconds, or "
            f"start the server with a larger --tenant-checkpoint{option or 's'}"
        )

    async def insert_or_replace(self, overwrite: bool, record: CheckpointRecord) -> None:
        """Inserts the row, replacing a checkpoint of the same name if `overwrite`."""
        known = await self._store.checkpoints.get(record.run_id, record.kind, record.name) if overwrite else None
        if known is not None:
            await self._files.mark_deleted(known.directory)
        async with self._mirror.deleting(known.directory) if known else nullcontext():
            replaced = await self._store.checkpoints.put(record, overwrite)
        if replaced is not None:
            await self._files.remove(replaced.directory)

    async def _publish(
        self,
        checkpoint: CheckpointRecord,
        move_files: Callable[[], Awaitable[int]],
        insert: Callable[[CheckpointRecord], Awaitable[None]],
    ) -> None:
        """Brings the files into place, then inserts the row; removes the files if that fails."""
        try:
            record = replace(checkpoint, size_bytes=await move_files())
            async with self._inserting:
                await self.require_room(record)
                await insert(record)
        except (ObjectStoreError, OSError) as error:
            await self._files.remove(checkpoint.directory)
            message = f"checkpoint {checkpoint.tinker_path} could not be saved: {error}"
            raise OperationError(message, "server") from error
        except IntegrityError:
            await self._files.remove(checkpoint.directory)
            raise name_in_use_error(checkpoint) from None
        except DatabaseUnreachable:
            raise  # the row may have been committed; if not, the files are swept
        except Exception:
            await self._files.remove(checkpoint.directory)
            raise
        await self._mirror.add(record.directory)


def name_in_use_error(checkpoint: CheckpointRecord) -> OperationError:
    # Of the verbs that save, only save_weights has it.
    overwrite = ", save with overwrite=True" if checkpoint.kind == "weights" else ""
    return OperationError(
        f"checkpoint {checkpoint.tinker_path} exists: choose another name{overwrite}, or delete it first"
    )


async def _shielded(work: Coroutine[None, None, None]) -> None:
    """Runs `work` to its end even if the caller is cancelled, and only then raises CancelledError: `work` needs what
    the caller has made, and a row and its directory must be created and removed together."""
    task, is_cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled and not task.cancelled():
        logger.info("a save was cancelled while publishing; its outcome: %s", task.exception() or "published")
        raise asyncio.CancelledError
    task.result()
