"""RunState: what a run is in the workers, and how it is made there again when they have lost it.

Its last two snapshots and the operations behind the older one are kept. Snapshots are taken while passes go on: behind
optimizer steps, so at such a boundary operations of the past stop being needed; with the gradients that wait for their
step where too much has come without one, or for too long.
"""

import asyncio
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...schemas.errors import OperationError, RequestError
from ...workers.protocol.verbs import WorkerLost
from ..files.wal import Place
from ..journal.journal import Header, Journaled
from ..journal.quarantine import REBUILD_STRIKE, Strikes
from ..journal.snapshots import Snapshot
from ..store import RunRecord
from .operations import CreateRun, Operation, is_chained, read_again
from .queued import Refused
from .replay_log import History, Outcome, Past, Repeat
from .run_services import RunServices

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 16
_NUM_KEPT = 2
_WINDOW_SHARE = 2
"""Times the bytes after which a snapshot is due at a step, it is due without one."""


@dataclass(eq=False)
class Window:
    """The operations from one optimizer step to the next. tainted_by: why that step would be a wrong one."""

    tainted_by: str | None = None

    def taint(self, reason: str) -> None:
        self.tainted_by = self.tainted_by or reason

    def refused(self, seq_id: int, refused: Refused) -> None:
        if refused.taints:
            self.taint(f"{refused.kind} with seq_id {seq_id} was refused ({refused.reason})")


@dataclass(frozen=True, eq=False)
class Boundary:
    """A point in the order of a run's operations: right behind this one. window: whose operations come next.

    past, ended: the operation's, unless it has ended well.
    """

    seq_id: int
    window: Window
    past: Past | None = None
    ended: asyncio.Task[None] | None = None


