"""Sequence parallelism: each rank runs some of the tokens of a packed row, and attends with some of the heads.

Jacobs et al., DeepSpeed Ulysses (2023), https://arxiv.org/abs/2309.14509.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from ..attention import AttentionKind, Group, Packing, attend
from .collectives import exchanged
from .mesh import Team
from .rows import TokenShare


@dataclass(frozen=True)
class SharedPacking:
    """The sequences of a whole row, of whose tokens each rank of a team has as many."""

    whole: Packing
    team: Team

    @staticmethod
    def of(packing: Packing, share: TokenShare, team: Team) -> "SharedPacking":
        if not share.num_missing:
            return SharedPacking(packing, team)
        filling = Group(share.num_tokens, 1, share.num_missing)
        return SharedPacking(replace(packing, groups=(*packing.groups, filling), cumulative={}), team)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.whole.longest

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """As the function `attend`, of this rank's tokens."""
        size = self.team.size
        if size == 1:
            return attend(query, key, value, self.whole, kind)
        if key.shape[1] % size:
            key, value = (x.repeat_interleave(size // key.shape[1], dim=1) for x in (key, value))
        query, key, value = (self._all_tokens(x) for x in (query, key, value))
        return self._own_tokens(attend(query, key, value, self.whole, kind))

    def _all_tokens(self, x: Tensor) -> Tensor:
        """[own tokens, heads, head_dim] -> [all tokens, own heads, head_dim]."""
        by_rank = x.unflatten(1, (self.team.size, -1)).transpose(0, 1).contiguous()
        return exchanged(by_rank, self.team).flatten(0, 1)

    def _own_tokens(self, x: Tensor) -> Tensor:
        """[all tokens, own heads, head_dim] -> [own tokens, heads, head_dim]."""
        by_rank = x.unflatten(0, (self.team.size, -1)).contiguous()
        return exchanged(by_rank, self.team).transpose(0, 1).flatten(1, 2)
