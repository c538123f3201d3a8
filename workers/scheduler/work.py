"""Defines the work that waits for a group's ranks."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from ...schemas.errors import OperationError
from ...schemas.sampling import SampleResponse
from ...schemas.training import ForwardBackwardOutput, ForwardBackwardRequest
from ..protocol.calls import Failure, OperationPart, OptimizerStep, SampledPart, SampleJob, SavedContents
from ..protocol.methods import Method
from ..protocol.work_context import WorkContext

T = TypeVar("T")

OnProgress = Callable[[tuple[SampledPart, ...]], None]


@dataclass(frozen=True)
class CallSize:
    """The size of a call of the ranks."""

    tokens: int
    """Tokens of the data in a pass, 0 for other calls."""
    operations: int


@dataclass(eq=False)
class Work(Generic[T]):
    """Work with the future of its answer, which the group sets."""

    answer: "asyncio.Future[T]" = field(init=False)
    context: WorkContext | None = field(init=False, default=None)
    """The request or operation for which the work is done; the group sets it too."""

    def settle(self, answer: T | Failure | OperationError) -> None:
        """Answers the caller, if it waits still."""
        if self.answer.done():
            return
        if isinstance(answer, Failure):
            self.answer.set_exception(answer.error())
        elif isinstance(answer, OperationError):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


@dataclass(eq=False)
class RunWork(Work[T]):
    """Work on a run or adapter, which waits in the group's queue."""

    key: str
    """The run (or adapter), whose work runs in the order of arrival."""
    tenant_id: str
    number: int = field(init=False, default=0)
    """Never reused in a group, whose queue sets it."""
    tokens: int = field(init=False, default=0)
    """Tokens of the data left in a forward or forward_backward, at least 1, because one without any is still work."""
    creates: str | None = field(kw_only=True, default=None)
    """The run or adapter that the ranks hold after it."""
    drops: str | None = field(kw_only=True, default=None)
    """The run or adapter that the ranks no longer hold after it."""
    on_begin: Callable[[CallSize], None] | None = field(kw_only=True, default=None)
    """Called with the size of the call in which the ranks are sent it, or each part of it."""

    @property
    def has_begun(self) -> bool:
        """True if the ranks have received a part of it, so that it must be finished."""
        return False

    @property
    def suspect_position(self) -> float | None:
        """Returns the position up to which its run is suspect if the ranks die with this work; None if it is not."""
        return None


@dataclass(eq=False)
class PassWork(RunWork[ForwardBackwardOutput]):
    """A forward or forward_backward, whose data are put into passes one datum at a time."""

    request: ForwardBackwardRequest
    position: float | None = field(kw_only=True, default=None)
    """The position in the run, if it shares its seq_id with others."""
    lengths: tuple[int, ...] = field(init=False)
    """Tokens of each datum."""
    chunk_start: int = field(init=False, default=0)
    """Index of the first datum in the current pass."""
    num_taken: int = field(init=False, default=0)
    """Number of data, from the first, that are in passes already."""

    def __post_init__(self) -> None:
        self.lengths = tuple(len(datum.tokens) for datum in self.request.data)
        self.tokens = max(1, sum(self.lengths))

    @property
    def has_begun(self) -> bool:
        return self.num_taken > 0

    @property
    def suspect_position(self) -> float | None:
        return self.request.seq_id if self.position is None else self.position

    @property
    def is_taken(self) -> bool:
        """True if the current pass is its last one."""
        return self.num_taken == len(self.lengths)

    @property
    def part(self) -> OperationPart:
        """Returns its chunk in the current pass."""
        request = self.request
        if self.chunk_start > 0 or not self.is_taken:
            request = replace(request, data=request.data[self.chunk_start : self.num_taken])
        return OperationPart(self.number, request, self.chunk_start, self.is_taken)

    def take(self, enough: float, room: float) -> int:
        """Takes data until they have `enough` tokens: the first one always, further ones only if they fit in `room`.

        Returns:
            their tokens.
        """
        tokens = 0
        while not self.is_taken and (not tokens or (tokens < enough and tokens + self.lengths[self.num_taken] <= room)):
            tokens += self.lengths[self.num_taken]
            self.num_taken += 1
        self.tokens -= tokens
        return tokens


@dataclass(eq=False)
class StepWork(RunWork[dict[str, float]]):
    """An optimizer step, which runs together with those of other runs."""

    step: OptimizerStep

    @property
    def suspect_position(self) -> float | None:
        return self.step.seq_id


@dataclass(eq=False)
class MethodWork(RunWork[T]):
    """A call of a worker's method for one run or adapter."""

    method: Method[T]
    arguments: tuple[object, ...] = ()


@dataclass(eq=False)
class SnapshotWork(RunWork[None]):
    """Writes the run as of the work before it into `directory`, while the worker does other work."""

    directory: str
    contents: SavedContents = "all"


@dataclass(eq=False)
class SamplingWork(Work[SampleResponse]):
    """A sampling job."""

    job: SampleJob
    on_progress: OnProgress | None = None
    num_slices: int = 0
    """Slices that it has completed."""

    @property
    def safe_position(self) -> int:
        """Returns a number of slices after which a retry is certainly past this point.

        Slices of a retry may do half as much; and the slice in progress and the two short ones after a pause count.
        """
        return 2 * self.num_slices + 3


AnyWork = RunWork[Any] | SamplingWork
