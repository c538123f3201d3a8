"""Queue of a run's operations: those that wait, in any order of arrival, and those in progress; and the gaps in it,
which are given up if they last.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence

from ...schemas.errors import RequestError
from ...schemas.futures import Pending
from ..files.segment_log import RecordPosition
from ..operations.operation import Operation, RefusedOperation
from ..tenants.quotas import QueuePosition
from .run_state import RunServices, RunState

logger = logging.getLogger(__name__)

MAX_AHEAD = 10_000
"""Maximum distance of a seq_id from the next one to be executed."""

_MAX_REFUSALS_KEPT = 1000
_MAX_IN_PROGRESS = 64
_MAX_BYTES_IN_PROGRESS = 64 << 20

_MAX_LOADABLE = 5
_RETRY_SECONDS = 5.0
"""Pause before giving up a gap is retried; it fails as long as the journal cannot be written."""

_IF_RESTORED = (
    ", nor did any other operation since the server started. If the server was restored from an older copy of its "
    "state, steps are missing: create a new run from a checkpoint"
)


class OperationQueue:
    """Orders a run's operations by seq_id; it neither awaits nor performs anything.

    next_seq_id: of the operation that is begun next.
    waiting, in_progress: by seq_id, in the order of arrival.
    """

    def __init__(self, run_id: str) -> None:
        self.next_seq_id = 0
        self.waiting: dict[int, Operation] = {}
        self.in_progress: dict[int, Operation] = {}
        self._run_id = run_id
        self._refusals: dict[int, str] = {}

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.in_progress

    @property
    def next(self) -> Operation | None:
        """Returns the operation that can begin next, or None if it has not arrived."""
        return self.waiting.get(self.next_seq_id)

    @property
    def first_missing(self) -> int:
        return next(number for number in itertools.count(self.next_seq_id) if number not in self.waiting)

    @property
    def free_seq_id(self) -> int:
        return max(self.waiting, default=self.next_seq_id - 1) + 1

    @property
    def gap_since(self) -> float | None:
        """Returns since when the next operation has blocked others; None if no operation waits for it."""
        if not self.waiting or self.next is not None:
            return None
        return next(iter(self.waiting.values())).arrived_at

    @property
    def missing(self) -> range:
        """Returns the seq_ids before the first operation that waits."""
        return range(self.next_seq_id, min(self.waiting, default=self.next_seq_id))

    @property
    def all_missing(self) -> list[int]:
        """Returns the seq_ids that have not arrived, though later ones have."""
        return [
            number for number in range(self.next_seq_id, max(self.waiting, default=0)) if number not in self.waiting
        ]

    @property
    def being_journaled(self) -> "list[asyncio.Future[RecordPosition]]":
        return [operation.journaled for operation in self.waiting.values() if operation.log_entry.place is None]

    def arrived_before(self, seq_id: int) -> bool:
        """True if this seq_id arrived before, so that only its response is requested."""
        return 0 <= seq_id < self.next_seq_id or seq_id in self.waiting

    def check_acceptable(self, seq_id: int) -> None:
        """Raises RequestError if the seq_id cannot be queued."""
        if seq_id < 0:
            raise RequestError(f"seq_id {seq_id} is negative: number operations 1, 2, 3 and so on")
        if seq_id > self.next_seq_id + MAX_AHEAD:
            raise RequestError(
                f"seq_id {seq_id} is more than {MAX_AHEAD} ahead of {self.next_seq_id}, whose turn it is: number "
                "operations 1, 2, 3 and so on"
            )

    def check_not_refused(self, seq_id: int) -> None:
        """Raises RequestError if the operation with this seq_id was refused."""
        operation = self.waiting.get(seq_id)
        reason = operation.reason if isinstance(operation, RefusedOperation) else self._refusals.get(seq_id)
        if reason is not None:
            raise RequestError(
                f"seq_id {seq_id} was refused before ({reason}): send the operation with the next seq_id"
            )

    def can_refuse(self, seq_id: int) -> bool:
        """True if the seq_id has not arrived and can be counted as refused."""
        return max(self.next_seq_id, 1) <= seq_id <= self.next_seq_id + MAX_AHEAD and seq_id not in self.waiting

    def remember_refusal(self, seq_id: int, reason: str) -> None:
        self._refusals[seq_id] = reason
        if len(self._refusals) > _MAX_REFUSALS_KEPT:
            del self._refusals[next(iter(self._refusals))]

    def position_of(self, seq_id: int) -> QueuePosition:
        """Returns the position of an operation that will be submitted with this seq_id; 0 means the next free one."""
        seq_id = seq_id or self.free_seq_id
        if self.arrived_before(seq_id):
            return QueuePosition(self._run_id, may_unblock=True)
        missing = self.first_missing
        has_gap = len(self.waiting) > missing - self.next_seq_id
        rests = missing == self.next_seq_id and not self.in_progress
        ready = seq_id == missing
        # Clients may send the operation that fills a gap only after later ones were accepted.
        return QueuePosition(
            self._run_id,
            ready,
            is_alone=ready and rests,
            may_unblock=has_gap and (ready or rests),
            num_operations=len(self.waiting),
            num_bytes=sum(operation.log_entry.num_bytes for operation in self.waiting.values()),
        )

    def num_before(self, seq_id: int) -> int:
        return sum(other < seq_id for other in (*self.in_progress, *self.waiting))

    def may_begin(self, operation: Operation) -> bool:
        """True if the operation may begin now; operations that are not chained run alone."""
        if isinstance(operation, RefusedOperation) or not self.in_progress:
            return True
        is_chained = operation.is_chained and next(iter(self.in_progress.values())).is_chained
        num_bytes = sum(one.log_entry.num_bytes for one in (operation, *self.in_progress.values()))
        return is_chained and len(self.in_progress) < _MAX_IN_PROGRESS and num_bytes <= _MAX_BYTES_IN_PROGRESS

    def begin(self, operation: Operation) -> None:
        """Moves the next operation from those that wait to those in progress; a refused one has ended then."""
        del self.waiting[operation.seq_id]
        self.next_seq_id += 1
        if isinstance(operation, RefusedOperation):
            self.remember_refusal(operation.seq_id, operation.reason)
        else:
            self.in_progress[operation.seq_id] = operation


class Gaps:
    """Gives up operations that do not arrive though later ones have, and says so to those that wait for them.

    refuse: counts seq_ids as done, for a reason.
    awaits_first_operation: true until an operation arrives that follows those of an earlier process.
    """

    def __init__(
        self,
        state: RunState,
        queue: OperationQueue,
        services: RunServices,
        refuse: Callable[[Sequence[int], str], None],
    ) -> None:
        self.awaits_first_operation = False
        self._state = state
        self._queue = queue
        self._services = services
        self._refuse = refuse
        # To suggest if the run cannot continue.
        self._checkpoint_paths: Sequence[str] = ()
        self._gap_seconds = services.config.sessions.seq_gap_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._gave_up_at = -math.inf

    def resume(self, loadable: Sequence[str]) -> None:
        """Expects a run's first operation after a restart; loadable: the paths of its checkpoints, oldest first."""
        self.awaits_first_operation, self._checkpoint_paths = True, loadable
        if self._services.restore_marker.is_behind(self._state.record.run_id):
            self._state.fail(self._behind())

    def end_wait(self) -> None:
        """Notes that the first operation after a restart was accepted."""
        self.awaits_first_operation = False
        self._services.restore_marker.mark_continued(self._state.record.run_id)

    def watch(self) -> None:
        """Restarts the timer of a gap; call it after each change of a queue in which operations wait."""
        self.close()
        if (since := self._queue.gap_since) is not None:
            at = max(since + self._gap_seconds, self._gave_up_at + _RETRY_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(at - time.monotonic(), self._time_out)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pending(self, seq_id: int) -> Pending | None:
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

    def _time_out(self) -> None:
        """Refuses the missing operations up to the first that arrived; a run that is behind its client ends instead."""
        since = self._queue.gap_since
        if since is None:
            return
        if time.monotonic() < since + self._gap_seconds - 1e-3:  # this gap began after the one that set the timer
            self.watch()
            return
        self._gave_up_at = time.monotonic()
        run_id, marker, missing = self._state.record.run_id, self._services.restore_marker, self._queue.missing
        within = f"within {self._gap_seconds:g} s"
        if marker.is_waiting(run_id):
            marker.mark_behind(run_id)
            reason = self._behind()
            self._state.fail(reason)
            logger.error("seq_id %d did not arrive %s: %s", missing.start, within, reason)
            self._refuse(self._queue.all_missing, reason)
            return
        doubt = _IF_RESTORED if self.awaits_first_operation else ""
        if len(missing) == 1:
            which, those = f"seq_id {missing.start}", "it"
        else:
            which, those = f"seq_id {missing.start} to {missing[-1]}", "they"
        logger.warning("%s: %s given up: %s did not arrive %s%s", run_id, which, those, within, doubt)
        self._refuse(missing, f"it did not arrive {within}{doubt}")

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
