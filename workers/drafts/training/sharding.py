"""Shards the draft training of a micro-batch over ranks, and moves captured features to the ranks that need them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ...batch.bins import balance_bins
from ...batch.micro_batch import MicroBatch, MicroBatchSegment
from ...ops.attention import Packing, pack_lengths
from ...parallel.mesh import Team
from ...parallel.token_shard import scored_tokens
from ..model.groups import DraftGroups
from ..sequences.features import Labels
from ..sequences.sequence_shard import SequenceShard, shard_slice


@dataclass(frozen=True, eq=False)
class DraftBatch:
    """The sequences of one operation in a micro-batch, n tokens in all.

    operation: its index. lengths: of the sequences. labels: targets and weights of the n tokens.
    segment: the segment of this rank's micro-batch that they are, None = they are in the micro-batch of another rank.
    """

    operation: int
    lengths: tuple[int, ...]
    labels: Labels
    segment: MicroBatchSegment | None

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def for_other_rank(self, device: torch.device | str) -> "DraftBatch":
        """Returns the batch as other ranks see it, with its labels on `device`."""
        labels = Labels(self.labels.targets.to(device), self.labels.weights.to(device), self.labels.datum_indices)
        return DraftBatch(self.operation, self.lengths, labels, None)

    @cached_property
    def starts(self) -> np.ndarray:
        return np.cumsum((0, *self.lengths[:-1]))


@dataclass(frozen=True, eq=False)
class DraftBatchShare:
    """The sequences of a draft batch that one shard group trains on, concatenated.

    tokens: int64 [n], their positions in the batch.
    needed: the tokens whose features this rank needs: its own shard, and the look-ahead of the draft after it.
    """

    batch: DraftBatch
    sequences: Sequence[int]
    tokens: np.ndarray
    needed: slice

    @property
    def lengths(self) -> list[int]:
        return [self.batch.lengths[i] for i in self.sequences]

    @property
    def packing(self) -> Packing:
        return Packing(pack_lengths(self.lengths))

    def positions(self, device: torch.device) -> Tensor:
        return torch.from_numpy(np.concatenate([np.arange(length) for length in self.lengths])).to(device)

    def labels(self) -> Labels:
        labels = self.batch.labels
        rows = torch.from_numpy(self.tokens).to(labels.weights.device)
        return Labels(labels.targets[rows], labels.weights[rows], [labels.datum_indices[i] for i in self.sequences])

    def shard(self, team: Team) -> SequenceShard:
        return SequenceShard(len(self.tokens), team if team.size > 1 else None)


class DraftDistribution:
    """Distributes the draft batches of a feature team's micro-batches, taken in order.

    Each shard group gets whole sequences, with about as many tokens as every other group, and each rank of a group gets
    a shard of these.
    """

    def __init__(self, groups: DraftGroups, batches: Sequence[DraftBatch], lookaheads: Sequence[int]) -> None:
        """Decides the distribution. `lookaheads` has the draft's look-ahead in each batch, in tokens."""
        self._groups, self._batches, self._lookaheads = groups, batches, lookaheads
        all_sequences = [(i, j) for i, batch in enumerate(batches) for j in range(len(batch.lengths))]
        # Indexed by shard group and batch.
        self._sequences: list[list[list[int]]] = []
        for numbers in balance_bins([batches[i].lengths[j] for i, j in all_sequences], groups.num_shard_groups):
            by_batch: list[list[int]] = [[] for _ in batches]
            for i, j in sorted(all_sequences[number] for number in numbers):
                by_batch[i].append(j)
            self._sequences.append(by_batch)

    def own_shares(self) -> Iterator[tuple[DraftBatchShare, slice]]:
        """Yields this rank's share of each batch, and where it is among all tokens whose features this rank needs."""
        first = 0
        for share in self._shares(self._groups.feature_team.index):
            stop = first + share.needed.stop - share.needed.start
            yield share, slice(first, stop)
            first = stop

    def needed_tokens(self, index: int) -> np.ndarray:
        """Returns the tokens whose features a rank of the team needs, int64, numbered over all batches."""
        firsts = np.cumsum([0, *(batch.num_tokens for batch in self._batches)])
        return np.concatenate([
            first + share.tokens[share.needed]
            for first, share in zip(firsts, self._shares(index), strict=False)
        ])  # fmt: skip

    def _shares(self, index: int) -> list[DraftBatchShare]:
        groups = self._groups
        sequences, shard = self._sequences[groups.shard_group_of(index)], groups.shard_of(index)
        return [
            _share(batch, own, shard, groups.mesh.spec.sp, lookahead)
            for batch, own, lookahead in zip(self._batches, sequences, self._lookaheads, strict=True)
        ]


