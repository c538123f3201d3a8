"""Snapshots of a run's state, taken while passes continue.

The last two snapshots are kept, with the operations after the older one. Usually they follow an optimizer step; with
pending gradients, they are taken only if too many bytes, or too much time, have passed without a step.
"""

import asyncio
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...schemas.errors import OperationError
from ...workers.protocol.calls import WorkerLost
from ...workers.scheduler.quarantine import MAX_STRIKES
from ..journal.snapshot_store import EARLIER_TARGET, RunSnapshot
from ..operations.operation import Outcome, ReplayEntry
from .run_state import OperationWindow, RunServices, RunState

logger = logging.getLogger(__name__)

_NUM_KEPT = 2
_BYTES_WITHOUT_STEP = 2
"""Without an optimizer step, a snapshot is due after this multiple of the bytes after which it is due at a step."""


@dataclass(frozen=True, eq=False)
class Boundary:
    """The point in a run's order of operations right after one operation.

    window: of the operations after it. log_entry, task: those of the operation, unless it has already succeeded.
    """

    seq_id: int
    window: OperationWindow
    log_entry: ReplayEntry | None = None
    task: asyncio.Task[None] | None = None


class RunSnapshots:
    """Takes and keeps a run's snapshots."""

    def __init__(self, state: RunState, services: RunServices) -> None:
        self._state = state
        self._services = services
        self._run_id = state.record.run_id
        # The snapshots, newest first; the log has all operations from _first_held on.
        self._kept: list[RunSnapshot] = []
        self._first_held = 0
        # Protects _kept, which must not change during a rebuild.
        self.keeping = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        # True if the next operation must be followed by a snapshot.
        self._is_overdue = False
        # Crashes of workers that did nothing but write one.
        self._num_strikes = 0

    async def find(self, journaled: Collection[int]) -> int:
        """Finds the snapshots of an earlier process, and returns the first seq_id that is still needed.

        Args:
            journaled: seq_ids of the operations in the journal.
        Raises:
            ValueError: the run cannot be rebuilt from what exists.
        """
        found = await self._services.snapshot_store.find(self._run_id)
        self._kept = [await self._with_pinned_target(each) for each in found[:_NUM_KEPT]]
        for old in found[_NUM_KEPT:]:
            await self._services.snapshot_store.remove(old.directory)
        has_beginning = all(seq_id in journaled for seq_id in range(self.newest_seq_id + 1 if self._kept else 1))
        if len(self._kept) >= _NUM_KEPT or (self._kept and not has_beginning):
            self._first_held = self._kept[-1].seq_id + 1
        elif not has_beginning:
            raise ValueError(
                f"{self._run_id} has no snapshot, and its first operations are not in the journal: it was unloaded, or "
                "they are lost"
            )
        needed = {seq_id for seq_id in journaled if seq_id >= self._first_held}
        await self._services.context.pinned_checkpoints.retain(self._run_id, needed, self._targets)
        return self._first_held

    def __bool__(self) -> bool:
        return bool(self._kept)

    @property
    def newest_seq_id(self) -> int:
        """Returns the seq_id of the newest snapshot, -1 if there is none."""
        return self._kept[0].seq_id if self._kept else -1

    @property
    def are_given_up(self) -> bool:
        """True if writing snapshots alone crashed the workers MAX_STRIKES times: none are taken until a restart."""
        return self._num_strikes >= MAX_STRIKES

    @property
    def covers_beginning(self) -> bool:
        """True if the run's first operations are no longer kept, so that it can only be rebuilt from a snapshot."""
        return self._first_held > 0

    def first_window(self) -> OperationWindow:
        """Returns the window of the operation whose seq_id `find` returned."""
        return OperationWindow(self._kept[-1].tainted_by if self.covers_beginning else None)

    @property
    def held_features(self) -> Mapping[int, Mapping[str, int]]:
        """Returns the uses of captured features from the newest snapshot (see RunSnapshot)."""
        return self._kept[0].held if self._kept else {}

    def covers(self, seq_id: int) -> bool:
        """True if a snapshot includes the effect of this operation."""
        return seq_id <= self.newest_seq_id

    async def newest_whole(self) -> RunSnapshot | None:
        """Returns the newest snapshot that is undamaged, deleting damaged ones; call it while holding `keeping`."""
        for snapshot in list(self._kept):
            if await self._services.snapshot_store.is_whole(snapshot) and await self._has_its_target(snapshot):
                return snapshot
            self._kept.remove(snapshot)
            await self._services.snapshot_store.remove(snapshot.directory)
        return None

    def take_if_due(self, boundary: Boundary, *, is_step: bool) -> None:
        """Takes a snapshot if one is due; call it as soon as an operation has been handed over.

        Args:
            is_step: whether it is an optimizer step, after which a snapshot is due earlier.
        """
        if not self._state.is_live or self._tasks:
            return
        steps, num_bytes = self._services.config.journal.snapshot_steps, self._services.config.journal.snapshot_bytes
        limits = (steps, num_bytes) if is_step else (math.inf, _BYTES_WITHOUT_STEP * num_bytes)
        if self._state.log.is_due(*limits) or self._is_overdue:
            self.take(boundary)

    def make_due(self) -> None:
        """Makes a snapshot due after the next operation."""
        self._is_overdue = True

    async def take_when_idle(self, boundary: Boundary, *, with_copy: bool) -> None:
        """Takes a snapshot of a live, idle run at the current boundary, unless one covers it.

        Args:
            with_copy: also copy it, so that the journal need not hold anything of the run.
        """
        if not self._tasks and not self.covers(boundary.seq_id):
            self.take(boundary)
        if self._tasks:
            await asyncio.wait(self._tasks)
        if with_copy and self.newest_seq_id == boundary.seq_id >= self._first_held:
            await self._keep_copy(self._kept[0])

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Deletes everything of the run, which is over."""
        await self.stop()
        self._state.log.cover(math.inf)
        await self._services.snapshot_store.remove_all(self._run_id)
        await self._services.context.pinned_checkpoints.unpin_all(self._run_id)

    def take(self, boundary: Boundary) -> None:
        """Starts taking a snapshot at a boundary, which must be the current one; none after MAX_STRIKES."""
        if self.are_given_up:
            return
        try:
            staging = self._services.snapshot_store.stage(self._run_id)
        except OSError as error:
            logger.error("%s: no snapshot can be taken (%s)", self._run_id, error)
            return
        self._is_overdue = False
        task = asyncio.create_task(self._take(staging, boundary))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, staging: Path, boundary: Boundary) -> None:
        try:
            # Handed over before anything else is awaited, so that it follows the operation directly.
            await self._services.context.dispatch.snapshot_run(self._run_id, staging)
            self._num_strikes = 0
            if boundary.task is not None:
                await asyncio.wait({boundary.task})
            # Otherwise a crash could leave a snapshot with operations that are not known to be done.
            await self._state.log.all_answered(boundary.seq_id)
            if boundary.log_entry is None or boundary.log_entry.outcome is Outcome.DONE:
                await self._publish(staging, boundary)
        except WorkerLost as lost:
            # Only this task may have noticed. An idle run is rebuilt when it, or a snapshot of it, is needed next.
            self._state.lose()
            self._is_overdue = True
            self._num_strikes += lost.alone
            if not self.are_given_up:
                logger.info("%s: its snapshot waits until the run is rebuilt (%s)", self._run_id, lost)
            else:
                logger.error(
                    "%s takes no more snapshots until the server restarts: the worker died %d times while only writing"
                    " one",
                    self._run_id, MAX_STRIKES,
                )  # fmt: skip
        except (OperationError, OSError) as error:
            logger.warning("%s: the snapshot behind seq_id %d failed: %s", self._run_id, boundary.seq_id, error)
        finally:
            self._tasks -= {asyncio.current_task()}
            await self._services.snapshot_store.remove(staging)

    async def _publish(self, staging: Path, boundary: Boundary) -> None:
        """Publishes the snapshot with its taint.

        A taint added to the window later is no problem: its operation is then in the replay log whenever the snapshot
        is used.
        """
        held = self._services.context.features.pending_uses(self._state.record, boundary.seq_id)
        target = await self._target_at(boundary.seq_id)
        await self._keep(
            await self._services.snapshot_store.publish(
                staging, self._run_id, boundary.seq_id, boundary.window.tainted_by, held, target
            )
        )

    async def _target_at(self, seq_id: int) -> int | None:
        """Returns which operation pinned the target that a draft has after this one, None for the base model."""
        before = next((each for each in self._kept if each.seq_id <= seq_id), None)
        setting = self._state.log.newest_target(-1 if before is None else before.seq_id, seq_id)
        if setting is None:
            return None if before is None else before.target
        pinned = self._services.context.pinned_checkpoints.target(self._run_id, setting)
        return setting if await asyncio.to_thread(pinned.exists) else None

    async def _has_its_target(self, snapshot: RunSnapshot) -> bool:
        if snapshot.target is None:
            return True
        try:
            found = await self._services.context.pinned_checkpoints.find(self._run_id, snapshot.target, "target")
        except ValueError as error:
            logger.error("the target of %s cannot be used: %s", snapshot.directory, error)
            return False
        return found is not None

    async def _with_pinned_target(self, snapshot: RunSnapshot) -> RunSnapshot:
        """Pins the target in a snapshot of an earlier version."""
        target = snapshot.directory / EARLIER_TARGET
        if snapshot.target is not None or not await asyncio.to_thread(target.is_dir):
            return snapshot
        await self._services.context.pinned_checkpoints.adopt_target(self._run_id, snapshot.seq_id, target)
        return replace(snapshot, target=snapshot.seq_id)

    @property
    def _targets(self) -> set[int]:
        """The operations that pinned the targets of the kept snapshots."""
        return {each.target for each in self._kept if each.target is not None}

    async def _keep_copy(self, snapshot: RunSnapshot) -> None:
        try:
            await self._keep(await self._services.snapshot_store.copy(snapshot, self._run_id))
        except (OSError, ValueError) as error:
            logger.error("%s: %s cannot be copied: %s", self._run_id, snapshot.directory, error)
            if snapshot in self._kept and isinstance(error, ValueError):
                self._kept.remove(snapshot)

    async def _keep(self, snapshot: RunSnapshot) -> None:
        """Adds a snapshot and deletes the oldest, if there are too many."""
        async with self.keeping:
            newest_first = sorted([snapshot, *self._kept], key=lambda one: -one.seq_id)
            self._kept, dropped = newest_first[:_NUM_KEPT], newest_first[_NUM_KEPT:]
            if len(self._kept) == _NUM_KEPT:
                self._first_held = self._kept[-1].seq_id + 1
                self._state.log.cover(self._kept[-1].seq_id)
                oldest = self._kept[-1].seq_id
                await self._services.context.pinned_checkpoints.unpin_up_to(self._run_id, oldest, self._targets)
            for old in dropped:
                await self._services.snapshot_store.remove(old.directory)
