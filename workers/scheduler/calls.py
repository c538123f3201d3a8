"""Defines the calls of a group's ranks: what is sent, how long it may take, and what its answer means for the work."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, get_args

from ...schemas.training import ForwardBackwardOutput
from ..pools.base import RankTime
from ..protocol.calls import Failure, SliceResult
from ..protocol.methods import APPLY_STEPS, BEGIN_SNAPSHOT, ENDED_SNAPSHOTS, RUN_PASS, SAMPLE_SLICE, Activity
from ..protocol.timeouts import CallTimeouts, cost_of
from .cohorts import Cohort
from .group_work import GroupWork
from .queue import Kind
from .supervision.ranks import Ranks
from .work import AnyWork, CallSize, MethodWork, PassWork, SnapshotWork, StepWork

IDLE, RESTARTING = "idle", "restarting"
ACTIVITIES = (*get_args(Activity), IDLE, RESTARTING)
"""Everything that a group's ranks can be doing."""

Result = TypeVar("Result")


class RankCall(ABC, Generic[Result]):
    """A call of all ranks of a group."""

    kind: ClassVar[Kind]
    activity: Activity
    """The work that the ranks do."""
    uses_device = True
    """False if the call needs nothing on the devices."""

    def __init__(self, works: Sequence[AnyWork] = (), num_tokens: int = 0) -> None:
        self.works = works
        """The work in the call, including large operations of which more passes will follow."""
        self.size = CallSize(num_tokens, len(works))

    @property
    def num_taken(self) -> int:
        """Returns how much of the work is no longer in the queue."""
        return len(self.works)

    @abstractmethod
    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Result]:
        """Sends the call to the ranks and returns their answer."""

    @abstractmethod
    def finish(self, group: GroupWork, answer: Result | Failure, now: float) -> None:
        """Answers the work and records what the call changed.

        Args:
            answer: a Failure if the whole call failed.
        """

    def record(self, timeouts: CallTimeouts, seconds: float) -> None:
        """Records how long the call took."""


@dataclass(frozen=True)
class EndedCall:
    """A call of a group's ranks that has been answered."""

    group: str
    call: RankCall[Any]
    began_at: float
    """Seconds since 1970."""
    seconds: float
    rank_times: Sequence[RankTime]
    """The times of all ranks, empty if the call failed."""
    idle_tokens: int
    """See Ranks: those of the last pass."""
    error: str | None
    """The reason if all of it failed."""


class PassCall(RankCall[Sequence[ForwardBackwardOutput | Failure | None]]):
    """A joint forward and backward of operations of many runs."""

    kind = "training"
    activity = RUN_PASS.activity

    def __init__(self, works: Sequence[PassWork]) -> None:
        self._works = works
        lengths = [work.lengths[work.chunk_start : work.num_taken] for work in works]
        self._cost = sum(cost_of(own, work.request.forward_only) for work, own in zip(works, lengths, strict=True))
        super().__init__(works, sum(map(sum, lengths)))

    @property
    def num_taken(self) -> int:
        # The others still wait in the queue, for their next passes.
        return sum(work.is_taken for work in self._works)

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Sequence[ForwardBackwardOutput | Failure | None]]:
        hang_seconds = timeouts.for_pass(self._cost, len({work.key for work in self._works}))
        return ranks.run_pass(tuple(work.part for work in self._works), hang_seconds)

    def finish(
        self, group: GroupWork, answer: Sequence[ForwardBackwardOutput | Failure | None] | Failure, now: float
    ) -> None:
        if isinstance(answer, Failure):
            group.incomplete |= {work.key: answer.message for work in self._works if not work.request.forward_only}
            answer = [answer] * len(self._works)
        for work, of_part in zip(self._works, answer, strict=True):
            if of_part is None:  # more parts follow
                continue
            if not work.is_taken:
                group.queue.remove(work)
            work.settle(of_part)
            group.suspect_runs.record_progress(work.key, work.request.seq_id or None)

    def record(self, timeouts: CallTimeouts, seconds: float) -> None:
        timeouts.passes.record(self._cost, seconds)


