"""The interface of a head, which computes one or more numbers from each final hidden state, and of its pass over the
rows of a micro-batch."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from ..lora import Segment


class HeadPass(Protocol):
    """A head's pass over n rows of final hidden states, in chunks."""

    @property
    def chunk_rows(self) -> int:
        """Returns how many rows to score at a time."""
        ...

    def scores(self, rows: slice) -> Tensor:
        """Returns the scores, float32, in the shape of the rows' targets: [m] or [m, K]."""
        ...

    def backward(self, gradient: Tensor, hidden_gradient: Tensor) -> None:
        """Computes the gradients of the rows that were scored last.

        Writes the gradient by their hidden states, [m, hidden], and adds those by trained weights to the models'
        scratch.

        Args:
            gradient: by the scores.
        """
        ...


class Head(Protocol):
    """Has no state but frozen weights."""

    def split_budget(self, number: int) -> "Head":
        """Returns one of `number` heads that run concurrently and share the memory budget of a single one."""
        ...

    def gathered(self) -> AbstractContextManager[None]:
        """Holds everything that `start_pass` needs on this rank while inside. All ranks enter together."""
        ...

    def start_pass(self, hidden: Tensor, segments: Sequence[Segment], targets: Tensor) -> HeadPass:
        """Starts a pass.

        Args:
            hidden: [n, hidden].
            segments: in order, the model whose part of the head each row uses.
            targets: int64, [n] or [n, K].
        """
        ...


def chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    return (slice(i, min(i + chunk_rows, num_rows)) for i in range(0, num_rows, chunk_rows))
