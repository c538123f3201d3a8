"""Executes one operation of a run, from its turn to its result."""

import logging
from functools import partial

from ...schemas.errors import Category, OperationError, RequestError
from ...workers.protocol.calls import WorkerLost
from ...workers.scheduler.quarantine import MAX_STRIKES
from ..journal.futures import Result
from ..journal.strikes import STRIKE, PoisonOperation, Strikes
from ..operations.loading import CreateRun
from ..operations.operation import Operation, Outcome
from ..operations.training import OptimStep
from ..store.database.database_errors import OUTAGE_ERRORS
from .rebuilder import Rebuilder
from .run_services import RunServices
from .run_state import OperationWindow, RunState

logger = logging.getLogger(__name__)


class Execution:
    """Performs the operations of a run, retrying after crashes of workers and database outages."""

    def __init__(self, state: RunState, services: RunServices, rebuilder: Rebuilder) -> None:
        self._state = state
        self._services = services
        self._rebuilder = rebuilder

    async def execute(self, operation: Operation, window: OperationWindow) -> None:
        """Performs the operation and answers it. The outcome is in the operation's log entry.

        Args:
            window: the gradient window that the operation is part of, or ends.
        """
        entry, state, futures = operation.log_entry, self._state, self._services.futures
        result, message, category, is_tainted = None, "", "user", False
        try:
            result = await self._perform(operation, window)
        except Exception as error:
            entry.outcome, message, category = self._explain(operation, error)
            is_tainted = operation.is_step and window.tainted_by is not None
            if operation.taints_if_failed:
                window.taint(f"{entry.kind} with seq_id {entry.seq_id} failed ({message})")
            await self._undo(operation, error)
            if isinstance(operation, CreateRun):
                state.unusable = f"run {state.record.run_id} could not be created: {message}"
        else:
            entry.outcome, state.outage = Outcome.DONE, None
        if operation.future is None:
            return
        ended = operation.ended(state.record.run_id, None if result is not None else message)
        # What taints a window may be a refusal, whose message quotes the request.
        reason = "an operation before it failed or was refused" if is_tainted else ended.error
        self._services.telemetry.operation_ended(operation.context, ended, operation.size_of_call, category, reason)
        if result is not None:
            futures.resolve(operation.future, result, ended)
        else:
            futures.fail(operation.future, message, category, ended)

    async def _perform(self, operation: Operation, window: OperationWindow) -> Result:
        """Performs the operation, again after each crash and outage.

        Raises:
            OperationError: the operation failed, or was given up after too many crashes.
            RequestError: access was denied.
        """
        record_strike = partial(self._record_strike, operation.seq_id)
        strikes = Strikes(f"this {operation.kind}", record_strike, operation.num_strikes)
        while True:
            if isinstance(operation, OptimStep):
                # The last attempt is without what follows the step, which may be what kills the workers.
                operation.skips_schedules = strikes.num == MAX_STRIKES - 1
            if self._state.unusable is not None:
                raise OperationError(self._state.unusable, "user" if self._state.has_ended else "server")
            if self._state.is_lost:
                await self._rebuilder.ensure_rebuilt(operation.seq_id)
                continue
            try:
                if operation.failed_before or strikes.is_exhausted:
                    await self._fail_again(operation, window, strikes)
                operation.check(self._state.record)
                if operation.is_step and window.tainted_by is not None:
                    await self._services.context.clear_gradients(self._state.record, operation.seq_id)
                    raise _incomplete(window.tainted_by)
                return await self._perform_once(operation, window)
            except WorkerLost as lost:
                self._state.is_loaded = False
                await strikes.add(lost)
            except OUTAGE_ERRORS as error:
                await self._state.wait_out(error)

    async def _perform_once(self, operation: Operation, window: OperationWindow) -> Result:
        state, context = self._state, self._services.context
        if not operation.reports_begin:
            operation.mark_begun()
        try:
            result = await operation.perform(context, state.record)
        except OperationError as error:
            if operation.is_step and window.tainted_by is not None and not isinstance(error, WorkerLost):
                # A part failed after the step was handed over, so the worker refused it and cleared the gradients.
                raise _incomplete(window.tainted_by) from None
            raise
        if isinstance(operation, OptimStep):
            state.num_steps = operation.step
        if operation.clears_gradients:  # it loaded weights, and perhaps an optimizer that counts other steps
            state.window, state.num_steps = OperationWindow(), None
        if operation.changes_record:
            state.record = await context.stored_record(state.record)
        if isinstance(operation, CreateRun):
            state.created, state.is_loaded = operation, True
        return result

    async def _fail_again(self, operation: Operation, window: OperationWindow, strikes: Strikes) -> None:
        """Fails an operation that failed in an earlier process, so that its result stays the same. Raises
        OperationError.
        """
        if operation.is_step and (strikes.is_exhausted or window.tainted_by is not None):
            await self._services.context.clear_gradients(self._state.record, operation.seq_id)
        strikes.check()
        raise OperationError("it failed before the server restarted", "server")

    def _explain(self, operation: Operation, error: Exception) -> tuple[Outcome, str, Category]:
        """Returns how the operation ended, with the message and category that its client gets."""
        if isinstance(error, RequestError):
            return Outcome.FAILED, error.message, "user"
        if not isinstance(error, OperationError):
            request_id = self._state.record.request_id(operation.seq_id)
            logger.error("%s failed", request_id, exc_info=error)
            message = f"internal error in {operation.kind} {request_id}: see the server's log"
            return Outcome.SERVER_FAILED, message, "server"
        if isinstance(error, PoisonOperation):
            return Outcome.POISONED, error.message, error.category
        outcome = Outcome.SERVER_FAILED if error.category == "server" else Outcome.FAILED
        return outcome, error.message, error.category

    async def _undo(self, operation: Operation, error: Exception) -> None:
        try:
            await operation.undo(self._services.context, self._state.record, error)
        except Exception:
            # The client must get its answer in any case.
            logger.exception("%s: what %s held is not released", self._state.record.run_id, operation.kind)

    async def _record_strike(self, seq_id: int) -> None:
        """Raises RequestError if the journal cannot be written."""
        place = await self._services.journal.append(self._state.header(STRIKE, seq_id))
        self._state.log.add_strike(STRIKE, seq_id, place)


def _incomplete(reason: str) -> OperationError:
    return OperationError(
        f"optim_step was not taken: {reason}. The gradients accumulated since the last step were cleared: repeat the "
        "whole batch, then optim_step"
    )
