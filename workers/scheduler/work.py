"""Work: what waits for a group's ranks and who waits for its answer; and Line, the works of one run in their order."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ...schemas.training import ForwardBackwardRequest
from ..protocol.verbs import Contents, Step


@dataclass(frozen=True)
class Verb:
    """A call that concerns one run or adapter alone. creates, drops: the id that the worker holds (or not) after it."""

    method: str
    arguments: tuple[object, ...] = ()
    creates: str | None = None
    drops: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """The run as of the works before it, which the worker writes into `directory` while it goes on."""

    directory: str
    contents: Contents = "all"


Item = ForwardBackwardRequest | Step | Verb | Snapshot
ItemT = TypeVar("ItemT", bound=Item)


@dataclass(eq=False)
class Work(Generic[ItemT]):
    """key: the run (or adapter) whose works are done in the order in which they came. tenant_id: whose it is."""

    key: str
    tenant_id: str
    item: ItemT
    answer: "asyncio.Future[Any]"

    @property
    def begun(self) -> bool:
        """Whether the ranks have had a part of it, so that it has to go on to its end."""
        return False


@dataclass(eq=False)
class PassWork(Work[ForwardBackwardRequest]):
    """A forward or forward_backward, which goes into passes datum by datum.

    lengths: of its data. num_taken: its first data, which are in passes already. tokens: of the others; an operation
    without tokens counts as one, for it is work all the same.
    """

    operation_id: int
    lengths: tuple[int, ...] = field(init=False)
    num_taken: int = field(init=False, default=0)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = tuple(len(datum.tokens) for datum in self.item.data)
        self.tokens = max(1, sum(self.lengths))

    @property
    def begun(self) -> bool:
        return self.num_taken > 0

    @property
    def taken(self) -> bool:
        return self.num_taken == len(self.lengths)

    def take(self, enough: float, room: float) -> int:
        """Takes data until they have `enough` tokens: the first in any case, the others while there is room.

        Returns their tokens.
        """
        tokens = 0
        while not self.taken and (not tokens or (tokens < enough and tokens + self.lengths[self.num_taken] <= room)):
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
class Line:
    """Only its head is ready: what comes behind a step or verb waits until that has been answered."""

    key: str
    tenant_id: str
    works: deque[Work[Any]] = field(default_factory=deque)

    @property
    def head(self) -> Work[Any]:
        return self.works[0]

    @property
    def comes_back(self) -> bool:
        """Whether a step, which goes before the next pass, is all that its next operation waits for."""
        return len(self.works) > 1 and isinstance(self.head.item, Step) and isinstance(self.works[1], PassWork)

    @property
    def operation(self) -> PassWork:
        assert isinstance(self.head, PassWork)
        return self.head
