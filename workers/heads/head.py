"""The interface of a head, which computes one or more numbers from each final hidden state, and of its pass over the
tokens of a micro-batch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from ..lora import Segment


class HeadPass(Protocol):
    """A head's pass over the final hidden states of n tokens, in chunks of m."""

    @property
    def chunk_tokens(self) -> int:
        """Returns how many tokens to score at a time."""
        ...

    def scores(self, tokens: slice) -> Tensor:
        """Returns the scores, float32, in the shape of the tokens' targets: [m] or [m, K]."""
        ...

    def backward(self, gradient: Tensor, hidden_gradient: Tensor) -> None:
        """Computes the gradients of the tokens that were scored last.

        Adds the gradients by trained weights to the models' scratch.

        Args:
            gradient: by the scores, in their shape.
            hidden_gradient: receives the gradient by the hidden states, [m, hidden].
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
            segments: in order, the model whose part of the head each token uses.
            targets: int64, [n] or [n, K].
        """
        ...