class StepsCall(RankCall[Sequence[dict[str, float] | Failure]]):
    """Optimizer steps of several runs."""

    kind = "training"
    activity = APPLY_STEPS.activity

    def __init__(self, works: Sequence[StepWork], group: GroupWork) -> None:
        super().__init__(works)
        self._works = works
        self._steps = tuple(group.with_refusal(work.step) for work in works)

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Sequence[dict[str, float] | Failure]]:
        return ranks.call(APPLY_STEPS.name, self._steps, hang_seconds=timeouts.for_steps(len(self._steps)))

    def finish(self, group: GroupWork, answer: Sequence[dict[str, float] | Failure] | Failure, now: float) -> None:
        if isinstance(answer, Failure):
            answer = [answer] * len(self._works)
        else:
            group.forget_incomplete(work.key for work in self._works)
        for work, metrics in zip(self._works, answer, strict=True):
            work.settle(metrics)
            group.suspect_runs.record_progress(work.key, work.step.seq_id or None)


class MethodCall(RankCall[Result]):
    """A call of one method, for one run or adapter."""

    kind = "methods"

    def __init__(self, work: MethodWork[Result]) -> None:
        super().__init__([work])
        self._work = work
        self.activity = work.method.activity
        self.uses_device = not work.method.runs_offloaded

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Result]:
        method = self._work.method
        return ranks.call(method.name, *self._work.arguments, hang_seconds=timeouts.for_method(method))

    def finish(self, group: GroupWork, answer: Result | Failure, now: float) -> None:
        work = self._work
        # Recorded here, not by the caller, so that a death right after the answer finds the run.
        if not isinstance(answer, Failure):
            if work.creates is not None:
                group.record_created(work.creates)
            if work.method.clears_gradients:
                group.forget_incomplete([work.key])
            if work.drops is not None:
                group.record_dropped(work.drops)
        work.settle(answer)


class BeginSnapshotCall(RankCall[None]):
    """Begins a snapshot, which the workers write while they do other work."""

    kind = "snapshots"
    activity = BEGIN_SNAPSHOT.activity

    def __init__(self, work: SnapshotWork, snapshot_id: int) -> None:
        super().__init__([work])
        self._work = work
        self._snapshot_id = snapshot_id

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[None]:
        arguments = (self._snapshot_id, self._work.key, self._work.directory, self._work.contents)
        return ranks.call(BEGIN_SNAPSHOT.name, *arguments, hang_seconds=timeouts.for_method(BEGIN_SNAPSHOT))

    def finish(self, group: GroupWork, answer: Failure | None, now: float) -> None:
        if isinstance(answer, Failure):
            self._work.settle(answer)
        else:
            group.snapshots.add(self._snapshot_id, self._work, now)


class PollSnapshotsCall(RankCall[Mapping[int, Failure | None]]):
    """Asks which snapshots are written."""

    kind = "snapshots"
    activity = ENDED_SNAPSHOTS.activity
    uses_device = not ENDED_SNAPSHOTS.runs_offloaded

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Mapping[int, Failure | None]]:
        return ranks.call(ENDED_SNAPSHOTS.name, hang_seconds=timeouts.for_method(ENDED_SNAPSHOTS))

    def finish(self, group: GroupWork, answer: Mapping[int, Failure | None] | Failure, now: float) -> None:
        if isinstance(answer, Failure):
            group.snapshots.fail_all(answer, now)
        else:
            group.snapshots.settle(answer, now)


class SliceCall(RankCall[SliceResult]):
    """A burst of decoding for the sampling jobs of one cohort."""

    kind = "sampling"
    activity = SAMPLE_SLICE.activity

    def __init__(self, cohort: Cohort, milliseconds: float) -> None:
        self._slice = cohort.slice(milliseconds)
        self._cohort = cohort
        super().__init__(tuple(cohort.running.values()))

    @property
    def num_taken(self) -> int:
        return 0  # the jobs stay in their cohort until they end

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[SliceResult]:
        return ranks.run_slice(self._slice, timeouts.for_slice(self._slice.budget_milliseconds))

    def finish(self, group: GroupWork, answer: SliceResult | Failure, now: float) -> None:
        if isinstance(answer, Failure):
            answer = SliceResult(dict.fromkeys(group.cohorts.drop_running(), answer), 0)
        for job_id, parts in answer.progress.items():
            if (streaming := self._cohort.running.get(job_id)) and streaming.on_progress is not None:
                streaming.on_progress(parts)
        for job_id, response in answer.finished.items():
            if waiting := group.cohorts.ended(job_id):
                waiting.settle(response)
                group.suspect_jobs.clear(job_id)
        for job_id, waiting in self._cohort.running.items():
            waiting.num_slices += 1
            group.suspect_jobs.record_progress(job_id, waiting.num_slices)

    def record(self, timeouts: CallTimeouts, seconds: float) -> None:
        timeouts.slices.record(1.0, seconds)
