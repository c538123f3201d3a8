"""Loaded: the checkpoints that live runs have loaded, each kept as it was then until snapshots hold what it did.

Their owners may delete and overwrite them meanwhile. Files are shared with the checkpoint where the file system can.
Layout below state_dir/loaded: RUN/SEQ_ID of the operation, RUN/SEQ_ID-target of what a draft model guesses from it on,
with .staging-* beside them while they are made.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

from ...schemas.errors import OperationError
from ..checkpoints.files import link_files, link_or_copy
from ..files.directories import STAGING, directory_name, make_directory, move_into_place, staging_in, sync_files
from ..files.manifest import MANIFEST, check

logger = logging.getLogger(__name__)

Part = Literal["weights", "target"]
"""What of a run a checkpoint was loaded into."""


class Loaded:
    """sync: whether they are to survive the death of the machine."""

    def __init__(self, root: Path, sync: bool) -> None:
        self._root = root.absolute()
        self._sync = sync

    async def find(self, run_id: str, seq_id: int, part: Part = "weights") -> Path | None:
        """What the operation has loaded, if it has. Raises ValueError where that is damaged."""
        directory = self._of(run_id) / _name(seq_id, part)
        if not await asyncio.to_thread(directory.exists):
            return None
        await asyncio.to_thread(check, directory)
        return directory

    async def keep(self, run_id: str, seq_id: int, checkpoint: Path, part: Part = "weights") -> Path:
        """In place of what was kept before. checkpoint: a whole one, with its manifest.

        Raises OperationError: by the user where it was deleted meanwhile, by the server where there is no room for it.
        """
        try:
            return await asyncio.to_thread(self._keep, self._of(run_id), _name(seq_id, part), checkpoint)
        except FileNotFoundError as error:
            raise OperationError("the checkpoint was not loaded, for it was deleted meanwhile") from error
        except OSError as error:
            logger.error("what %s loads cannot be kept in %s: %s", run_id, self._root, error)
            reason = f"the checkpoint was not loaded, for the server cannot keep it for a crash ({error.strerror})"
            raise OperationError(f"{reason}: free space on its disk", "server") from error

    async def forget(self, run_id: str, seq_id: int) -> None:
        """Of the operations up to this one, snapshots hold what they did."""
        await asyncio.to_thread(self._retain, self._of(run_id), lambda number: number > seq_id)

    async def retain(self, run_id: str, seq_ids: Collection[int]) -> None:
        """At start: those that may be needed. What the journal lost with the machine may come again as another one."""
        await asyncio.to_thread(self._retain, self._of(run_id), lambda number: number in seq_ids)

    async def forget_all(self, run_id: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self._of(run_id), ignore_errors=True)

    def sweep(self, live: Collection[str]) -> None:
        """At start, blocking: what was never finished, and what runs have loaded that are not live."""
        names = {directory_name(run_id) for run_id in live}
        for directory in (*self._root.glob("*"), *self._root.glob(f"*/{STAGING}*")):
            if directory.name.startswith(STAGING) or directory.name not in names:
                shutil.rmtree(directory, ignore_errors=True)

    def _of(self, run_id: str) -> Path:
        return self._root / directory_name(run_id)

    def _keep(self, of_run: Path, name: str, checkpoint: Path) -> Path:
        staging = staging_in(of_run)
        try:
            make_directory(staging, self._sync)
            link_files(checkpoint, staging)
            link_or_copy(checkpoint / MANIFEST, staging / MANIFEST)
            if self._sync:
                sync_files(staging)
            shutil.rmtree(of_run / name, ignore_errors=True)
            move_into_place(staging, of_run / name, root=of_run if self._sync else None)
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return of_run / name

    def _retain(self, of_run: Path, is_needed: Callable[[int], bool]) -> None:
        for directory in of_run.glob("[0-9]*"):
            if not is_needed(int(directory.name.partition("-")[0])):
                shutil.rmtree(directory, ignore_errors=True)


def _name(seq_id: int, part: Part) -> str:
    return str(seq_id) if part == "weights" else f"{seq_id}-{part}"
