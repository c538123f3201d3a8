"""Computes the losses of a micro-batch from its final hidden states, and their gradient, with any kind of head.

Segments and objectives are in the order of the rows, and the objectives cover all rows. If ranks divide the rows,
hidden, gradient and segments have this rank's rows, `share.rows`; objectives and outputs have all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..batch.micro_batch import Objective, in_shape_of, join_outputs
from ..heads import Head, HeadPass
from ..heads.head import chunks
from ..lora import Segment
from ..lora.segment import clip_segments
from ..losses import LossOutput
from ..parallel.mesh import Mesh
from ..parallel.token_shard import TokenShard, overlap

# By the name of their scores (see Loss.scores).
Heads = Mapping[str, Head]


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """The result for n rows, in host memory: each array is float32 in the shape of the targets, [n] or [n, K].

    scores: a head's. losses, metrics: see LossOutput. ratios, denominator: of drafts, over all n rows.
    """

    scores: np.ndarray
    losses: np.ndarray
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    denominator: float = 0.0

    @staticmethod
    def of(scores: Tensor, output: LossOutput) -> "ScoredRows":
        metrics = {name: values.cpu().numpy() for name, values in output.metrics.items()}
        return ScoredRows(scores.cpu().numpy(), output.losses.cpu().numpy(), metrics)

    def part(self, rows: slice) -> "ScoredRows":
        """Returns the result for some of the rows, without ratios."""
        metrics = {name: values[rows] for name, values in self.metrics.items()}
        return ScoredRows(self.scores[rows], self.losses[rows], metrics)


@torch.no_grad()
def score(
    heads: Heads,
    hidden: Tensor,
    segments: Sequence[Segment],
    objectives: Sequence[Objective],
    share: TokenShard | None = None,
) -> list[ScoredRows]:
    """Returns the result of each objective for hidden [n, hidden], without gradients.

    `share` is None if this rank has all rows.
    """
    share = share or TokenShard(len(hidden), Mesh())
    scores = share.joined(_HeadRuns(heads, hidden, segments, objectives, share).all_scores())
    return [_evaluated(objective, scores) for objective in objectives]


@torch.no_grad()
def score_with_gradient(
    heads: Heads,
    hidden: Tensor,
    segments: Sequence[Segment],
    objectives: Sequence[Objective],
    gradient: Tensor,
    share: TokenShard | None = None,
) -> list[ScoredRows]:
    """Like `score`, with gradients.

    Writes the gradient with respect to hidden [n, hidden] to `gradient`, and adds the gradients of adapters on the
    heads to their scratch.
    """
    share = share or TokenShard(len(hidden), Mesh())
    runs = _HeadRuns(heads, hidden, segments, objectives, share)
    scorings = [_ObjectiveScoring(objective) for objective in objectives]
    if wanting := [each for each in scorings if runs.needs_all_scores_first(each.objective)]:
        scores = share.joined(runs.all_scores())
        for scoring in wanting:
            scoring.score_all(scores)
    parts = []
    for head, rows, own in runs.chunks():
        parts.append(head.scores(rows))
        of_scores = torch.zeros_like(parts[-1])
        for scoring, taken, of_objective in _overlapping(scorings, share.places(own)):
            targets = scoring.objective.targets
            found = scoring.gradient(in_shape_of(targets, parts[-1][taken]), of_objective)
            in_shape_of(targets, of_scores[taken]).copy_(found)
        head.backward(of_scores, gradient[own])
    if share.is_all:
        return [scoring.output() for scoring in scorings]
    scores = share.joined(_concatenated(parts, runs.targets))
    return [_evaluated(objective, scores) for objective in objectives]


@dataclass(frozen=True, eq=False)
class _HeadRun:
    """Neighbouring rows scored by one head. first: index of the first of them among this rank's rows."""

    first: int
    num_rows: int
    head: HeadPass


