"""Multiplies tokens with the factors that the experts of a sparse layer share, once for all experts of a token.

These factors are at the side of the hidden states: A of gate and up multiplies the tokens before they are routed, and B
of down multiplies the sum over a token's experts. What is between, each expert's own factors, is in lora_experts.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .adapter import Adapter
from .segment import RowGroup
from .target import DOWN

# Widths are multiples of this, so that rows of 16-bit numbers are multiples of 16 bytes.
_NATIVE_RANK = 8


def width_of(adapters: Sequence[Adapter]) -> int:
    """Returns the columns that products with the shared factors of any of these adapters have; 0 if none shares any."""
    highest = max((adapter.lora.rank for adapter in adapters if adapter.shares_factors), default=0)
    return -(-highest // _NATIVE_RANK) * _NATIVE_RANK


def shared_factors(layer: str, kinds: Sequence[str], adapters: Sequence[Adapter], width: int) -> tuple[Tensor, Tensor]:
    """Copies what some adapters share in a layer. The rows that lower ranks lack are zeros.

    Args:
        layer: its path.
        kinds: its experts' linear layers before their activation.
    Returns:
        A of gate, if there is one, then of up, [kinds * width, hidden], and B^T of down, [width, hidden]; for n
        adapters [n, kinds * width, hidden] and [n, width, hidden].
    """
    pairs = [adapter.vectors.weight_views() for adapter in adapters]
    of_a = [[views[f"{layer}.{kind}"][0] for kind in kinds] for views in pairs]
    return _padded(of_a, width), _padded([[views[f"{layer}.{DOWN}"][1]] for views in pairs], width)


class SharedTerms:
    """The products with what adapters share in a layer, for all tokens of a packed row.

    width: see `width_of`.
    """

    def __init__(
        self, layer: str, kinds: Sequence[str], parts: Sequence[tuple[RowGroup, tuple[Tensor, Tensor]]], width: int
    ) -> None:
        self.width = width
        self._layer, self._kinds, self._parts = layer, kinds, parts

    def reduce(self, x: Tensor, anchor: Tensor) -> Tensor:
        """Returns scale * x A^T of gate, if there is one, then of up, [tokens, kinds * width], for x [tokens, hidden].

        Tokens without such an adapter get zeros. backward adds to the gradients of A.
        """
        if not torch.is_grad_enabled():
            return self._reduced(x)
        reduced = _Reduced.apply(x, anchor, self)
        assert isinstance(reduced, Tensor)
        return reduced

    def add_expanded(self, y: Tensor, z: Tensor) -> Tensor:
        """Adds scale * z B^T of down to y [tokens, hidden] in place, for z [tokens, width], and returns y.

        backward adds to the gradients of B.
        """
        if not torch.is_grad_enabled():
            self._add_expanded(y, z)
            return y
        expanded = _Expanded.apply(y, z, self)
        assert isinstance(expanded, Tensor)
        return expanded

    def _reduced(self, x: Tensor) -> Tensor:
        reduced = x.new_zeros(len(x), len(self._kinds) * self.width)
        for group, (a, _) in self._parts:
            group.matmul.times(x[group.rows], a.mT, out=reduced[group.rows]).mul_(group.matmul.scale)
        return reduced

    def reduce_backward(self, grad: Tensor, x: Tensor) -> Tensor:
        """Adds to the gradients of A, and returns the gradient of x. `grad` is that of `reduce`."""
        grad_x = torch.zeros_like(x)
        for group, (a, _) in self._parts:
            scaled, own = grad[group.rows].clone().mul_(group.matmul.scale), x[group.rows]
            for kind, of_kind in zip(self._kinds, scaled.split(self.width, dim=1), strict=True):
                group.matmul.add_outer(self._gradients(group, kind, 0), of_kind, own)
            group.matmul.times(scaled, a, out=grad_x[group.rows])
        return grad_x

    def _add_expanded(self, y: Tensor, z: Tensor) -> None:
        for group, (_, b) in self._parts:
            y[group.rows].add_(group.matmul.times(z[group.rows].clone().mul_(group.matmul.scale), b))

    def expand_backward(self, grad: Tensor, z: Tensor) -> Tensor:
        """Adds to the gradients of B, and returns the gradient of z. `grad` is that of `add_expanded`."""
        grad_z = torch.zeros_like(z)
        for group, (_, b) in self._parts:
            own, scaled = grad[group.rows], z[group.rows].clone().mul_(group.matmul.scale)
            group.matmul.add_outer(self._gradients(group, DOWN, 1), scaled, own)
            group.matmul.times(own, b.mT, out=grad_z[group.rows]).mul_(group.matmul.scale)
        return grad_z

    def _gradients(self, group: RowGroup, kind: str, side: int) -> list[Tensor]:
        name = f"{self._layer}.{kind}"
        return [adapter.gradients.of_lane().views[name][side] for adapter in group.adapters]


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, terms: SharedTerms) -> Tensor:
        ctx.terms = terms
        ctx.save_for_backward(x)
        return terms._reduced(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return ctx.terms.reduce_backward(grads[0], x), None, None


class _Expanded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, terms: SharedTerms) -> Tensor:
        ctx.terms = terms
        ctx.save_for_backward(z)
        ctx.mark_dirty(y)
        terms._add_expanded(y, z)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (z,) = ctx.saved_tensors
        return grads[0], ctx.terms.expand_backward(grads[0].contiguous(), z), None


def _padded(of_adapters: Sequence[Sequence[Tensor]], width: int) -> Tensor:
    """Returns each adapter's matrices [rank, n] below each other, padded to `width` ranks each: [adapters, ranks, n],
    without the first dimension for a single adapter."""
    num, kinds, like = len(of_adapters), len(of_adapters[0]), of_adapters[0][0]
    padded = like.new_zeros(num, kinds, width, like.shape[1])
    for own, matrices in zip(padded, of_adapters, strict=True):
        for place, matrix in zip(own, matrices, strict=True):
            place[: len(matrix)] = matrix
    stacked = padded.flatten(1, 2)
    return stacked[0] if num == 1 else stacked
