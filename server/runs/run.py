"""Run: one model being trained, as one ordered queue of operations.

A run accepts operations in any order and executes each once, in the order of seq_ids. It journals, orders, awaits and
resolves them; it decodes nothing and deals with neither ranks nor tensors. Forward, forward_backward and optim_step are
handed to the dispatch before earlier ones are done, since the dispatch keeps their order; so the workers need not wait
between two of them. If the workers lose the run's state, it is rebuilt first, and operations in progress are then
handed over again.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...schemas.errors import OperationError, RequestError
from ...schemas.futures import Pending
from ...schemas.schedules import NO_SCHEDULES
from ...workers.protocol.calls import RunInfo, WorkerLost
from ...workers.protocol.work_context import WorkContext, enter_work, name_run
from ..http.bodies import ReceivedBody
from ..http.digests import Fingerprint
from ..journal.futures import Future, check_same
from ..operations.loading import CreateRun
from ..operations.operation import MISSING, Operation, Outcome, RefusedOperation
from ..operations.training import OptimStep
from ..store import RunRecord
from ..tenants.quotas import QueuePosition
from ..tenants.reservation import Reservation
from .execution import Execution
from .operation_queue import MissingSeqTimer, OperationQueue
from .rebuilder import Rebuilder
from .recovery import JournaledRun, RunRecovery, UnfinishedOperation
from .replay_log import ReplayLog
from .run_services import RunServices
from .run_state import OperationWindow, RunState
from .snapshots import Boundary, RunSnapshots

logger = logging.getLogger(__name__)

_MAX_LOADABLE = 5
_IF_USED = (
    "is another process training this run? Nothing was done: train a run in one process, which numbers its operations "
    "1, 2, 3 and so on"
)
_IF_RESTORED = (
    ", nor did any other operation since the server started. If the server was restored from an older copy of its "
    "state, steps are missing: create a new run from a checkpoint"
)


@dataclass(frozen=True)
class Submitted:
    request_id: str
    seq_id: int


class Run:
    """Owns a run's queue of operations and executes it until `end` or `stop`; requests call `submit` and `refuse`.

    The class is long because an operation's order, journal entry, answer and snapshot meet here; its parts do the work.
    """

    def __init__(self, record: RunRecord, services: RunServices) -> None:
        self.last_request_at = record.last_request_at
        self._services = services
        self._state = RunState(record, ReplayLog(services.journal.release))
        self._queue = OperationQueue(record.run_id)
        self._snapshots = RunSnapshots(self._state, services)
        self._one_ended = asyncio.Event()
        self._rebuilder = Rebuilder(self._state, services, self._snapshots, on_end=self._one_ended.set)
        self._execution = Execution(self._state, services, self._rebuilder)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._working: asyncio.Task[None] | None = None
        self._has_stopped = False
        # True until an operation arrives that follows those of an earlier process; and the checkpoints to suggest if
        # the run cannot continue.
        self._awaits_first_operation = False
        self._checkpoint_paths: Sequence[str] = ()
        self._gap = MissingSeqTimer(services.config.sessions.seq_gap_seconds, self._give_up_gap)

    @property
    def record(self) -> RunRecord:
        return self._state.record

    async def info(self) -> RunInfo:
        """Raises RequestError 409 until the run has been created."""
        if self.is_lost:
            await self._rebuilder.ensure_rebuilt()
        info = self._services.context.infos.get(self.record.run_id)
        if info is None:
            raise RequestError(f"run {self.record.run_id} is not created yet: wait for the result of that first", 409)
        return info

    async def submit(
        self, seq_id: int, operation: Operation, received: ReceivedBody, reservation: Reservation
    ) -> Submitted:
        """Returns as soon as the operation is journaled.

        A retry, with a seq_id that arrived before, gets the same response again.

        Args:
            seq_id: 0 requests the next free one, except for CreateRun, whose own it is.
        Raises:
            RequestError: 400 if the seq_id was refused before, was used for another operation, or is too far ahead;
                503 if the journal cannot be written.
        """
        self.last_request_at = time.time()
        name_run(self.record.run_id)
        queue, is_next_after_restart = self._queue, False
        if seq_id == 0 and not isinstance(operation, CreateRun):
            seq_id = queue.free_seq_id
        is_repeated = queue.arrived_before(seq_id)
        if not is_repeated:
            if self._state.unusable is not None and seq_id >= 0:
                raise RequestError(self._state.unusable, 410)
            queue.check_acceptable(seq_id)
            is_next_after_restart = self._awaits_first_operation and seq_id == queue.first_missing
            self._accept(seq_id, operation, received, reservation)
        if waiting := queue.waiting.get(seq_id):
            await self._wait_until_journaled(waiting)
        if is_next_after_restart:
            self._awaits_first_operation = False
            self._services.restore_marker.mark_continued(self.record.run_id)
        queue.check_not_refused(seq_id)
        if is_repeated and received.digest is not None and not isinstance(operation, CreateRun):
            await self._check_same(seq_id, Fingerprint(operation.kind, received.digest))
        return Submitted(self.record.request_id(seq_id), seq_id)

    async def _check_same(self, seq_id: int, again: Fingerprint) -> None:
        number = f"seq_id {seq_id} of {self.record.run_id}"
        await check_same(self._services.futures, self.record.request_id(seq_id), number, again, _IF_USED)

    async def refuse(self, seq_id: int, refused: RefusedOperation) -> None:
        """Counts the seq_id as done, so that later ones need not wait for it. Does nothing if it arrived before."""
        if self._queue.can_refuse(seq_id):
            self._add(seq_id, refused)
            await self._wait_until_journaled(refused)

    async def resume(self, journaled: JournaledRun, loadable: Sequence[str] = ()) -> None:
        """Continues where an earlier process ended.

        Args:
            loadable: the paths of the run's checkpoints, oldest first.
        Raises:
            ValueError, OSError, RequestError: the run cannot be resumed.
        """
        recovery = RunRecovery(self._state, self._services, self._snapshots, self._rebuilder, journaled)
        recovered = await recovery.recover()
        self._queue.next_seq_id, self._state.window = recovered.next_seq_id, recovered.window
        for seq_id, reason in recovered.refusals.items():
            self._queue.remember_refusal(seq_id, reason)
        for seq_id, uses in recovered.held.items():
            self._services.features.restore_hold(self.record, seq_id, uses)
        for seq_id, unfinished in recovered.unfinished.items():
            self._restore(seq_id, unfinished)
        self._awaits_first_operation, self._checkpoint_paths = True, loadable
        if self._services.restore_marker.is_behind(self.record.run_id):
            self._state.unusable = self._behind()
        self._start_work()

    async def share(self, adapter_id: str) -> bool:
        """Copies the run's weights to a sampler, after a rebuild if the workers have lost them; False if the run is
        over.

        Raises:
            OperationError: the copy failed; WorkerLost if the workers lost the run meanwhile.
        """
        while self.is_lost and not self._has_stopped:
            await self._rebuilder.ensure_rebuilt()
        if self._has_stopped or not (self.is_usable and self._state.is_loaded):
            return False
        try:
            await self._services.context.dispatch.copy_adapter(self.record.run_id, adapter_id)
        except WorkerLost:
            self._state.is_loaded = False
            raise
        return True

    def arrived_before(self, seq_id: int) -> bool:
        """True if this seq_id arrived before, so that only its response is requested."""
        return self._queue.arrived_before(seq_id)

    def position_of(self, seq_id: int) -> QueuePosition:
        """Returns the position of an operation that will be submitted with this seq_id."""
        return self._queue.position_of(seq_id)

    async def snapshot_if_older_than(self, held_seconds: float) -> None:
        """Takes snapshots until the journal holds nothing of the run that is older than that.

        A busy run takes its snapshot after its next chained operation instead.
        """
        if not self._state.log.is_older_than(held_seconds) or not self.is_usable:
            return
        if not self._queue.is_empty:
            self._snapshots.make_due()
            return
        if self.is_lost:
            await self._rebuilder.ensure_rebuilt()
        await self._snapshot_if_idle(with_copy=True)

    async def snapshot(self) -> None:
        """Takes a snapshot of an idle run, unless the last snapshot covers everything."""
        if self._state.log.is_older_than(0):
            await self._snapshot_if_idle(with_copy=False)

    async def _snapshot_if_idle(self, *, with_copy: bool) -> None:
        if self._queue.is_empty and self._state.is_loaded:
            boundary = Boundary(self._queue.next_seq_id - 1, self._state.window)
            await self._snapshots.take_when_idle(boundary, with_copy=with_copy)

    async def end(self, reason: str) -> None:
        """Ends the run and releases its state.

        Queued operations fail. Those in progress are cancelled, but for the first, which may be running.
        """
        self._state.unusable, self._state.has_ended = reason, True
        self._rebuilder.cancel()
        self._refuse_missing(self._queue.all_missing, reason)
        self._one_ended.set()
        # Only the first operation handed to the dispatch is certain to be running.
        for task in list(self._tasks.values())[:0:-1]:
            task.cancel()
        while in_progress := [task for task in (self._working, *self._tasks.values()) if task is not None]:
            await asyncio.wait(in_progress)
        await self._snapshots.close()
        self._services.restore_marker.mark_continued(self.record.run_id)
        try:
            await self._services.context.drop(self.record)
        except OperationError as error:
            logger.warning("run %s could not be dropped: %s", self.record.run_id, error)

    async def stop(self) -> None:
        """Stops at server shutdown; the journal keeps everything for the next process."""
        self._has_stopped = True
        self._gap.close()
        tasks = [self._working, self._rebuilder.cancel(), *self._tasks.values()]
        if in_progress := [task for task in tasks if task is not None]:
            for task in in_progress:
                task.cancel()
            await asyncio.wait(in_progress)
        await self._snapshots.stop()
        for operation in self._queue.waiting.values():
            operation.release()

    @property
    def has_operations(self) -> bool:
        """True if an operation of the run was accepted, or is about to be."""
        return bool(self._queue.waiting) or self._queue.next_seq_id > 0

    @property
    def is_busy(self) -> bool:
        """True if an operation is in progress, or about to begin."""
        return bool(self._queue.in_progress) or self._queue.next is not None or self._rebuilder.is_rebuilding

    @property
    def is_usable(self) -> bool:
        """True unless the run is over, could not be created, or could not be rebuilt."""
        return self._state.unusable is None

    @property
    def is_lost(self) -> bool:
        """True if the workers lost this run and it must be rebuilt."""
        return self._state.is_lost

    def _accept(self, seq_id: int, operation: Operation, received: ReceivedBody, reservation: Reservation) -> None:
        if uses := operation.feature_uses:
            self._services.features.hold(self.record, seq_id, uses)
        operation.reservation = reservation
        self._add(seq_id, operation, received)
        reservation.keep(operation.size(received), operation.num_tokens)
        operation.future = self._new_future(operation)

    def _add(self, seq_id: int, operation: Operation, received: ReceivedBody | None = None) -> None:
        """Journals and queues the operation."""
        header, body = self._state.header(operation.kind, seq_id), b""
        if operation.reservation is not None:
            header = replace(header, feature_bytes=operation.reservation.feature_bytes)
        if received is not None:
            body, encoding, operation.digest = received.body, received.content_encoding, received.digest
            header = replace(header, content_type=received.content_type, content_encoding=encoding)
            header = replace(header, digest=received.digest)
        operation.queue(seq_id, self._services.journal.append(operation.header(header), body))
        operation.context = self._context_of(operation)
        self._queue.waiting[seq_id] = operation
        self._start_work()

    async def _wait_until_journaled(self, operation: Operation) -> None:
        """Raises RequestError if the entry cannot be written; the operation is then forgotten, and its seq_id is free
        again.
        """
        seq_id = operation.seq_id
        try:
            operation.log_entry.place = await asyncio.shield(operation.journaled)
        except RequestError:
            if self._queue.waiting.get(seq_id) is operation:
                del self._queue.waiting[seq_id]
                operation.release()
                await self._services.features.release_hold(self.record, seq_id)
                if operation.future is not None:
                    self._services.futures.forget(operation.future)
                self._gap.watch(self._queue.gap_since)
            raise

    def _restore(self, seq_id: int, unfinished: UnfinishedOperation) -> None:
        """Queues an operation that an earlier process accepted or refused."""
        earlier, operation, record = unfinished.earlier, unfinished.operation, self.record
        journaled = asyncio.get_running_loop().create_future()
        journaled.set_result(earlier.place)
        operation.queue(seq_id, journaled)
        operation.context = self._context_of(operation)
        operation.num_strikes, operation.digest = unfinished.num_strikes, earlier.digest
        operation.failed_before = earlier.outcome is Outcome.SERVER_FAILED
        if earlier.outcome is None:
            operation.future = self._new_future(operation)
            operation.reservation = Reservation(self._services.quotas, record.tenant_id)
            num_bytes = earlier.feature_bytes or 0
            release = self._services.features.reserve_again(record.tenant_id, num_bytes)
            operation.reservation.add_features(num_bytes, release)
        if operation.future is not None or operation.changes_state:
            self._services.features.restore_hold(record, seq_id, operation.feature_uses)
        self._queue.waiting[seq_id] = operation

    def _context_of(self, operation: Operation) -> WorkContext:
        return self._services.telemetry.work_began(operation.kind, self.record.tenant_id, self.record.run_id)

    def _new_future(self, operation: Operation) -> Future:
        entry = operation.log_entry
        pending, answered = partial(self._pending, entry.seq_id), partial(self._state.log.mark_result_stored, entry)
        record = self.record
        request_id = record.request_id(entry.seq_id)
        return self._services.futures.create(request_id, record.tenant_id, pending, answered, operation.fingerprint)

    def _start_work(self) -> None:
        """Starts executing if the next operation has arrived; call it after every change of the queue."""
        if self._working is None and self._queue.next is not None:
            self._working = asyncio.create_task(self._work())
        self._gap.watch(self._queue.gap_since)

    async def _work(self) -> None:
        """Begins the queued operations in order, up to the first gap."""
        try:
            while (operation := self._queue.next) is not None:
                await self._wait_until_journaled(operation)
                while not self._may_begin(operation):
                    self._one_ended.clear()
                    await self._one_ended.wait()
                self._begin(operation)
        except RequestError as error:
            logger.error("%s: %s", self.record.run_id, error)
        finally:
            self._working = None
        self._start_work()

    def _may_be_due(self) -> bool:
        """True if something may have to be done after the next optimizer step."""
        schedules, known = self.record.schedules, self._state.num_steps
        in_progress = sum(operation.is_step for operation in self._queue.in_progress.values())
        if known is None:
            return schedules != NO_SCHEDULES
        # Of the steps in progress some may fail, and some may have been counted.
        return schedules.is_due_within(known + 1, known + in_progress + 1)

    def _may_begin(self, operation: Operation) -> bool:
        if self._state.unusable is not None:
            return True
        if isinstance(operation, OptimStep):
            operation.runs_alone = self._may_be_due()
        return not self._rebuilder.is_rebuilding and self._queue.may_begin(operation)

    def _begin(self, operation: Operation) -> None:
        """Begins an operation. Tasks take their first steps in the order of creation, so the dispatch receives them in
        order.
        """
        entry, state, window = operation.log_entry, self._state, self._state.window
        self._services.quotas.mark_unstalled(self.record.tenant_id, self.record.run_id)
        operation.take_turn(state.turns)
        entry.num_bytes = operation.num_bytes
        state.log.add(entry)
        self._queue.begin(operation)
        if isinstance(operation, RefusedOperation):
            window.refused(entry.seq_id, operation)
            return
        if operation.is_step:
            state.window = OperationWindow()
        task = self._tasks[entry.seq_id] = asyncio.create_task(self._take_turn(operation, window))
        # A task that is cancelled before its first step never reaches its `finally`.
        task.add_done_callback(lambda _: self._end_turn(entry.seq_id))
        if operation.is_chained:
            boundary = Boundary(entry.seq_id, state.window, entry, task)
            self._snapshots.take_if_due(boundary, is_step=operation.is_step)

    async def _take_turn(self, operation: Operation, window: OperationWindow) -> None:
        enter_work(operation.context)
        try:
            # Without a client that waits, it is run only for its effect: it must not be published again.
            if operation.future is not None or operation.changes_state:
                await self._execution.execute(operation, window)
                if operation.log_entry.outcome is Outcome.DONE and operation.loads_files:
                    # The pinned checkpoint can then be deleted soon.
                    self._snapshots.take(Boundary(operation.seq_id, self._state.window))
                elif operation.is_step and not operation.is_chained:
                    self._snapshots.take_if_due(Boundary(operation.seq_id, self._state.window), is_step=True)
                self._services.sessions.touch(self.record.session_id)
        finally:
            if operation.future is None:
                self._state.log.mark_result_stored(operation.log_entry)
            self._end_turn(operation.seq_id)

    def _end_turn(self, seq_id: int) -> None:
        """Removes an operation that has ended or was cancelled. Calling it again is a no-op."""
        operation = self._queue.in_progress.pop(seq_id, None)
        if operation is None:
            return
        del self._tasks[seq_id]
        self._state.turns.end(seq_id)
        if self._state.unusable is not None and operation.future is not None:
            self._services.futures.fail(operation.future, self._state.unusable, "user")
        operation.release()
        self._one_ended.set()

    def _pending(self, seq_id: int) -> Pending:
        if seq_id > self._queue.next_seq_id and (gap_since := self._queue.gap_since) is not None:
            return self._pending_behind_gap(gap_since)
        if self._state.outage is not None:
            return Pending(queue_state_reason=self._state.outage)
        if self._rebuilder.is_rebuilding:
            return Pending(queue_state_reason="the worker died: the state of this run is being rebuilt")
        num_before = self._queue.num_before(seq_id)
        if not num_before:
            return Pending(queue_state_reason=self._services.status(self.record.base_model, self.record.role))
        are = "operations of this run are" if num_before > 1 else "operation of this run is"
        return Pending(queue_state_reason=f"{num_before} {are} ahead")

    def _pending_behind_gap(self, since: float) -> Pending:
        throttled = self._services.quotas.pending(self.record.tenant_id)
        reason = f"waiting for the operation with seq_id {self._queue.next_seq_id}, which has not arrived"
        if throttled is not None:
            reason = f"{reason}: your requests are throttled ({throttled.queue_state_reason})"
        return Pending(
            queue_state=throttled.queue_state if throttled else "paused_capacity",
            queue_state_reason=f"{reason}; it will count as refused in {self._gap.seconds_left(since):.0f} s",
        )

    def _give_up_gap(self) -> None:
        """Refuses the missing operations up to the first that arrived; a run that is behind its client ends instead."""
        run_id, marker, missing = self.record.run_id, self._services.restore_marker, self._queue.missing
        within = f"within {self._services.config.sessions.seq_gap_seconds:g} s"
        if marker.is_waiting(run_id):
            marker.mark_behind(run_id)
            self._state.unusable = self._behind()
            logger.error("seq_id %d did not arrive %s: %s", missing.start, within, self._state.unusable)
            self._refuse_missing(self._queue.all_missing, self._state.unusable)
            return
        doubt = _IF_RESTORED if self._awaits_first_operation else ""
        if len(missing) == 1:
            which, those = f"seq_id {missing.start}", "it"
        else:
            which, those = f"seq_id {missing.start} to {missing[-1]}", "they"
        logger.warning("%s: %s given up: %s did not arrive %s%s", run_id, which, those, within, doubt)
        self._refuse_missing(missing, f"it did not arrive {within}{doubt}")

    def _refuse_missing(self, seq_ids: Sequence[int], reason: str) -> None:
        for seq_id in seq_ids:
            self._add(seq_id, RefusedOperation(MISSING, reason, taints=True))

    def _behind(self) -> str:
        remedy = "create a new run; this one has no checkpoint to start from"
        if self._checkpoint_paths:
            newest = ", ".join(self._checkpoint_paths[: -_MAX_LOADABLE - 1 : -1])
            remedy = f"create a new run from a checkpoint (create_training_client_from_state), newest first: {newest}"
        return (
            f"run {self.record.run_id} is over: the server was restored from a copy of its state of "
            f"{self._services.restore_marker.copied_at}, and the client is ahead of that, so steps it has seen are "
            f"missing: {remedy}"
        )
