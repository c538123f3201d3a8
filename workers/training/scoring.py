"""Computes the losses of a micro-batch from its final hidden states, and their gradient, with any kind of head.

Segments and objectives are in the order of the rows, and the objectives cover all rows. If ranks divide the rows,
hidden, gradient and segments have this rank's rows, `share.rows`; objectives and outputs have all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..batch.objective import Objective, join_outputs
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
class ObjectiveScores:
    """The result for the n rows of an objective. scores: float32 in the shape of its targets, [n] or [n, K]."""

    scores: Tensor
    loss: LossOutput


@torch.no_grad()
def score(
    heads: Heads,
    hidden: Tensor,
    segments: Sequence[Segment],
    objectives: Sequence[Objective],
    share: TokenShard | None = None,
) -> list[ObjectiveScores]:
    """Returns the result of each objective for hidden [n, hidden], without gradients.

    `share` is None if this rank has all rows.
    """
    share = share or TokenShard(len(hidden), Mesh())
    scores = share.joined(_all_scores(_HeadRuns(heads, hidden, segments, objectives, share)))
    return [_evaluated(objective, scores) for objective in objectives]


@torch.no_grad()
def score_with_gradient(
    heads: Heads,
    hidden: Tensor,
    segments: Sequence[Segment],
    objectives: Sequence[Objective],
    gradient: Tensor,
    share: TokenShard | None = None,
) -> list[ObjectiveScores]:
    """Like `scored`, with gradients.

    Writes the gradient with respect to hidden [n, hidden] to `gradient`, and adds the gradients of adapters on the
    heads to their scratch.
    """
    share = share or TokenShard(len(hidden), Mesh())
    pieces = _HeadRuns(heads, hidden, segments, objectives, share)
    scorings = [_ObjectiveScoring(objective) for objective in objectives]
    wanting = [scoring for scoring in scorings if pieces.needs_all_scores_first(scoring.objective)]
    if wanting:
        scores = share.joined(_all_scores(pieces))
        for scoring in wanting:
            scoring.score_all(scores)
    parts = []
    for piece in pieces:
        for rows in chunks(piece.num_rows, piece.head.chunk_rows):
            parts.append(piece.head.scores(rows))
            of_all = slice(piece.first + rows.start, piece.first + rows.stop)
            piece.head.backward(_gradient_of(scorings, share.places(of_all), parts[-1]), gradient[of_all])
    if share.is_all:
        return [scoring.output() for scoring in scorings]
    scores = share.joined(_concatenated(parts, pieces.targets))
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
        self._pieces: dict[int, _HeadRun] = {}
        self._first_of: dict[int, int] = {}
        for scores, members in groupby(objectives, key=lambda objective: objective.loss.scores):
            of_head = list(members)
            start, stop = of_head[0].start, of_head[-1].stop
            last = stop if of_head[-1] is not objectives[-1] else share.num_padded
            rows = overlap(share.rows, start, last)
            head = heads[scores].start_pass(hidden[rows], clip_segments(segments, rows), self.targets[rows])
            self._pieces[start] = _HeadRun(rows.start, rows.stop - rows.start, head)
            self._first_of |= {objective.start: start for objective in of_head}

    def __iter__(self) -> Iterator[_HeadRun]:
        return iter(self._pieces.values())

    def needs_all_scores_first(self, objective: Objective) -> bool:
        """True for a sequence-wise loss over several chunks: all scores are computed first, because the loss of a whole
        sequence must be known before any gradient."""
        start = self._first_of[objective.start]
        size = self._pieces[start].head.chunk_rows
        first, last = (objective.start - start) // size, (objective.stop - 1 - start) // size
        return objective.loss.sequence_wise and (first != last or not self._share.is_all)


def _all_scores(pieces: _HeadRuns) -> Tensor:
    parts = [piece.head.scores(rows) for piece in pieces for rows in chunks(piece.num_rows, piece.head.chunk_rows)]
    return _concatenated(parts, pieces.targets)


class _ObjectiveScoring:
    """Accumulates an objective's scores and losses, chunk by chunk."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._scores: list[Tensor] = []
        self._losses: list[LossOutput] = []
        self._whole_gradient: Tensor | None = None

    def score_all(self, scores: Tensor) -> None:
        """Takes the scores of all rows, before the first chunk."""
        self._whole_gradient = self._gradient(_of(self.objective, scores), slice(None))

    def gradient(self, scores: Tensor, rows: slice) -> Tensor:
        """Returns the gradient with respect to the scores of `rows`, counted from the objective's first row."""
        if self._whole_gradient is not None:
            return self._whole_gradient[rows]
        return self._gradient(scores, rows)

    def output(self) -> ObjectiveScores:
        return ObjectiveScores(torch.cat(self._scores), join_outputs(self._losses))

    def _gradient(self, scores: Tensor, rows: slice) -> Tensor:
        output, gradient = self.objective.gradient(scores, rows)
        self._scores.append(scores)
        self._losses.append(output)
        return gradient


def _of(objective: Objective, scores: Tensor) -> Tensor:
    return _view_like(objective.targets, scores[objective.start : objective.stop])


def _evaluated(objective: Objective, scores: Tensor) -> ObjectiveScores:
    own = _of(objective, scores)
    return ObjectiveScores(own, objective.evaluate(own, slice(None)))


def _concatenated(scores: list[Tensor], targets: Tensor) -> Tensor:
    if len(scores) == 1:
        return scores[0]
    return torch.cat(scores) if scores else torch.empty(targets.shape, device=targets.device)


def _gradient_of(scorings: list[_ObjectiveScoring], rows: slice, scores: Tensor) -> Tensor:
    """Returns the gradient of all losses with respect to the scores of a chunk, `rows`."""
    gradient = torch.zeros_like(scores)
    for scoring in scorings:
        objective = scoring.objective
        piece = overlap(rows, objective.start, objective.stop)
        if piece.start < piece.stop:
            own = _view_like(objective.targets, scores[piece])
            first, stop = (rows.start + rows.step * bound - objective.start for bound in (piece.start, piece.stop))
            found = scoring.gradient(own, slice(first, stop, rows.step))
            _view_like(objective.targets, gradient[piece]).copy_(found)
    return gradient


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


def _view_like(targets: Tensor, values: Tensor) -> Tensor:
    """Returns the view of rows of a `_concatenate_targets` tensor that belongs to these targets."""
    if values.ndim == 1:
        return values
    return values[:, 0] if targets.ndim == 1 else values[:, : targets.shape[1]]
