"""Shards the draft training of a micro-batch over ranks, and moves captured features to the ranks that need them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...batch.micro_batch import MicroBatch, MicroBatchSegment, balance_bins
from ...ops.attention import Packing, pack_lengths
from ...parallel.mesh import Team
from ...parallel.token_shard import scored_rows
from ..groups import DraftGroups
from ..sequences.labels import Labels
from ..sequences.sequence_shard import SequenceShard, shard_slice


@dataclass(frozen=True, eq=False)
class DraftBatch:
    """The sequences of one operation in a micro-batch, n tokens in all.

    task: the operation's index. lengths: of the sequences. labels: targets and weights of the n tokens.
    part: the segment of this rank's micro-batch that they are, None = they are in the micro-batch of another rank.
    """

    task: int
    lengths: tuple[int, ...]
    labels: Labels
    part: MicroBatchSegment | None

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def for_other_rank(self, device: torch.device | str) -> "DraftBatch":
        """Returns the lesson as other ranks see it, with its labels on `device`."""
        labels = self.labels
        there = Labels(labels.targets.to(device), labels.weights.to(device), labels.numbers)
        return DraftBatch(self.task, self.lengths, there, None)

    @cached_property
    def starts(self) -> np.ndarray:
        """Returns the position of each sequence's first token."""
        return np.cumsum((0, *self.lengths[:-1]))


@dataclass(frozen=True, eq=False)
class DraftBatchShare:
    """The sequences of a lesson that one block of ranks trains on, concatenated.

    tokens: int64 [n], their positions in the lesson.
    needed: the tokens whose features this rank needs: its own shard, and the look-ahead of the draft after it.
    """

    lesson: DraftBatch
    sequences: Sequence[int]
    tokens: np.ndarray
    needed: slice

    @staticmethod
    def of(
        lesson: DraftBatch, sequences: Sequence[int], stretch: int, num_stretches: int, halo: int
    ) -> "DraftBatchShare":
        pieces = [np.arange(lesson.lengths[i]) + lesson.starts[i] for i in sequences]
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        own = shard_slice(len(tokens), stretch, num_stretches)
        stop = min(len(tokens), own.stop + halo) if own.start < own.stop else own.stop
        return DraftBatchShare(lesson, sequences, tokens, slice(own.start, stop))

    @property
    def num_needed(self) -> int:
        return self.needed.stop - self.needed.start

    @property
    def lengths(self) -> list[int]:
        return [self.lesson.lengths[i] for i in self.sequences]

    @property
    def packing(self) -> Packing:
        return Packing(pack_lengths(self.lengths))

    def positions(self, device: torch.device) -> Tensor:
        return torch.from_numpy(np.concatenate([np.arange(length) for length in self.lengths])).to(device)

    def labels(self) -> Labels:
        whole = self.lesson.labels
        rows = torch.from_numpy(self.tokens).to(whole.weights.device)
        return Labels(whole.targets[rows], whole.weights[rows], [whole.numbers[i] for i in self.sequences])

    def stretch(self, team: Team) -> SequenceShard | None:
        return SequenceShard(len(self.tokens), team) if team.size > 1 else None


class DraftDistribution:
    """Distributes the lessons of an audience's micro-batches, taken in order.

    Each block of ranks gets whole sequences, with about as many tokens as every other block, and each rank of a block
    gets a shard of these.
    """

    def __init__(self, groups: DraftGroups, lessons: Sequence[DraftBatch], halos: Sequence[int]) -> None:
        """Decides the distribution. `halos` is the draft's look-ahead in each lesson, in tokens."""
        self._groups, self._lessons, self._halos = groups, lessons, halos
        places = [(i, j) for i, lesson in enumerate(lessons) for j in range(len(lesson.lengths))]
        # Indexed by block and lesson.
        self._sequences: list[list[list[int]]] = []
        for block in balance_bins([lessons[i].lengths[j] for i, j in places], groups.num_blocks):
            by_lesson: list[list[int]] = [[] for _ in lessons]
            for i, j in sorted(places[k] for k in block):
                by_lesson[i].append(j)
            self._sequences.append(by_lesson)

    def own(self) -> Iterator[tuple[DraftBatchShare, slice]]:
        """Yields this rank's share of each lesson, and where it is among all tokens whose features this rank needs."""
        first = 0
        for taken in self._of(self._groups.feature_team.index):
            yield taken, slice(first, first + taken.num_needed)
            first += taken.num_needed

    def wanted(self, index: int) -> np.ndarray:
        """Returns the tokens whose features a rank of the audience needs, int64, in order, numbered over all
        lessons."""
        firsts = np.cumsum([0, *(lesson.num_tokens for lesson in self._lessons)])
        return np.concatenate([
            first + taken.tokens[taken.needed]
            for first, taken in zip(firsts, self._of(index), strict=False)
        ])  # fmt: skip

    def _of(self, index: int) -> list[DraftBatchShare]:
        groups = self._groups
        sequences, stretch = self._sequences[groups.block_of(index)], groups.shard_of(index)
        return [
            DraftBatchShare.of(lesson, own, stretch, groups.mesh.spec.sp, halo)
            for lesson, own, halo in zip(self._lessons, sequences, self._halos, strict=True)
        ]


