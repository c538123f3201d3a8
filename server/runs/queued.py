"""Queued operations of a run: the seq_ids that have arrived, each with its operation or the reason of its refusal."""

import asyncio
from dataclasses import dataclass

from ..files.wal import Place
from ..journal.futures import Future
from ..tenants.quotas import Admission
from .operations import Operation, is_chained, kind_of
from .replay_log import REFUSED, Outcome, Past

GAP = "an operation"
"""Kind of an operation that has not arrived."""


@dataclass(frozen=True)
class Refused:
    """An operation that was not accepted; taints: it may have been part of the next optimizer step's batch."""

    kind: str
    reason: str
    taints: bool


@dataclass(eq=False)
class Entry:
    """A handle to the operation's journal entry, without the operation, which may be large.

    place: done as soon as the entry is written. past: set as soon as the operation begins.
    """

    place: asyncio.Future[Place]
    past: Past | None = None


@dataclass(eq=False)
class Slot:
    """A seq_id that has arrived.

    future: None if no client waits for a result: the operation was refused, or an earlier process answered it, but lost
    its
    effect. admission: the reservation of an operation that this process accepted. num_strikes: from earlier processes.
    has_broken: an earlier process answered it with a failure of the server.
    """

    content: Operation | Refused
    arrived_at: float
    entry: Entry
    future: Future | None = None
    admission: Admission | None = None
    num_strikes: int = 0
    has_broken: bool = False

    @property
    def operation(self) -> Operation:
        """Returns the operation; only valid if it was not refused."""
        assert not isinstance(self.content, Refused)
        return self.content

    @property
    def num_bytes(self) -> int:
        return self.admission.num_bytes if self.admission else 0

    @property
    def is_chained(self) -> bool:
        return not isinstance(self.content, Refused) and is_chained(self.content)

    def past(self, seq_id: int) -> Past:
        """Returns the replay log entry of an operation that begins now, or of a refusal. It must be journaled."""
        place = self.entry.place.result()
        if isinstance(self.content, Refused):
            taints = self.content.taints
            return Past(seq_id, REFUSED, place, outcome=Outcome.FAILED, taints=taints, is_answered=True)
        return Past(seq_id, kind_of(self.content), place, self.num_bytes)

    def release(self) -> None:
        if self.admission is not None:
            self.admission.release()
