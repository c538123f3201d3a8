"""Norms of queries and keys over all heads together, where each rank along tp has only some of the heads."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.fused import RmsNorm
from .mesh import Team


class ShardedHeadNorms:
    """The norms of a layer's queries and keys, given as norms over all heads."""

    def __init__(self, query: RmsNorm, key: RmsNorm, team: Team) -> None:
        self.team = team
        self.sizes = [len(norm.weight) for norm in (query, key)]
        own = [slice(team.index * size // team.size, (team.index + 1) * size // team.size) for size in self.sizes]
        self.parts = [RmsNorm(norm.parameter, norm.eps, own=each) for norm, each in zip((query, key), own, strict=True)]

    def normed(self, query: Tensor, key: Tensor) -> Sequence[Tensor]:
        """Normalizes this rank's heads, [tokens, features] each. All ranks of the team call this together."""
        if self.team.size == 1:
            return [norm(x) for x, norm in zip((query, key), self.parts, strict=True)]
        normed = _Normed.apply(query, key, self)
        assert isinstance(normed, tuple)
        return normed

    def means(self, of_ranks: Sequence[Tensor]) -> Tensor:
        """Returns the means over all features, [2, tokens], given this rank's sums for queries and keys, [tokens]
        each."""
        sums = self.team.all_reduce(torch.stack(list(of_ranks)))
        return sums.div_(sums.new_tensor(self.sizes)[:, None])


class _Normed(torch.autograd.Function):
    """Exchanges one number for each token and norm in forward, and one in backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, norms: ShardedHeadNorms) -> tuple[Tensor, ...]:
        wide = query.float(), key.float()
        inverses = norms.means([x.square().sum(-1) for x in wide]).add_(norms.parts[0].eps).rsqrt_()
        ctx.norms = norms
        ctx.save_for_backward(query, key, inverses)
        return tuple(
            (x * inverse[:, None]).mul_(norm.weight).to(query.dtype)
            for x, inverse, norm in zip(wide, inverses, norms.parts, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, inverses = ctx.saved_tensors
        wide = query.float(), key.float()
        for number, norm in enumerate(ctx.norms.parts):
            norm.add_gradient(grads[number].float(), wide[number], inverses[number, :, None])
        weighted = [grad.float() * norm.weight for grad, norm in zip(grads, ctx.norms.parts, strict=True)]
        along = ctx.norms.means([torch.linalg.vecdot(grad, x) for grad, x in zip(weighted, wide, strict=True)])
        along.mul_(inverses.pow(3)).neg_()
        found = (
            grad.mul_(inverse[:, None]).addcmul_(x, of_x[:, None]).to(query.dtype)
            for grad, x, inverse, of_x in zip(weighted, wide, inverses, along, strict=True)
        )
        return (*found, None)
