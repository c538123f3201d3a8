"""Slots: the seq_ids of a run that have come, each with its operation or with why that was refused."""

import asyncio
from dataclasses import dataclass

from ..files.wal import Place
from ..journal.futures import Future
from ..tenants.quotas import Admission
from .operations import Operation, is_chained, kind_of
from .replay_log import REFUSED, Outcome, Past

GAP = "an operation"
"""The kind of an operation that has not arrived."""


@dataclass(frozen=True)
class Refused:
    """An operation that was not accepted. taints: it may have been meant to be a part of the next optimizer step."""

    kind: str
    reason: str
    taints: bool


@dataclass(eq=False)
class Entry:
    """place: in the journal, once it is there. past: once it was begun. Without the operation, which may be large."""

    place: asyncio.Future[Place]
    past: Past | None = None


@dataclass(eq=False)
class Slot:
    """A seq_id that has come.

    future: None where nobody is to be answered: of a refusal, and of what an earlier process has answered, but whose
    effect is lost. admission: of what this process accepted. num_strikes: of earlier processes. has_broken: one of
    them has answered that it failed, of how things were then.
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
        """Of one that was not refused."""
        assert not isinstance(self.content, Refused)
        return self.content

    @property
    def num_bytes(self) -> int:
        return self.admission.num_bytes if self.admission else 0

    @property
    def is_chained(self) -> bool:
        return not isinstance(self.content, Refused) and is_chained(self.content)

    def past(self, seq_id: int) -> Past:
        """Of one that is begun; of a refusal, which has ended. It must be journaled."""
        place = self.entry.place.result()
        if isinstance(self.content, Refused):
            taints = self.content.taints
            return Past(seq_id, REFUSED, place, outcome=Outcome.FAILED, taints=taints, is_answered=True)
        return Past(seq_id, kind_of(self.content), place, self.num_bytes)

    def release(self) -> None:
        if self.admission is not None:
            self.admission.release()
