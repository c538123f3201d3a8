"""Holds the work of one rank group, and what its ranks hold. Makes no calls, and awaits nothing."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from ...schemas.errors import OperationError
from ..pools.base import WorkerDied
from ..protocol.calls import Failure, OptimizerStep, WorkerLost
from .cohorts import Cohorts
from .quarantine import SUSPECT_SHRINK_FACTOR, Suspects
from .queue import GroupQueue, PassLimits
from .supervision.backoff import backoff
from .work import AnyWork, RunWork, SamplingWork, SnapshotWork

_MAX_SNAPSHOTS = 4
_FIRST_SECONDS, _LONGEST_SECONDS = 0.01, 0.5


class GroupWork:
    """The work that waits for a group's ranks, or that they do: that on runs, sampling jobs, and snapshots that are
    being written.
    """

    def __init__(self, limits: PassLimits, suspect_jobs: Suspects | None = None) -> None:
        self.limits = limits
        self.suspect_runs = Suspects()
        self.suspect_jobs = Suspects(SUSPECT_SHRINK_FACTOR) if suspect_jobs is None else suspect_jobs
        """Shared by groups that may receive each other's sampling jobs."""
        self.incomplete: dict[str, str] = {}
        """Reasons why gradients are incomplete, by run: a call with its operation failed, which ranks may not know."""
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
            if isinstance(work, RunWork) and work.drops is not None:
                work.settle(None)  # the worker's death dropped everything
            else:
                work.settle(error_of(work))

    def describe(self, name: str, num_taken: int) -> str | None:
        """Describes what waits or runs on the group; None if nothing does.

        Args:
            num_taken: works in the current call that are no longer in the queue.
        """
        num_works = self.queue.num_works + num_taken + len(self.cohorts) + len(self.snapshots.works())
        if not num_works:
            return None
        words = f"{num_works} operations wait or run" if num_works > 1 else "1 operation waits or runs"
        words += f" on {name}"
        if num_passes := math.ceil(self.queue.num_tokens / self.limits.max_tokens):
            passes = f"{num_passes} passes" if num_passes > 1 else "1 pass"
            words += f"; {self.queue.num_tokens} tokens wait for {passes}"
        if num_apart := self.cohorts.num_apart:
            requests = f"{num_apart} sampling requests" if num_apart > 1 else "1 sampling request"
            words += f"; {requests} of a worker that died take turns with the others"
        return words

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


class PendingSnapshots:
    """The snapshots that the ranks write while they do other work."""

    def __init__(self) -> None:
        self.due_at = math.inf
        """The monotonic time at which the ranks are polled for finished ones; infinite while none is being written."""
        self._writing: dict[int, SnapshotWork] = {}
        self._ids = count()
        self._num_polls = 0

    @property
    def has_room(self) -> bool:
        """True if another snapshot may begin; each holds a copy of its run in the worker's memory."""
        return len(self._writing) < _MAX_SNAPSHOTS

    def works(self) -> list[SnapshotWork]:
        return list(self._writing.values())

    def next_id(self) -> int:
        return next(self._ids)

    def add(self, snapshot_id: int, work: SnapshotWork, now: float) -> None:
        self._writing[snapshot_id] = work
        self._num_polls = 0
        self._poll_later(now)

    def settle(self, answers: Mapping[int, Failure | None], now: float) -> None:
        """Answers the snapshots that ended, and polls for the others at growing intervals."""
        for snapshot_id, answer in answers.items():
            if (work := self._writing.pop(snapshot_id, None)) is not None:
                work.settle(answer)
        self._poll_later(now)

    def fail_all(self, failure: Failure, now: float) -> None:
        """Fails all snapshots, because their outcome is unknown."""
        self.settle(dict.fromkeys(self._writing, failure), now)

    def _poll_later(self, now: float) -> None:
        self.due_at = math.inf
        if self._writing:
            self._num_polls += 1
            self.due_at = now + backoff(self._num_polls, _FIRST_SECONDS, _LONGEST_SECONDS)
