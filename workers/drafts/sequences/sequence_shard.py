"""Sharding of concatenated sequences over ranks, for draft training.

In attention the ranks divide heads instead of tokens: Jacobs et al., DeepSpeed Ulysses (2023),
https://arxiv.org/abs/2309.14509.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from ...parallel.collectives import all_to_all_rows, gather_rows
from ...parallel.mesh import Team


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """Splits tokens into contiguous shards of equal size, one for each rank of the team, if there is one."""

    num_tokens: int
    team: Team | None = None

    @property
    def own(self) -> slice:
        """Returns this rank's shard, which may be empty."""
        return self.of(0 if self.team is None else self.team.index)

    def of(self, index: int) -> slice:
        return shard_slice(self.num_tokens, index, self._size)

    @property
    def round_robin(self) -> slice:
        """Returns which items this rank gets of those that are distributed round robin."""
        return slice(0, None, 1) if self.team is None else slice(self.team.index, None, self.team.size)

    def by_heads(self, x: Tensor) -> Tensor:
        """Exchanges [own tokens, heads, size] for [num_tokens, own heads, size].

        As in all methods here, gradients travel back the same way, and all ranks call it together.
        """
        if self.team is None:
            return x
        by_rank = self._filled(x, self._each).unflatten(1, (self._size, -1)).transpose(0, 1).contiguous()
        return all_to_all_rows(by_rank, self.team).flatten(0, 1)[: self.num_tokens]

    def by_tokens(self, x: Tensor) -> Tensor:
        """Exchanges [num_tokens, own heads, size] for [own tokens, heads, size]."""
        if self.team is None:
            return x
        by_rank = self._filled(x, self._size * self._each).unflatten(0, (self._size, -1))
        return all_to_all_rows(by_rank, self.team).transpose(0, 1).flatten(1, 2)[: self._num_own]

    def joined(self, x: Tensor) -> Tensor:
        """Gathers [own tokens, ...] to [num_tokens, ...]."""
        if self.team is None:
            return x
        return gather_rows(self._filled(x, self._each), self.team)[: self.num_tokens]

    def summed(self, x: Tensor) -> Tensor:
        """Sums over the ranks, in place and without gradients."""
        return x if self.team is None else self.team.all_reduce(x)

    def kv_repeats(self, heads: int, kv_heads: int) -> int:
        """Returns how often keys and values must be repeated so that each rank has the keys of its queries."""
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
        return x if len(x) == size else pad(x, (0, 0) * (x.dim() - 1) + (0, size - len(x)))


def shard_slice(num_tokens: int, index: int, size: int) -> slice:
    """Returns the shard of rank `index` of `size` ranks."""
    each = -(-num_tokens // size)
    return slice(min(num_tokens, index * each), min(num_tokens, (index + 1) * each))
