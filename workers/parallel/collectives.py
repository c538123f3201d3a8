"""Collectives that gradients pass through: the backward of each is the transpose of its forward.

Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al., Reducing activation recomputation in large
transformer models (2022), section 4.2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .expert_counts import ExpertCounts
from .mesh import Team

Exchange = Callable[[Tensor], Tensor]


def copy_to_team(x: Tensor, team: Team) -> Tensor:
    """Returns x, which is equal on all ranks. Its gradient is summed over the ranks."""
    if team.size == 1 or not torch.is_grad_enabled():
        return x
    return _apply(x, lambda x: x.view_as(x), partial(_sum, team=team))


def reduce_from_team(x: Tensor, team: Team) -> Tensor:
    """Returns the sum over all ranks; the gradient passes unchanged. Sums in place if gradients are disabled."""
    if team.size == 1:
        return x
    return _apply(x, partial(_sum, team=team), lambda grad: grad) if torch.is_grad_enabled() else team.all_reduce(x)


def gather_rows(x: Tensor, team: Team) -> Tensor:
    """Gathers [n, ...] of each rank to [size * n, ...]. The gradient of a rank's rows is summed over all ranks."""
    return x if team.size == 1 else _apply(x, team.all_gather, team.reduce_scatter)


def reduce_scatter_rows(x: Tensor, team: Team) -> Tensor:
    """Reduces [size * n, ...] over all ranks and scatters the sum, [n, ...] to each rank."""
    return x if team.size == 1 else _apply(x, team.reduce_scatter, team.all_gather)


def gather_replicated_rows(x: Tensor, team: Team) -> Tensor:
    """Gathers [n, ...] of each rank to [size * n, ...]. Each rank takes its rows of the gradient, which must be equal
    on all ranks."""
    return x if team.size == 1 else _apply(x, team.all_gather, team.part)


def own_rows(x: Tensor, team: Team) -> Tensor:
    """Returns this rank's [n, ...] of [size * n, ...], which is equal on all ranks. The gradients of all ranks are
    gathered."""
    return x if team.size == 1 else _apply(x, team.part, team.all_gather)


def all_to_all_rows(x: Tensor, team: Team, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
    """Calls Team.all_to_all; gradients travel back the same way."""
    if team.size == 1:
        return x
    there = partial(team.all_to_all, sent=sent, received=received)
    return _apply(x, there, partial(team.all_to_all, sent=received, received=sent))


@dataclass(frozen=True)
class ResidualStream:
    """The layout of the residual stream over a tensor-parallel team.

    sharded: whether each rank has only its tokens of the stream, and gathers them for the linear layers; otherwise each
    has all tokens.
    ep_ranks_share_tokens: whether the ranks of an expert-parallel team have the same tokens.
    expert_counts: where sparse layers count the tokens of each expert; None if nothing reads that.
    """

    team: Team
    sharded: bool
    ep_ranks_share_tokens: bool
    expert_counts: ExpertCounts | None = None

    def enter(self, x: Tensor, is_replicated: bool) -> Tensor:
        """Moves x from the stream into a part of a layer, which needs all tokens.

        Args:
            is_replicated: whether all ranks have all weights of the part and compute the same; otherwise its first
                layers are split by their outputs.
        """
        if not self.sharded:
            return x if is_replicated or self.team.size == 1 else copy_to_team(x, self.team)
        return gather_replicated_rows(x, self.team) if is_replicated else gather_rows(x, self.team)

    def leave(self, x: Tensor, is_replicated: bool) -> Tensor:
        """Moves x back to the stream. The outputs of the part's last layers are summed, unless the part is
        replicated."""
        if not self.sharded:
            return x if is_replicated or self.team.size == 1 else reduce_from_team(x, self.team)
        return own_rows(x, self.team) if is_replicated else reduce_scatter_rows(x, self.team)


class _Collective(torch.autograd.Function):
    """Calls one function on x, and its transpose on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Exchange, transpose: Exchange) -> Tensor:
        ctx.transpose = transpose
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grads[0]), None, None


def _apply(x: Tensor, function: Exchange, transpose: Exchange) -> Tensor:
    result = _Collective.apply(x, function, transpose)
    assert isinstance(result, Tensor)
    return result


def _sum(x: Tensor, team: Team) -> Tensor:
    """Returns the sum over all ranks, in a new tensor: autograd still refers to x."""
    return team.all_reduce(x.clone(memory_format=torch.contiguous_format))
