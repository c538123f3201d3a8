"""The state that verify checks: its rows and files, and what several checks ask of them."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from sqlalchemy import Row, Table, select

from ...checkpoints.checkpoint_files import CheckpointFiles
from ...checkpoints.mirror import CheckpointMirrors
from ...files.directories import directory_name
from ...files.object_store import ObjectStore
from ...files.state_lock import live_directory
from ...files.storage_config import CheckpointStorageConfig
from ...store import RunRecord, Store


class VerifiedState:
    """A state directory with its database and the stores of its checkpoints."""

    def __init__(
        self, store: Store, state_dir: Path, object_store: ObjectStore, config: CheckpointStorageConfig
    ) -> None:
        self.store = store
        self.state_dir = state_dir.absolute()
        self.live_dir = live_directory(self.state_dir)
        self.object_store = object_store
        self.config = config
        self.mirror = CheckpointMirrors(store, object_store, config)
        self.files = CheckpointFiles(state_dir, config, object_store, self.copies_of)
        self.moves: Mapping[str, str] = {}
        """Former directories of checkpoints -> the present ones, which rows may not name yet."""
        self.run_directories: set[str] = set()
        """Those of all runs in the database, by name."""

    async def read_names(self) -> None:
        """Reads the moves and the runs, which change while a server runs."""
        self.moves = await asyncio.to_thread(self.files.moves, await self.store.checkpoints.list_directories())
        self.run_directories = {directory_name(run_id) for run_id in await self.store.runs.list_ids()}

    async def rows(self, table: Table) -> Sequence[Row]:
        return await self.store.read(lambda connection: connection.execute(select(table)).all())

    async def copies_of(self, directory: str) -> list[str]:
        """Returns the copies of the checkpoint at its present directory, which its row may not name yet."""
        former = {new: old for old, new in self.moves.items()}
        return await self.mirror.complete_copies(former.get(directory, directory))

    async def live_runs(self) -> list[RunRecord]:
        open_sessions = await self.store.sessions.list_open()
        return [run for one in open_sessions for run in await self.store.runs.list_of_session(one.session_id)]

    async def live_adapters(self) -> set[str]:
        samplers = await self.store.samplers.list_open()
        return {one.adapter_id for one in samplers if one.is_ephemeral and one.adapter_id}
