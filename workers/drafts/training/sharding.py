"""Shards the draft training of a micro-batch over ranks, and moves captured features to the ranks that need them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...batch.micro_batch import MicroBatch, MicroBatchSegment, spread
from ...ops.attention import Packing, pack_lengths
from ...parallel.mesh import Team
from ...parallel.rows import scored_rows
from ..groups import DraftGroups
from ..sequences.labels import Labels
from ..sequences.stretch import Stretch, stretch_of


@dataclass(frozen=True, eq=False)
class Lesson:
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

    def elsewhere(self, device: torch.device | str) -> "Lesson":
        """Returns the lesson as other ranks see it, with its labels on `device`."""
        labels = self.labels
        there = Labels(labels.targets.to(device), labels.weights.to(device), labels.numbers)
        return Lesson(self.task, self.lengths, there, None)

    @cached_property
    def starts(self) -> np.ndarray:
        """Returns the position of each sequence's first token."""
        return np.cumsum((0, *self.lengths[:-1]))


@dataclass(frozen=True, eq=False)
class Taken:
    """The sequences of a lesson that one block of ranks trains on, concatenated.

    tokens: int64 [n], their positions in the lesson.
    known: the tokens whose features this rank needs: its own shard, and the look-ahead of the draft after it.
    """

    lesson: Lesson
    sequences: Sequence[int]
    tokens: np.ndarray
    known: slice

    @staticmethod
    def of(lesson: Lesson, sequences: Sequence[int], stretch: int, num_stretches: int, halo: int) -> "Taken":
        pieces = [np.arange(lesson.lengths[i]) + lesson.starts[i] for i in sequences]
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        own = stretch_of(len(tokens), stretch, num_stretches)
        stop = min(len(tokens), own.stop + halo) if own.start < own.stop else own.stop
        return Taken(lesson, sequences, tokens, slice(own.start, stop))

    @property
    def num_known(self) -> int:
        return self.known.stop - self.known.start

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

    def stretch(self, team: Team) -> Stretch | None:
        return Stretch(len(self.tokens), team) if team.size > 1 else None


class Deal:
    """Distributes the lessons of an audience's micro-batches, taken in order.

    Each block of ranks gets whole sequences, with about as many tokens as every other block, and each rank of a block
    gets a shard of these.
    """

    def __init__(self, groups: DraftGroups, lessons: Sequence[Lesson], halos: Sequence[int]) -> None:
        """Decides the distribution. `halos` is the draft's look-ahead in each lesson, in tokens."""
        self._groups, self._lessons, self._halos = groups, lessons, halos
        places = [(i, j) for i, lesson in enumerate(lessons) for j in range(len(lesson.lengths))]
        # Indexed by block and lesson.
        self._sequences: list[list[list[int]]] = []
        for block in spread([lessons[i].lengths[j] for i, j in places], groups.num_blocks):
            by_lesson: list[list[int]] = [[] for _ in lessons]
            for i, j in sorted(places[k] for k in block):
                by_lesson[i].append(j)
            self._sequences.append(by_lesson)

    def own(self) -> Iterator[tuple[Taken, slice]]:
        """Yields this rank's share of each lesson, and where it is among all tokens whose features this rank needs."""
        first = 0
        for taken in self._of(self._groups.audience.index):
            yield taken, slice(first, first + taken.num_known)
            first += taken.num_known

    def wanted(self, index: int) -> np.ndarray:
        """Returns the tokens whose features a rank of the audience needs, int64, in order, numbered over all
        lessons."""
        firsts = np.cumsum([0, *(lesson.num_tokens for lesson in self._lessons)])
        return np.concatenate([
            first + taken.tokens[taken.known]
            for first, taken in zip(firsts, self._of(index), strict=False)
        ])  # fmt: skip

    def _of(self, index: int) -> list[Taken]:
        groups = self._groups
        sequences, stretch = self._sequences[groups.block_of(index)], groups.stretch_of(index)
        return [
            Taken.of(lesson, own, stretch, groups.mesh.spec.sp, halo)
            for lesson, own, halo in zip(self._lessons, sequences, self._halos, strict=True)
        ]


class Carrier:
    """Sends features from the ranks that computed them (see TokenShare) to the ranks that need them."""

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

    def brought(self, own: Tensor) -> Tensor:
        """Exchanges [held tokens, ...] for [wanted tokens, ...]. All ranks of the team call this together."""
        return self._team.exchanged(own[self._rows], self._sent, self._received)[self._order]


def lessons_of(micro_batch: MicroBatch, numbers: Sequence[Sequence[int]]) -> list[Lesson]:
    """Returns the lessons of a micro-batch. `numbers` has the index of each task's rows in its operation."""
    return [
        Lesson(
            part.operation,
            tuple(stop - start for start, stop in zip(part.bounds, part.bounds[1:], strict=False)),
            Labels(
                objective.targets[part.start - objective.start : part.stop - objective.start],
                objective.inputs["weights"][part.start - objective.start : part.stop - objective.start],
                [numbers[part.operation][datum] for datum in part.datums],
            ),
            part,
        )
        for objective in micro_batch.objectives
        for part in micro_batch.segments_of(objective)
    ]


def lessons_of_all(groups: DraftGroups, own: Sequence[Lesson], device: torch.device) -> list[list[Lesson]]:
    """Returns the lessons of each micro-batch of the audience. Ranks that share a micro-batch contribute it once."""
    if groups.num_micro_batches == 1:
        return [list(own)]
    told = groups.audience.exchange([lesson.elsewhere("cpu") for lesson in own])[:: groups.num_sharing]
    of_all = [[lesson.elsewhere(device) for lesson in lessons] for lessons in told]
    of_all[groups.audience.index // groups.num_sharing] = list(own)
    return of_all


def had_by(groups: DraftGroups, lengths: Sequence[int], ring: int) -> list[np.ndarray]:
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
