"""Defines the calls of a group's ranks: the work in them, what is sent, and how long it may take."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, get_args

from ...schemas.errors import OperationError
from ...schemas.training import ForwardBackwardOutput
from ..pools.base import RankTime, WorkerError
from ..protocol.calls import Failure, OptimizerStep, SliceResult
from ..protocol.methods import APPLY_STEPS, BEGIN_SNAPSHOT, ENDED_SNAPSHOTS, RUN_PASS, SAMPLE_SLICE, Activity
from ..protocol.timeouts import CallTimeouts, cost_of
from .cohorts import Cohort
from .queue import Kind
from .supervision.ranks import Ranks
from .work import AnyWork, CallSize, MethodWork, PassWork, SnapshotWork, StepWork

IDLE, RESTARTING = "idle", "restarting"
ACTIVITIES = (*get_args(Activity), IDLE, RESTARTING)
"""Everything that a group's ranks can be doing."""

MergedAnswers = Sequence[ForwardBackwardOutput | Failure | None]

T = TypeVar("T")


class RankCall(ABC, Generic[T]):
    """A call of all ranks of a group."""

    kind: ClassVar[Kind]
    activity: Activity
    """The work that the ranks do."""
    uses_device = True
    """False if the call needs nothing on the devices."""
    answer: T | Failure
    """The ranks' answer once they have given it; a Failure if the whole call failed."""

    def __init__(self, works: Sequence[AnyWork] = (), num_tokens: int = 0) -> None:
        self.works = works
        """The work in the call, including large operations of which more passes will follow."""
        self.size = CallSize(num_tokens, len(works))

    @property
    def num_taken(self) -> int:
        """Returns how much of the work is no longer in the queue."""
        return len(self.works)

    @abstractmethod
    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[T]:
        """Sends the call to the ranks and returns their answer."""

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


class PassCall(RankCall[MergedAnswers]):
    """A joint forward and backward of operations of many runs: `Worker.run_pass` on each rank."""

    kind = "training"
    activity = RUN_PASS.activity
    works: Sequence[PassWork]

    def __init__(self, works: Sequence[PassWork]) -> None:
        lengths = [work.lengths[work.chunk_start : work.num_taken] for work in works]
        self._cost = sum(cost_of(own, work.request.forward_only) for work, own in zip(works, lengths, strict=True))
        super().__init__(works, sum(map(sum, lengths)))

    @property
    def num_taken(self) -> int:
        # The others still wait in the queue, for their next passes.
        return sum(work.is_taken for work in self.works)

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[MergedAnswers]:
        hang_seconds = timeouts.for_runs(len({work.key for work in self.works})) + timeouts.passes.limit(self._cost)
        return ranks.send_pass(tuple(work.part for work in self.works), hang_seconds)

    def record(self, timeouts: CallTimeouts, seconds: float) -> None:
        timeouts.passes.record(self._cost, seconds)


class StepsCall(RankCall[Sequence[dict[str, float] | Failure]]):
    """Optimizer steps of several runs."""

    kind = "training"
    activity = APPLY_STEPS.activity
    works: Sequence[StepWork]

    def __init__(self, works: Sequence[StepWork], steps: Sequence[OptimizerStep]) -> None:
        """Makes the call; `steps` are those of the works, with the reasons to refuse some."""
        super().__init__(works)
        self._steps = tuple(steps)

    async def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Sequence[dict[str, float] | Failure]:
        try:
            return await ranks.call(APPLY_STEPS.name, self._steps, hang_seconds=timeouts.for_runs(len(self._steps)))
        except (WorkerError, OperationError, ValueError) as error:  # some of the steps may have been taken
            raise ranks.pool.kill(f"optimizer steps failed unexpectedly ({error})") from error


class MethodCall(RankCall[T]):
    """A call of one method, for one run or adapter."""

    kind = "methods"

    def __init__(self, work: MethodWork[T]) -> None:
        super().__init__([work])
        self.work = work
        self.activity = work.method.activity
        self.uses_device = not work.method.runs_offloaded

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[T]:
        method = self.work.method
        return ranks.call(method.name, *self.work.arguments, hang_seconds=timeouts.for_method(method))


class BeginSnapshotCall(RankCall[None]):
    """Begins a snapshot, which the workers write while they do other work."""

    kind = "snapshots"
    activity = BEGIN_SNAPSHOT.activity

    def __init__(self, work: SnapshotWork, snapshot_id: int) -> None:
        super().__init__([work])
        self.work = work
        self.snapshot_id = snapshot_id

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[None]:
        arguments = (self.snapshot_id, self.work.key, self.work.directory, self.work.contents)
        return ranks.call(BEGIN_SNAPSHOT.name, *arguments, hang_seconds=timeouts.for_method(BEGIN_SNAPSHOT))


class PollSnapshotsCall(RankCall[Mapping[int, Failure | None]]):
    """Asks which snapshots are written."""

    kind = "snapshots"
    activity = ENDED_SNAPSHOTS.activity
    uses_device = not ENDED_SNAPSHOTS.runs_offloaded

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[Mapping[int, Failure | None]]:
        return ranks.call(ENDED_SNAPSHOTS.name, hang_seconds=timeouts.for_method(ENDED_SNAPSHOTS))


class SliceCall(RankCall[SliceResult]):
    """A burst of decoding for the sampling jobs of one cohort."""

    kind = "sampling"
    activity = SAMPLE_SLICE.activity

    def __init__(self, cohort: Cohort, milliseconds: float) -> None:
        self._slice = cohort.slice(milliseconds)
        self.cohort = cohort
        super().__init__(tuple(cohort.running.values()))

    @property
    def num_taken(self) -> int:
        return 0  # the jobs stay in their cohort until they end

    def send(self, ranks: Ranks, timeouts: CallTimeouts) -> Awaitable[SliceResult]:
        return ranks.run_slice(self._slice, timeouts.for_slice(self._slice.budget_milliseconds))

    def record(self, timeouts: CallTimeouts, seconds: float) -> None:
        timeouts.slices.record(1.0, seconds)
