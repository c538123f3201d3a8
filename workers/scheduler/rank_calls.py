"""Defines the calls of a group's ranks: what is sent, how long it may take, and what its answer means for the work."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..pools.base import RankTime
from ..protocol.calls import Failure, Pass, SliceResult
from ..protocol.methods import CLEARS_GRADIENTS
from ..protocol.timeouts import CallTimeouts
from .cohorts import Cohort
from .group_work import AnyWork, GroupWork
from .supervision.ranks import Ranks
from .work import CallSize, MethodWork, PassWork, SnapshotWork, StepWork

IDLE, RESTARTING = "idle", "restarting"
ACTIVITIES = ("pass", "step", "sampling", "saving", "loading", "publishing", "other", IDLE, RESTARTING)
"""Everything that a group's ranks can be doing."""

_ACTIVITIES: Mapping[str, str] = {
    **dict.fromkeys(("save_run", "convert_adapter"), "saving"),
    **dict.fromkeys(("create_run", "load_run", "load_adapter", "load_draft", "set_target"), "loading"),
    **dict.fromkeys(("copy_adapter", "export_adapter", "import_adapter"), "publishing"),
}
"""The activity of a call, by the worker's method."""


class RankCall(ABC):
    """A call of all ranks of a group.

    kind: the ranks' time is shared between kinds of calls. activity: what the ranks do, one of ACTIVITIES.
    num_tokens: of the data in a pass.
    works: the work in the call, including large operations of which more passes will follow.
    uses_device: false if the call needs nothing on the devices.
    """

    kind: ClassVar[str]
    activity: str
    num_tokens = 0
    uses_device = True

    def __init__(self, works: Sequence[AnyWork] = ()) -> None:
        self.works = works

    @property
    def size(self) -> CallSize:
        return CallSize(self.num_tokens, len(self.works))

    @property
    def num_taken(self) -> int:
        """Returns how much of the work is no longer in the queue."""
        return len(self.works)

    @abstractmethod
    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Any]:
        """Sends the call to the ranks and returns their answer."""

    @abstractmethod
    def finish(self, group: GroupWork, answer: Any, now: float) -> None:
        """Answers the work and records what the call changed.

        Args:
            answer: a Failure if the whole call failed.
        """

    def record(self, timeouts: CallTimeouts, seconds: float) -> None:  # noqa: B027
        """Records how long the call took."""


@dataclass(frozen=True)
class EndedCall:
    """A call of a group's ranks that has been answered.

    began_at: in seconds since 1970. rank_times: by rank, empty if it failed. idle_tokens: of a pass, see Ranks.
    error: the reason if all of it failed.
    """

    group: str
    call: RankCall
    began_at: float
    seconds: float
    rank_times: Sequence[RankTime]
    idle_tokens: int
    error: str | None


class PassCall(RankCall):
    """A joint forward and backward of operations of many runs."""

    kind = "training"
    activity = "pass"

    def __init__(self, works: Sequence[PassWork]) -> None:
        super().__init__(works)
        self._works = works
        self._cost = sum(work.cost for work in works)
        self.num_tokens = sum(sum(work.lengths[work.chunk_start : work.num_taken]) for work in works)

    @property
    def num_taken(self) -> int:
        # The others still wait in the queue, for their next passes.
        return sum(work.is_taken for work in self._works)

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Any]:
        hang_seconds = timeouts.for_pass(self._cost, len({work.key for work in self._works}))
        return ranks.run_pass(Pass(tuple(work.part for work in self._works)), hang_seconds)

    def finish(self, group: GroupWork, answer: Any, now: float) -> None:
        if isinstance(answer, Failure):
            group.incomplete |= {work.key: answer.message for work in self._works if not work.request.forward_only}
        for work, each in zip(self._works, _for_each(answer, self._works), strict=True):
            if not work.is_taken:
                if not isinstance(each, Failure):
                    continue
                group.queue.drop(work)
            work.settle(each)
            group.suspect_runs.record_progress(work.key, work.request.seq_id or None)

    def record(self, timeouts: CallTimeouts, seconds: float) -> None:
        timeouts.passes.record(self._cost, seconds)


