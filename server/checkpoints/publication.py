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
from ..store import CheckpointRecord, DatabaseUnreachable, Store
from .checkpoint_files import CheckpointFiles
from .lost_rows import manifest_entries
from .mirror import CheckpointMirrors

logger = logging.getLogger(__name__)


class CheckpointPublication:
    """Brings the files of a checkpoint into place, inserts its row, and has its copies made."""

    def __init__(self, store: Store, files: CheckpointFiles, mirror: CheckpointMirrors) -> None:
        self._store = store
        self._files = files
        self._mirror = mirror

    async def publish(
        self,
        checkpoint: CheckpointRecord,
        move_files: Callable[[Mapping[str, object]], Awaitable[int]],
        insert: Callable[[CheckpointRecord], Awaitable[None]],
        request_id: str | None = None,
    ) -> None:
        """Publishes the checkpoint, to the end even if the caller is cancelled.

        Args:
            move_files: gets the manifest's entries, moves the files into place, and returns their bytes.
            insert: inserts the row.
            request_id: of the save.
        Raises:
            OperationError: (user) the name is in use; (server) the files cannot be stored.
        """
        entries = await manifest_entries(self._store, checkpoint, request_id)
        await _shielded(self._publish(checkpoint, partial(move_files, entries), insert))

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
        """Brings the files into place, then inserts the row; removes the files if that fails.

        Args:
            move_files: moves the files into place and returns their bytes.
        """
        try:
            record = replace(checkpoint, size_bytes=await move_files())
            await insert(record)
        except (ObjectStoreError, OSError) as error:
            await self._files.remove(checkpoint.directory)
            raise OperationError(
                f"checkpoint {checkpoint.tinker_path} could not be saved: {error}", "server"
            ) from error
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
    return OperationError(
        f"checkpoint {checkpoint.tinker_path} exists: choose another name, delete it first, or save with overwrite=True"
    )


async def _shielded(work: Coroutine[None, None, None]) -> None:
    """Runs `work` to its end even if the caller is cancelled, and only then raises CancelledError.

    `work` needs what the caller has made, and a row and its directory must be created and removed together.
    """
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
