"""The experts of a sparse layer: tokens go to the ranks that have theirs, and run sorted by expert in grouped products.

Fedus et al., Switch Transformers (2021); Lepikhin et al., GShard (2020), section 3.2.
"""

from typing import Any

import torch
from torch import Tensor

from .fused import swiglu
from .parallel.collectives import exchanged, summed
from .parallel.mesh import Team


class RoutedExperts:
    """A router and experts of transformers, whose weights lie one after the other: gate_up_proj [experts, 2 * features,
    hidden], the gates before the others, and down_proj [experts, hidden, features]. Of a team each rank has some."""

    def __init__(self, block: Any, team: Team) -> None:
        self._router, self._experts, self._team = block.gate, block.experts, team

    def forward(self, x: Tensor, are_alike: bool) -> Tensor:
        """x [tokens, hidden] -> the same. are_alike: whether all ranks of the team have the same tokens."""
        _, weights, chosen = self._router(x)
        if are_alike or self._team.size == 1:
            return summed(self._of_own(x, weights, chosen), self._team)
        return self._of_all(x, weights, chosen)

    @property
    def _num_own(self) -> int:
        return self._experts.gate_up_proj.shape[0]

    def _of_own(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The part of this rank's experts in the result. weights, chosen: [tokens, experts of each]."""
        number = chosen.flatten() - self._team.index * self._num_own
        if self._team.size > 1:
            is_own = (number >= 0) & (number < self._num_own)
            number = torch.where(is_own, number, self._num_own)  # behind all others
        order = number.argsort(stable=True)
        counts = number.bincount(minlength=self._num_own)[: self._num_own]
        return _weighted(self._mlp(x[order // chosen.shape[1]], counts), order, weights)

    def _of_all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The result, whose pairs of token and expert have been to the ranks of their experts."""
        number = chosen.flatten()
        order = number.argsort(stable=True)
        counts = number.bincount(minlength=self._num_own * self._team.size)
        # [ranks, own experts]: how many come from each rank for each of this one's experts.
        arriving = self._team.exchanged(counts).view(self._team.size, -1)
        sent, received = counts.view(self._team.size, -1).sum(1).tolist(), arriving.sum(1).tolist()
        pairs = exchanged(x[order // chosen.shape[1]], self._team, sent, received)
        by_expert = _expert_of_each(arriving).argsort(stable=True)
        of_pairs = _scattered(self._mlp(pairs[by_expert], arriving.sum(0)), by_expert)
        return _weighted(exchanged(of_pairs, self._team, received, sent), order, weights)

    def _mlp(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [pairs, hidden] sorted by expert; counts: of each of this rank's. Of pairs beyond these, zeros."""
        gate, up = grouped_product(x, self._experts.gate_up_proj, counts).chunk(2, dim=-1)
        return grouped_product(swiglu(gate, up), self._experts.down_proj, counts)


def grouped_product(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """x [rows, in], the first rows times the first weight's transpose and so on: [rows, out].

    weights [groups, out, in], frozen; counts int64 [groups]: rows of each, maybe none. Rows of no group become zeros.
    """
    if not torch.is_grad_enabled():
        return _grouped(x, weights.transpose(1, 2), counts)
    y = _GroupedProduct.apply(x, weights, counts)
    assert isinstance(y, Tensor)
    return y


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.counts = counts
        return _grouped(x, weights.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors
        return _grouped(grads[0].contiguous(), weights, ctx.counts), None, None


def _grouped(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """matrices [groups, in, out]."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        stops = counts.cumsum(0)
        y = torch._grouped_mm(x, matrices, offs=stops.int())  # pyright: ignore[reportPrivateImportUsage]
        return y.masked_fill_(torch.arange(len(x), device=x.device)[:, None] >= stops[-1], 0)
    y, start = x.new_zeros(len(x), matrices.shape[2]), 0
    for matrix, count in zip(matrices, counts.tolist(), strict=True):
        if count:
            torch.mm(x[start : start + count], matrix, out=y[start : start + count])
        start += count
    return y


def _expert_of_each(arriving: Tensor) -> Tensor:
    """arriving [ranks, experts], how many rows come from each for each -> of every row, as they come, its expert."""
    experts = torch.arange(arriving.shape[1], device=arriving.device).repeat(arriving.shape[0])
    return experts.repeat_interleave(arriving.flatten())


def _weighted(of_pairs: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """[pairs, hidden] of the pairs in this order -> their weighted sum [tokens, hidden] by token."""
    by_token = _scattered(of_pairs, order).view(*weights.shape, -1)
    return (by_token * weights.unsqueeze(-1)).sum(1).to(of_pairs.dtype)


def _scattered(x: Tensor, order: Tensor) -> Tensor:
    """Row i to place order[i], a permutation."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return x[places]
