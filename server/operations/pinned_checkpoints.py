"""Pinned checkpoints: copies of the checkpoints that live runs have loaded, kept until snapshots cover the load.

Targets of drafts, which may be as large as the base model, are not in snapshots: theirs are kept as long as a snapshot
names them. The owners of checkpoints may delete or overwrite the originals meanwhile. Files are hard-linked where the
file system allows it.
Layout below state_dir/loaded: RUN/SEQ_ID of the operation, RUN/SEQ_ID-target for the target of a draft model, and
.staging-* while they are written.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

from ...schemas.errors import OperationError
from ..checkpoints.checkpoint_files import link_files, link_or_copy
from ..files.directories import (
    directory_name,
    make_directory,
    move_into_place,
    remove_tree,
    staging_path,
    sweep_runs,
    sync_files,
)
from ..files.manifest import MANIFEST, check_directory, write_manifest

logger = logging.getLogger(__name__)

Part = Literal["weights", "target"]
"""The part of a run that a checkpoint was loaded into."""


class PinnedCheckpoints:
    """Keeps and finds the pinned checkpoints of all runs; sync: whether they must survive a machine crash."""

    def __init__(self, root: Path, sync: bool) -> None:
        self._root = root.absolute()
        self._sync = sync

    async def find(self, run_id: str, seq_id: int, part: Part = "weights") -> Path | None:
        """Returns the directory of what the operation loaded, or None if it loaded nothing.

        Raises ValueError if it is damaged.
        """
        directory = self._run_directory(run_id) / _name(seq_id, part)
        if not await asyncio.to_thread(directory.exists):
            return None
        await asyncio.to_thread(check_directory, directory)
        return directory

    async def pin(self, run_id: str, seq_id: int, checkpoint: Path, part: Part = "weights") -> Path:
        """Pins the checkpoint, replacing what was pinned for this operation before.

        Args:
            checkpoint: a complete checkpoint, with its manifest.
        Raises:
            OperationError: category "user" if the checkpoint was deleted meanwhile, "server" if there is no space for
                it.
        """
        try:
            return await asyncio.to_thread(self._keep, self._run_directory(run_id), _name(seq_id, part), checkpoint)
        except FileNotFoundError as error:
            raise OperationError("the checkpoint was not loaded, because it was deleted meanwhile") from error
        except OSError as error:
            logger.error("the checkpoint that %s loads cannot be kept in %s: %s", run_id, self._root, error)
            reason = f"the checkpoint was not loaded: the server cannot keep a copy of it ({error.strerror})"
            raise OperationError(f"{reason}: free space on its disk", "server") from error

    async def unpin_up_to(self, run_id: str, seq_id: int, targets: Collection[int]) -> None:
        """Deletes the checkpoints of operations up to this seq_id, which snapshots cover, except for these targets."""
        await asyncio.to_thread(self._retain, self._run_directory(run_id), lambda number: number > seq_id, targets)

    async def retain(self, run_id: str, seq_ids: Collection[int], targets: Collection[int]) -> None:
        """Deletes the checkpoints of all other operations, except for these targets, at server start.

        An operation that the journal lost in a machine crash may be sent again as a different one.
        """
        await asyncio.to_thread(self._retain, self._run_directory(run_id), lambda number: number in seq_ids, targets)

    def target(self, run_id: str, seq_id: int) -> Path:
        """Returns the directory of the target that the operation has pinned, which exists if it has."""
        return self._run_directory(run_id) / _name(seq_id, "target")

    async def adopt_target(self, run_id: str, seq_id: int, directory: Path) -> None:
        """Pins the files of a target that an earlier version stored in a snapshot, as the target of this operation.
        Raises OSError."""
        await asyncio.to_thread(self._adopt, self._run_directory(run_id), _name(seq_id, "target"), directory)

    async def unpin_all(self, run_id: str) -> None:
        await asyncio.to_thread(remove_tree, self._run_directory(run_id), ignore_errors=True)

    def sweep(self, live: Collection[str]) -> None:
        """Deletes unfinished directories, and those of runs that are not live. Blocking; for server start."""
        sweep_runs(self._root, live)

    def _run_directory(self, run_id: str) -> Path:
        return self._root / directory_name(run_id)

    def _keep(self, run_directory: Path, name: str, checkpoint: Path) -> Path:
        staging = staging_path(run_directory)
        try:
            make_directory(staging, self._sync)
            link_files(checkpoint, staging)
            link_or_copy(checkpoint / MANIFEST, staging / MANIFEST)
            if self._sync:
                sync_files(staging)
            remove_tree(run_directory / name, ignore_errors=True)
            move_into_place(staging, run_directory / name, root=run_directory if self._sync else None)
        except OSError:
            remove_tree(staging, ignore_errors=True)
            raise
        return run_directory / name

    def _adopt(self, run_directory: Path, name: str, directory: Path) -> None:
        if (run_directory / name).exists():
            return
        staging = staging_path(run_directory)
        make_directory(staging, self._sync)
        for path in directory.iterdir():
            link_or_copy(path, staging / path.name)
        write_manifest(staging, {}, sync=self._sync)
        move_into_place(staging, run_directory / name, root=run_directory if self._sync else None)

    def _retain(self, run_directory: Path, is_needed: Callable[[int], bool], targets: Collection[int]) -> None:
        kept = {_name(seq_id, "target") for seq_id in targets}
        for directory in run_directory.glob("[0-9]*"):
            if directory.name not in kept and not is_needed(int(directory.name.partition("-")[0])):
                remove_tree(directory, ignore_errors=True)


def _name(seq_id: int, part: Part) -> str:
    return str(seq_id) if part == "weights" else f"{seq_id}-{part}"
