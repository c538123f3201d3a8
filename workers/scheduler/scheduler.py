"""Holds the work of a rank group, decides which call its ranks make next, and answers the work.

Makes no calls and awaits nothing, so that it can be tested alone.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from ...schemas.errors import OperationError
from ..pools.base import WorkerDied
from ..protocol.calls import Failure, OptimizerStep, SliceResult, WorkerLost
from ..protocol.methods import CLEAR_GRADIENTS
from .calls import BeginSnapshotCall, MethodCall, PassCall, PollSnapshotsCall, RankCall, SliceCall, StepsCall
from .cohorts import Cohorts
from .quarantine import SUSPECT_SHRINK_FACTOR, Suspects
from .queue import GroupQueue, Kind, PassLimits
from .snapshots import PendingSnapshots
from .work import AnyWork, MethodWork, RunWork, SamplingWork, SnapshotWork

T = TypeVar("T")

# Lengths of the first slices after a pause, as fractions of a slice.
_FIRST_SLICES = (1 / 16, 1 / 4)


class HeldModels:
    """The runs, adapters and drafts that the ranks hold, or held when one of them died, by id."""

    def __init__(self) -> None:
        self._live: set[str] = set()
        self._lost: dict[str, str] = {}
        # Reasons why gradients are incomplete, by run: a call with its operation failed, which ranks may not know.
        self._tainted: dict[str, str] = {}

    def __contains__(self, key: str) -> bool:
        """True if the ranks have it, as far as is known."""
        return key in self._live

    def check_available(self, key: str | None) -> None:
        """Raises WorkerLost if it was lost with a worker."""
        if key in self._lost:
            raise WorkerLost(self._lost[key])

    def add(self, key: str) -> None:
        self._live.add(key)
        self._lost.pop(key, None)

    def remove(self, key: str) -> None:
        self._live.discard(key)

    def lose_all(self, reason: str) -> None:
        self._lost |= {key: f"{key} was lost when {reason}: it must be rebuilt, or loaded again" for key in self._live}
        self._live.clear()
        self._tainted.clear()

    def forget_lost(self, key: str) -> bool:
        """Forgets it; True if it was lost with a worker."""
        return self._lost.pop(key, None) is not None

    def mark_tainted(self, run_ids: Iterable[str], reason: str) -> None:
        """Makes the next step of these runs be refused."""
        self._tainted |= dict.fromkeys(run_ids, reason)

    def forget_tainted(self, run_ids: Iterable[str]) -> None:
        for run_id in run_ids:
            self._tainted.pop(run_id, None)

    def with_refusal(self, step: OptimizerStep) -> OptimizerStep:
        """Returns the step, with the reason to refuse it if its gradients are incomplete."""
        reason = self._tainted.get(step.run_id)
        return step if reason is None else replace(step, refusal_reason=reason)


class Scheduler:
    """Shares the ranks of a group between kinds of calls: training, methods, snapshots and sampling.

    Of the kinds that have work, the one that has used the least time goes next. Each `next_call` must be followed by
    `finish`, or by `worker_died`, before the next one.
    """

    def __init__(
        self,
        limits: PassLimits,
        slice_milliseconds: float,
        suspect_jobs: Suspects | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without work.

        Args:
            suspect_jobs: shared by groups that may receive each other's sampling jobs; None means private.
        """
        self.limits = limits
        self.held = HeldModels()
        self.suspect_runs = Suspects()
        self.suspect_jobs = Suspects(SUSPECT_SHRINK_FACTOR) if suspect_jobs is None else suspect_jobs
        self.suspect_snapshots = Suspects()
        """Runs whose last snapshot was lost with a worker."""
        self._slice_milliseconds = slice_milliseconds
        self._clock = clock
        self._numbers = count()
        self._slices_since_pause = 0
        # The time that each kind has used. One without work is set forward to the one that runs, so that idle time
        # earns no credit; time used while others waited stays on its account.
        self._seconds: dict[Kind, float] = dict.fromkeys(("training", "methods", "snapshots", "sampling"), 0.0)
        self._clear()

    def _clear(self) -> None:
        self.queue = GroupQueue(self.limits, self.suspect_runs, self._numbers)
        self.cohorts = Cohorts(self.suspect_jobs)
        self.snapshots = PendingSnapshots(self.suspect_snapshots)

    def set_pass_tokens(self, number: int) -> None:
        """Sets the most tokens of a pass, before there is any work."""
        self.limits = replace(self.limits, max_tokens=number)
        self._clear()

    def ready(self, on_device: bool = True) -> list[Kind]:
        """Returns the kinds of calls for which there is work.

        Args:
            on_device: false if the group does not hold its devices, so that only what needs none can run.
        """
        queue, kinds = self.queue, list[Kind]()
        is_writing = self.snapshots.due_at < math.inf
        if is_writing and (self.snapshots.has_suspect or queue.has_suspects or self.cohorts.num_apart):
            # A suspect must be alone, so everything waits until the snapshots are written.
            return ["snapshots"] if self._clock() >= self.snapshots.due_at else []
        if on_device and queue.has_training:
            kinds.append("training")
        if queue.methods.tenants and (on_device or queue.methods.next().method.runs_offloaded):
            kinds.append("methods")
        may_begin = on_device and queue.snapshots.tenants and self.snapshots.has_room(queue.snapshots.next())
        if may_begin or self._clock() >= self.snapshots.due_at:
            kinds.append("snapshots")
        if on_device and self.cohorts.has_work:
            kinds.append("sampling")
        return kinds

    def next_call(self, on_device: bool = True) -> RankCall[Any] | None:
        """Takes the work of the next call from the queue; None if none can run now. Args: as in `ready`."""
        kinds = self.ready(on_device)
        if not kinds:
            return None
        kind = min(kinds, key=self._seconds.__getitem__)  # the first one on a tie
        for idle in self._seconds.keys() - set(kinds):
            self._seconds[idle] = max(self._seconds[idle], self._seconds[kind])
        match kind:
            case "training":
                if steps := self.queue.take_steps():
                    return StepsCall(steps, [self.held.with_refusal(work.step) for work in steps])
                return PassCall(self.queue.take_pass())
            case "methods":
                return MethodCall(self.queue.remove(self.queue.methods.next()))
            case "snapshots" if self._clock() >= self.snapshots.due_at:
                return PollSnapshotsCall()
            case "snapshots":
                return BeginSnapshotCall(self.queue.remove(self.queue.snapshots.next()), self.snapshots.next_id())
            case "sampling":
                return self._next_slice()

    def _next_slice(self) -> SliceCall:
        """Returns the next slice. The first slices after a pause are short, because a client that sends one sampling
        request mostly sends more right after it.
        """
        cohort = self.cohorts.next()
        is_pause = len(self.cohorts) == len(cohort.joining)
        number = self._slices_since_pause = 0 if is_pause else self._slices_since_pause + 1
        part = _FIRST_SLICES[number] if number < len(_FIRST_SLICES) else 1
        return SliceCall(cohort, self._slice_milliseconds * part)

    def finish(self, call: RankCall[T], answer: T | Failure, seconds: float) -> None:
        """Answers the call's work and records what the call changed.

        Args:
            answer: a Failure if the whole call failed.
            seconds: the time it took.
        """
        call.answer = answer
        self._seconds[call.kind] += seconds
        match call:
            case PassCall():
                self._finish_pass(call)
            case StepsCall():
                self._finish_steps(call)
            case MethodCall():
                self._finish_method(call)
            case BeginSnapshotCall() | PollSnapshotsCall():
                self._finish_snapshots(call)
            case SliceCall():
                self._finish_slice(call)

    def _finish_pass(self, call: PassCall) -> None:
        works, answers = call.works, call.answer
        if isinstance(answers, Failure):
            trained = [work.key for work in works if not work.request.forward_only]
            self.held.mark_tainted(trained, answers.message)
            answers = [answers] * len(works)
        for work, answer in zip(works, answers, strict=True):
            if answer is None:  # more parts follow
                continue
            if not work.is_taken:
                self.queue.remove(work)
            work.settle(answer)
            if work.key in self.suspect_runs:
                self.suspect_runs.record_progress(work.key, work.suspect_position or None)

    def _finish_steps(self, call: StepsCall) -> None:
        works, answers = call.works, call.answer
        if isinstance(answers, Failure):
            answers = [answers] * len(works)
        else:
            self.held.forget_tainted(work.key for work in works)
        for work, metrics in zip(works, answers, strict=True):
            work.settle(metrics)
            if work.key in self.suspect_runs:
                self.suspect_runs.record_progress(work.key, work.suspect_position or None)

    def _finish_method(self, call: MethodCall[Any]) -> None:
        work = call.work
        # Recorded here, not by the caller, so that a death right after the answer finds the run.
        if not isinstance(call.answer, Failure):
            if work.creates is not None:
                self.held.add(work.creates)
            if work.method.clears_gradients:
                self.held.forget_tainted([work.key])
            if work.drops is not None:
                self.held.remove(work.drops)
        elif work.method is CLEAR_GRADIENTS:  # incomplete ones: steps that wait already must not use them
            self.held.mark_tainted([work.key], call.answer.message)
        work.settle(call.answer)

    def _finish_snapshots(self, call: BeginSnapshotCall | PollSnapshotsCall) -> None:
        now = self._clock()
        if isinstance(call, PollSnapshotsCall):
            if isinstance(call.answer, Failure):
                self.snapshots.fail_all(call.answer, now)
            else:
                self.snapshots.settle(call.answer, now)
        elif isinstance(call.answer, Failure):
            call.work.settle(call.answer)
        else:
            self.snapshots.add(call.snapshot_id, call.work, now)

    def _finish_slice(self, call: SliceCall) -> None:
        result, running = call.answer, call.cohort.running
        if isinstance(result, Failure):
            result = SliceResult(dict.fromkeys(self.cohorts.drop_running(), result), 0)
        for job_id, parts in result.progress.items():
            if (streaming := running.get(job_id)) and streaming.on_progress is not None:
                streaming.on_progress(parts)
        for job_id, response in result.finished.items():
            if ended := self.cohorts.ended(job_id):
                ended.settle(response)
                self.suspect_jobs.pop(job_id, None)
        for job_id, unfinished in running.items():
            unfinished.num_slices += 1
            if job_id in self.suspect_jobs:
                self.suspect_jobs.record_progress(job_id, unfinished.num_slices)

    def worker_died(self, group: str, death: WorkerDied, in_call: Sequence[AnyWork]) -> str:
        """Fails all work and forgets what the workers held; returns the consequences for the log.

        Args:
            group: its name.
            in_call: the work of the call in which the worker died, which becomes suspect.
        """
        running = [*in_call, *self.snapshots.works()]
        consequences = self._accuse(running)
        self.held.lose_all(f"the worker of {group} died ({death})")
        message = f"base model {group}: {death}; what only the worker had is lost"
        suspect = _only_suspect(in_call, running)
        self.fail_all(lambda work: WorkerLost(message, alone=work is suspect), in_call)
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

    def _accuse(self, running: Iterable[AnyWork]) -> str:
        snapshots = (work.key for work in running if isinstance(work, SnapshotWork))
        self.suspect_snapshots.accuse(dict.fromkeys(snapshots))
        runs: dict[str, float] = {}
        jobs: dict[str, int] = {}
        for work in running:
            if isinstance(work, SamplingWork):
                jobs[work.job.job_id] = work.safe_position
            elif (position := work.suspect_position) is not None:
                runs[work.key] = max(position, runs.get(work.key, 0))
        self.suspect_runs.accuse({key: position or None for key, position in runs.items()})
        self.suspect_jobs.accuse(jobs)
        return _consequences("runs", runs, self.suspect_runs) + _consequences("requests", jobs, self.suspect_jobs)

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


def _only_suspect(in_call: Sequence[AnyWork], running: Sequence[AnyWork]) -> AnyWork | None:
    """Returns the work that alone can have killed the ranks; None if there were several, or none.

    A method counts as alone even while snapshots are written: methods are never suspects.
    """
    if len(in_call) == 1 and isinstance(in_call[0], MethodWork):
        return in_call[0]
    return running[0] if len(running) == 1 else None


def _consequences(what: str, accused: Collection[str], suspects: Suspects) -> str:
    if len(accused) < 2:
        return ""
    most = suspects.max_together(accused)
    return (
        f"; {len(accused)} {what} were in the call: until they get past that point they run apart from all"
        f" others, {most:.0f} at a time"
    )
