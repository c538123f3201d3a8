"""Run: one model being trained, as one ordered queue of operations.

A run accepts operations in any order and executes each once, in the order of seq_ids. It journals, orders, awaits and
resolves them; it decodes nothing and deals with neither ranks nor tensors. Forward, forward_backward and optim_step are
handed to the dispatch before earlier ones are done, since the dispatch keeps their order; so the workers need not wait
between two of them. If the workers lose the run's state, it is rebuilt first, and operations in progress are then
handed over again.

The way of an operation: `Run.submit` journals it and answers the request; once its journal entry is written,
`Execution.begin_ready` begins it in its turn, as a task that runs `Operation.perform`, which calls the dispatch; the
result resolves the operation's future, for which the client polls (routes/futures.py).
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from ...schemas.errors import OperationError, RequestError
from ...schemas.futures import Pending, SubmitResponse
from ...workers.protocol.calls import RunInfo, WorkerLost
from ...workers.protocol.work_context import CURRENT_WORK
from ..files.segment_log import RecordPosition
from ..http.bodies import Body
from ..http.digests import Fingerprint
from ..journal.futures import check_same
from ..journal.journal import request_id_of
from ..operations.loading import CreateRun
from ..operations.operation import MISSING, Operation, RefusedOperation
from ..store import RunRecord
from ..tenants.quotas import Reservation
from .execution import Execution
from .operation_queue import Gaps, OperationQueue
from .rebuilder import Rebuilder
from .recovery import JournaledRun, RunRecovery
from .replay_log import ReplayLog
from .run_state import RunServices, RunState
from .snapshots import Boundary, RunSnapshots

logger = logging.getLogger(__name__)

_IF_USED = (
    "is another process training this run? Nothing was done: train a run in one process, which numbers its operations "
    "1, 2, 3 and so on"
)
_NO_BODY = Body()


class Run:
    """Owns a run's queue of operations and executes it until `end` or `stop`; requests call `submit` and `refuse`."""

    def __init__(self, record: RunRecord, services: RunServices) -> None:
        self.last_request_at = record.last_request_at
        self._services = services
        self._state = state = RunState(record, ReplayLog(services.journal.release))
        self.queue = queue = OperationQueue(record.run_id)
        self._snapshots = snapshots = RunSnapshots(state, services)
        self._rebuilder = rebuilder = Rebuilder(state, queue, services, snapshots)
        self._gaps = Gaps(state, queue, services, self._refuse_missing)
        self._execution = Execution(state, queue, self._gaps, services, rebuilder, snapshots)
        rebuilder.on_end = self._execution.begin_ready

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

    async def submit(self, seq_id: int, operation: Operation, body: Body, reservation: Reservation) -> SubmitResponse:
        """Returns as soon as the operation is journaled.

        A retry, with a seq_id that arrived before, gets the same response again.

        Args:
            seq_id: 0 requests the next free one, except for CreateRun, whose own it is.
        Raises:
            RequestError: 400 if the seq_id was refused before, was used for another operation, or is too far ahead;
                503 if the journal cannot be written.
        """
        self.last_request_at = time.time()
        record, queue = self.record, self.queue
        if (work := CURRENT_WORK.get()) is not None:
            work.run = record.run_id
        if seq_id == 0 and not isinstance(operation, CreateRun):
            seq_id = queue.free_seq_id
        if queue.arrived_before(seq_id):
            await self._check_repeated(seq_id, operation, body)
        elif self._state.unusable is not None and seq_id >= 0:
            raise RequestError(self._state.unusable, 410)
        else:
            queue.check_acceptable(seq_id)
            await self._accept(seq_id, operation, body, reservation)
        return SubmitResponse(request_id=request_id_of(record.run_id, seq_id), model_id=record.run_id, seq_id=seq_id)

    async def _accept(self, seq_id: int, operation: Operation, body: Body, reservation: Reservation) -> None:
        is_next_after_restart = self._gaps.awaits_first_operation and seq_id == self.queue.first_missing
        if uses := operation.feature_uses:
            self._services.context.features.hold(self.record, seq_id, uses)
        operation.assign_seq_id(seq_id)
        operation.reservation = reservation
        reservation.keep(operation.size(body), operation.num_tokens)
        operation.log_entry.num_bytes = reservation.num_bytes
        self._create_future(operation, body.digest)
        self._journal(operation, body)
        try:
            await asyncio.shield(operation.journaled)
        except RequestError:
            await self._services.context.features.release_hold(self.record, seq_id)
            raise
        if is_next_after_restart:
            self._gaps.end_wait()

    def _journal(self, operation: Operation, body: Body = _NO_BODY) -> None:
        """Queues the operation, which begins in its turn as soon as it is journaled."""
        record = self.record
        operation.work_context = self._services.telemetry.work_began(operation.kind, record.tenant_id, record.run_id)
        operation.journaled = self._services.journal.append(operation.header(record, body), body.received)
        self.queue.waiting[operation.seq_id] = operation
        if operation.journaled.done():
            self._begin_when_journaled(operation, operation.journaled)
        else:
            operation.journaled.add_done_callback(partial(self._begin_when_journaled, operation))

    def _begin_when_journaled(self, operation: Operation, written: "asyncio.Future[RecordPosition]") -> None:
        """Forgets the operation if its entry cannot be written: its seq_id is free again."""
        if written.exception() is None:
            operation.log_entry.place = written.result()
        else:
            del self.queue.waiting[operation.seq_id]
            operation.release()
            if operation.future is not None:
                self._services.futures.forget(operation.future)
        self._execution.begin_ready()

    def _create_future(self, operation: Operation, digest: str | None) -> None:
        pending = partial(self._pending, operation.seq_id)
        answered = partial(self._state.log.mark_result_stored, operation.log_entry)
        fingerprint = None if digest is None else Fingerprint(operation.kind, digest)
        request_id, tenant_id = request_id_of(self.record.run_id, operation.seq_id), self.record.tenant_id
        operation.future = self._services.futures.create(request_id, tenant_id, pending, answered, fingerprint)

    async def _check_repeated(self, seq_id: int, operation: Operation, body: Body) -> None:
        """Waits until the operation with this seq_id is journaled. Raises RequestError if it was refused, or is another
        one."""
        if (waiting := self.queue.waiting.get(seq_id)) is not None and waiting.log_entry.place is None:
            await asyncio.shield(waiting.journaled)
        self.queue.check_not_refused(seq_id)
        if body.digest is not None and not isinstance(operation, CreateRun):
            number, again = f"seq_id {seq_id} of {self.record.run_id}", Fingerprint(operation.kind, body.digest)
            await check_same(self._services.futures, request_id_of(self.record.run_id, seq_id), number, again, _IF_USED)

    async def refuse(self, seq_id: int, refused: RefusedOperation) -> None:
        """Counts the seq_id as done, so that later ones need not wait for it. Does nothing if it arrived before."""
        if self.queue.can_refuse(seq_id):
            refused.assign_seq_id(seq_id)
            self._journal(refused)
            await asyncio.shield(refused.journaled)

    def _refuse_missing(self, seq_ids: Sequence[int], reason: str) -> None:
        for seq_id in seq_ids:
            refused = RefusedOperation(MISSING, reason, taints=True)
            refused.assign_seq_id(seq_id)
            self._journal(refused)

    async def resume(self, journaled: JournaledRun, loadable: Sequence[str] = ()) -> None:
        """Continues where an earlier process ended.

        Args:
            loadable: the paths of the run's checkpoints, oldest first.
        Raises:
            ValueError, OSError, RequestError: the run cannot be resumed.
        """
        recovery = RunRecovery(self._state, self._services, self._snapshots, self._rebuilder, journaled)
        recovered = await recovery.recover()
        self.queue.next_seq_id, self._state.window = recovered.next_seq_id, recovered.window
        for seq_id, reason in recovered.refusals.items():
            self.queue.remember_refusal(seq_id, reason)
        for seq_id, uses in recovered.held.items():
            self._services.context.features.restore_hold(self.record, seq_id, uses)
        for operation, digest in recovered.unfinished:
            if operation.reservation is not None:
                self._create_future(operation, digest)
            self.queue.waiting[operation.seq_id] = operation
        self._gaps.resume(loadable)
        self._execution.begin_ready()

    async def share(self, adapter_id: str) -> bool:
        """Copies the run's weights to a sampler, after a rebuild if the workers have lost them; False if the run is
        over.

        Raises:
            OperationError: the copy failed; WorkerLost if the workers lost the run meanwhile.
        """
        while self.is_lost and not self._state.has_stopped:
            await self._rebuilder.ensure_rebuilt()
        if self._state.has_stopped or not self._state.is_live:
            return False
        try:
            await self._services.context.dispatch.copy_adapter(self.record.run_id, adapter_id)
        except WorkerLost:
            self._state.lose()
            raise
        return True

    async def snapshot_if_older_than(self, held_seconds: float) -> None:
        """Takes snapshots until the journal holds nothing of the run that is older than that.

        A busy run takes its snapshot after its next chained operation instead.
        """
        if not self._state.log.is_older_than(held_seconds) or not self.is_usable:
            return
        if not self.queue.is_empty:
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
        if self.queue.is_empty and self._state.is_live:
            boundary = Boundary(self.queue.next_seq_id - 1, self._state.window)
            await self._snapshots.take_when_idle(boundary, with_copy=with_copy)

    async def end(self, reason: str) -> None:
        """Ends the run and releases its state.

        Queued operations fail. Those in progress are cancelled, but for the first, which may be running.
        """
        self._state.end(reason)
        self._rebuilder.cancel()
        self._execution.cancel_later()
        self._refuse_missing(self.queue.all_missing, reason)
        await self._execution.finish()
        if not self.queue.waiting:  # else a refusal could not be journaled, and is tried again
            self._gaps.close()
        await self._snapshots.close()
        self._services.restore_marker.mark_continued(self.record.run_id)
        try:
            await self._services.context.drop(self.record)
        except OperationError as error:
            logger.warning("run %s could not be dropped: %s", self.record.run_id, error)

    async def stop(self) -> None:
        """Stops at server shutdown; the journal keeps everything for the next process."""
        self._state.has_stopped = True
        self._gaps.close()
        await self._execution.stop()
        await self._snapshots.stop()
        for operation in self.queue.waiting.values():
            operation.release()

    @property
    def has_operations(self) -> bool:
        """True if an operation of the run was accepted, or is about to be."""
        return bool(self.queue.waiting) or self.queue.next_seq_id > 0

    @property
    def is_busy(self) -> bool:
        """True if an operation is in progress, or about to begin."""
        return bool(self.queue.in_progress) or self.queue.next is not None or self._rebuilder.is_rebuilding

    @property
    def is_usable(self) -> bool:
        """True unless the run is over, could not be created, or could not be rebuilt."""
        return self._state.unusable is None

    @property
    def is_lost(self) -> bool:
        """True if the workers lost this run and it must be rebuilt."""
        return self._state.is_lost

    def _pending(self, seq_id: int) -> Pending:
        if (behind := self._gaps.pending(seq_id)) is not None:
            return behind
        if self._state.outage is not None:
            return Pending(queue_state_reason=self._state.outage)
        dispatch, base_model = self._services.context.dispatch, self.record.base_model
        if self._rebuilder.is_rebuilding and dispatch.is_up(base_model):
            return Pending(queue_state_reason="the worker died: the state of this run is being rebuilt")
        num_before = self.queue.num_before(seq_id)
        if self._rebuilder.is_rebuilding or not num_before:
            return Pending(queue_state_reason=dispatch.status(base_model, self.record.role))
        are = "operations of this run are" if num_before > 1 else "operation of this run is"
        return Pending(queue_state_reason=f"{num_before} {are} ahead")
