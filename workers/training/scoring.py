"""Computes the losses of a micro-batch from its final hidden states, and their gradient, with any kind of head.

Segments and objectives are in the order of the tokens, and the objectives cover all tokens. If ranks divide the tokens,
hidden, gradient and segments have those that this rank scores, `share.scored`; objectives and outputs have all of them.
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
from ..parallel.token_shard import TokenShard, overlap

# By the name of their scores (see Loss.scores).
Heads = Mapping[str, Head]


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """The result for n tokens, in host memory: each array is float32 in the shape of the targets, [n] or [n, K].

    scores: a head's. losses, metrics: see LossOutput. ratios, denominator: of drafts, over all n tokens.
    """

    scores: np.ndarray
    losses: np.ndarray
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    denominator: float = 0.0

    @staticmethod
    def of(scores: Tensor, output: LossOutput) -> "ScoredTokens":
        metrics = {name: values.cpu().numpy() for name, values in output.metrics.items()}
        return ScoredTokens(scores.cpu().numpy(), output.losses.cpu().numpy(), metrics)

    def part(self, tokens: slice) -> "ScoredTokens":
        """Returns the result for some of the tokens, without ratios."""
        metrics = {name: values[tokens] for name, values in self.metrics.items()}
        return ScoredTokens(self.scores[tokens], self.losses[tokens], metrics)


@torch.no_grad()
def score(
    heads: Heads,
    hidden: Tensor,
    segments: Sequence[Segment],
    objectives: Sequence[Objective],
    share: TokenShard | None = None,
) -> list[ScoredTokens]:
    """Returns the result of each objective for hidden [n, hidden], without gradients.

    `share` is None if this rank has all tokens.
    """
    scores = _HeadSpans(heads, hidden, segments, objectives, share).all_scores()
    scores = scores if share is None else share.joined(scores)
    return [_evaluated(objective, scores) for objective in objectives]


@torch.no_grad()
def score_with_gradient(
    heads: Heads,
    hidden: Tensor,
    segments: Sequence[Segment],
    objectives: Sequence[Objective],
    gradient: Tensor,
    share: TokenShard | None = None,
) -> list[ScoredTokens]:
    """Like `score`, with gradients.

    Writes the gradient with respect to hidden [n, hidden] to `gradient`, and adds the gradients of adapters on the
    heads to their scratch.
    """
    spans = _HeadSpans(heads, hidden, segments, objectives, share)
    scorings = [_ObjectiveScoring(objective) for objective in objectives]
    if wanting := [each for each in scorings if spans.needs_all_scores_first(each.objective)]:
        scores = spans.all_scores()
        scores = scores if share is None else share.joined(scores)
        for scoring in wanting:
            scoring.score_all(scores)
    parts = []
    for head, of_head, own in spans.chunks():
        parts.append(head.scores(of_head))
        of_scores = torch.zeros_like(parts[-1])
        tokens = own if share is None else share.in_micro_batch(own)
        for scoring, taken, of_objective in _overlapping(scorings, tokens):
            targets = scoring.objective.targets
            found = scoring.gradient(in_shape_of(targets, parts[-1][taken]), of_objective)
            in_shape_of(targets, of_scores[taken]).copy_(found)
        head.backward(of_scores, gradient[own])
    if share is None:
        return [scoring.output() for scoring in scorings]
    scores = share.joined(_concatenated(parts, spans.targets))
    return [_evaluated(objective, scores) for objective in objectives]


@dataclass(frozen=True, eq=False)
class _HeadSpan:
    """Neighbouring tokens scored by one head. first: index of the first of them among those that this rank scores."""

    first: int
    num_tokens: int
    head: HeadPass


class _HeadSpans:
    """Divides the tokens that this rank scores into spans with the same head.

    targets: of all of these tokens, int64 [n] or [n, K].
    """

    def __init__(
        self,
        heads: Heads,
        hidden: Tensor,
        segments: Sequence[Segment],
        objectives: Sequence[Objective],
        share: TokenShard | None,
    ) -> None:
        self._share = share
        targets = _concatenate_targets([each.targets for each in objectives])
        self.targets = targets if share is None else share.of_scored(targets)
        # Keyed by the first token, counted over all ranks.
        self._spans: dict[int, _HeadSpan] = {}
        self._first_of: dict[int, int] = {}
        for scores, members in groupby(objectives, key=lambda objective: objective.loss.scores):
            of_head = list(members)
            start, stop = of_head[0].start, of_head[-1].stop
            own = slice(start, stop)
            if share is not None:
                last = stop if of_head[-1] is not objectives[-1] else share.num_padded
                own = overlap(share.scored, start, last)
            head = heads[scores].start_pass(hidden[own], clip_segments(segments, own), self.targets[own])
            self._spans[start] = _HeadSpan(own.start, own.stop - own.start, head)
            self._first_of |= {objective.start: start for objective in of_head}

    def chunks(self) -> Iterator[tuple[HeadPass, slice, slice]]:
        """Yields the tokens to score at a time: the head, their slice of its tokens, and of those of this rank."""
        for span in self._spans.values():
            for tokens in chunks(span.num_tokens, span.head.chunk_tokens):
                yield span.head, tokens, slice(span.first + tokens.start, span.first + tokens.stop)

    def all_scores(self) -> Tensor:
        """Returns the scores of all tokens that this rank scores."""
        return _concatenated([head.scores(tokens) for head, tokens, _ in self.chunks()], self.targets)

    def needs_all_scores_first(self, objective: Objective) -> bool:
        """True for a sequence-wise loss over several chunks: all scores are computed first, because the loss of a whole
        sequence must be known before any gradient."""
        if not objective.loss.sequence_wise:
            return False
        start = self._first_of[objective.start]
        size = self._spans[start].head.chunk_tokens
        first, last = (objective.start - start) // size, (objective.stop - 1 - start) // size
        return first != last or self._share is not None


class _ObjectiveScoring:
    """Accumulates an objective's scores and losses, chunk by chunk."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._scores: list[Tensor] = []
        self._losses: list[LossOutput] = []
        self._whole_gradient: Tensor | None = None

    def score_all(self, scores: Tensor) -> None:
        """Takes the scores of all tokens, before the first chunk."""
        self._whole_gradient = self.gradient(_scores_of(self.objective, scores), slice(None))

    def gradient(self, scores: Tensor, tokens: slice) -> Tensor:
        """Returns the gradient with respect to the scores of `tokens`, counted from the objective's first token."""
        if self._whole_gradient is not None:
            return self._whole_gradient[tokens]
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            output = self.objective.evaluate(leaf, tokens)
            (gradient,) = torch.autograd.grad(output.losses.sum(), leaf)
        self._scores.append(scores)
        self._losses.append(LossOutput(output.losses.detach(), output.metrics))
        return gradient

    def output(self) -> ScoredTokens:
        return ScoredTokens.of(torch.cat(self._scores), join_outputs(self._losses))


