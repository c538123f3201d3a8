"""Defines the work that waits for a group's ranks, and the queue of one run's work."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ...schemas.errors import OperationError
from ...schemas.training import ForwardBackwardRequest
from ..protocol.calls import Failure, OperationPart, OptimizerStep, SampledPart, SampleJob, SavedContents
from ..protocol.methods import RUNS_OFFLOADED
from ..protocol.timeouts import cost_of
from ..protocol.work_context import WorkContext

OnProgress = Callable[[tuple[SampledPart, ...]], None]


@dataclass(frozen=True)
class CallSize:
    """The size of a call of the ranks. tokens: of the data in a pass, 0 of other calls."""

    tokens: int
    operations: int


@dataclass(eq=False)
class AwaitedWork:
    """Work with the future of its answer, which the group sets.

    context: for whom it is done; the group sets it too.
    """

    answer: "asyncio.Future[Any]" = field(init=False)
    context: WorkContext | None = field(init=False, default=None)

    def settle(self, answer: object) -> None:
        """Sets the answer: a result, a Failure, or an OperationError. Does nothing if no caller waits any more."""
        if self.answer.done():
            return
        if isinstance(answer, Failure):
            self.answer.set_exception(answer.error())
        elif isinstance(answer, OperationError):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


@dataclass(eq=False)
class WorkItem(AwaitedWork):
    """Work that waits for the ranks.

    key: the run (or adapter), whose work runs in the order of arrival.
    number: never reused in a group, whose queue sets it.
    tokens: of the data left in a forward or forward_backward, at least 1, because one without tokens is still work.
    creates, drops: the run or adapter that the ranks hold, or no longer hold, after it.
    on_begin: called with the size of the call in which the ranks are sent it, or each part of it.
    """

    key: str
    tenant_id: str
    number: int = field(init=False, default=0)
    tokens: int = field(init=False, default=0)
    creates: str | None = field(kw_only=True, default=None)
    drops: str | None = field(kw_only=True, default=None)
    on_begin: Callable[[CallSize], None] | None = field(kw_only=True, default=None)

    @property
    def has_begun(self) -> bool:
        """True if the ranks have received a part of it, so that it must be finished."""
        return False

    @property
    def suspect_position(self) -> int | None:
        """Returns the seq_id up to which its run is suspect if the ranks die with this work; None if it is not."""
        return None


@dataclass(eq=False)
class PassWork(WorkItem):
    """A forward or forward_backward, whose data are put into passes one datum at a time.

    lengths: tokens of each datum.
    num_taken: how many data, from the first, are in passes already; those from chunk_start on are in the current pass.
    """

    request: ForwardBackwardRequest
    lengths: tuple[int, ...] = field(init=False)
    chunk_start: int = field(init=False, default=0)
    num_taken: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.lengths = tuple(len(datum.tokens) for datum in self.request.data)
        self.tokens = max(1, sum(self.lengths))

    @property
    def has_begun(self) -> bool:
        return self.num_taken > 0

    @property
    def suspect_position(self) -> int | None:
        return self.request.seq_id

    @property
    def is_taken(self) -> bool:
        """True if the current pass is its last one."""
        return self.num_taken == len(self.lengths)

    @property
    def cost(self) -> float:
        """Returns the cost of its chunk in the current pass, as `cost_of`."""
        return cost_of(self.lengths[self.chunk_start : self.num_taken], self.request.forward_only)

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

    def take_all(self) -> int:
        tokens, self.tokens, self.num_taken = self.tokens, 0, len(self.lengths)
        return tokens


@dataclass(eq=False)
class StepWork(WorkItem):
    """An optimizer step, which runs together with those of other runs."""

    step: OptimizerStep

    @property
    def suspect_position(self) -> int | None:
        return self.step.seq_id


@dataclass(eq=False)
class MethodWork(WorkItem):
    """A call of a worker's method for one run or adapter."""

    method: str
    arguments: tuple[object, ...] = ()

    @property
    def needs_device(self) -> bool:
        return self.method not in RUNS_OFFLOADED


@dataclass(eq=False)
class SnapshotWork(WorkItem):
    """Writes the run as of the work before it into `directory`, while the worker does other work."""

    directory: str
    contents: SavedContents = "all"


@dataclass(eq=False)
class SamplingWork(AwaitedWork):
    """A sampling job.

    num_slices: slices that it has completed.
    """

    job: SampleJob
    on_progress: OnProgress | None = None
    num_slices: int = 0

    @property
    def safe_position(self) -> int:
        """Returns a number of slices after which a retry is certainly past this point.

        Slices of a retry may do half as much; and the slice in progress and the two short ones after a pause count.
        """
        return 2 * self.num_slices + 3


@dataclass(eq=False)
class RunQueue:
    """Holds the work of one run, in order.

    Only the head can run: an optimizer step or a method blocks what follows until it is answered.
    """

    key: str
    tenant_id: str
    works: deque[WorkItem] = field(default_factory=deque)

    @property
    def head(self) -> WorkItem:
        return self.works[0]

    @property
    def awaits_step_only(self) -> bool:
        """True if the run's next forward_backward waits only for an optimizer step, which runs before the next pass."""
        return len(self.works) > 1 and isinstance(self.head, StepWork) and isinstance(self.works[1], PassWork)

    @property
    def operation(self) -> PassWork:
        assert isinstance(self.head, PassWork)
        return self.head
