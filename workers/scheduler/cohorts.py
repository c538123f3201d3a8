"""Groups sampling jobs into cohorts that run together in a slice.

All jobs share one cohort, except suspects (see quarantine.py), which run apart in small cohorts. The ranks hold the
jobs of all cohorts and each slice runs one cohort, so no job waits for another to finish. Of the cohorts apart, only
the one whose turn it is occupies the ranks' KV cache, so a suspect that kills the worker implicates no other.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, count

from ..protocol.calls import SamplingSlice
from .quarantine import Suspects
from .work import SamplingWork

# Slices of the first turn of a cohort apart. Each next turn is twice as long, because a job that gave up its cache must
# be recomputed when its turn begins.
_FIRST_TURN = 32

_COMPILE_SECONDS, _COMPILE_SECONDS_OF_TENANT = 0.2, 0.1
"""The time in which a slice may compile constraints of joining jobs; the first one may take longer."""


@dataclass(eq=False)
class Cohort:
    """Sampling jobs that run together."""

    number: int
    max_jobs: float
    joining: dict[str, SamplingWork] = field(default_factory=dict)
    running: dict[str, SamplingWork] = field(default_factory=dict)
    """Jobs that the ranks hold."""
    cancelled: list[str] = field(default_factory=list)
    """Ids of jobs that the ranks must drop."""
    turn_slices: int = _FIRST_TURN
    """Slices of its turn."""
    num_turn_slices: int = 0
    """Slices of its turn that are over."""

    def __len__(self) -> int:
        return len(self.joining) + len(self.running)

    @property
    def wants_slice(self) -> bool:
        return bool(self.joining or self.running or self.cancelled)

    def slice(self, milliseconds: float) -> SamplingSlice:
        """Returns the next slice; the jobs that join in it count as running from here on."""
        joining, cancelled = self._take_joining(), self.cancelled
        self.running |= joining
        self.cancelled = []
        jobs = tuple(waiting.job for waiting in joining.values())
        return SamplingSlice(jobs, tuple(cancelled), milliseconds, self.number)

    def _take_joining(self) -> dict[str, SamplingWork]:
        """Takes the joining jobs but those whose constraints would hold the ranks too long: they join later."""
        taken: dict[str, SamplingWork] = {}
        compiled: set[str] = set()
        of_tenants: defaultdict[str, float] = defaultdict(float)
        total = 0.0
        for job_id, work in self.joining.items():
            job, constraint = work.job, work.job.params.constraint
            if constraint is not None and constraint.digest not in compiled:
                seconds = job.compile_seconds
                is_over_share = of_tenants[job.tenant_id] + seconds > _COMPILE_SECONDS_OF_TENANT
                if compiled and (is_over_share or total + seconds > _COMPILE_SECONDS):
                    continue
                compiled.add(constraint.digest)
                of_tenants[job.tenant_id] += seconds
                total += seconds
            taken[job_id] = work
        self.joining = {job_id: work for job_id, work in self.joining.items() if job_id not in taken}
        return taken

    def remove(self, job_id: str) -> SamplingWork | None:
        """Removes the job; the next slice lets the ranks drop it if they hold it."""
        if waiting := self.joining.pop(job_id, None):
            return waiting
        if waiting := self.running.pop(job_id, None):
            self.cancelled.append(job_id)
        return waiting


class Cohorts:
    """The sampling jobs of a group, divided by which may share a slice; changed by Scheduler and RankGroup alone."""

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self._numbers = count()
        self._main = Cohort(next(self._numbers), float("inf"))
        # Ordered by turn: the first one is next.
        self._apart: OrderedDict[int, Cohort] = OrderedDict()
        self._cohort_of: dict[str, Cohort] = {}
        self._main_went_last = False

    def __len__(self) -> int:
        """Returns the number of jobs."""
        return len(self._cohort_of)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._cohort_of

    @property
    def num_apart(self) -> int:
        """Returns the number of jobs that run outside the main cohort."""
        return len(self) - len(self._main)

    @property
    def has_work(self) -> bool:
        """True if there are jobs, or some that the ranks must drop."""
        return bool(self._cohort_of or self._main.cancelled or any(cohort.cancelled for cohort in self._apart.values()))

    def works(self) -> list[SamplingWork]:
        return [each for cohort in self._all() for each in chain(cohort.joining.values(), cohort.running.values())]

    def enqueue_job(self, waiting: SamplingWork) -> None:
        most = self._suspects.max_together([waiting.job.job_id])
        cohort = self._main if most == self._main.max_jobs else self._with_room(most)
        cohort.joining[waiting.job.job_id] = waiting
        self._cohort_of[waiting.job.job_id] = cohort

    def cancel(self, job_id: str) -> SamplingWork | None:
        """Removes the job and returns it, or None if it is unknown."""
        cohort = self._cohort_of.pop(job_id, None)
        return None if cohort is None else cohort.remove(job_id)

    def ended(self, job_id: str) -> SamplingWork | None:
        """Removes a job that the ranks have finished and returns it; None if it was cancelled meanwhile."""
        cohort = self._cohort_of.get(job_id)
        if cohort is None or job_id not in cohort.running:
            return None
        del self._cohort_of[job_id]
        return cohort.running.pop(job_id)

    def next(self) -> Cohort:
        """Returns the cohort of the next slice: the main one alternates with the others, which take turns among
        themselves.
        """
        self._apart = OrderedDict((number, each) for number, each in self._apart.items() if each.wants_slice)
        self._main_went_last = not self._apart or (self._main.wants_slice and not self._main_went_last)
        if self._main_went_last:
            return self._main
        cohort = next(iter(self._apart.values()))
        if cohort.num_turn_slices == cohort.turn_slices:
            cohort.turn_slices, cohort.num_turn_slices = 2 * cohort.turn_slices, 0
            self._apart.move_to_end(cohort.number)
            cohort = next(iter(self._apart.values()))
        cohort.num_turn_slices += 1
        return cohort

    def drop_running(self) -> list[str]:
        """Lets the ranks drop every running job, because their progress is unknown; returns the jobs' ids."""
        lost = []
        for cohort in self._all():
            cohort.cancelled += cohort.running
            lost += cohort.running
        return lost

    def _all(self) -> Iterator[Cohort]:
        yield self._main
        yield from self._apart.values()

    def _with_room(self, most: float) -> Cohort:
        """Returns a cohort apart that can take a suspect allowed to run with at most `most` jobs."""
        for cohort in self._apart.values():
            if len(cohort) < min(cohort.max_jobs, most):
                cohort.max_jobs = min(cohort.max_jobs, most)
                return cohort
        cohort = Cohort(next(self._numbers), most)
        self._apart[cohort.number] = cohort
        return cohort
