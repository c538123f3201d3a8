"""Arrival of a run's operations, in any order: they are journaled and queued; those that do not arrive are given up."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...schemas.errors import RequestError
from ...schemas.futures import Pending
from ..http.bodies import Body
from ..http.digests import Fingerprint
from ..operations.operation import MISSING, Operation, Outcome, RefusedOperation
from ..tenants.reservation import Reservation
from .operation_queue import OperationQueue
from .recovery import UnfinishedOperation
from .run_state import RunServices, RunState

logger = logging.getLogger(__name__)

_MAX_LOADABLE = 5
_RETRY_SECONDS = 5.0
"""Pause before giving up a gap is retried; it fails as long as the journal cannot be written."""

_IF_RESTORED = (
    ", nor did any other operation since the server started. If the server was restored from an older copy of its "
    "state, steps are missing: create a new run from a checkpoint"
)


class Arrivals:
    """Journals and queues a run's operations.

    pending: says why the operation with a seq_id has no result yet. on_arrival: called after each change of the queue.
    """

    def __init__(
        self,
        state: RunState,
        queue: OperationQueue,
        services: RunServices,
        pending: Callable[[int], Pending],
        on_arrival: Callable[[], None],
    ) -> None:
        self._state = state
        self._queue = queue
        self._services = services
        self._pending = pending
        self._on_arrival = on_arrival
        # True until an operation arrives that follows those of an earlier process; and the checkpoints to suggest if
        # the run cannot continue.
        self._awaits_first_operation = False
        self._checkpoint_paths: Sequence[str] = ()
        self._gap_seconds = services.config.sessions.seq_gap_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._gave_up_at = -math.inf

    async def accept(self, seq_id: int, operation: Operation, body: Body, reservation: Reservation) -> None:
        """Returns as soon as the operation is journaled. Raises RequestError."""
        is_next_after_restart = self._awaits_first_operation and seq_id == self._queue.first_missing
        if uses := operation.feature_uses:
            self._services.features.hold(self._state.record, seq_id, uses)
        operation.reservation = reservation
        self.add(seq_id, operation, body)
        reservation.keep(operation.size(body), operation.num_tokens)
        self._create_future(operation)
        await self.wait_until_journaled(operation)
        if is_next_after_restart:
            self._awaits_first_operation = False
            self._services.restore_marker.mark_continued(self._state.record.run_id)

    def add(self, seq_id: int, operation: Operation, body: Body | None = None) -> None:
        """Journals and queues the operation."""
        record = self._state.record
        header, received = self._state.header(operation.kind, seq_id), b""
        if operation.reservation is not None:
            header = replace(header, feature_bytes=operation.reservation.feature_bytes)
        if body is not None:
            received, operation.digest = body.received, body.digest
            encoding = body.content_encoding
            header = replace(header, content_type=body.content_type, content_encoding=encoding, digest=body.digest)
        operation.queue(seq_id, self._services.journal.append(operation.header(header), received))
        operation.context = self._services.telemetry.work_began(operation.kind, record.tenant_id, record.run_id)
        self._queue.waiting[seq_id] = operation
        self._on_arrival()
        self.watch_gap()

    async def wait_until_journaled(self, operation: Operation) -> None:
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
                await self._services.features.release_hold(self._state.record, seq_id)
                if operation.future is not None:
                    self._services.futures.forget(operation.future)
                self.watch_gap()
            raise

    def resume(self, unfinished: Mapping[int, UnfinishedOperation], loadable: Sequence[str]) -> None:
        """Queues the operations that an earlier process accepted or refused, but did not finish."""
        for seq_id, each in unfinished.items():
            self._restore(seq_id, each)
        self._awaits_first_operation, self._checkpoint_paths = True, loadable
        if self._services.restore_marker.is_behind(self._state.record.run_id):
            self._state.unusable = self._behind()
        self._on_arrival()
        self.watch_gap()

    def _restore(self, seq_id: int, unfinished: UnfinishedOperation) -> None:
        earlier, operation, record = unfinished.earlier, unfinished.operation, self._state.record
        journaled = asyncio.get_running_loop().create_future()
        journaled.set_result(earlier.place)
        operation.queue(seq_id, journaled)
        operation.context = self._services.telemetry.work_began(operation.kind, record.tenant_id, record.run_id)
        operation.num_strikes, operation.digest = unfinished.num_strikes, earlier.digest
        operation.failed_before = earlier.outcome is Outcome.SERVER_FAILED
        if earlier.outcome is None:
            self._create_future(operation)
            operation.reservation = Reservation(self._services.quotas, record.tenant_id)
            num_bytes = earlier.feature_bytes or 0
            release = self._services.features.reserve_again(record.tenant_id, num_bytes)
            operation.reservation.add_features(num_bytes, release)
        if operation.future is not None or operation.changes_state:
            self._services.features.restore_hold(record, seq_id, operation.feature_uses)
        self._queue.waiting[seq_id] = operation

    def _create_future(self, operation: Operation) -> None:
        entry, record = operation.log_entry, self._state.record
        pending, answered = partial(self._pending, entry.seq_id), partial(self._state.log.mark_result_stored, entry)
        request_id = record.request_id(entry.seq_id)
        fingerprint = None if operation.digest is None else Fingerprint(operation.kind, operation.digest)
        operation.future = self._services.futures.create(request_id, record.tenant_id, pending, answered, fingerprint)

    def refuse_missing(self, seq_ids: Sequence[int], reason: str) -> None:
        for seq_id in seq_ids:
            self.add(seq_id, RefusedOperation(MISSING, reason, taints=True))

    def watch_gap(self) -> None:
        """Restarts the timer of a gap in the seq_ids; call it after each change of the queue."""
        self.close()
        if (since := self._queue.gap_since) is not None:
            at = max(since + self._gap_seconds, self._gave_up_at + _RETRY_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(at - time.monotonic(), self._give_up_gap)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pending_behind_gap(self, seq_id: int) -> Pending | None:
        """Returns why the operation with this seq_id waits for one that has not arrived; None if it does not."""
        since = self._queue.gap_since
        if since is None or seq_id <= self._queue.next_seq_id:
            return None
        throttled = self._services.quotas.pending(self._state.record.tenant_id)
        reason = f"waiting for the operation with seq_id {self._queue.next_seq_id}, which has not arrived"
        if throttled is not None:
            reason = f"{reason}: your requests are throttled ({throttled.queue_state_reason})"
        seconds_left = max(0.0, since + self._gap_seconds - time.monotonic())
        return Pending(
            queue_state=throttled.queue_state if throttled else "paused_capacity",
            queue_state_reason=f"{reason}; it will count as refused in {seconds_left:.0f} s",
        )

    def _give_up_gap(self) -> None:
        """Refuses the missing operations up to the first that arrived; a run that is behind its client ends instead."""
        self._gave_up_at = time.monotonic()
        run_id, marker, missing = self._state.record.run_id, self._services.restore_marker, self._queue.missing
        within = f"within {self._gap_seconds:g} s"
        if marker.is_waiting(run_id):
            marker.mark_behind(run_id)
            self._state.unusable = self._behind()
            logger.error("seq_id %d did not arrive %s: %s", missing.start, within, self._state.unusable)
            self.refuse_missing(self._queue.all_missing, self._state.unusable)
            return
        doubt = _IF_RESTORED if self._awaits_first_operation else ""
        if len(missing) == 1:
            which, those = f"seq_id {missing.start}", "it"
        else:
            which, those = f"seq_id {missing.start} to {missing[-1]}", "they"
        logger.warning("%s: %s given up: %s did not arrive %s%s", run_id, which, those, within, doubt)
        self.refuse_missing(missing, f"it did not arrive {within}{doubt}")

    def _behind(self) -> str:
        remedy = "create a new run; this one has no checkpoint to start from"
        if self._checkpoint_paths:
            newest = ", ".join(self._checkpoint_paths[: -_MAX_LOADABLE - 1 : -1])
            remedy = f"create a new run from a checkpoint (create_training_client_from_state), newest first: {newest}"
        return (
            f"run {self._state.record.run_id} is over: the server was restored from a copy of its state of "
            f"{self._services.restore_marker.copied_at}, and the client is ahead of that, so steps it has seen are "
            f"missing: {remedy}"
        )