class FeatureExchange:
    """Sends features from the ranks that computed them (see TokenShard) to the ranks that need them."""

    def __init__(
        self, team: Team, have: Sequence[np.ndarray], want: Sequence[np.ndarray], device: torch.device
    ) -> None:
        """Plans the exchange. `have` and `want` hold the token numbers of each rank of the team; each token is held by
        exactly one."""
        self._team = team
        num_tokens = sum(map(len, have))
        owner, place = np.empty(num_tokens, np.int64), np.empty(num_tokens, np.int64)
        for index, tokens in enumerate(have):
            owner[tokens], place[tokens] = index, np.arange(len(tokens))
        to_each = [place[tokens[owner[tokens] == team.index]] for tokens in want]
        of_owner = owner[want[team.index]]
        self._sent, self._received = (
            [len(each) for each in to_each],
            np.bincount(of_owner, minlength=team.size).tolist(),
        )
        self._rows = torch.from_numpy(np.concatenate(to_each)).to(device)
        # Rows arrive grouped by owner.
        self._order = torch.from_numpy(np.argsort(np.argsort(of_owner, kind="stable"), kind="stable")).to(device)

    def exchange(self, own: Tensor) -> Tensor:
        """Exchanges [held tokens, ...] for [wanted tokens, ...]. All ranks of the team call this together."""
        return self._team.all_to_all(own[self._rows], self._sent, self._received)[self._order]


def draft_batches(micro_batch: MicroBatch, numbers: Sequence[Sequence[int]]) -> list[DraftBatch]:
    """Returns the lessons of a micro-batch. `numbers` has the index of each task's rows in its operation."""
    return [
        DraftBatch(
            part.operation,
            tuple(stop - start for start, stop in zip(part.bounds, part.bounds[1:], strict=False)),
            Labels(
                objective.targets[part.start - objective.start : part.stop - objective.start],
                objective.inputs["weights"][part.start - objective.start : part.stop - objective.start],
                [numbers[part.operation][datum] for datum in part.rows],
            ),
            part,
        )
        for objective in micro_batch.objectives
        for part in micro_batch.segments_of(objective)
    ]


def gather_draft_batches(
    groups: DraftGroups, own: Sequence[DraftBatch], device: torch.device
) -> list[list[DraftBatch]]:
    """Returns the lessons of each micro-batch of the audience. Ranks that share a micro-batch contribute it once."""
    if groups.num_micro_batches == 1:
        return [list(own)]
    told = groups.feature_team.all_gather_object([lesson.for_other_rank("cpu") for lesson in own])[
        :: groups.num_sharing
    ]
    of_all = [[lesson.for_other_rank(device) for lesson in lessons] for lessons in told]
    of_all[groups.feature_team.index // groups.num_sharing] = list(own)
    return of_all


def tokens_by_rank(groups: DraftGroups, lengths: Sequence[int], ring: int) -> list[np.ndarray]:
    """Returns for each rank of the audience the tokens whose features it computes, numbered over all micro-batches.

    Args:
        lengths: of the audience's micro-batches, in tokens.
    """
    firsts, num = np.cumsum([0, *lengths]), groups.num_sharing
    return [
        first + np.array(scored_rows(length, index, num, ring), np.int64)
        for first, length in zip(firsts, lengths, strict=False)
        for index in range(num)
    ]
