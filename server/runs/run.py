"""Run: one model being trained, as one ordered queue of operations.

A run accepts operations in any order and executes each once, in the order of seq_ids. It journals, orders, awaits and
resolves them; it decodes nothing and deals with neither ranks nor tensors. Forward, forward_backward and optim_step are
handed to the dispatch before earlier ones are done, since the dispatch keeps their order; so the workers need not wait
between two of them. If the workers lose the run's state, it is rebuilt first, and operations in progress are then
handed over again.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from ...schemas.drafts import SetTargetRequest
from ...schemas.errors import Category, OperationError, RequestError
from ...schemas.futures import Pending
from ...schemas.training import ForwardBackwardRequest, OptimStepRequest
from ...workers.protocol.calls import RunInfo, WorkerLost
from ..features.feature_store import uses_of
from ..files.wal import RecordPosition
from ..http.bodies import ReceivedBody
from ..journal.futures import Future, Result
from ..journal.journal import Header
from ..journal.quarantine import STRIKE, PoisonOperation, Strikes
from ..store import RunRecord
from ..store.database_errors import OUTAGE_ERRORS, driver_message
from ..tenants.quotas import QueuePosition
from ..tenants.reservation import Reservation
from .missing_seq import MissingSeqTimer
from .operations import CreateRun, LoadWeights, Operation, has_room, kind_of, loads_files, size_of
from .queued import GAP, JournalHandle, QueuedOperation, RefusedOperation
from .recovery import JournaledRun, RunRecovery, UnfinishedOperation
from .replay_log import CLEARS_GRADIENTS, STATE_KINDS, Outcome, ReplayEntry
from .run_services import RunServices
from .snapshotting import Boundary, RunState, SnapshotWindow

logger = logging.getLogger(__name__)

MOST_AHEAD = 10_000
"""Maximum distance of a seq_id from the next one to be executed."""

_MOST_REFUSALS_KEPT = 1000
_MOST_LOADABLE = 5
_DOUBT = (
    ", nor did anything else that follows the state with which the server started: if it was restored from an older "
    "state, steps are missing: then do not continue this run, but create a new one from a checkpoint"
)
_MOST_UNDER_WAY = 64
_OUTAGE_SECONDS = 2.0
_MOST_BYTES_UNDER_WAY = 64 << 20


@dataclass(frozen=True)
class Submitted:
    request_id: str
    seq_id: int


class Run:
    """Owns a run's queue of operations and executes it until `end` or `stop`; requests call `submit` and `refuse`."""

    def __init__(self, record: RunRecord, services: RunServices) -> None:
        self.record = record
        self.last_request_at = record.last_request_at
        self._services = services
        # By seq_id, in the order of arrival: operations that wait, and operations in progress.
        self._slots: dict[int, QueuedOperation] = {}
        self._in_progress: dict[int, QueuedOperation] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._one_ended = asyncio.Event()
        self._next_seq_id = 0
        self._refusals: dict[int, str] = {}
        self._window = SnapshotWindow()
        self._state = RunState(record, services)
        self._rebuilding: asyncio.Task[None] | None = None
        # Operations that wait for a rebuild, by seq_id.
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._outage: str | None = None
        self._unusable: str | None = None
        self._has_stopped = False
        # True until an operation arrives that follows those of an earlier process; and the checkpoints to suggest if
        # the run cannot continue.
        self._awaits_first_operation = False
        self._checkpoint_paths: Sequence[str] = ()
        self._working: asyncio.Task[None] | None = None
        self._gap = MissingSeqTimer(services.config.sessions.seq_gap_seconds, self._give_up_gap)

    async def info(self) -> RunInfo:
        """Raises RequestError 409 until the run has been created."""
        if self.is_lost:
            await self._wait_until_rebuilt(-1)
        info = self._services.operations.infos.get(self.record.run_id)
        if info is None:
            raise RequestError(f"run {self.record.run_id} is not created yet: wait for the result of that first", 409)
        return info

    async def submit(
        self,
        seq_id: int,
        operation: Operation,
        received: ReceivedBody,
        admission: Reservation,
        drawn: dict[str, int] | None = None,
    ) -> Submitted:
        """Returns as soon as the operation is journaled.

        A seq_id that arrived before gets the same response again, even if the body differs now.

        Args:
            seq_id: 0 requests the next free one, except for CreateRun, whose own it is.
        Raises:
            RequestError: 400 if the seq_id was refused before, or is too far ahead; 503 if the journal cannot be
                written.
        """
        self.last_request_at = time.time()
        if seq_id == 0 and not isinstance(operation, CreateRun):
            seq_id = self._free_seq_id()
        if 0 <= seq_id < self._next_seq_id:
            return self._submitted_before(seq_id)
        if seq_id not in self._slots:
            self._check_acceptable(seq_id)
            goes_on = self._awaits_first_operation and seq_id == self._first_missing
            self._accept(seq_id, operation, received, admission, drawn or {})
        else:
            goes_on = False
        slot = self._slots[seq_id]
        await self._wait_until_journaled(seq_id, slot)
        if goes_on:
            self._awaits_first_operation = False
            self._services.restore_marker.mark_continued(self.record.run_id)
        if isinstance(slot.content, RefusedOperation):
            raise _refused_before(seq_id, slot.content.reason)
        return Submitted(self.request_id(seq_id), seq_id)

    async def resume(self, inherited: JournaledRun, loadable: Sequence[str] = ()) -> None:
        """Continues where an earlier process ended.

        Args:
            loadable: the paths of the run's checkpoints, oldest first.
        Raises:
            ValueError, OSError, RequestError: the run cannot be resumed.
        """
        resumed = await RunRecovery(self.record, self._services, self._state, inherited).recover()
        self._next_seq_id, self._window = resumed.next_seq_id, resumed.window
        for seq_id, reason in resumed.refusals.items():
            self._remember_refusal(seq_id, reason)
        for seq_id, uses in resumed.held.items():
            self._services.features.restore_hold(self.record, seq_id, uses)
        for seq_id, undone in resumed.unfinished.items():
            self._slots[seq_id] = self._slot_of(seq_id, undone)
        self._awaits_first_operation, self._checkpoint_paths = True, loadable
        if self._services.restore_marker.is_behind(self.record.run_id):
            self._unusable = self._behind()
        self._start_work()

    async def share(self, adapter_id: str) -> bool:
        """Copies the run's weights to a sampler, after a rebuild if the workers have lost them; False if the run is
        over.

        Raises:
            OperationError: the copy failed; WorkerLost if the workers lost the run meanwhile.
        """
        while self.is_lost and not self._has_stopped:
            await self._wait_until_rebuilt(-1)
        if self._has_stopped or not (self.is_usable and self._state.is_live):
            return False
        try:
            await self._services.operations.share(self.record, adapter_id)
        except WorkerLost:
            self._state.mark_lost()
            raise
        return True

    def arrived_before(self, seq_id: int) -> bool:
        """True if this seq_id arrived before, so that only its response is requested."""
        return 0 < seq_id < self._next_seq_id or seq_id in self._slots

    def priority_of(self, seq_id: int) -> QueuePosition:
        """Returns the priority of an operation that will be submitted with this seq_id."""
        seq_id = seq_id or self._free_seq_id()
        if self.arrived_before(seq_id):
            return QueuePosition(self.record.run_id, may_unblock=True)
        missing = self._first_missing
        has_gap = len(self._slots) > missing - self._next_seq_id
        rests = missing == self._next_seq_id and not self._in_progress
        ready = seq_id == missing
        # Clients may send the operation that fills a gap only after later ones were accepted.
        return QueuePosition(
            self.record.run_id,
            ready,
            is_alone=ready and rests,
            may_unblock=has_gap and (ready or rests),
            num_operations=len(self._slots),
            num_bytes=sum(slot.num_bytes for slot in self._slots.values()),
        )

    async def refuse(self, seq_id: int, refused: RefusedOperation) -> None:
        """Counts the seq_id as done, so that later ones need not wait for it. Does nothing if it arrived before."""
        if max(self._next_seq_id, 1) <= seq_id <= self._next_seq_id + MOST_AHEAD and seq_id not in self._slots:
            self._add_refusal(seq_id, refused)
            await self._wait_until_journaled(seq_id, self._slots[seq_id])

    def request_id(self, seq_id: int) -> str:
        return self.record.request_id(seq_id)

    async def settle(self, held_seconds: float) -> None:
        """Takes snapshots until the journal holds nothing of the run that is older than that.

        A busy run takes its snapshot after its next operation instead.
        """
        if not self._state.history.is_older_than(held_seconds) or self._unusable is not None:
            return
        if not self._is_idle:
            self._state.make_snapshot_due()
            return
        if self.is_lost:
            await self._wait_until_rebuilt(-1)
        await self._settle(twice=True)

    async def snapshot(self) -> None:
        """Takes a snapshot of an idle run, unless the last snapshot covers everything."""
        if self._state.history.is_older_than(0):
            await self._settle(twice=False)

    async def _settle(self, twice: bool) -> None:
        if self._is_idle and self._state.is_live:
            await self._state.snapshot_when_idle(Boundary(self._next_seq_id - 1, self._window), with_copy=twice)

    async def end(self, reason: str) -> None:
        """Fails queued operations, lets those in progress finish, and releases the run's state."""
        self._unusable = reason
        if self._rebuilding is not None:
            self._rebuilding.cancel()
        self._give_up_gaps(reason)
        self._one_ended.set()
        # Only the first operation handed to the dispatch is certain to be running.
        for task in list(self._tasks.values())[:0:-1]:
            task.cancel()
        while under_way := [task for task in (self._working, *self._tasks.values()) if task is not None]:
            await asyncio.wait(under_way)
        await self._state.close()
        self._services.restore_marker.mark_continued(self.record.run_id)
        try:
            await self._services.operations.drop(self.record)
        except OperationError as error:
            logger.warning("run %s could not be dropped: %s", self.record.run_id, error)

    async def stop(self) -> None:
        """Stops at server shutdown; the journal keeps everything for the next process."""
        self._has_stopped = True
        self._gap.close()
        if under_way := [task for task in (self._working, self._rebuilding, *self._tasks.values()) if task is not None]:
            for task in under_way:
                task.cancel()
            await asyncio.wait(under_way)
        await self._state.stop()
        for slot in self._slots.values():
            slot.release()

    @property
    def has_operations(self) -> bool:
        """True if an operation of the run was accepted, or is about to be."""
        return bool(self._slots) or self._next_seq_id > 0

    @property
    def is_busy(self) -> bool:
        """True if an operation is in progress, or about to begin."""
        return bool(self._in_progress) or self._next_seq_id in self._slots or self._rebuilding is not None

    @property
    def is_usable(self) -> bool:
        """True unless the run is over, could not be created, or could not be rebuilt."""
        return self._unusable is None

    @property
    def is_lost(self) -> bool:
        """True if the workers lost this run and it must be rebuilt."""
        return self._state.is_lost and self._unusable is None

    @property
    def _is_idle(self) -> bool:
        return not self._slots and not self._in_progress

    # Accepting

    @property
    def _first_missing(self) -> int:
        return next(number for number in itertools.count(self._next_seq_id) if number not in self._slots)

    def _free_seq_id(self) -> int:
        return max(self._slots, default=self._next_seq_id - 1) + 1

    def _submitted_before(self, seq_id: int) -> Submitted:
        if seq_id in self._refusals:
            raise _refused_before(seq_id, self._refusals[seq_id])
        return Submitted(self.request_id(seq_id), seq_id)

    def _check_acceptable(self, seq_id: int) -> None:
        if seq_id < 0:
            raise RequestError(f"seq_id {seq_id} is negative: number operations 1, 2, 3 and so on")
        if self._unusable is not None:
            raise RequestError(self._unusable, 410)
        if seq_id > self._next_seq_id + MOST_AHEAD:
            raise RequestError(
                f"seq_id {seq_id} is more than {MOST_AHEAD} ahead of {self._next_seq_id}, whose turn it is: number "
                "operations 1, 2, 3 and so on"
            )

    def _accept(
        self, seq_id: int, operation: Operation, received: ReceivedBody, admission: Reservation, drawn: dict[str, int]
    ) -> None:
        header = replace(
            self._header(kind_of(operation), seq_id),
            content_type=received.content_type,
            content_encoding=received.content_encoding,
            drawn=drawn,
            reader=operation.reader if isinstance(operation, LoadWeights) else None,
            target_path=operation.target_path if isinstance(operation, CreateRun) else None,
            feature_bytes=admission.feature_bytes if has_room(operation) else None,
        )
        self._services.features.hold(self.record, seq_id, operation)
        slot = self._add(seq_id, operation, self._services.journal.append(header, received.body))
        size = size_of(operation, received)
        admission.keep(size.num_bytes, size.num_tokens)
        slot.admission = admission
        slot.future = self._new_future(seq_id, slot)

    def _add_refusal(self, seq_id: int, refused: RefusedOperation) -> None:
        header = replace(self._header(refused.kind, seq_id), refused=refused.reason)
        self._add(seq_id, refused, self._services.journal.append(header))

    def _header(self, kind: str, seq_id: int) -> Header:
        return Header(kind, self.record.tenant_id, self.record.run_id, seq_id, self.request_id(seq_id))

    def _add(
        self, seq_id: int, content: Operation | RefusedOperation, journaled: "asyncio.Future[RecordPosition]"
    ) -> QueuedOperation:
        slot = QueuedOperation(content, time.monotonic(), JournalHandle(journaled))
        self._slots[seq_id] = slot
        self._start_work()
        return slot

    async def _wait_until_journaled(self, seq_id: int, slot: QueuedOperation) -> None:
        """Raises RequestError if the entry cannot be written; the operation is then forgotten, and its seq_id is free
        again.
        """
        try:
            await asyncio.shield(slot.entry.place)
        except RequestError:
            if self._slots.get(seq_id) is slot:
                del self._slots[seq_id]
                slot.release()
                await self._services.features.release_hold(self.record, seq_id)
                if slot.future is not None:
                    self._services.futures.forget(slot.future)
                self._gap.watch(self._gap_since)
            raise

    def _answered(self, entry: JournalHandle) -> None:
        """Called as soon as the operation's result is durable."""
        if entry.past is not None:
            self._state.history.mark_answered(entry.past)
        else:
            self._services.journal.release(entry.place.result())

    def _slot_of(self, seq_id: int, undone: UnfinishedOperation) -> QueuedOperation:
        """Queues an operation that an earlier process accepted or refused."""
        journaled: asyncio.Future[RecordPosition] = asyncio.get_running_loop().create_future()
        journaled.set_result(undone.earlier.place)
        slot = QueuedOperation(
            undone.content,
            time.monotonic(),
            JournalHandle(journaled),
            num_strikes=undone.num_strikes,
            failed_before=undone.earlier.outcome is Outcome.SERVER_FAILED,
        )
        if undone.earlier.outcome is None:
            slot.future = self._new_future(seq_id, slot)
            slot.admission = self._restore_admission(undone.earlier.feature_bytes or 0)
        if slot.future is not None or undone.earlier.kind in STATE_KINDS:
            self._services.features.restore_hold(self.record, seq_id, uses_of(undone.content))
        return slot

    def _restore_admission(self, feature_bytes: int) -> Reservation:
        """Reserves space for what a resumed operation captures."""
        tenant_id = self.record.tenant_id
        admission = Reservation(self._services.quotas, tenant_id)
        admission.add_features(feature_bytes, self._services.features.room.reserve_unchecked(tenant_id, feature_bytes))
        return admission

    def _new_future(self, seq_id: int, slot: QueuedOperation) -> Future:
        pending, answered = partial(self._pending, seq_id), partial(self._answered, slot.entry)
        return self._services.futures.create(self.request_id(seq_id), self.record.tenant_id, pending, answered)

    # Executing

    def _start_work(self) -> None:
        """Starts executing if the next operation has arrived; call it after every change of the queue."""
        if self._working is None and self._next_seq_id in self._slots:
            self._working = asyncio.create_task(self._work())
        self._gap.watch(self._gap_since)

    async def _work(self) -> None:
        """Begins the queued operations in order, up to the first gap."""
        try:
            while (slot := self._slots.get(self._next_seq_id)) is not None:
                await self._wait_until_journaled(self._next_seq_id, slot)
                while not self._may_begin(slot):
                    self._one_ended.clear()
                    await self._one_ended.wait()
                self._begin(self._next_seq_id, slot)
                del self._slots[self._next_seq_id]
                self._next_seq_id += 1
        except RequestError as error:
            logger.error("%s: %s", self.record.run_id, error)
        finally:
            self._working = None
        self._start_work()

    def _may_begin(self, slot: QueuedOperation) -> bool:
        """True if the operation may begin now; operations that are not chained run alone."""
        if self._rebuilding is not None and self._unusable is None:
            return False
        under_way = self._in_progress.values()
        if isinstance(slot.content, RefusedOperation) or not under_way or self._unusable is not None:
            return True
        chained = slot.is_chained and next(iter(under_way)).is_chained
        num_bytes = slot.num_bytes + sum(other.num_bytes for other in under_way)
        return chained and len(under_way) < _MOST_UNDER_WAY and num_bytes <= _MOST_BYTES_UNDER_WAY

    def _begin(self, seq_id: int, slot: QueuedOperation) -> None:
        """Begins an operation. Tasks take their first steps in the order of creation, so the dispatch receives them in
        order.
        """
        self._services.quotas.mark_unstalled(self.record.tenant_id, self.record.run_id)
        past = slot.entry.past = self._state.history.add(slot.past(seq_id))
        if isinstance(slot.content, RefusedOperation):
            self._window.refused(seq_id, slot.content)
            self._remember_refusal(seq_id, slot.content.reason)
            return
        window = self._window
        if isinstance(slot.content, OptimStepRequest):
            self._window = SnapshotWindow()
        self._in_progress[seq_id] = slot
        self._tasks[seq_id] = asyncio.create_task(self._take_turn(seq_id, slot, window))
        # A task that is cancelled before its first step never reaches its `finally`.
        self._tasks[seq_id].add_done_callback(lambda _: self._end_turn(seq_id))
        if slot.is_chained:
            boundary = Boundary(seq_id, self._window, past, self._tasks[seq_id])
            self._state.snapshot_if_due(boundary, is_step=isinstance(slot.content, OptimStepRequest))

    async def _take_turn(self, seq_id: int, slot: QueuedOperation, window: SnapshotWindow) -> None:
        past = slot.entry.past
        assert past is not None
        if slot.future is None and past.kind not in STATE_KINDS:
            # It changed no state that could be lost, and must not be published again.
            self._state.history.mark_answered(past)
            self._end_turn(seq_id)
            return
        strikes = Strikes(f"this {past.kind}", partial(self._note_strike, seq_id), slot.num_strikes)
        try:
            result = await self._perform(seq_id, slot, window, strikes)
        except OperationError as error:
            past.outcome = _outcome(error)
            await self._fail(seq_id, slot, window, error.message, error.category)
        except RequestError as error:
            past.outcome = Outcome.FAILED
            await self._fail(seq_id, slot, window, error.message, "user")
        except Exception:
            logger.exception("%s failed", self.request_id(seq_id))
            past.outcome = Outcome.SERVER_FAILED
            message = f"internal error in {past.kind} {self.request_id(seq_id)}: see the server's log"
            await self._fail(seq_id, slot, window, message, "server")
        else:
            past.outcome = Outcome.DONE
            self._outage = None
            self._note_done(seq_id, slot.operation)
            if slot.future is not None:
                self._services.futures.resolve(slot.future, result)
        finally:
            if slot.future is None:
                self._state.history.mark_answered(past)
            self._end_turn(seq_id)
        self._services.sessions.touch(self.record.session_id)

    def _note_done(self, seq_id: int, operation: Operation) -> None:
        if isinstance(operation, CreateRun):
            self._state.mark_created(operation, self.record)
        if loads_files(operation):
            # The pinned checkpoint can then be deleted soon.
            self._state.snapshot(Boundary(seq_id, self._window))

    def _end_turn(self, seq_id: int) -> None:
        """Removes an operation that has ended or was cancelled. Calling it again is a no-op."""
        slot = self._in_progress.pop(seq_id, None)
        if slot is None:
            return
        del self._tasks[seq_id]
        if self._unusable is not None and slot.future is not None:
            self._services.futures.fail(slot.future, self._unusable, "user")
        slot.release()
        self._one_ended.set()

    async def _perform(self, seq_id: int, slot: QueuedOperation, window: SnapshotWindow, strikes: Strikes) -> Result:
        """Performs the operation, retrying after crashes of workers and database outages.

        Raises:
            OperationError: the operation failed, or was given up after too many crashes.
            RequestError: access was denied.
        """
        while True:
            if self._unusable is not None:
                raise OperationError(self._unusable, "server")
            if self.is_lost:
                await self._wait_until_rebuilt(seq_id)
                continue
            try:
                if slot.failed_before or strikes.is_exhausted:
                    await self._fail_again(seq_id, slot.operation, window, strikes)
                return await self._perform_once(seq_id, slot.operation, window)
            except WorkerLost as lost:
                self._state.mark_lost()
                await strikes.add(lost)
            except OUTAGE_ERRORS as error:
                await self._wait_out(error)

    async def _fail_again(self, seq_id: int, operation: Operation, window: SnapshotWindow, strikes: Strikes) -> None:
        """Fails an operation that failed in an earlier process, so that its result stays the same. Raises
        OperationError.
        """
        if isinstance(operation, OptimStepRequest) and (strikes.is_exhausted or window.tainted_by is not None):
            await self._services.operations.clear_gradients(self.record, seq_id)
        strikes.check()
        raise OperationError("it failed before the server restarted", "server")

    async def _perform_once(self, seq_id: int, operation: Operation, window: SnapshotWindow) -> Result:
        if isinstance(operation, OptimStepRequest):
            return await self._perform_step(seq_id, operation, window)
        result = await self._services.operations.perform(self.record, operation, seq_id)
        if kind_of(operation) in CLEARS_GRADIENTS:
            self._window = SnapshotWindow()
        if isinstance(operation, CreateRun | SetTargetRequest):
            self.record = await self._services.operations.stored_record(self.record)
        return result

    async def _perform_step(self, seq_id: int, operation: OptimStepRequest, window: SnapshotWindow) -> Result:
        """Performs an optimizer step, unless a part of its batch failed: such a step would be wrong.

        If a part fails after the step was handed to the dispatch, the worker refuses the step and clears the gradients.
        """
        if self.record.role == "reference":
            raise OperationError("a reference is not trained: load_weights moves it to another checkpoint of a policy")
        if window.tainted_by is not None:
            await self._services.operations.clear_gradients(self.record, seq_id)
            raise _incomplete(window.tainted_by)
        try:
            return await self._services.operations.perform(self.record, operation, seq_id)
        except WorkerLost:
            raise
        except OperationError:
            if window.tainted_by is not None:
                raise _incomplete(window.tainted_by) from None
            raise

    async def _wait_out(self, outage: SQLAlchemyError) -> None:
        reason = f"the server's database cannot be used ({driver_message(outage)})"
        if reason != self._outage:
            logger.error("%s waits: %s", self.record.run_id, reason)
        self._outage = reason
        await asyncio.sleep(_OUTAGE_SECONDS)

    async def _wait_until_rebuilt(self, seq_id: int) -> None:
        """Returns as soon as the state is rebuilt and all operations before this seq_id have been handed over again."""
        if self._rebuilding is None:
            self._rebuilding = asyncio.create_task(self._rebuild())
            # A task that is cancelled before its first step wakes no waiter by itself.
            self._rebuilding.add_done_callback(self._rebuilt)
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append((seq_id, waiting))
        await waiting

    async def _rebuild(self) -> None:
        try:
            await self._state.rebuild()
        except OUTAGE_ERRORS as error:
            await self._wait_out(error)
        except (OperationError, RequestError, OSError, ValueError) as error:
            logger.error("%s cannot be rebuilt: %s", self.record.run_id, error)
            self._give_up(str(error))
        except Exception:
            logger.exception("%s cannot be rebuilt", self.record.run_id)
            self._give_up("see the server's log")

    def _give_up(self, reason: str) -> None:
        self._unusable = f"run {self.record.run_id} was lost with its worker and cannot be rebuilt: {reason}"

    def _rebuilt(self, _: asyncio.Task[None]) -> None:
        self._rebuilding = None
        # Waiters resume in this order, each up to where it hands its operation to the dispatch.
        for waiting in [waiting for _, waiting in sorted(self._waiting, key=lambda one: one[0])]:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting = []
        self._one_ended.set()

    async def _note_strike(self, seq_id: int) -> None:
        """Raises RequestError if the journal cannot be written."""
        strike = await self._services.journal.append(self._header(STRIKE, seq_id))
        self._state.history.add(ReplayEntry(seq_id, STRIKE, strike, outcome=Outcome.FAILED, is_answered=True))

    async def _fail(
        self, seq_id: int, slot: QueuedOperation, window: SnapshotWindow, message: str, category: Category
    ) -> None:
        operation = slot.content
        if isinstance(operation, CreateRun):
            self._unusable = f"run {self.record.run_id} could not be created: {message}"
        if isinstance(operation, ForwardBackwardRequest) and not operation.forward_only:
            window.taint(f"forward_backward with seq_id {seq_id} failed ({message})")
        elif isinstance(operation, ForwardBackwardRequest):
            # No optimizer step releases what a forward pass holds.
            await self._services.features.release_hold(self.record, seq_id)
        if slot.future is not None:
            self._services.futures.fail(slot.future, message, category)

    def _remember_refusal(self, seq_id: int, reason: str) -> None:
        self._refusals[seq_id] = reason
        if len(self._refusals) > _MOST_REFUSALS_KEPT:
            del self._refusals[next(iter(self._refusals))]

    # Waiting

    def _pending(self, seq_id: int) -> Pending:
        if seq_id > self._next_seq_id and (gap_since := self._gap_since) is not None:
            return self._pending_behind_gap(gap_since)
        if self._outage is not None:
            return Pending(queue_state_reason=self._outage)
        if self._rebuilding is not None:
            return Pending(queue_state_reason="the worker died: the state of this run is being rebuilt")
        earlier = [other for other in (*self._in_progress, *self._slots) if other < seq_id]
        if not earlier:
            return Pending(queue_state_reason=self._services.status(self.record.base_model, self.record.role))
        are = "operations of this run are" if len(earlier) > 1 else "operation of this run is"
        return Pending(queue_state_reason=f"{len(earlier)} {are} ahead")

    def _pending_behind_gap(self, since: float) -> Pending:
        put_off = self._services.quotas.pending(self.record.tenant_id)
        reason = f"waiting for the operation with seq_id {self._next_seq_id}, which has not arrived"
        if put_off is not None:
            reason = f"{reason}: your requests are throttled ({put_off.queue_state_reason})"
        return Pending(
            queue_state=put_off.queue_state if put_off else "paused_capacity",
            queue_state_reason=f"{reason}; it will count as refused in {self._gap.seconds_left(since):.0f} s",
        )

    @property
    def _gap_since(self) -> float | None:
        """Returns since when the next operation has blocked others; None if no operation waits for it."""
        if not self._slots or self._next_seq_id in self._slots:
            return None
        return next(iter(self._slots.values())).arrived_at

    def _give_up_gap(self) -> None:
        """Refuses the missing operations up to the first that arrived; a run that is behind its client ends instead."""
        run_id, copied, first = self.record.run_id, self._services.restore_marker, min(self._slots)
        within = f"within {self._services.config.sessions.seq_gap_seconds:g} s"
        if copied.is_waiting(run_id):
            copied.mark_behind(run_id)
            self._unusable = self._behind()
            logger.error("seq_id %d did not arrive %s: %s", self._next_seq_id, within, self._unusable)
            self._give_up_gaps(self._unusable)
            return
        doubt = _DOUBT if self._awaits_first_operation else ""
        if (last := first - 1) == self._next_seq_id:
            which, those = f"seq_id {last}", "it"
        else:
            which, those = f"seq_id {self._next_seq_id} to {last}", "they"
        logger.warning("%s: %s given up: %s did not arrive %s%s", run_id, which, those, within, doubt)
        for seq_id in range(self._next_seq_id, first):
            self._add_refusal(seq_id, RefusedOperation(GAP, f"it did not arrive {within}{doubt}", taints=True))

    def _behind(self) -> str:
        remedy = "create a new run; this one has no checkpoint to start from"
        if self._checkpoint_paths:
            newest = ", ".join(self._checkpoint_paths[: -_MOST_LOADABLE - 1 : -1])
            remedy = f"create a new run from a checkpoint (create_training_client_from_state), newest first: {newest}"
        return (
            f"run {self.record.run_id} is over: the server was restored from a copy of its state of "
            f"{self._services.restore_marker.copied_at}, and the client is ahead of that, so steps it has seen are "
            f"missing: {remedy}"
        )

    def _give_up_gaps(self, reason: str) -> None:
        for seq_id in range(self._next_seq_id, max(self._slots, default=0)):
            if seq_id not in self._slots:
                self._add_refusal(seq_id, RefusedOperation(GAP, reason, taints=True))


def _outcome(error: OperationError) -> Outcome:
    if isinstance(error, PoisonOperation):
        return Outcome.POISONED
    return Outcome.SERVER_FAILED if error.category == "server" else Outcome.FAILED


def _incomplete(reason: str) -> OperationError:
    return OperationError(
        f"optim_step was not taken: {reason}. The gradients accumulated since the last step were cleared: repeat the "
        "whole batch, then optim_step"
    )


def _refused_before(seq_id: int, reason: str) -> RequestError:
    return RequestError(f"seq_id {seq_id} was refused before ({reason}): send the operation with the next seq_id")
