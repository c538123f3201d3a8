"""Rebuilds a run after the workers have lost it: from its newest snapshot, by replaying the operations after that."""

import asyncio
import logging
from collections.abc import Callable, Collection

from ...schemas.errors import OperationError, RequestError
from ...workers.protocol.calls import WorkerLost
from ..journal.journal import EntryLocation
from ..journal.strikes import REBUILD_STRIKE, Strikes
from ..operations.loading import CreateRun
from ..operations.operation import Operation, Outcome, ReplayEntry
from ..operations.registry import read_operation
from ..store.database.database_errors import OUTAGE_ERRORS
from .operation_queue import OperationQueue
from .replay_log import ReplayAction
from .run_state import RunServices, RunState
from .snapshots import RunSnapshots

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 16


class Rebuilder:
    """Rebuilds a run when an operation needs it; operations in progress wait for it in the order of their seq_ids.

    on_end: `Execution.begin_ready`, which begins those that arrived meanwhile, behind them.
    """

    def __init__(self, state: RunState, queue: OperationQueue, services: RunServices, snapshots: RunSnapshots) -> None:
        self.on_end: Callable[[], None] = lambda: None
        self.progressed = asyncio.Event()
        """Set when an operation in progress has ended, or waits for the rebuild."""
        self._state = state
        self._queue = queue
        self._services = services
        self._snapshots = snapshots
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        # Crashes during rebuilds from the newest snapshot, whose seq_id that is.
        self._strikes = Strikes("the rebuild of this run", self._record_strike)
        self._struck_seq_id = -1

    @property
    def is_rebuilding(self) -> bool:
        return self._task is not None

    async def ensure_rebuilt(self, seq_id: int = -1) -> None:
        """Rebuilds the run, unless that is under way. Returns as soon as the state is rebuilt and all operations before
        this seq_id have been handed over again.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._rebuild_or_mark_unusable())
            # A task that is cancelled before its first step wakes no waiter by itself.
            self._task.add_done_callback(self._ended)
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append((seq_id, waiting))
        self.progressed.set()
        await waiting

    def cancel(self) -> asyncio.Task[None] | None:
        """Cancels a rebuild and returns its task."""
        if self._task is not None:
            self._task.cancel()
        return self._task

    def restore_strikes(self, strikes: Collection[EntryLocation]) -> None:
        """Counts the journaled strikes of an earlier process against rebuilding the run."""
        for one in strikes:
            self._state.log.add_strike(REBUILD_STRIKE, one.header.seq_id, one.place)
            self._strikes.num += one.header.seq_id >= self._snapshots.newest_seq_id
        self._struck_seq_id = self._snapshots.newest_seq_id

    def _ended(self, ended: asyncio.Task[None]) -> None:
        self._task = None
        # Waiters resume in this order, each up to where it hands its operation to the dispatch.
        for waiting in [waiting for _, waiting in sorted(self._waiting, key=lambda one: one[0])]:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting = []
        self.on_end()

    async def _rebuild_or_mark_unusable(self) -> None:
        run_id = self._state.record.run_id
        try:
            await self._all_ended_or_waiting()
            await self._rebuild()
        except OUTAGE_ERRORS as error:
            await self._state.wait_out(error)
        except (OperationError, RequestError, OSError, ValueError) as error:
            logger.error("%s cannot be rebuilt: %s", run_id, error)
            self._mark_unusable(str(error))
        except Exception:
            logger.exception("%s cannot be rebuilt", run_id)
            self._mark_unusable("see the server's log")

    async def _all_ended_or_waiting(self) -> None:
        """Waits until each operation in progress has ended, or waits for the rebuild.

        An operation that the workers had answered is replayed only if it has ended by now, and one that ended later,
        after its strike was journaled, would be handed over behind its successors.
        """
        while self._queue.in_progress.keys() - {seq_id for seq_id, _ in self._waiting}:
            self.progressed.clear()
            await self.progressed.wait()

    def _mark_unusable(self, reason: str) -> None:
        run_id = self._state.record.run_id
        self._state.fail(f"run {run_id} was lost with its worker and cannot be rebuilt: {reason}")

    async def _rebuild(self) -> None:
        while self._state.is_lost:
            if self._snapshots.newest_seq_id > self._struck_seq_id:
                self._strikes.forget()
            self._strikes.check()
            try:
                async with self._snapshots.keeping:
                    await self._attempt()
            except WorkerLost as lost:
                logger.warning("the rebuild of %s is retried: %s", self._state.record.run_id, lost)
                await self._strikes.add(lost)
            else:
                self._state.begin()
        if self._snapshots.are_given_up:
            self._strikes.forget()
        elif self._strikes.num:
            # The next snapshot clears the strikes, since no rebuild starts from the old one then.
            self._snapshots.make_due()

    async def _attempt(self) -> None:
        context, record = self._services.context, self._state.record
        snapshot = await self._snapshots.newest_whole()
        if snapshot is None and self._snapshots.covers_beginning:
            raise OperationError("its snapshots are damaged, and the operations before them are not kept", "server")
        await context.dispatch.drop_run(record.run_id, keeps_suspicion=True)  # what the workers may still have of it
        created = self._state.created if snapshot is None else CreateRun()
        assert created is not None
        await created.replay(context, record)
        if snapshot is not None:
            await context.restore(record, snapshot)
        after, is_tainted = (-1, False) if snapshot is None else (snapshot.seq_id, snapshot.tainted_by is not None)
        replays = list(self._state.log.replay_actions(after, is_tainted))
        await self._replay(replays)
        begun = "its beginning" if snapshot is None else f"the snapshot behind seq_id {snapshot.seq_id}"
        logger.info("%s is rebuilt, from %s and %d operations", record.run_id, begun, len(replays))

    async def _replay(self, replays: list[tuple[ReplayEntry, ReplayAction]]) -> None:
        """Replays operations in order; chained ones are handed over several at a time, since the dispatch keeps their
        order.
        """
        in_progress: list[asyncio.Task[None]] = []
        for entry, action in replays:
            operation = None
            if action is ReplayAction.REPLAY:
                operation = await self._read(entry)
            is_chained = operation is not None and operation.is_chained
            if not is_chained or len(in_progress) >= _MAX_AT_ONCE:
                await _wait_for_all(in_progress)
                in_progress = []
            replaying = asyncio.create_task(self._replay_one(entry, operation))
            # Retrieve the exception: if several fail, only the first is reported.
            replaying.add_done_callback(lambda task: task.cancelled() or task.exception())
            in_progress.append(replaying)
            # Let the task take its first step, which hands the operation over.
            await asyncio.sleep(0)
            if not is_chained:
                await _wait_for_all(in_progress)
                in_progress = []
        await _wait_for_all(in_progress)

    async def _read(self, entry: ReplayEntry) -> Operation:
        assert entry.place is not None
        operation = await read_operation(self._services.journal, entry.place, entry.outcome)
        operation.seq_id = entry.seq_id
        return operation

    async def _replay_one(self, entry: ReplayEntry, operation: Operation | None) -> None:
        """Replays one operation, or clears the pending gradients if `operation` is None."""
        context, record = self._services.context, self._state.record
        if operation is None:
            await context.clear_gradients(record, entry.seq_id)
            return
        try:
            await operation.replay(context, record)
        except WorkerLost:
            raise
        except (OperationError, RequestError) as error:
            await operation.undo(context, record, error)
            if entry.outcome is not Outcome.FAILED:
                message = f"{entry.kind} with seq_id {entry.seq_id} cannot be replayed: {error}"
                raise OperationError(message, "server") from error
        else:
            if entry.outcome is Outcome.FAILED:
                raise OperationError(f"{entry.kind} with seq_id {entry.seq_id} failed before, but not now", "server")

    async def _record_strike(self) -> None:
        self._struck_seq_id = seq_id = self._snapshots.newest_seq_id
        place = await self._services.journal.append(self._state.header(REBUILD_STRIKE, seq_id))
        self._state.log.add_strike(REBUILD_STRIKE, seq_id, place)


async def _wait_for_all(tasks: list[asyncio.Task[None]]) -> None:
    """Waits for all tasks, then raises the exception of the first that failed."""
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        task.result()