class _HeadRuns:
    """Divides this rank's rows into runs of rows with the same head.

    targets: of all of this rank's rows, int64 [n] or [n, K].
    """

    def __init__(
        self,
        heads: Heads,
        hidden: Tensor,
        segments: Sequence[Segment],
        objectives: Sequence[Objective],
        share: TokenShard,
    ) -> None:
        self._share = share
        self.targets = share.of_rows(_concatenate_targets([each.targets for each in objectives]))
        # Keyed by the first row, counted over all ranks.
        self._runs: dict[int, _HeadRun] = {}
        self._first_of: dict[int, int] = {}
        for scores, members in groupby(objectives, key=lambda objective: objective.loss.scores):
            of_head = list(members)
            start, stop = of_head[0].start, of_head[-1].stop
            last = stop if of_head[-1] is not objectives[-1] else share.num_padded
            rows = overlap(share.rows, start, last)
            head = heads[scores].start_pass(hidden[rows], clip_segments(segments, rows), self.targets[rows])
            self._runs[start] = _HeadRun(rows.start, rows.stop - rows.start, head)
            self._first_of |= {objective.start: start for objective in of_head}

    def chunks(self) -> Iterator[tuple[HeadPass, slice, slice]]:
        """Yields the rows to score at a time: the head, their slice of its rows, and of this rank's rows."""
        for run in self._runs.values():
            for rows in chunks(run.num_rows, run.head.chunk_rows):
                yield run.head, rows, slice(run.first + rows.start, run.first + rows.stop)

    def all_scores(self) -> Tensor:
        """Returns the scores of all of this rank's rows."""
        return _concatenated([head.scores(rows) for head, rows, _ in self.chunks()], self.targets)

    def needs_all_scores_first(self, objective: Objective) -> bool:
        """True for a sequence-wise loss over several chunks: all scores are computed first, because the loss of a whole
        sequence must be known before any gradient."""
        if not objective.loss.sequence_wise:
            return False
        start = self._first_of[objective.start]
        size = self._runs[start].head.chunk_rows
        first, last = (objective.start - start) // size, (objective.stop - 1 - start) // size
        return first != last or not self._share.is_all


class _ObjectiveScoring:
    """Accumulates an objective's scores and losses, chunk by chunk."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._scores: list[Tensor] = []
        self._losses: list[LossOutput] = []
        self._whole_gradient: Tensor | None = None

    def score_all(self, scores: Tensor) -> None:
        """Takes the scores of all rows, before the first chunk."""
        self._whole_gradient = self.gradient(_own_rows(self.objective, scores), slice(None))

    def gradient(self, scores: Tensor, rows: slice) -> Tensor:
        """Returns the gradient with respect to the scores of `rows`, counted from the objective's first row."""
        if self._whole_gradient is not None:
            return self._whole_gradient[rows]
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            output = self.objective.evaluate(leaf, rows)
            (gradient,) = torch.autograd.grad(output.losses.sum(), leaf)
        self._scores.append(scores)
        self._losses.append(LossOutput(output.losses.detach(), output.metrics))
        return gradient

    def output(self) -> ScoredRows:
        return ScoredRows.of(torch.cat(self._scores), join_outputs(self._losses))


def _overlapping(
    scorings: Sequence[_ObjectiveScoring], rows: slice
) -> Iterator[tuple[_ObjectiveScoring, slice, slice]]:
    """Yields the objectives that have some of the rows: which of `rows` these are, and which of the objective's."""
    for scoring in scorings:
        start = scoring.objective.start
        taken = overlap(rows, start, scoring.objective.stop)
        if taken.start < taken.stop:
            first, stop = (rows.start + rows.step * bound - start for bound in (taken.start, taken.stop))
            yield scoring, taken, slice(first, stop, rows.step)


def _own_rows(objective: Objective, scores: Tensor) -> Tensor:
    return in_shape_of(objective.targets, scores[objective.start : objective.stop])


def _evaluated(objective: Objective, scores: Tensor) -> ScoredRows:
    own = _own_rows(objective, scores)
    return ScoredRows.of(own, objective.evaluate(own, slice(None)))


def _concatenated(scores: list[Tensor], targets: Tensor) -> Tensor:
    if len(scores) == 1:
        return scores[0]
    return torch.cat(scores) if scores else torch.empty(targets.shape, device=targets.device)


def _concatenate_targets(targets: list[Tensor]) -> Tensor:
    """Concatenates [n] and [n, K] tensors to [n] if all are [n], else to [n, largest K] with zeros where a row has
    fewer."""
    if len(targets) == 1:
        return targets[0]
    if all(each.ndim == 1 for each in targets):
        return torch.cat(targets)
    columns = [each.reshape(len(each), -1) for each in targets]
    widest = max(each.shape[1] for each in columns)
    return torch.cat([pad(each, (0, widest - each.shape[1])) for each in columns])
