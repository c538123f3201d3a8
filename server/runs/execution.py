"""Begins a run's operations in order, performs each, and answers it."""

import asyncio
import logging
from functools import partial

from ...schemas.errors import Category, OperationError, RequestError
from ...workers.protocol.calls import WorkerLost
from ...workers.protocol.work_context import CURRENT_WORK
from ...workers.scheduler.quarantine import MAX_STRIKES
from ..journal.futures import Result
from ..journal.journal import request_id_of
from ..journal.strikes import STRIKE, PoisonOperation
from ..operations.loading import CreateRun
from ..operations.operation import Operation, Outcome, RefusedOperation
from ..operations.training import OptimStep
from ..store.database.database_errors import OUTAGE_ERRORS
from .operation_queue import Gaps, OperationQueue
from .rebuilder import Rebuilder
from .run_state import OperationWindow, RunServices, RunState
from .snapshots import Boundary, RunSnapshots

logger = logging.getLogger(__name__)


class Execution:
    """Executes a run's queue, retrying operations after crashes of workers and database outages."""

    def __init__(
        self,
        state: RunState,
        queue: OperationQueue,
        gaps: Gaps,
        services: RunServices,
        rebuilder: Rebuilder,
        snapshots: RunSnapshots,
    ) -> None:
        self._state = state
        self._queue = queue
        self._gaps = gaps
        self._services = services
        self._rebuilder = rebuilder
        self._snapshots = snapshots
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin_ready(self) -> None:
        """Begins the operations whose turn it is, up to the first that is not in the journal yet; call it when one has
        been journaled, and when one or a rebuild has ended.
        """
        if self._state.has_stopped:
            return
        queue = self._queue
        while (operation := queue.waiting.get(queue.next_seq_id)) and operation.log_entry.place is not None:
            if isinstance(operation, OptimStep):
                operation.may_be_due = self._state.may_be_due(queue.in_progress.values())
            is_free = not self._rebuilder.is_rebuilding and queue.may_begin(operation)
            if self._state.unusable is None and not is_free:
                break
            self._begin(operation)
        if queue.waiting:
            self._gaps.watch()

    def cancel_later(self) -> None:
        """Cancels the operations in progress, but for the first, since only that is certain to be running."""
        for task in list(self._tasks.values())[:0:-1]:
            task.cancel()

    async def finish(self) -> None:
        """Begins all operations of a run that is over, which fail, and waits for the end of all."""
        self.begin_ready()
        while unfinished := [*self._tasks.values(), *self._queue.being_journaled]:
            await asyncio.wait(unfinished)

    async def stop(self) -> None:
        """Cancels all operations in progress and a rebuild, and waits for their end."""
        tasks = [self._rebuilder.cancel(), *self._tasks.values()]
        if in_progress := [task for task in tasks if task is not None]:
            for task in in_progress:
                task.cancel()
            await asyncio.wait(in_progress)

    def _begin(self, operation: Operation) -> None:
        """Begins an operation. Tasks take their first steps in the order of creation, so the dispatch receives them in
        order.
        """
        entry, state, window = operation.log_entry, self._state, self._state.window
        self._services.quotas.mark_unstalled(state.record.tenant_id, state.record.run_id)
        operation.wait_clock, operation.ready_at = state.wait_clock, state.wait_clock.queue(operation.arrived_at)
        state.log.add(entry)
        self._queue.begin(operation)
        if isinstance(operation, RefusedOperation):
            window.refused(entry.seq_id, operation)
            return
        if operation.is_step or operation.clears_gradients:
            state.window = OperationWindow()
        operation.strikes.record = partial(self._record_strike, entry.seq_id)
        task = self._tasks[entry.seq_id] = asyncio.create_task(self._execute(operation, window, state.window))
        # A task that is cancelled before its first step never reaches its `finally`.
        task.add_done_callback(lambda _: self._ended(entry.seq_id))
        if operation.is_chained:
            boundary = Boundary(entry.seq_id, state.window, entry, task)
            self._snapshots.take_if_due(boundary, is_step=operation.is_step)

    def _ended(self, seq_id: int) -> None:
        """Removes an operation that has ended or was cancelled. Calling it again is a no-op."""
        state, operation = self._state, self._queue.in_progress.pop(seq_id, None)
        if operation is None:
            return
        del self._tasks[seq_id]
        state.wait_clock.end(seq_id)
        if operation.future is None:
            state.log.mark_result_stored(operation.log_entry)
        elif state.unusable is not None:
            self._services.futures.fail(operation.future, state.unusable, "user")
        operation.release()
        self._rebuilder.progressed.set()
        self.begin_ready()

    async def _execute(self, operation: Operation, window: OperationWindow, following: OperationWindow) -> None:
        """Performs the operation and answers it. The outcome is in the operation's log entry.

        Args:
            window: the gradient window that the operation is part of, or ends.
            following: that of the operations behind it.
        """
        CURRENT_WORK.set(operation.work_context)
        try:
            # Without a client that waits, it is run only for its effect: it must not be published again.
            if operation.future is None and not operation.changes_state:
                return
            try:
                result = await self._perform(operation, window)
            except Exception as error:
                await self._failed(operation, window, following, error)
            else:
                operation.log_entry.outcome, self._state.outage = Outcome.DONE, None
                if operation.future is not None:
                    ended, size = operation.ended(self._state.record.run_id, None), operation.size_of_call
                    self._services.futures.resolve(operation.future, result, ended)
                    self._services.telemetry.operation_ended(operation.work_context, ended, size, "user", None)
                if operation.loads_files:  # the pinned checkpoint can then be deleted soon
                    self._snapshots.take(Boundary(operation.seq_id, following))
            if operation.is_step and not operation.is_chained:
                self._snapshots.take_if_due(Boundary(operation.seq_id, following), is_step=True)
            self._services.context.sessions.touch(self._state.record.session_id)
        finally:
            self._ended(operation.seq_id)

    async def _failed(
        self, operation: Operation, window: OperationWindow, following: OperationWindow, error: Exception
    ) -> None:
        """Answers an operation that failed."""
        entry, state = operation.log_entry, self._state
        entry.outcome, message, category = self._explain(operation, error)
        is_tainted = operation.is_step and window.tainted_by is not None
        gradients_remain = operation.clears_gradients or (operation.is_step and entry.outcome is Outcome.SERVER_FAILED)
        if gradients_remain and window.tainted_by is not None:
            following.tainted_by = window.tainted_by
        if operation.taints_if_failed:
            window.taint(f"{entry.kind} with seq_id {entry.seq_id} failed ({message})")
        try:
            await operation.undo(self._services.context, state.record, error)
        except Exception:
            # The client must get its answer in any case.
            logger.exception("%s: what %s held is not released", state.record.run_id, operation.kind)
        if isinstance(operation, CreateRun):
            state.fail(f"run {state.record.run_id} could not be created: {message}")
        if operation.future is None:
            return
        ended = operation.ended(state.record.run_id, message)
        # What taints a window may be a refusal, whose message quotes the request.
        reason = "an operation before it failed or was refused" if is_tainted else ended.error
        self._services.futures.fail(operation.future, message, category, ended)
        self._services.telemetry.operation_ended(
            operation.work_context, ended, operation.size_of_call, category, reason
        )

    async def _perform(self, operation: Operation, window: OperationWindow) -> Result:
        """Performs the operation, again after each crash and outage.

        Raises:
            OperationError: the operation failed, or was given up after too many crashes.
            RequestError: access was denied.
        """
        state = self._state
        while True:
            if isinstance(operation, OptimStep):
                # The last attempt is without what follows the step, which may be what kills the workers.
                operation.skips_schedules = operation.strikes.num == MAX_STRIKES - 1
            if state.unusable is not None:
                raise OperationError(state.unusable, "user" if state.has_ended else "server")
            if state.is_lost:
                await self._rebuilder.ensure_rebuilt(operation.seq_id)
                continue
            is_handed_over = False
            try:
                if operation.failed_before or operation.strikes.are_too_many:
                    await self._fail_again(operation, window)
                operation.check(state.record)
                if operation.is_step and window.tainted_by is not None:
                    await self._clear_gradients(operation, window)
                    raise _incomplete(window.tainted_by)
                if not operation.reports_begin:
                    operation.mark_begun()
                is_handed_over = True
                result = await operation.perform(self._services.context, state.record)
                await self._follow(operation)
                return result
            except WorkerLost as lost:
                state.lose()
                await operation.strikes.add(lost)  # the last one allowed raises PoisonOperation
            except OperationError:
                if is_handed_over and operation.is_step and window.tainted_by is not None:
                    # A part failed after the step was handed over, so the worker refused it and cleared the gradients.
                    raise _incomplete(window.tainted_by) from None
                raise
            except OUTAGE_ERRORS as error:
                await state.wait_out(error)

    async def _fail_again(self, operation: Operation, window: OperationWindow) -> None:
        """Raises the error that the operation ended with before the server restarted."""
        if operation.is_step and operation.strikes.are_too_many:
            await self._clear_gradients(operation, window)
        operation.strikes.check()
        raise OperationError("it failed before the server restarted", "server")

    async def _clear_gradients(self, step: Operation, window: OperationWindow) -> None:
        """Clears the gradients of a step that is not taken; if that fails, they make the next step wrong.

        The scheduler then refuses a step that waits already; a rebuild learns from the log to clear, as was done.
        """
        try:
            await self._services.context.clear_gradients(self._state.record, step.seq_id)
        except OperationError as error:
            if not isinstance(error, WorkerLost):
                step.log_entry.taints = True
                window.taint(f"gradients of {step.kind} with seq_id {step.seq_id} could not be cleared ({error})")
            raise

    async def _follow(self, operation: Operation) -> None:
        """Notes what a performed operation changed in the run."""
        state = self._state
        if isinstance(operation, OptimStep):
            state.num_steps = operation.step
        if operation.clears_gradients:  # it loaded weights, and perhaps an optimizer that counts other steps
            state.num_steps = None
        if operation.changes_record:
            state.record = await self._services.context.stored_record(state.record)
        if isinstance(operation, CreateRun):
            state.created = operation
            state.begin()

    def _explain(self, operation: Operation, error: Exception) -> tuple[Outcome, str, Category]:
        """Returns how the operation ended, with the message and category that its client gets."""
        if isinstance(error, RequestError):
            return Outcome.FAILED, error.message, "user"
        if not isinstance(error, OperationError):
            request_id = request_id_of(self._state.record.run_id, operation.seq_id)
            logger.error("%s failed", request_id, exc_info=error)
            message = f"internal error in {operation.kind} {request_id}: see the server's log"
            return Outcome.SERVER_FAILED, message, "server"
        if isinstance(error, PoisonOperation):
            return Outcome.POISONED, error.message, error.category
        outcome = Outcome.SERVER_FAILED if error.category == "server" else Outcome.FAILED
        return outcome, error.message, error.category

    async def _record_strike(self, seq_id: int) -> None:
        """Raises RequestError if the journal cannot be written."""
        place = await self._services.journal.append(self._state.header(STRIKE, seq_id))
        self._state.log.add_strike(STRIKE, seq_id, place)


def _incomplete(reason: str) -> OperationError:
    return OperationError(
        f"optim_step was not taken: {reason}. The gradients accumulated since the last step were cleared: repeat the "
        "whole batch, then optim_step"
    )
