"""Stretch: of the tokens of some sequences, one after the other, those that a rank's draft goes on from.

In attention over these tokens the ranks share out heads: Jacobs et al., DeepSpeed Ulysses (2023),
https://arxiv.org/abs/2309.14509.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from ...parallel.collectives import exchanged, joined_rows
from ...parallel.mesh import Team


@dataclass(frozen=True, eq=False)
class Stretch:
    """Neighbours, as many for each rank of the team; None = there is one, which has all of them."""

    num_tokens: int
    team: Team | None = None

    @property
    def own(self) -> slice:
        """Those of this rank, which may be none."""
        return self.of(0 if self.team is None else self.team.index)

    def of(self, index: int) -> slice:
        """Those of any rank."""
        return stretch_of(self.num_tokens, index, self._size)

    @property
    def every(self) -> slice:
        """Which of what is dealt out one by one this rank gets."""
        return slice(0, None, 1) if self.team is None else slice(self.team.index, None, self.team.size)

    def by_heads(self, x: Tensor) -> Tensor:
        """[own tokens, heads, size] -> [num_tokens, own heads, size]. Here as elsewhere gradients go the same way
        back, and all ranks ask at once."""
        if self.team is None:
            return x
        by_rank = self._filled(x, self._each).unflatten(1, (self._size, -1)).transpose(0, 1).contiguous()
        return exchanged(by_rank, self.team).flatten(0, 1)[: self.num_tokens]

    def by_tokens(self, x: Tensor) -> Tensor:
        """[num_tokens, own heads, size] -> [own tokens, heads, size]."""
        if self.team is None:
            return x
        by_rank = self._filled(x, self._size * self._each).unflatten(0, (self._size, -1))
        return exchanged(by_rank, self.team).transpose(0, 1).flatten(1, 2)[: self._num_own]

    def joined(self, x: Tensor) -> Tensor:
        """[own tokens, ...] -> [num_tokens, ...]."""
        if self.team is None:
            return x
        return joined_rows(self._filled(x, self._each), self.team)[: self.num_tokens]

    def summed(self, x: Tensor) -> Tensor:
        """What each rank has a part of, in place, and without gradients."""
        return x if self.team is None else self.team.sum(x)

    def copies(self, heads: int, kv_heads: int) -> int:
        """How many times over keys and values have to be there, lest a rank has queries and none of their keys."""
        return 1 if kv_heads % self._size == 0 else heads // kv_heads

    @property
    def _size(self) -> int:
        return 1 if self.team is None else self.team.size

    @property
    def _each(self) -> int:
        return -(-self.num_tokens // self._size)

    @property
    def _num_own(self) -> int:
        return self.own.stop - self.own.start

    def _filled(self, x: Tensor, size: int) -> Tensor:
        """With rows of zeros behind the last."""
        return x if len(x) == size else pad(x, (0, 0) * (x.dim() - 1) + (0, size - len(x)))


def stretch_of(num_tokens: int, index: int, size: int) -> slice:
    """Of so many neighbours those that one of `size` ranks gets."""
    each = -(-num_tokens // size)
    return slice(min(num_tokens, index * each), min(num_tokens, (index + 1) * each))
