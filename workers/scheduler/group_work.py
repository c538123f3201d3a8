"""Holds the work of one rank group, and what its ranks hold. Makes no calls, and awaits nothing."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count

from ...schemas.errors import OperationError
from ..pools.base import WorkerDied
from ..protocol.calls import OptimizerStep, WorkerLost
from .cohorts import Cohorts
from .fair_queue import PassLimits
from .pending_snapshots import PendingSnapshots
from .quarantine import SUSPECT_SHRINK_FACTOR, Suspects
from .queue import GroupQueue
from .work import SamplingWork, WorkItem

AnyWork = WorkItem | SamplingWork


class GroupWork:
    """The work that waits for a group's ranks, or that they do.

    queue, cohorts, snapshots: the work that waits; sampling jobs; snapshots that are being written.
    suspect_jobs: shared by groups that may receive each other's sampling jobs.
    incomplete: run -> why its gradients are incomplete: a call that contained its operation failed, which ranks may not
        know.
    """

    def __init__(self, limits: PassLimits, suspect_jobs: Suspects | None = None) -> None:
        self.limits = limits
        self.suspect_runs = Suspects()
        self.suspect_jobs = Suspects(SUSPECT_SHRINK_FACTOR) if suspect_jobs is None else suspect_jobs
        self.incomplete: dict[str, str] = {}
        self._numbers = count()
        self._live: set[str] = set()
        self._lost: dict[str, str] = {}
        self._clear()

    def _clear(self) -> None:
        self.queue = GroupQueue(self.limits, self.suspect_runs, self._numbers)
        self.cohorts = Cohorts(self.suspect_jobs)
        self.snapshots = PendingSnapshots()

    def set_pass_tokens(self, number: int) -> None:
        """Sets the most tokens of a pass, before there is any work."""
        self.limits = replace(self.limits, max_tokens=number)
        self._clear()

    def holds(self, key: str) -> bool:
        """True if the current worker has the run, adapter or draft, as far as is known."""
        return key in self._live

    def check_available(self, key: str | None) -> None:
        """Raises WorkerLost if the run or adapter was lost with a worker."""
        if key in self._lost:
            raise WorkerLost(self._lost[key])

    def forget_lost(self, key: str) -> bool:
        """Forgets the run or adapter; True if it was lost with a worker."""
        self.suspect_runs.clear(key)
        return self._lost.pop(key, None) is not None

    def record_created(self, key: str) -> None:
        self._live.add(key)
        self._lost.pop(key, None)

    def record_dropped(self, key: str) -> None:
        self._live.discard(key)
        self.suspect_runs.clear(key)

    def with_refusal(self, step: OptimizerStep) -> OptimizerStep:
        """Returns the step, with the reason to refuse it if its gradients are incomplete."""
        reason = self.incomplete.get(step.run_id)
        return step if reason is None else replace(step, refusal_reason=reason)

    def forget_incomplete(self, run_ids: Iterable[str]) -> None:
        for run_id in run_ids:
            self.incomplete.pop(run_id, None)

    def worker_died(self, group: str, death: WorkerDied, in_call: Sequence[AnyWork]) -> str:
        """Fails all work and forgets what the workers held; returns the consequences for the log.

        Args:
            group: its name.
            in_call: the work of the call in which the worker died, which becomes suspect.
        """
        consequences = self._accuse(in_call)
        for key in self._live:
            self._lost[key] = (
                f"{key} was lost when the worker of {group} died ({death}): it must be rebuilt, or loaded again"
            )
        self._live.clear()
        self.incomplete.clear()
        message = f"base model {group}: {death}; what only the worker had is lost"
        alone = in_call if len(in_call) == 1 else ()
        self.fail_all(lambda work: WorkerLost(message, alone=work in alone), in_call)
        return consequences

    def fail_all(self, error_of: Callable[[AnyWork], OperationError], in_call: Iterable[AnyWork] = ()) -> None:
        """Fails the work that waits, that the workers do aside, and that is in the current call."""
        waiting = dict.fromkeys((*in_call, *self.snapshots.works(), *self.queue.works(), *self.cohorts.works()))
        self._clear()
        for work in waiting:
            # A drop succeeds: the worker's death dropped everything.
            is_drop = isinstance(work, WorkItem) and work.drops is not None
            work.settle(None if is_drop else error_of(work))

    def _accuse(self, in_call: Iterable[AnyWork]) -> str:
        runs: dict[str, int] = {}
        jobs: dict[str, int] = {}
        for work in in_call:
            if isinstance(work, SamplingWork):
                jobs[work.job.job_id] = work.safe_position
            elif (seq_id := work.suspect_position) is not None:
                runs[work.key] = max(seq_id, runs.get(work.key, 0))
        self.suspect_runs.accuse({key: seq_id or None for key, seq_id in runs.items()})
        self.suspect_jobs.accuse(jobs)
        return _consequences("runs", runs, self.suspect_runs) + _consequences("requests", jobs, self.suspect_jobs)


def _consequences(what: str, accused: Collection[str], suspects: Suspects) -> str:
    if len(accused) < 2:
        return ""
    most = suspects.max_together(accused)
    return (
        f"; {len(accused)} {what} were in the call: until they get past that point they run apart from all"
        f" others, {most:.0f} at a time"
    )
