"""RunState: a run's state in the workers, its snapshots, and the rebuild of the state after the workers have lost it.

The last two snapshots are kept, with the operations after the older one. Snapshots are taken while passes continue.
Usually they follow an optimizer step; with pending gradients, they are taken only if too many bytes, or too much time,
have passed without a step.
"""

import asyncio
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...schemas.errors import OperationError, RequestError
from ...workers.protocol.calls import WorkerLost
from ..files.wal import RecordPosition
from ..journal.journal import EntryLocation, Header
from ..journal.quarantine import REBUILD_STRIKE, Strikes
from ..journal.snapshot_store import RunSnapshot
from ..store import RunRecord
from .operations import CreateRun, Operation, is_chained, read_for_replay
from .queued import RefusedOperation
from .replay_log import Outcome, ReplayAction, ReplayEntry, ReplayLog
from .run_services import RunServices

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 16
_NUM_KEPT = 2
_WINDOW_SHARE = 2
"""Without an optimizer step, a snapshot is due after this multiple of the bytes after which it is due at a step."""


@dataclass(eq=False)
class SnapshotWindow:
    """The operations from one optimizer step to the next; tainted_by: why the step that ends it would be wrong."""

    tainted_by: str | None = None

    def taint(self, reason: str) -> None:
        self.tainted_by = self.tainted_by or reason

    def refused(self, seq_id: int, refused: RefusedOperation) -> None:
        if refused.taints:
            self.taint(f"{refused.kind} with seq_id {seq_id} was refused ({refused.reason})")


@dataclass(frozen=True, eq=False)
class Boundary:
    """The point in a run's order of operations right after one operation.

    window: of the operations after it. past, ended: log entry and task of the operation, unless it has already
    succeeded.
    """

    seq_id: int
    window: SnapshotWindow
    past: ReplayEntry | None = None
    ended: asyncio.Task[None] | None = None


