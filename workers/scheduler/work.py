"""Defines the work that waits for a group's ranks, and the queue of one run's work."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ...schemas.training import ForwardBackwardRequest
from ..protocol.calls import OptimizerStep, SavedContents


@dataclass(frozen=True)
class WorkerCall:
    """A call of a worker's method for one run or adapter.

    creates, drops: the id that the worker holds, or no longer holds, after it.
    """

    method: str
    arguments: tuple[object, ...] = ()
    creates: str | None = None
    drops: str | None = None


@dataclass(frozen=True)
class SnapshotRequest:
    """Writes the run as of the work before it into `directory`, while the worker does other work."""

    directory: str
    contents: SavedContents = "all"


Item = ForwardBackwardRequest | OptimizerStep | WorkerCall | SnapshotRequest
ItemT = TypeVar("ItemT", bound=Item)


@dataclass(eq=False)
class WorkItem(Generic[ItemT]):
    """An item that waits for the ranks, with the future of its answer.

    key: the run (or adapter), whose work runs in the order of arrival.
    """

    key: str
    tenant_id: str
    item: ItemT
    answer: "asyncio.Future[Any]"

    @property
    def has_begun(self) -> bool:
        """True if the ranks have received a part of it, so that it must be finished."""
        return False


@dataclass(eq=False)
class PassWorkItem(WorkItem[ForwardBackwardRequest]):
    """A forward or forward_backward, whose data are put into passes one datum at a time.

    lengths: tokens of each datum.
    num_taken: how many data, from the first, are in passes already.
    tokens: of the data left; at least 1, because an operation without tokens is still work.
    """

    operation_id: int
    lengths: tuple[int, ...] = field(init=False)
    num_taken: int = field(init=False, default=0)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = tuple(len(datum.tokens) for datum in self.item.data)
        self.tokens = max(1, sum(self.lengths))

    @property
    def has_begun(self) -> bool:
        return self.num_taken > 0

    @property
    def is_taken(self) -> bool:
        return self.num_taken == len(self.lengths)

    def take(self, enough: float, room: float) -> int:
        """Takes data until they have `enough` tokens: the first one always, further ones only if they fit in `room`.

        Returns:
            their tokens.
        """
        tokens = 0
        while not self.is_taken and (not tokens or (tokens < enough and tokens + self.lengths[self.num_taken] <= room)):
            tokens += self.lengths[self.num_taken]
            self.num_taken += 1
        return self._pay(tokens)

    def take_all(self) -> int:
        self.num_taken = len(self.lengths)
        return self._pay(self.tokens)

    def _pay(self, tokens: int) -> int:
        self.tokens -= tokens
        return tokens


@dataclass(eq=False)
class RunQueue:
    """Holds the work of one run, in order. Only the head can run: an optimizer step or verb blocks what follows until
    answered.
    """

    key: str
    tenant_id: str
    works: deque[WorkItem[Any]] = field(default_factory=deque)

    @property
    def head(self) -> WorkItem[Any]:
        return self.works[0]

    @property
    def awaits_step_only(self) -> bool:
        """True if the run's next forward_backward waits only for an optimizer step, which runs before the next pass."""
        return (
            len(self.works) > 1
            and isinstance(self.head.item, OptimizerStep)
            and isinstance(self.works[1], PassWorkItem)
        )

    @property
    def operation(self) -> PassWorkItem:
        assert isinstance(self.head, PassWorkItem)
        return self.head
