"""Exchanges between the ranks of a team that gradients pass through, each the transpose of another.

Shoeybi et al., Megatron-LM (2019), section 3; Korthikanti et al., Reducing activation recomputation in large
transformer models (2022), section 4.2.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .mesh import Team


def copied(x: Tensor, team: Team) -> Tensor:
    """x, which all ranks have alike; its gradient is the sum of theirs."""
    return x if team.size == 1 or not torch.is_grad_enabled() else _apply(_Copied, x, team)


def summed(x: Tensor, team: Team) -> Tensor:
    """The sum over all ranks, whose gradient each of them has alike. Without gradients in place."""
    if team.size == 1:
        return x
    return _apply(_Summed, x, team) if torch.is_grad_enabled() else team.sum(x)


def joined_rows(x: Tensor, team: Team) -> Tensor:
    """[n, ...] of each rank -> [size * n, ...]; each gets the sum of the gradients by its rows."""
    return x if team.size == 1 else _apply(_JoinedRows, x, team)


def summed_rows(x: Tensor, team: Team) -> Tensor:
    """[size * n, ...] -> this rank's [n, ...] of the sum over all ranks."""
    return x if team.size == 1 else _apply(_SummedRows, x, team)


def joined_alike(x: Tensor, team: Team) -> Tensor:
    """[n, ...] of each rank -> [size * n, ...]; each gets its rows of the gradient, which all ranks have alike."""
    return x if team.size == 1 else _apply(_JoinedAlike, x, team)


def own_rows(x: Tensor, team: Team) -> Tensor:
    """[size * n, ...], which all ranks have alike -> this rank's [n, ...]; each gets the gradients of all."""
    return x if team.size == 1 else _apply(_OwnRows, x, team)


def exchanged(x: Tensor, team: Team, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
    """As Team.exchanged; the gradients go back the same way."""
    return x if team.size == 1 else _apply(_Exchanged, x, team, sent, received)


@dataclass(frozen=True)
class Stream:
    """How the residual stream, between the layers' linear parts, lies on the ranks of a tensor-parallel team.

    sharded: each rank has its tokens of it, which it gathers for the linear layers; else each has all. are_alike:
    whether the ranks of an expert-parallel team have the same tokens.
    """

    team: Team
    sharded: bool
    are_alike: bool

    def enter(self, x: Tensor, is_replicated: bool) -> Tensor:
        """From the stream to a part of a layer, which wants all tokens. is_replicated: whether all ranks have all
        of its weights, and so do the same; else the first layers there share out their outputs."""
        if is_replicated:
            return joined_alike(x, self.team) if self.sharded else x
        return joined_rows(x, self.team) if self.sharded else copied(x, self.team)

    def leave(self, x: Tensor, is_replicated: bool) -> Tensor:
        """Back to the stream, from the last layers there, whose outputs are to be added up unless all do the same."""
        if is_replicated:
            return own_rows(x, self.team) if self.sharded else x
        return summed_rows(x, self.team) if self.sharded else summed(x, self.team)


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
        return ctx.team.sum(_own(grads[0])), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        return team.sum(_own(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _JoinedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return team.joined(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.team.summed_part(grads[0]), None


class _SummedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return team.summed_part(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.team.joined(grads[0]), None


class _JoinedAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return team.joined(x)

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
        return ctx.team.joined(grads[0]), None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team, sent: list[int] | None, received: list[int] | None) -> Tensor:
        ctx.team, ctx.sent, ctx.received = team, sent, received
        return team.exchanged(x, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.team.exchanged(grads[0], ctx.received, ctx.sent), None, None, None


def _own(x: Tensor) -> Tensor:
    """A copy that may be written to: autograd still knows x."""
    return x.clone(memory_format=torch.contiguous_format)
