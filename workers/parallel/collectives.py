"""Collectives that gradients pass through: the backward of each is the transpose of its forward.

Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al., Reducing activation recomputation in large
transformer models (2022), section 4.2.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .expert_counts import ExpertCounts
from .mesh import Team


def copy_to_team(x: Tensor, team: Team) -> Tensor:
    """Returns x, which is equal on all ranks. Its gradient is summed over the ranks."""
    return x if team.size == 1 or not torch.is_grad_enabled() else _apply(_Copied, x, team)


def reduce_from_team(x: Tensor, team: Team) -> Tensor:
    """Returns the sum over all ranks; the gradient passes unchanged. Sums in place if gradients are disabled."""
    if team.size == 1:
        return x
    return _apply(_Summed, x, team) if torch.is_grad_enabled() else team.all_reduce(x)


def gather_rows(x: Tensor, team: Team) -> Tensor:
    """Gathers [n, ...] of each rank to [size * n, ...]. The gradient of a rank's rows is summed over all ranks."""
    return x if team.size == 1 else _apply(_JoinedRows, x, team)


def reduce_scatter_rows(x: Tensor, team: Team) -> Tensor:
    """Reduces [size * n, ...] over all ranks and scatters the sum, [n, ...] to each rank."""
    return x if team.size == 1 else _apply(_SummedRows, x, team)


def gather_replicated_rows(x: Tensor, team: Team) -> Tensor:
    """Gathers [n, ...] of each rank to [size * n, ...]. Each rank takes its rows of the gradient, which must be equal
    on all ranks."""
    return x if team.size == 1 else _apply(_JoinedAlike, x, team)


def own_rows(x: Tensor, team: Team) -> Tensor:
    """Returns this rank's [n, ...] of [size * n, ...], which is equal on all ranks. The gradients of all ranks are
    gathered."""
    return x if team.size == 1 else _apply(_OwnRows, x, team)


def all_to_all_rows(x: Tensor, team: Team, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
    """Calls Team.all_to_all; gradients travel back the same way."""
    return x if team.size == 1 else _apply(_Exchanged, x, team, sent, received)


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


def _apply(function: Any, *arguments: Any) -> Tensor:
    result = function.apply(*arguments)
    assert isinstance(result, Tensor)
    return result


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.team.all_reduce(_own(grads[0])), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        return team.all_reduce(_own(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _JoinedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return team.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.team.reduce_scatter(grads[0]), None


class _SummedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return team.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.team.all_gather(grads[0]), None


class _JoinedAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return team.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.team.part(grads[0]), None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return team.part(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.team.all_gather(grads[0]), None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team, sent: list[int] | None, received: list[int] | None) -> Tensor:
        ctx.team, ctx.sent, ctx.received = team, sent, received
        return team.all_to_all(x, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.team.all_to_all(grads[0], ctx.received, ctx.sent), None, None, None


def _own(x: Tensor) -> Tensor:
    """Returns a copy that may be overwritten, since autograd still refers to x."""
    return x.clone(memory_format=torch.contiguous_format)
