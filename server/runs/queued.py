"""Queued operations of a run: the seq_ids that have arrived, each with its operation or the reason of its refusal."""

import asyncio
from dataclasses import dataclass

from ..files.wal import RecordPosition
from ..journal.futures import Future
from ..tenants.reservation import Reservation
from .operations import Operation, is_chained, kind_of
from .replay_log import REFUSED, Outcome, ReplayEntry

GAP = "an operation"
"""Kind of an operation that has not arrived."""


@dataclass(frozen=True)
class RefusedOperation:
    """An operation that was not accepted; taints: it may have been part of the next optimizer step's batch."""

    kind: str
    reason: str
    taints: bool


@dataclass(eq=False)
class JournalHandle:
    """A handle to the operation's journal entry, without the operation, which may be large.

    place: done as soon as the entry is written. past: set as soon as the operation begins.
    """

    place: asyncio.Future[RecordPosition]
    past: ReplayEntry | None = None


@dataclass(eq=False)
class QueuedOperation:
    """A seq_id that has arrived.

    future: None if no client waits for a result: the operation was refused, or an earlier process answered it, but lost
    its effect. admission: the reservation of an operation that this process accepted. num_strikes: from earlier
    processes.
    failed_before: an earlier process answered it with a failure of the server.
    """

    content: Operation | RefusedOperation
    arrived_at: float
    entry: JournalHandle
    future: Future | None = None
    admission: Reservation | None = None
    num_strikes: int = 0
    failed_before: bool = False

    @property
    def operation(self) -> Operation:
        """Returns the operation; only valid if it was not refused."""
        assert not isinstance(self.content, RefusedOperation)
        return self.content

    @property
    def num_bytes(self) -> int:
        return self.admission.num_bytes if self.admission else 0

    @property
    def is_chained(self) -> bool:
        return not isinstance(self.content, RefusedOperation) and is_chained(self.content)

    def past(self, seq_id: int) -> ReplayEntry:
        """Returns the replay log entry of an operation that begins now, or of a refusal. It must be journaled."""
        place = self.entry.place.result()
        if isinstance(self.content, RefusedOperation):
            taints = self.content.taints
            return ReplayEntry(seq_id, REFUSED, place, outcome=Outcome.FAILED, taints=taints, is_answered=True)
        return ReplayEntry(seq_id, kind_of(self.content), place, self.num_bytes)

    def release(self) -> None:
        if self.admission is not None:
            self.admission.release()
