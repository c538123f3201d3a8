"""Sweeps what crashes left of checkpoints, restores lost rows, and deletes expired checkpoints."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence, Set
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from ..files.directories import directory_name
from ..files.manifest import read_manifest
from ..files.object_store import ObjectStoreError
from ..logs.repeated_errors import RepeatedErrorLog
from ..store import Store
from .checkpoint_files import CheckpointFiles
from .leftovers import find_unlisted, path_of_lost_row, restore_row
from .mirror import CheckpointMirrors

logger = logging.getLogger(__name__)

_EXPIRY_PERIOD_SECONDS = 10.0


class CheckpointUpkeep:
    """Makes files and rows agree when the server starts, and expires checkpoints while it runs."""

    def __init__(
        self, store: Store, files: CheckpointFiles, mirror: CheckpointMirrors, expire: Callable[[], Awaitable[None]]
    ) -> None:
        self._store = store
        self._files = files
        self._mirror = mirror
        self._expire = expire
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        # Listed before the rows are read: a checkpoint published in between must not look like one without a row.
        found = await asyncio.to_thread(lambda: list(self._files.local_root.glob("*/*/*")))
        published = await self._follow_moved_root(await self._store.checkpoints.list_directories())
        published |= await self._restore_lost_rows(await asyncio.to_thread(find_unlisted, found, published))
        runs = {directory_name(run_id) for run_id in await self._store.runs.list_ids()}
        await asyncio.to_thread(self._files.sweep, found, runs, published)
        await self._mirror.start(self._files, published)
        self._tasks = [asyncio.create_task(self._expire_periodically()), asyncio.create_task(self._sweep_url(runs))]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _restore_lost_rows(self, unlisted: Sequence[Path]) -> Set[str]:
        """Restores lost rows and returns the directories of those checkpoints, if their manifest names the tenant:
        versions that did not write it did not mark deleted checkpoints either."""
        taken = set()
        for directory in unlisted:
            manifest = await asyncio.to_thread(read_manifest, directory)
            path = await path_of_lost_row(self._store, str(directory), manifest, self._files.is_ours_alone(directory))
            if path is not None and "tenant_id" in manifest:
                await restore_row(self._store, str(directory), manifest)
                logger.warning("the database had lost %s, which is in %s: its row is restored", path, directory)
                taken.add(str(directory))
        return taken

    async def _follow_moved_root(self, directories: Collection[str]) -> Set[str]:
        """Updates the rows if the state directory has moved since; returns the current directories."""
        moves = await asyncio.to_thread(self._files.moves, directories)
        await self._mirror.move_directories(moves)
        if moves:
            await self._store.checkpoints.move_directories(moves)
        return {moves.get(directory, directory) for directory in directories}

    async def _sweep_url(self, runs: Collection[str]) -> None:
        try:
            await self._files.sweep_url(runs, self._store.checkpoints.list_directories)
        except ObjectStoreError as error:
            logger.warning("could not look for unfinished uploads that a crash may have left: %s", error)

    async def _expire_periodically(self) -> None:
        errors = RepeatedErrorLog(logger, "deleting expired checkpoints")
        while True:
            try:
                await self._expire()
            except SQLAlchemyError as error:  # possibly temporary, such as a full disk
                errors.failed(error)
            else:
                errors.succeeded()
            await asyncio.sleep(_EXPIRY_PERIOD_SECONDS)