class StepsCall(RankCall):
    """Optimizer steps of several runs."""

    kind = "training"
    activity = "step"

    def __init__(self, works: Sequence[StepWork], group: GroupWork) -> None:
        super().__init__(works)
        self._works = works
        self._steps = tuple(group.with_refusal(work.step) for work in works)

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Any]:
        return ranks.call("apply_steps", self._steps, hang_seconds=timeouts.for_steps(len(self._steps)))

    def finish(self, group: GroupWork, answer: Any, now: float) -> None:
        if not isinstance(answer, Failure):
            group.forget_incomplete(work.key for work in self._works)
        for work, each in zip(self._works, _for_each(answer, self._works), strict=True):
            work.settle(each)
            group.suspect_runs.record_progress(work.key, work.step.seq_id or None)


class MethodCall(RankCall):
    """A call of one method, for one run or adapter."""

    kind = "methods"

    def __init__(self, work: MethodWork) -> None:
        super().__init__([work])
        self._work = work
        self.activity = _ACTIVITIES.get(work.method, "other")
        self.uses_device = work.needs_device

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Any]:
        method = self._work.method
        return ranks.call(method, *self._work.arguments, hang_seconds=timeouts.for_method(method))

    def finish(self, group: GroupWork, answer: Any, now: float) -> None:
        work = self._work
        # Recorded here, not by the caller, so that a death right after the answer finds the run.
        if not isinstance(answer, Failure):
            if work.creates is not None:
                group.record_created(work.creates)
            if work.method in CLEARS_GRADIENTS:
                group.forget_incomplete([work.key])
            if work.drops is not None:
                group.record_dropped(work.drops)
        work.settle(answer)


class BeginSnapshotCall(RankCall):
    """Begins a snapshot, which the workers write while they do other work."""

    kind = "snapshots"
    activity = "saving"

    def __init__(self, work: SnapshotWork, snapshot_id: int) -> None:
        super().__init__([work])
        self._work = work
        self._snapshot_id = snapshot_id

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Any]:
        arguments = (self._snapshot_id, self._work.key, self._work.directory, self._work.contents)
        return ranks.call("begin_snapshot", *arguments, hang_seconds=timeouts.for_method("begin_snapshot"))

    def finish(self, group: GroupWork, answer: Any, now: float) -> None:
        if isinstance(answer, Failure):
            self._work.settle(answer)
        else:
            group.snapshots.add(self._snapshot_id, self._work, now)


class PollSnapshotsCall(RankCall):
    """Asks which snapshots are written."""

    kind = "snapshots"
    activity = "saving"
    uses_device = False

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Any]:
        return ranks.call("ended_snapshots", hang_seconds=timeouts.for_method("ended_snapshots"))

    def finish(self, group: GroupWork, answer: Any, now: float) -> None:
        if isinstance(answer, Failure):
            group.snapshots.fail_all(answer, now)
        else:
            group.snapshots.settle(answer, now)


class SliceCall(RankCall):
    """A burst of decoding for the sampling jobs of one cohort."""

    kind = "sampling"
    activity = "sampling"

    def __init__(self, cohort: Cohort, milliseconds: float) -> None:
        self._slice = cohort.slice(milliseconds)
        self._cohort = cohort
        super().__init__(tuple(cohort.running.values()))

    @property
    def num_taken(self) -> int:
        return 0  # the jobs stay in their cohort until they end

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Any]:
        return ranks.run_slice(self._slice, timeouts.for_slice(self._slice.budget_milliseconds))

    def finish(self, group: GroupWork, answer: Any, now: float) -> None:
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


def _for_each(answer: Any, works: Sequence[AnyWork]) -> Sequence[object]:
    return [answer] * len(works) if isinstance(answer, Failure) else answer