class RunState:
    """Takes a run's snapshots and rebuilds its state; `mark_created` and `mark_lost` report whether the workers have
    the run."""

    def __init__(self, record: RunRecord, services: RunServices) -> None:
        self.history = ReplayLog(services.journal.release)
        self._record = record
        self._services = services
        # How the run was created, None before that; and whether the workers have it.
        self._created: CreateRun | None = None
        self._is_live = False
        # The snapshots, newest first; the history has all operations from _first_held on.
        self._kept: list[RunSnapshot] = []
        self._first_held = 0
        # Protects _kept, which must not change during a rebuild.
        self._keeping = asyncio.Lock()
        # Crashes during rebuilds from the newest snapshot.
        self._strikes = Strikes("the rebuild of this run", self._note_strike)
        self._snapshotting: set[asyncio.Task[None]] = set()
        # True if the next operation must be followed by a snapshot.
        self._is_overdue = False

    def mark_created(self, created: CreateRun, record: RunRecord) -> None:
        """Records that the workers have the run as it was created, and its record as it is now."""
        self._created, self._record, self._is_live = created, record, True

    def mark_created_before(self, created: CreateRun) -> None:
        """Records that the run was created in an earlier process, whose workers are gone."""
        self._created = created

    def mark_lost(self) -> None:
        """Records that the workers have lost the run."""
        self._is_live = False

    @property
    def is_live(self) -> bool:
        """True if the workers have the run."""
        return self._is_live

    @property
    def is_lost(self) -> bool:
        """True if the run was created and must be rebuilt in the workers."""
        return self._created is not None and not self._is_live

    async def find_snapshots(self, journaled: Collection[int], strikes: Collection[EntryLocation]) -> int:
        """Finds the snapshots of an earlier process, and returns the first seq_id that is still needed.

        Args:
            journaled: seq_ids of the operations in the journal.
            strikes: journaled strikes against rebuilding the run.
        Raises:
            ValueError: the run cannot be rebuilt from what exists.
        """
        found = await self._services.snapshots.find(self._record.run_id)
        self._kept = found[:_NUM_KEPT]
        for old in found[_NUM_KEPT:]:
            await self._services.snapshots.remove(old.directory)
        has_beginning = all(seq_id in journaled for seq_id in range(self._kept[0].seq_id + 1 if self._kept else 1))
        if len(self._kept) >= _NUM_KEPT or (self._kept and not has_beginning):
            self._first_held = self._kept[-1].seq_id + 1
        elif not has_beginning:
            raise ValueError(f"{self._record.run_id} has no snapshot, and its first operations are not in the journal")
        needed = {seq_id for seq_id in journaled if seq_id >= self._first_held}
        await self._services.pinned_checkpoints.retain(self._record.run_id, needed)
        for one in strikes:
            self._hold_strike(one.header.seq_id, one.place)
            self._strikes.num += one.header.seq_id >= self._newest_seq_id
        return self._first_held

    @property
    def has_snapshots(self) -> bool:
        return bool(self._kept)

    def first_window(self) -> SnapshotWindow:
        """Returns the window of the operation whose seq_id `find_snapshots` returned."""
        return SnapshotWindow(self._kept[-1].tainted_by if self._first_held > 0 else None)

    @property
    def held_features(self) -> Mapping[int, Mapping[str, int]]:
        """Returns the uses of captured features from the newest snapshot (see RunSnapshot)."""
        return self._kept[0].held if self._kept else {}

    def covers(self, seq_id: int) -> bool:
        """True if a snapshot includes the effect of this operation."""
        return seq_id <= self._newest_seq_id

    def snapshot_if_due(self, boundary: Boundary, *, is_step: bool) -> None:
        """Takes a snapshot if one is due; call it as soon as an operation has been handed over.

        Args:
            is_step: whether it is an optimizer step, after which a snapshot is due earlier.
        """
        if not self.is_live or self._snapshotting:
            return
        steps, num_bytes = self._services.config.journal.snapshot_steps, self._services.config.journal.snapshot_bytes
        limits = (steps, num_bytes) if is_step else (math.inf, _WINDOW_SHARE * num_bytes)
        if self.history.is_due(*limits) or self._is_overdue:
            self.snapshot(boundary)

    def make_snapshot_due(self) -> None:
        """Makes a snapshot due after the next operation."""
        self._is_overdue = True

    async def snapshot_when_idle(self, boundary: Boundary, *, with_copy: bool) -> None:
        """Takes a snapshot of a live, idle run at the current boundary, unless one covers it.

        Args:
            with_copy: also copy it, so that the journal need not hold anything of the run.
        """
        if not self._snapshotting and not self.covers(boundary.seq_id):
            self.snapshot(boundary)
        if self._snapshotting:
            await asyncio.wait(self._snapshotting)
        if (
            with_copy
            and [one.seq_id for one in self._kept[:1]] == [boundary.seq_id]
            and self._first_held <= boundary.seq_id
        ):
            await self._keep_copy(self._kept[0])

    async def rebuild(self) -> None:
        """Rebuilds the run in the workers. Raises OperationError or RequestError if that is impossible."""
        while not self._is_live:
            self._strikes.check()
            try:
                async with self._keeping:
                    await self._make()
            except WorkerLost as lost:
                logger.warning("the rebuild of %s is retried: %s", self._record.run_id, lost)
                await self._strikes.add(lost)
            else:
                self._is_live = True
        if self._strikes.num:
            # The next snapshot clears the strikes, since no rebuild starts from the old one then.
            self.make_snapshot_due()

    async def stop(self) -> None:
        for task in self._snapshotting:
            task.cancel()
        if self._snapshotting:
            await asyncio.wait(self._snapshotting)

    async def close(self) -> None:
        """Deletes everything of the run, which is over."""
        await self.stop()
        self.history.close()
        await self._services.snapshots.remove_all(self._record.run_id)
        await self._services.pinned_checkpoints.unpin_all(self._record.run_id)

    # Snapshots

    def snapshot(self, boundary: Boundary) -> None:
        """Starts taking a snapshot at a boundary, which must be the current one."""
        try:
            staging = self._services.snapshots.stage(self._record.run_id)
        except OSError as error:
            logger.error("%s: no snapshot can be taken (%s)", self._record.run_id, error)
            return
        self._is_overdue = False
        task = asyncio.create_task(self._take_snapshot(staging, boundary))
        self._snapshotting.add(task)
        task.add_done_callback(self._snapshotting.discard)

    async def _take_snapshot(self, staging: Path, boundary: Boundary) -> None:
        try:
            # Handed over before anything else is awaited, so that it follows the operation directly.
            await self._services.operations.snapshot(self._record, staging)
            if boundary.ended is not None:
                await asyncio.wait({boundary.ended})
            # Otherwise a crash could leave a snapshot with operations that are not known to be done.
            await self.history.all_answered(boundary.seq_id)
            if boundary.past is None or boundary.past.outcome is Outcome.DONE:
                await self._publish(staging, boundary)
        except WorkerLost as lost:
            # Only this task may have noticed. An idle run is rebuilt when it, or a snapshot of it, is needed next.
            self.mark_lost()
            self._is_overdue = True
            logger.info("%s: its snapshot waits until the run is rebuilt (%s)", self._record.run_id, lost)
        except (OperationError, OSError) as error:
            logger.warning("%s: the snapshot behind seq_id %d failed: %s", self._record.run_id, boundary.seq_id, error)
        finally:
            self._snapshotting -= {asyncio.current_task()}
            await self._services.snapshots.remove(staging)

    async def _publish(self, staging: Path, boundary: Boundary) -> None:
        """Publishes the snapshot with its taint.

        A taint added to the window later is no problem: its operation is then in the replay log whenever the snapshot
        is used.
        """
        snapshots, tainted_by = self._services.snapshots, boundary.window.tainted_by
        held = self._services.features.pending_uses(self._record, boundary.seq_id)
        await self._keep(await snapshots.publish(staging, self._record.run_id, boundary.seq_id, tainted_by, held))

    async def _keep_copy(self, snapshot: RunSnapshot) -> None:
        try:
            await self._keep(await self._services.snapshots.copy(snapshot, self._record.run_id))
        except (OSError, ValueError) as error:
            logger.error("%s: %s cannot be copied: %s", self._record.run_id, snapshot.directory, error)
            if snapshot in self._kept and isinstance(error, ValueError):
                self._kept.remove(snapshot)

    async def _keep(self, snapshot: RunSnapshot) -> None:
        async with self._keeping:
            await self._replace_oldest(snapshot)

    async def _replace_oldest(self, snapshot: RunSnapshot) -> None:
        if snapshot.seq_id > self._newest_seq_id:
            self._strikes.forget()
        newest_first = sorted([snapshot, *self._kept], key=lambda one: -one.seq_id)
        self._kept, dropped = newest_first[:_NUM_KEPT], newest_first[_NUM_KEPT:]
        if len(self._kept) == _NUM_KEPT:
            self._first_held = self._kept[-1].seq_id + 1
            self.history.cover(self._kept[-1].seq_id)
            await self._services.pinned_checkpoints.unpin_up_to(self._record.run_id, self._kept[-1].seq_id)
        for old in dropped:
            await self._services.snapshots.remove(old.directory)

    # Making it again

    async def _make(self) -> None:
        snapshot = await self._newest_whole()
        if snapshot is None and self._first_held > 0:
            raise OperationError("its snapshots are damaged, and the operations before them are not kept", "server")
        operations, record = self._services.operations, self._record
        await operations.discard(record)
        if snapshot is None:
            assert self._created is not None
            await operations.create_in_workers(record, self._created, is_rebuild=True)
        else:
            await operations.create_in_workers(record, CreateRun(), is_rebuild=True)
            await operations.restore(record, snapshot.directory)
        after, is_tainted = (-1, False) if snapshot is None else (snapshot.seq_id, snapshot.tainted_by is not None)
        repeats = list(self.history.replay_actions(after, is_tainted))
        await self._repeat(repeats)
        begun = "its beginning" if snapshot is None else f"the snapshot behind seq_id {snapshot.seq_id}"
        logger.info("%s is rebuilt, from %s and %d operations", record.run_id, begun, len(repeats))

    async def _newest_whole(self) -> RunSnapshot | None:
        for snapshot in list(self._kept):
            if await self._services.snapshots.is_whole(snapshot):
                return snapshot
            self._kept.remove(snapshot)
            await self._services.snapshots.remove(snapshot.directory)
        return None

    async def _repeat(self, repeats: list[tuple[ReplayEntry, ReplayAction]]) -> None:
        """Repeats operations in order; chained ones are handed over several at a time, since the dispatch keeps their
        order.
        """
        under_way: list[asyncio.Task[None]] = []
        for past, repeat in repeats:
            operation = None
            if repeat is ReplayAction.AGAIN:
                operation = await read_for_replay(self._services.journal, past.place, past.outcome)
            chained = operation is not None and is_chained(operation)
            if not chained or len(under_way) >= _MOST_AT_ONCE:
                await _wait_for_all(under_way)
                under_way = []
            repeating = asyncio.create_task(self._repeat_one(past, operation))
            # Retrieve the exception: if several fail, only the first is reported.
            repeating.add_done_callback(lambda task: task.cancelled() or task.exception())
            under_way.append(repeating)
            # Let the task take its first step, which hands the operation over.
            await asyncio.sleep(0)
            if not chained:
                await _wait_for_all(under_way)
                under_way = []
        await _wait_for_all(under_way)

    async def _repeat_one(self, past: ReplayEntry, operation: Operation | None) -> None:
        """Repeats one operation, or clears the pending gradients if `operation` is None."""
        try:
            if operation is None:
                await self._services.operations.clear_gradients(self._record, past.seq_id)
            else:
                await self._services.operations.replay(self._record, operation, past.seq_id)
        except WorkerLost:
            raise
        except (OperationError, RequestError) as error:
            if past.outcome is not Outcome.FAILED:
                message = f"{past.kind} with seq_id {past.seq_id} cannot be repeated: {error}"
                raise OperationError(message, "server") from error
        else:
            if operation is not None and past.outcome is Outcome.FAILED:
                raise OperationError(f"{past.kind} with seq_id {past.seq_id} failed before, but not now", "server")

    # Strikes

    @property
    def _newest_seq_id(self) -> int:
        """Returns the seq_id of the newest snapshot, -1 if there is none."""
        return self._kept[0].seq_id if self._kept else -1

    async def _note_strike(self) -> None:
        seq_id, record = self._newest_seq_id, self._record
        header = Header(REBUILD_STRIKE, record.tenant_id, record.run_id, seq_id, record.request_id(seq_id))
        self._hold_strike(seq_id, await self._services.journal.append(header))

    def _hold_strike(self, seq_id: int, place: RecordPosition) -> None:
        self.history.add(ReplayEntry(seq_id, REBUILD_STRIKE, place, outcome=Outcome.FAILED, is_answered=True))


async def _wait_for_all(tasks: list[asyncio.Task[None]]) -> None:
    """Waits for all tasks, then raises the exception of the first that failed."""
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        task.result()
