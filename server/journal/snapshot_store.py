"""Snapshots: states of live runs at optimizer boundaries, from which the runs are rebuilt after a crash.

Layout below state_dir/snapshots: RUN/SEQ_ID, RUN/SEQ_ID-copy, and .staging-* while they are written. A snapshot whose
files do not match its manifest counts as absent.
"""

import asyncio
import logging
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..files.directories import directory_name, move_into_place, remove_tree, staging_path, sweep_runs
from ..files.manifest import MANIFEST, check_directory, listed_files, read_manifest, write_manifest

logger = logging.getLogger(__name__)

_COPY = "-copy"

# The directory in which earlier versions stored the target of a draft.
EARLIER_TARGET = "target"


@dataclass(frozen=True)
class RunSnapshot:
    """The state after the operation with this seq_id.

    tainted_by: why the step that ends its gradient window must be refused. held: the uses of captured features that
    this step will consume, by seq_id of the window's operations. target: the seq_id of the operation that pinned the
    target of a draft, which the snapshot does not contain; None without one.
    """

    seq_id: int
    directory: Path
    tainted_by: str | None = None
    held: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    target: int | None = None


class SnapshotStore:
    """Stages, publishes, finds and removes the snapshots of all runs.

    sync: whether they must survive a machine crash.
    """

    def __init__(self, root: Path, sync: bool) -> None:
        self._root = root.absolute()
        self._sync = sync

    def sweep(self, live: Collection[str]) -> None:
        """Deletes unfinished snapshots and those of runs that are not live. Blocking; for server start."""
        sweep_runs(self._root, live)

    def stage(self, run_id: str) -> Path:
        """Returns an empty directory to write into. Raises OSError.

        Blocking, because the snapshot must be handed to the dispatch before anything is awaited; takes 40 us, 200 us
        for the first of a run.
        """
        staging = staging_path(self._run_directory(run_id))
        staging.mkdir(parents=True)
        return staging

    async def publish(
        self,
        staging: Path,
        run_id: str,
        seq_id: int,
        tainted_by: str | None,
        held: Mapping[int, Mapping[str, int]],
        target: int | None,
    ) -> RunSnapshot:
        """Seals the staged files and renames them into place. Raises OSError."""
        snapshot = RunSnapshot(seq_id, self._run_directory(run_id) / str(seq_id), tainted_by, held, target)
        await asyncio.to_thread(self._seal_and_rename, staging, snapshot)
        return snapshot

    async def copy(self, snapshot: RunSnapshot, run_id: str) -> RunSnapshot:
        """Publishes a second copy of the same state, in case one of the two is damaged.

        Raises OSError; ValueError if the snapshot itself is damaged.
        """
        staging = self.stage(run_id)
        copy = replace(snapshot, directory=snapshot.directory.with_name(snapshot.directory.name + _COPY))
        try:
            await asyncio.to_thread(self._copy_and_rename, snapshot.directory, staging, copy)
        finally:
            await self.remove(staging)
        return copy

    async def find(self, run_id: str) -> list[RunSnapshot]:
        """Returns the run's snapshots, newest first; file hashes are not checked (see `is_whole`)."""
        return await asyncio.to_thread(self._find, run_id)

    async def is_whole(self, snapshot: RunSnapshot) -> bool:
        try:
            await asyncio.to_thread(check_directory, snapshot.directory)
        except ValueError as error:
            logger.error("a snapshot cannot be used: %s", error)
            return False
        return True

    async def remove(self, directory: Path) -> None:
        await asyncio.to_thread(remove_tree, directory, ignore_errors=True)

    async def remove_all(self, run_id: str) -> None:
        await self.remove(self._run_directory(run_id))

    def _find(self, run_id: str) -> list[RunSnapshot]:
        found = []
        for path in self._run_directory(run_id).glob("[0-9]*"):
            try:
                check_directory(path, hashes=False)
                seq_id = int(path.name.removesuffix(_COPY))
                manifest = read_manifest(path)
                held = {int(number): uses for number, uses in manifest.get("held", {}).items()}
                found.append(RunSnapshot(seq_id, path, manifest.get("tainted_by"), held, manifest.get("target")))
            except ValueError as error:
                logger.error("a snapshot cannot be used: %s", error)
        return sorted(found, key=lambda one: -one.seq_id)

    def _run_directory(self, run_id: str) -> Path:
        return self._root / directory_name(run_id)

    def _copy_and_rename(self, source: Path, staging: Path, copy: RunSnapshot) -> None:
        check_directory(source)
        for name in listed_files(source):
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, staging / name)
        self._seal_and_rename(staging, copy)

    def _seal_and_rename(self, staging: Path, snapshot: RunSnapshot) -> None:
        if (snapshot.directory / MANIFEST).exists():  # the same state, published before a crash
            remove_tree(snapshot.directory)
        entries = {name: getattr(snapshot, name) for name in ("seq_id", "tainted_by", "held", "target")}
        write_manifest(staging, entries, sync=self._sync)
        # The first snapshot also creates the directories above it, which must be synced too.
        move_into_place(staging, snapshot.directory, root=self._root.parent if self._sync else None)
