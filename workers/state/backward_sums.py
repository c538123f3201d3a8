"""Sums the gradients of a backward pass over ranks while it runs, one matrix at a time."""

from collections import deque
from collections.abc import Collection, Hashable
from functools import partial

from torch import Tensor

from .flat_params import FlatLayout
from .zero import ZeroShards


class BackwardSums:
    """Sums each matrix's gradient over ranks once it is complete, adds it to the part of the ranks that keep it, and
    frees it.

    Each rank sums all matrices, the last of the layout first; a gradient that is complete before its turn waits. So
    ranks that have no pass make the same calls. Passes of the same model must complete gradients in the same order for
    all data, also relative to other exchanges: otherwise ranks wait for each other forever.
    """

    def __init__(self, layout: FlatLayout, zero: ZeroShards, part: Tensor) -> None:
        """Begins a pass. Sums are added to `part`, float32, this rank's."""
        self._zero, self._part = zero, part
        self._remaining = deque(reversed(layout.matrices))
        self._leaves: dict[Hashable, Tensor] = {}
        self._complete: dict[Hashable, Tensor | None] = {}

    def watch(self, key: Hashable, leaf: Tensor) -> None:
        """Sums the gradient, float32, of this leaf of autograd, which has the weights of a matrix."""
        leaf.register_post_accumulate_grad_hook(partial(self._take, key))
        self._leaves[key] = leaf

    def sum_collected(self, keys: Collection[Hashable]) -> None:
        """Sums the gradients of these leaves, which were computed without autograd; zeros where there is none."""
        for key in keys:
            self._take(key, self._leaves[key])

    def finish(self) -> None:
        """Ends the pass, in which leaves without a gradient had none."""
        self._leaves = {}
        while self._remaining:
            self._sum_next()

    def _take(self, key: Hashable, leaf: Tensor) -> None:
        self._complete[key], leaf.grad = leaf.grad, None
        while self._remaining and self._remaining[0].key in self._complete:
            self._sum_next()

    def _sum_next(self) -> None:
        matrix = self._remaining.popleft()
        self._zero.add_sum(matrix, self._complete.pop(matrix.key, None), self._part)