def _share(batch: DraftBatch, sequences: Sequence[int], shard: int, num_shards: int, lookahead: int) -> DraftBatchShare:
    pieces = [np.arange(batch.lengths[i]) + batch.starts[i] for i in sequences]
    tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    own = shard_slice(len(tokens), shard, num_shards)
    stop = min(len(tokens), own.stop + lookahead) if own.start < own.stop else own.stop
    return DraftBatchShare(batch, sequences, tokens, slice(own.start, stop))


class FeatureExchange:
    """Sends features from the ranks that computed them (see TokenShard) to the ranks that need them."""

    def __init__(
        self, team: Team, computed: Sequence[np.ndarray], needed: Sequence[np.ndarray], device: torch.device
    ) -> None:
        """Plans the exchange.

        Args:
            computed, needed: for each rank of the team, the numbers of the tokens whose features it computed and needs.
                Each token's are computed by exactly one rank.
        """
        self._team = team
        num_tokens = sum(map(len, computed))
        owner, row = np.empty(num_tokens, np.int64), np.empty(num_tokens, np.int64)
        for index, tokens in enumerate(computed):
            owner[tokens], row[tokens] = index, np.arange(len(tokens))
        to_each = [row[tokens[owner[tokens] == team.index]] for tokens in needed]
        owners = owner[needed[team.index]]
        self._num_sent = [len(rows) for rows in to_each]
        self._num_received = np.bincount(owners, minlength=team.size).tolist()
        self._sent_rows = torch.from_numpy(np.concatenate(to_each)).to(device)
        # Rows arrive grouped by owner.
        self._order = torch.from_numpy(np.argsort(np.argsort(owners, kind="stable"), kind="stable")).to(device)

    def exchange(self, own: Tensor) -> Tensor:
        """Exchanges [computed tokens, ...] for [needed tokens, ...]. All ranks of the team call this together."""
        return self._team.all_to_all(own[self._sent_rows], self._num_sent, self._num_received)[self._order]


def draft_batches(micro_batch: MicroBatch, datum_indices: Sequence[Sequence[int]]) -> list[DraftBatch]:
    """Returns the draft batches of a micro-batch.

    Args:
        datum_indices: ValidatedBatch.datum_indices of each operation.
    """
    return [
        DraftBatch(
            segment.operation,
            tuple(stop - start for start, stop in pairwise(segment.bounds)),
            Labels(
                objective.targets[segment.start - objective.start : segment.stop - objective.start],
                objective.inputs["weights"][segment.start - objective.start : segment.stop - objective.start],
                [datum_indices[segment.operation][example] for example in segment.examples],
            ),
            segment,
        )
        for objective in micro_batch.objectives
        for segment in objective.segments
    ]


def gather_draft_batches(
    groups: DraftGroups, own: Sequence[DraftBatch], device: torch.device
) -> list[list[DraftBatch]]:
    """Returns the draft batches of each micro-batch of the feature team; ranks may share one."""
    if groups.num_micro_batches == 1:
        return [list(own)]
    of_ranks = groups.feature_team.all_gather_object([batch.for_other_rank("cpu") for batch in own])
    gathered = [[batch.for_other_rank(device) for batch in batches] for batches in of_ranks[:: groups.num_sharing]]
    gathered[groups.feature_team.index // groups.num_sharing] = list(own)
    return gathered


def tokens_by_rank(groups: DraftGroups, lengths: Sequence[int], ring: int) -> list[np.ndarray]:
    """Returns for each rank of the feature team the tokens whose features it computes, numbered over all micro-batches.

    Args:
        lengths: of the team's micro-batches, in tokens.
    """
    firsts, num = np.cumsum([0, *lengths]), groups.num_sharing
    return [
        first + np.array(scored_tokens(length, index, num, ring), np.int64)
        for first, length in zip(firsts, lengths, strict=False)
        for index in range(num)
    ]
