"""Cohorts: the sampling jobs of a group, and which of them run together in a slice.

All run together but for suspects (see suspects.py), which run apart from the others, a few at a time. The ranks hold
the jobs of all cohorts, and each slice is one cohort's, so nobody waits for the end of anybody's sample. Of those apart
only the one whose turn it is has room in the ranks' cache: what the next one dies of is not what others hold there.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count

from ...schemas.sampling import SampleResponse
from ..protocol.verbs import SampledPart, SampleJob, Slice
from .quarantine import Suspects

# Slices of the first turn of a cohort apart; the next is twice as long, since what has given up its room has to be run
# again at its beginning.
_FIRST_TURN = 32

OnProgress = Callable[[tuple[SampledPart, ...]], None]


@dataclass(eq=False)
class Sampling:
    """A job and who waits for its answer. num_slices: that it has been through."""

    job: SampleJob
    answer: "asyncio.Future[SampleResponse]"
    on_progress: OnProgress | None
    num_slices: int = 0

    @property
    def safe_position(self) -> int:
        """Slices after which a later attempt has certainly come past this point, where each may do less than now."""
        return 2 * self.num_slices + 3


@dataclass(eq=False)
class Cohort:
    """Jobs that run together. most: how many may be in it. running: those that the ranks have.

    cancelled: job ids that the ranks are to drop. turn, num_slices: how long its turn is, and how much of it is over.
    """

    number: int
    most: float
    joining: dict[str, Sampling] = field(default_factory=dict)
    running: dict[str, Sampling] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    turn: int = _FIRST_TURN
    num_slices: int = 0

    def __len__(self) -> int:
        return len(self.joining) + len(self.running)

    @property
    def wants_slice(self) -> bool:
        return bool(self.joining or self.running or self.cancelled)

    def slice(self, milliseconds: float) -> Slice:
        """The next one. What was to join is running then."""
        joining, cancelled = self.joining, self.cancelled
        self.running |= joining
        self.joining, self.cancelled = {}, []
        jobs = tuple(waiting.job for waiting in joining.values())
        return Slice(jobs, tuple(cancelled), milliseconds, self.number)

    def remove(self, job_id: str) -> Sampling | None:
        """One that is running is still to be dropped by the ranks."""
        if waiting := self.joining.pop(job_id, None):
            return waiting
        if waiting := self.running.pop(job_id, None):
            self.cancelled.append(job_id)
        return waiting


class Cohorts:
    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self._numbers = count()
        self._main = Cohort(next(self._numbers), float("inf"))
        # The one whose turn is next is the first.
        self._apart: OrderedDict[int, Cohort] = OrderedDict()
        self._cohort_of: dict[str, Cohort] = {}
        self._main_went_last = False

    def __len__(self) -> int:
        """Jobs."""
        return len(self._cohort_of)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._cohort_of

    @property
    def num_apart(self) -> int:
        """Jobs that do not run with all others."""
        return len(self) - len(self._main)

    @property
    def wants_slice(self) -> bool:
        return any(cohort.wants_slice for cohort in self._all())

    def works(self) -> list[Sampling]:
        return [each for cohort in self._all() for each in chain(cohort.joining.values(), cohort.running.values())]

    def add(self, waiting: Sampling) -> None:
        most = self._suspects.most_together([waiting.job.job_id])
        cohort = self._main if most == self._main.most else self._with_room(most)
        cohort.joining[waiting.job.job_id] = waiting
        self._cohort_of[waiting.job.job_id] = cohort

    def cancel(self, job_id: str) -> Sampling | None:
        """The one that was under way, if any."""
        cohort = self._cohort_of.pop(job_id, None)
        return None if cohort is None else cohort.remove(job_id)

    def ended(self, job_id: str) -> Sampling | None:
        """The ranks have it no longer; None if it was cancelled meanwhile."""
        cohort = self._cohort_of.get(job_id)
        if cohort is None or job_id not in cohort.running:
            return None
        del self._cohort_of[job_id]
        return cohort.running.pop(job_id)

    def next(self) -> Cohort:
        """Whose slice it is, while one is wanted: each other one is of all that are not apart, which take turns."""
        self._apart = OrderedDict((number, each) for number, each in self._apart.items() if each.wants_slice)
        self._main_went_last = not self._apart or (self._main.wants_slice and not self._main_went_last)
        if self._main_went_last:
            return self._main
        return self._next_apart()

    def _next_apart(self) -> Cohort:
        cohort = next(iter(self._apart.values()))
        if cohort.num_slices == cohort.turn:
            cohort.turn, cohort.num_slices = 2 * cohort.turn, 0
            self._apart.move_to_end(cohort.number)
            cohort = next(iter(self._apart.values()))
        cohort.num_slices += 1
        return cohort

    def lose_all(self) -> list[str]:
        """Nobody knows how far the ranks are with what they have: they are to drop it. Returns its ids."""
        lost = []
        for cohort in self._all():
            cohort.cancelled += cohort.running
            lost += cohort.running
        return lost

    def _all(self) -> Iterator[Cohort]:
        yield self._main
        yield from self._apart.values()

    def _with_room(self, most: float) -> Cohort:
        """For a suspect that may be one of so many."""
        for cohort in self._apart.values():
            if len(cohort) < min(cohort.most, most):
                cohort.most = min(cohort.most, most)
                return cohort
        cohort = Cohort(next(self._numbers), most)
        self._apart[cohort.number] = cohort
        return cohort