class RunState:
    """`began` and `lost` tell it whether the workers have the run."""

    def __init__(self, record: RunRecord, services: RunServices) -> None:
        self.history = History(services.journal.release)
        self._record = record
        self._services = services
        # How it began, None before that; and whether the workers have it.
        self._created: CreateRun | None = None
        self._is_live = False
        # The newest first; the history has everything from this seq_id on.
        self._kept: list[Snapshot] = []
        self._first_held = 0
        # Of what is kept: it changes only while nothing is made again from it.
        self._keeping = asyncio.Lock()
        # Against making it again from the newest snapshot.
        self._strikes = Strikes("make this run again", self._note_strike)
        self._snapshotting: set[asyncio.Task[None]] = set()
        # For too long there was none.
        self._is_overdue = False

    def began(self, created: CreateRun, record: RunRecord) -> None:
        """The workers have it as it was created, and as it is recorded now."""
        self._created, self._record, self._is_live = created, record, True

    def began_before(self, created: CreateRun) -> None:
        """In an earlier process, whose workers are gone."""
        self._created = created

    def lost(self) -> None:
        """By the workers, with what they had of it."""
        self._is_live = False

    @property
    def is_live(self) -> bool:
        """The workers have it."""
        return self._is_live

    @property
    def is_lost(self) -> bool:
        """It has begun, and is to be made again."""
        return self._created is not None and not self._is_live

    async def find_snapshots(self, journaled: Collection[int], strikes: Collection[Journaled]) -> int:
        """Of an earlier process, of which the journal has the operations with these seq_ids.

        strikes: against making the run again. Returns the first seq_id that is needed. Raises ValueError when the run
        cannot be made from what is there.
        """
        found = await self._services.snapshots.find(self._record.run_id)
        self._kept = found[:_NUM_KEPT]
        for old in found[_NUM_KEPT:]:
            await self._services.snapshots.remove(old.directory)
        has_beginning = all(seq_id in journaled for seq_id in range(self._kept[0].seq_id + 1 if self._kept else 1))
        if len(self._kept) >= _NUM_KEPT or (self._kept and not has_beginning):
            self._first_held = self._kept[-1].seq_id + 1
        elif not has_beginning:
            raise ValueError(f"{self._record.run_id} has no snapshot, and its beginning is not in the journal")
        needed = {seq_id for seq_id in journaled if seq_id >= self._first_held}
        await self._services.loaded.retain(self._record.run_id, needed)
        for one in strikes:
            self._hold_strike(one.header.seq_id, one.place)
            self._strikes.num += one.header.seq_id >= self._newest_seq_id
        return self._first_held

    @property
    def has_snapshots(self) -> bool:
        return bool(self._kept)

    def first_window(self) -> Window:
        """In which the first operation is that `find_snapshots` has returned."""
        return Window(self._kept[-1].tainted_by if self._first_held > 0 else None)

    @property
    def held(self) -> Mapping[int, Mapping[str, int]]:
        """See Snapshot, of the newest one."""
        return self._kept[0].held if self._kept else {}

    def covers(self, seq_id: int) -> bool:
        """Whether a snapshot holds what this operation did."""
        return seq_id <= self._newest_seq_id

    def snapshot_if_due(self, boundary: Boundary, *, is_step: bool) -> None:
        """To be called as soon as an operation has been handed over. is_step: an optimizer step, the best place."""
        if not self.is_live or self._snapshotting:
            return
        steps, num_bytes = self._services.config.snapshot_steps, self._services.config.snapshot_bytes
        limits = (steps, num_bytes) if is_step else (math.inf, _WINDOW_SHARE * num_bytes)
        if self.history.is_due(*limits) or self._is_overdue:
            self.snapshot(boundary)

    def hurry(self) -> None:
        """The next operation is to be followed by a snapshot."""
        self._is_overdue = True

    async def settle(self, boundary: Boundary, *, twice: bool) -> None:
        """A snapshot of a live run of which nothing is under way, at a boundary that is now.

        twice: also a copy of it, so that the journal need not hold anything of the run.
        """
        if not self._snapshotting and not self.covers(boundary.seq_id):
            self.snapshot(boundary)
        if self._snapshotting:
            await asyncio.wait(self._snapshotting)
        if (
            twice
            and [one.seq_id for one in self._kept[:1]] == [boundary.seq_id]
            and self._first_held <= boundary.seq_id
        ):
            await self._keep_copy(self._kept[0])

    async def make_again(self) -> None:
        """Raises OperationError, RequestError when it cannot be."""
        while not self._is_live:
            self._strikes.check()
            try:
                async with self._keeping:
                    await self._make()
            except WorkerLost as lost:
                logger.warning("%s is being made again once more: %s", self._record.run_id, lost)
                await self._strikes.add(lost)
            else:
                self._is_live = True
        if self._strikes.num:
            # With the next snapshot they are forgotten: nobody has to make it again from this one.
            self.hurry()

    async def stop(self) -> None:
        for task in self._snapshotting:
            task.cancel()
        if self._snapshotting:
            await asyncio.wait(self._snapshotting)

    async def close(self) -> None:
        """The run is over: nothing of it is kept."""
        await self.stop()
        self.history.close()
        await self._services.snapshots.remove_all(self._record.run_id)
        await self._services.loaded.forget_all(self._record.run_id)

    # Snapshots

    def snapshot(self, boundary: Boundary) -> None:
        """At a boundary that is now."""
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
            # Handed over before anything else is awaited: it has its place behind the operation.
            await self._services.operations.snapshot(self._record, staging)
            if boundary.ended is not None:
                await asyncio.wait({boundary.ended})
            # Else a crash would leave operations that a snapshot has and nobody knows to be done.
            await self.history.all_answered(boundary.seq_id)
            if boundary.past is None or boundary.past.outcome is Outcome.DONE:
                await self._publish(staging, boundary)
        except WorkerLost as lost:
            # Nobody else may have noticed: one that rests is rebuilt by the next who needs it, or wants a snapshot.
            self.lost()
            self._is_overdue = True
            logger.info("%s: its snapshot waits until the run is rebuilt (%s)", self._record.run_id, lost)
        except (OperationError, OSError) as error:
            logger.warning("%s: the snapshot behind seq_id %d failed: %s", self._record.run_id, boundary.seq_id, error)
        finally:
            self._snapshotting -= {asyncio.current_task()}
            await self._services.snapshots.remove(staging)

    async def _publish(self, staging: Path, boundary: Boundary) -> None:
        """What taints the window later, too, is no harm: it will have tainted it whenever the snapshot is used."""
        snapshots, tainted_by = self._services.snapshots, boundary.window.tainted_by
        held = self._services.features.held(self._record, boundary.seq_id)
        await self._keep(await snapshots.publish(staging, self._record.run_id, boundary.seq_id, tainted_by, held))

    async def _keep_copy(self, snapshot: Snapshot) -> None:
        try:
            await self._keep(await self._services.snapshots.copy(snapshot, self._record.run_id))
        except (OSError, ValueError) as error:
            logger.error("%s: %s cannot be copied: %s", self._record.run_id, snapshot.directory, error)
            if snapshot in self._kept and isinstance(error, ValueError):
                self._kept.remove(snapshot)

    async def _keep(self, snapshot: Snapshot) -> None:
        async with self._keeping:
            await self._replace_oldest(snapshot)

    async def _replace_oldest(self, snapshot: Snapshot) -> None:
        if snapshot.seq_id > self._newest_seq_id:
            self._strikes.forget()
        newest_first = sorted([snapshot, *self._kept], key=lambda one: -one.seq_id)
        self._kept, dropped = newest_first[:_NUM_KEPT], newest_first[_NUM_KEPT:]
        if len(self._kept) == _NUM_KEPT:
            self._first_held = self._kept[-1].seq_id + 1
            self.history.cover(self._kept[-1].seq_id)
            await self._services.loaded.forget(self._record.run_id, self._kept[-1].seq_id)
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
            await operations.make(record, self._created, again=True)
        else:
            await operations.make(record, CreateRun(), again=True)
            await operations.restore(record, snapshot.directory)
        after, is_tainted = (-1, False) if snapshot is None else (snapshot.seq_id, snapshot.tainted_by is not None)
        repeats = list(self.history.repeats(after, is_tainted))
        await self._repeat(repeats)
        begun = "its beginning" if snapshot is None else f"the snapshot behind seq_id {snapshot.seq_id}"
        logger.info("%s is there again, from %s and %d operations", record.run_id, begun, len(repeats))

    async def _newest_whole(self) -> Snapshot | None:
        for snapshot in list(self._kept):
            if await self._services.snapshots.is_whole(snapshot):
                return snapshot
            self._kept.remove(snapshot)
            await self._services.snapshots.remove(snapshot.directory)
        return None

    async def _repeat(self, repeats: list[tuple[Past, Repeat]]) -> None:
        """In order; several are handed over at once where the dispatch keeps their order."""
        under_way: list[asyncio.Task[None]] = []
        for past, repeat in repeats:
            operation = None
            if repeat is Repeat.AGAIN:
                operation = await read_again(self._services.journal, past.place, past.outcome)
            chained = operation is not None and is_chained(operation)
            if not chained or len(under_way) >= _MOST_AT_ONCE:
                await _all(under_way)
                under_way = []
            repeating = asyncio.create_task(self._repeat_one(past, operation))
            # Of several that fail only the first is told of.
            repeating.add_done_callback(lambda task: task.cancelled() or task.exception())
            under_way.append(repeating)
            # It takes its first step, by which it is handed over.
            await asyncio.sleep(0)
            if not chained:
                await _all(under_way)
                under_way = []
        await _all(under_way)

    async def _repeat_one(self, past: Past, operation: Operation | None) -> None:
        """operation: None = the gradients are to be dropped."""
        try:
            if operation is None:
                await self._services.operations.clear_gradients(self._record, past.seq_id)
            else:
                await self._services.operations.repeat(self._record, operation, past.seq_id)
        except WorkerLost:
            raise
        except (OperationError, RequestError) as error:
            if past.outcome is not Outcome.FAILED:
                message = f"{past.kind} with seq_id {past.seq_id} cannot be repeated: {error}"
                raise OperationError(message, "server") from error
        else:
            if operation is not None and past.outcome is Outcome.FAILED:
                raise OperationError(f"{past.kind} with seq_id {past.seq_id} failed before and does not now", "server")

    # Strikes

    @property
    def _newest_seq_id(self) -> int:
        """Of the snapshots; -1: there is none."""
        return self._kept[0].seq_id if self._kept else -1

    async def _note_strike(self) -> None:
        seq_id, record = self._newest_seq_id, self._record
        header = Header(REBUILD_STRIKE, record.tenant_id, record.run_id, seq_id, record.request_id(seq_id))
        self._hold_strike(seq_id, await self._services.journal.append(header))

    def _hold_strike(self, seq_id: int, place: Place) -> None:
        self.history.add(Past(seq_id, REBUILD_STRIKE, place, outcome=Outcome.FAILED, is_answered=True))


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    """Waits for every one, then raises what the first has failed with."""
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        task.result()
