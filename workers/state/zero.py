"""ZeRO stage 2: gradients, optimizer states and float32 weights sharded over ranks that all compute with the whole
weights.

Rajbhandari et al., ZeRO (2020), https://arxiv.org/abs/1910.02054, stage 2.
"""

from collections import deque
from collections.abc import Collection, Hashable
from functools import partial
from math import prod

import torch
from torch import Tensor

from ..parallel.mesh import Mesh, Team
from .flat_params import FlatLayout, Matrix
from .moments import EightBitMoments

# Numbers gathered on the device at a time.
_MOST = 1 << 24


class ZeroShards:
    """Shards vectors [P] of a layout over the ranks along all axes but tp.

    size: numbers of each part. own_range: the range of this rank's part. sums_in_backward: whether gradients are summed
    while a backward pass runs, see BackwardSums, and not once per operation.
    """

    def __init__(self, layout: FlatLayout, mesh: Mesh, sums_in_backward: bool) -> None:
        """Computes this rank's part. The layout's size must be a multiple of `multiple_of`."""
        self._layout, self._mesh = layout, mesh
        self._team = mesh.across("tp")
        self.size = layout.size // self._team.size
        self.own_range = slice(self._team.index * self.size, (self._team.index + 1) * self.size)
        self.sums_in_backward = sums_in_backward

    @staticmethod
    def multiple_of(mesh: Mesh) -> int:
        """Returns a size whose parts are whole blocks of the moments' storage format."""
        return mesh.across("tp").size * EightBitMoments.block

    def reduce_scatter(self, vector: Tensor) -> Tensor:
        """Returns this rank's part of the sum of a vector [P] over all ranks. The vector is overwritten."""
        if self._tp.index > 0:
            for repeated in self._layout.replicated:
                vector[repeated].zero_()
        return self.finish_sum(self._team.reduce_scatter(vector))

    def add_sum(self, matrix: Matrix, gradient: Tensor | None, part: Tensor) -> None:
        """Adds the sum over all ranks but those along tp of a matrix's gradient to the parts of the ranks that keep it.

        All ranks call this together, for the same matrix. The gradient is overwritten.

        Args:
            gradient: float32; None for zeros.
            part: of this rank, [size].
        """
        if matrix.is_replicated_over_tp and self._tp.index > 0:
            return
        first, num = self._layout.start_of(matrix.key), prod(matrix.shape)
        summand = part.new_zeros(num) if gradient is None else gradient.reshape(-1)
        for owner in range(first // self.size, (first + num - 1) // self.size + 1):
            start, stop = max(first, owner * self.size), min(first + num, (owner + 1) * self.size)
            summed = self._team.reduce(summand[start - first : stop - first], owner)
            if owner == self._team.index:
                part[start - self.own_range.start : stop - self.own_range.start] += summed

    def finish_sum(self, part: Tensor) -> Tensor:
        """Adds what the ranks along tp have of this rank's part of a sum over the others, in place."""
        self._tp.all_reduce(self._alike(part))
        return part

    def whole(self, part: Tensor) -> Tensor:
        """Returns the whole vector [P] in host memory."""
        if len(part) <= _MOST:
            return self._team.all_gather(part).cpu()
        whole = torch.empty(self._team.size, len(part), dtype=part.dtype)
        for start in range(0, len(part), _MOST):
            some = slice(start, start + _MOST)
            whole[:, some] = self._team.all_gather(part[some]).unflatten(0, (self._team.size, -1))
        return whole.flatten()

    def all_gather(self, part: Tensor, into: Tensor) -> None:
        """Writes the parts of all ranks into a vector [P], of which `part` may be a view, in its dtype."""
        sent = part.to(into.dtype, copy=True)
        if self._team.size > 1:
            self._team.start_all_gather(sent, into=into).wait()
        else:
            into.copy_(sent)

    def norm(self, part: Tensor) -> float:
        """Returns the norm of the whole vector."""
        alike = self._alike(part)
        squares = torch.tensor([_squares(part) - _squares(alike), _squares(alike)], dtype=torch.float64)
        self._tp.all_reduce(squares[:1])
        return float(self._team.all_reduce(squares).sum().sqrt())

    @property
    def _tp(self) -> Team:
        return self._mesh.along("tp")

    def _alike(self, part: Tensor) -> Tensor:
        """Returns the section of this rank's part that ranks along tp have too."""
        region = self._layout.regions.get((), slice(0, 0))
        first, stop = (min(max(bound - self.own_range.start, 0), len(part)) for bound in (region.start, region.stop))
        return part[first:stop]


def _squares(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2


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
        """Ends the pass; leaves that got no gradient count as zeros."""
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
