"""Queue of a run's operations: those that wait, in any order of arrival, and those in progress."""

import itertools

from ...schemas.errors import RequestError
from ..operations.operation import Operation, RefusedOperation
from ..tenants.quotas import QueuePosition

MAX_AHEAD = 10_000
"""Maximum distance of a seq_id from the next one to be executed."""

_MAX_REFUSALS_KEPT = 1000
_MAX_IN_PROGRESS = 64
_MAX_BYTES_IN_PROGRESS = 64 << 20


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
            num_bytes=sum(operation.num_bytes for operation in self.waiting.values()),
        )

    def num_before(self, seq_id: int) -> int:
        return sum(other < seq_id for other in (*self.in_progress, *self.waiting))

    def may_begin(self, operation: Operation) -> bool:
        """True if the operation may begin now; operations that are not chained run alone."""
        if isinstance(operation, RefusedOperation) or not self.in_progress:
            return True
        is_chained = operation.is_chained and next(iter(self.in_progress.values())).is_chained
        num_bytes = operation.num_bytes + sum(other.num_bytes for other in self.in_progress.values())
        return is_chained and len(self.in_progress) < _MAX_IN_PROGRESS and num_bytes <= _MAX_BYTES_IN_PROGRESS

    def begin(self, operation: Operation) -> None:
        """Moves the next operation from those that wait to those in progress; a refused one has ended then."""
        del self.waiting[operation.seq_id]
        self.next_seq_id += 1
        if isinstance(operation, RefusedOperation):
            self.remember_refusal(operation.seq_id, operation.reason)
        else:
            self.in_progress[operation.seq_id] = operation
