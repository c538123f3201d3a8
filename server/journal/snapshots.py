"""Snapshots: states of live runs at optimizer boundaries, from which they are made again after a crash.

Layout below state_dir/snapshots: RUN/SEQ_ID, RUN/SEQ_ID-copy, with .staging-* beside them while they are written. One
whose files are not as its manifest says counts as absent.
"""

import asyncio
import logging
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..files.directories import STAGING, directory_name, move_into_place, staging_in
from ..files.manifest import MANIFEST, check, listed_files, read_manifest, seal

logger = logging.getLogger(__name__)

_COPY = "-copy"


@dataclass(frozen=True)
class Snapshot:
    """The state after the operation with this seq_id. tainted_by: why the step that ends its window must be refused.
    held: by seq_id of that window's operations, the uses of captured features that this step is to take."""

    seq_id: int
    directory: Path
    tainted_by: str | None = None
    held: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


class Snapshots:
    """sync: whether they are to survive the death of the machine."""

    def __init__(self, root: Path, sync: bool) -> None:
        self._root = root.absolute()
        self._sync = sync

    def sweep(self, live: Collection[str]) -> None:
        """At start, blocking: what was never finished, and those of runs that are not live."""
        names = {directory_name(run_id) for run_id in live}
        for directory in self._root.glob("*"):
            if directory.name not in names:
                shutil.rmtree(directory, ignore_errors=True)
        for staging in self._root.glob(f"*/{STAGING}*"):
            shutil.rmtree(staging, ignore_errors=True)

    def stage(self, run_id: str) -> Path:
        """An empty directory to write into. Raises OSError.

        Blocking, since a snapshot is handed over before anything is awaited: 40 us, 200 for the first of a run.
        """
        staging = staging_in(self._of(run_id))
        staging.mkdir(parents=True)
        return staging

    async def publish(
        self, staging: Path, run_id: str, seq_id: int, tainted_by: str | None, held: Mapping[int, Mapping[str, int]]
    ) -> Snapshot:
        """Raises OSError."""
        snapshot = Snapshot(seq_id, self._of(run_id) / str(seq_id), tainted_by, held)
        await asyncio.to_thread(self._seal_and_rename, staging, snapshot)
        return snapshot

    async def copy(self, snapshot: Snapshot, run_id: str) -> Snapshot:
        """The same state once more, for when one of the two is damaged. Raises OSError."""
        staging = self.stage(run_id)
        copy = replace(snapshot, directory=snapshot.directory.with_name(snapshot.directory.name + _COPY))
        try:
            await asyncio.to_thread(self._copy_and_rename, snapshot.directory, staging, copy)
        finally:
            await self.remove(staging)
        return copy

    async def find(self, run_id: str) -> list[Snapshot]:
        """The newest first; those that look whole, unless one reads all of their files."""
        return await asyncio.to_thread(self._find, run_id)

    async def is_whole(self, snapshot: Snapshot) -> bool:
        try:
            await asyncio.to_thread(check, snapshot.directory)
        except ValueError as error:
            logger.error("a snapshot cannot be used: %s", error)
            return False
        return True

    async def remove(self, directory: Path) -> None:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def remove_all(self, run_id: str) -> None:
        await self.remove(self._of(run_id))

    def _find(self, run_id: str) -> list[Snapshot]:
        found = []
        for path in self._of(run_id).glob("[0-9]*"):
            try:
                check(path, hashes=False)
                seq_id = int(path.name.removesuffix(_COPY))
                manifest = read_manifest(path)
                held = {int(number): uses for number, uses in manifest.get("held", {}).items()}
                found.append(Snapshot(seq_id, path, manifest.get("tainted_by"), held))
            except ValueError as error:
                logger.error("a snapshot cannot be used: %s", error)
        return sorted(found, key=lambda one: -one.seq_id)

    def _of(self, run_id: str) -> Path:
        return self._root / directory_name(run_id)

    def _copy_and_rename(self, source: Path, staging: Path, copy: Snapshot) -> None:
        check(source)
        for name in listed_files(source):
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, staging / name)
        self._seal_and_rename(staging, copy)

    def _seal_and_rename(self, staging: Path, snapshot: Snapshot) -> None:
        if (snapshot.directory / MANIFEST).exists():  # of this very state, made before a crash
            shutil.rmtree(snapshot.directory)
        about = {"seq_id": snapshot.seq_id, "tainted_by": snapshot.tainted_by, "held": snapshot.held}
        seal(staging, about, sync=self._sync)
        # The first one makes all of them.
        move_into_place(staging, snapshot.directory, root=self._root.parent if self._sync else None)
