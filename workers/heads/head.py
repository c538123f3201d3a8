"""Head: what gives a number, or several, for each last hidden state; and its way through the rows of a micro-batch."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from ..lora import Segment


class HeadPass(Protocol):
    """A head on its way through n rows of last hidden states, some after the others."""

    @property
    def chunk_rows(self) -> int:
        """How many are scored at a time."""
        ...

    def scores(self, rows: slice) -> Tensor:
        """float32, of the shape of their targets: [m] or [m, K]."""
        ...

    def backward(self, gradient: Tensor, hidden_gradient: Tensor) -> None:
        """gradient: by the scores that were given last. Writes the one by their hidden states [m, hidden], and adds
        those by what adapters learn to their scratch."""
        ...


class Head(Protocol):
    """Stateless but for frozen weights."""

    def one_of(self, number: int) -> "Head":
        """One of so many that run at once, which have together as much memory as one alone."""
        ...

    def in_use(self) -> AbstractContextManager[None]:
        """Inside, this rank has all that `over` needs. Of all ranks at once."""
        ...

    def over(self, hidden: Tensor, segments: Sequence[Segment], targets: Tensor) -> HeadPass:
        """hidden [n, hidden]; targets int64 [n] or [n, K]. segments: whose part of the head each row gets, in order."""
        ...


def chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    return (slice(i, min(i + chunk_rows, num_rows)) for i in range(0, num_rows, chunk_rows))