def _overlapping(
    scorings: Sequence[_ObjectiveScoring], tokens: slice
) -> Iterator[tuple[_ObjectiveScoring, slice, slice]]:
    """Yields the objectives that have some of the tokens: which of `tokens` these are, and which of the objective's."""
    step = tokens.step or 1
    for scoring in scorings:
        start = scoring.objective.start
        taken = overlap(tokens, start, scoring.objective.stop)
        if taken.start < taken.stop:
            first, stop = (tokens.start + step * bound - start for bound in (taken.start, taken.stop))
            yield scoring, taken, slice(first, stop, step)


def _scores_of(objective: Objective, scores: Tensor) -> Tensor:
    return in_shape_of(objective.targets, scores[objective.start : objective.stop])


def _evaluated(objective: Objective, scores: Tensor) -> ScoredTokens:
    own = _scores_of(objective, scores)
    return ScoredTokens.of(own, objective.evaluate(own, slice(None)))


def _concatenated(scores: list[Tensor], targets: Tensor) -> Tensor:
    if len(scores) == 1:
        return scores[0]
    return torch.cat(scores) if scores else torch.empty(targets.shape, device=targets.device)


def _concatenate_targets(targets: list[Tensor]) -> Tensor:
    """Concatenates [n] and [n, K] tensors to [n] if all are [n], else to [n, largest K] with zeros where a token
    has fewer."""
    if len(targets) == 1:
        return targets[0]
    if all(each.ndim == 1 for each in targets):
        return torch.cat(targets)
    columns = [each.reshape(len(each), -1) for each in targets]
    widest = max(each.shape[1] for each in columns)
    return torch.cat([pad(each, (0, widest - each.shape[1])) for each in columns])
