"""The A and B matrices of some adapters at one site, stacked for products."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from .adapter import Adapter
from .segmented_matmul import SegmentedMatmul


@dataclass(frozen=True, eq=False)
class LinearSite:
    """Linear layers of one input, by name, whose outputs are concatenated.

    num_frozen: the columns after them that no adapter adapts.
    """

    names: tuple[str, ...]
    out_features: tuple[int, ...]
    num_frozen: int = 0

    @property
    def num_columns(self) -> int:
        return sum(self.out_features) + self.num_frozen

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """The columns of each layer's output."""
        return consecutive_slices(self.out_features)


@dataclass(frozen=True)
class FoldedFactors:
    """Holds both factors of all layers of a site, for products without gradients: x a b are the terms, scale included.

    a is [in, R] and b [R, out], or [n, in, R] and [n, R, out] for n adapters. R is the sum of the layers' ranks, so b
    is zero but for one block per layer.
    """

    a: Tensor
    b: Tensor


class StackedFactors:
    """Holds A and B of these adapters, stacked as `SegmentedMatmul.stack` does; stale as soon as the weights change."""

    def __init__(self, site: LinearSite, adapters: Sequence[Adapter], rows: SegmentedMatmul) -> None:
        self._site, self._adapters, self._stack = site, adapters, rows.stack

    @cached_property
    def a(self) -> Tensor:
        """The stacked A: [R, in] or [n, R, in]."""
        return self._new_a()

    @cached_property
    def bs(self) -> list[Tensor]:
        """B^T of each layer: [rank, out] or [n, rank, out]."""
        return self._stacks(1)

    @cached_property
    def ranks(self) -> tuple[slice, ...]:
        """The part of R that each layer has."""
        return consecutive_slices([b.shape[-2] for b in self.bs])

    @cached_property
    def folded(self) -> FoldedFactors:
        """The folded factors. They are copies, so they may be kept while the adapters are offloaded."""
        a, bs = self._new_a().mT.clone(memory_format=torch.contiguous_format), self._stacks(1)
        b = a.new_zeros(*a.shape[:-2], a.shape[-1], self._site.num_columns)
        for ranks, columns, of_layer in zip(
            consecutive_slices([b.shape[-2] for b in bs]), self._site.columns, bs, strict=True
        ):
            b[..., ranks, columns] = of_layer
        return FoldedFactors(a, b.mul_(self._scales(b)))

    def _new_a(self) -> Tensor:
        stacks = self._stacks(0)
        return stacks[0] if len(stacks) == 1 else torch.cat(stacks, dim=-2)

    def _stacks(self, which: int) -> list[Tensor]:
        """Returns, for each layer, the adapters' A (which=0) or B^T (which=1)."""
        matrices = [adapter.vectors.weight_views() for adapter in self._adapters]
        return [self._stack([each[name][which] for each in matrices]) for name in self._site.names]

    def _scales(self, like: Tensor) -> Tensor | float:
        """Returns the scales, in float32 even if the factors are not, like products with gradients do."""
        if like.dim() == 2:
            return self._adapters[0].scale
        return torch.tensor([adapter.scale for adapter in self._adapters], device=like.device).view(-1, 1, 1)


def consecutive_slices(sizes: Sequence[int]) -> tuple[slice, ...]:
    """Returns consecutive slices of these sizes."""
    return tuple(slice(stop - size, stop) for stop, size in zip(accumulate(sizes), sizes, strict=True))
