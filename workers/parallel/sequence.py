"""Sequence parallelism: each rank runs some of the tokens of a packed row. In attention, ranks divide heads as far as
there are enough, and beyond that keys and values of all tokens travel around a ring.

Heads: Jacobs et al., DeepSpeed Ulysses (2023), https://arxiv.org/abs/2309.14509. Both: Fang and Zhao, USP (2024),
https://arxiv.org/abs/2405.07719.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ..ops.attention import AttentionKind, Packing, SequenceGroup, attend
from ..ops.recurrence import Recurrence
from ..ops.token_index import IndexKind, IndexQueries, choose_in_row
from ..shapes.sequence_split import SequenceSplit
from .collectives import all_to_all_rows
from .mesh import Team
from .ring import Ring
from .token_shard import TokenShard


@dataclass(frozen=True)
class ShardedPacking:
    """The sequences of a whole row whose tokens are divided evenly over the ranks of a team."""

    whole: Packing
    team: Team
    split: SequenceSplit

    @staticmethod
    def of(packing: Packing, share: TokenShard, team: Team, split: SequenceSplit) -> "ShardedPacking":
        if not share.num_padding:
            return ShardedPacking(packing, team, split)
        filling = SequenceGroup(share.num_tokens, 1, share.num_padding)
        return ShardedPacking(replace(packing, groups=(*packing.groups, filling), cumulative={}), team, split)

    @property
    def longest(self) -> int:
        return self.whole.longest

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Computes attention for this rank's tokens, like the function `attend`."""
        size = self.split.ulysses
        if size == 1:
            return self._attend_stripe(query, key, value, kind)
        if key.shape[1] % size:
            key, value = (x.repeat_interleave(size // key.shape[1], dim=1) for x in (key, value))
        query, key, value = (self._stripe_tokens(x) for x in (query, key, value))
        heads = query.shape[1]
        kind = kind.of_heads(self.team.index % size * heads, heads)
        return self._own_tokens(self._attend_stripe(query, key, value, kind))

    def recur(self, op: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Computes the function `recur` on a single rank. Several ranks divide the heads, see `by_heads`."""
        assert self.team.size == 1
        return op.scan(inputs, self.whole)[0]

    def choose(self, queries: IndexQueries | None, key: Tensor, kind: IndexKind) -> Tensor | None:
        """Computes the function `token_index.choose` for the whole row, each rank for its own tokens. No ring."""
        if queries is None:
            return None
        whole, first = self.team.all_gather(key), self.team.index * len(key)
        return self.team.all_gather(choose_in_row(queries, whole, self.whole, first, kind.most))

    def by_heads(self, inputs: Sequence[Tensor], run: Callable[[Sequence[Tensor], Packing, Team], Tensor]) -> Tensor:
        """Runs a function of whole sequences, head by head, with this rank's share of the heads.

        Args:
            inputs: each [own tokens, heads, ...].
            run: takes the inputs [tokens, own heads, ...] in the order of the row, its packing, and the team; returns
                [tokens, own heads, ...].
        Returns:
            the output for this rank's tokens, [own tokens, heads, ...].
        """
        if self.team.size == 1:
            return run(inputs, self.whole, self.team)
        return self._to_tokens(run([self._to_heads(each) for each in inputs], self.whole, self.team))

    def _to_heads(self, x: Tensor) -> Tensor:
        """Exchanges [own tokens, heads, ...] for [tokens, own heads, ...]."""
        by_rank = x.unflatten(1, (self.team.size, -1)).transpose(0, 1).contiguous()
        by_stripe = all_to_all_rows(by_rank, self.team).flatten(0, 1)
        return by_stripe.unflatten(0, (self.split.ring, -1)).transpose(0, 1).flatten(0, 1)

    def _to_tokens(self, x: Tensor) -> Tensor:
        """Exchanges [tokens, own heads, ...] for [own tokens, heads, ...]."""
        by_stripe = x.unflatten(0, (-1, self.split.ring)).transpose(0, 1).flatten(0, 1)
        by_rank = by_stripe.unflatten(0, (self.team.size, -1)).contiguous()
        return all_to_all_rows(by_rank, self.team).transpose(0, 1).flatten(1, 2)

    def _attend_stripe(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Computes attention for all tokens of the stripe. Without a ring these are all tokens."""
        if self.split.ring == 1:
            return attend(query, key, value, self.whole, kind)
        assert kind.chosen is None
        return self._ring.attend(query, key, value, kind)

    @cached_property
    def _ring(self) -> Ring:
        return Ring(self.whole, self.team, self.split)

    def _stripe_tokens(self, x: Tensor) -> Tensor:
        """Exchanges [own tokens, heads, head_dim] for [tokens of the stripe, own heads, head_dim]."""
        by_rank = x.unflatten(1, (self.split.ulysses, -1)).transpose(0, 1).contiguous()
        return self._exchanged(by_rank).flatten(0, 1)

    def _own_tokens(self, x: Tensor) -> Tensor:
        """Exchanges [tokens of the stripe, own heads, head_dim] for [own tokens, heads, head_dim]."""
        by_rank = x.unflatten(0, (self.split.ulysses, -1)).contiguous()
        return self._exchanged(by_rank).transpose(0, 1).flatten(1, 2)

    def _exchanged(self, by_rank: Tensor) -> Tensor:
        """Exchanges among the ranks of the same stripe."""
        if self.split.ring == 1:
            return all_to_all_rows(by_rank, self.team)
        size, stripe = self.split.ulysses, self.team.index // self.split.ulysses
        counts = [int(index // size == stripe) for index in range(self.team.size)]
        return all_to_all_rows(by_rank, self.team, counts, counts)
