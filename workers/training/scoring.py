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
from ..lora import Segment
from ..lora.segment import clip_segments, overlap
from ..losses import LossOutput
from ..parallel.token_shard import TokenShard

# By the name of their scores (see Loss.scores).
Heads = Mapping[str, Head]


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """The result for n tokens, in host memory: each array is float32 in the shape of the targets, [n] or [n, K].

    start: the first of them in the micro-batch. scores: a head's. losses, metrics: see LossOutput. ratios, denominator:
    of drafts, over all n tokens.
    """

    start: int
    scores: np.ndarray
    losses: np.ndarray
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    denominator: float = 0.0

    @staticmethod
    def of(objective: Objective, scores: Tensor, output: LossOutput) -> "ScoredTokens":
        metrics = {name: values.cpu().numpy() for name, values in output.metrics.items()}
        return ScoredTokens(objective.start, scores.cpu().numpy(), output.losses.cpu().numpy(), metrics)


@torch.no_grad()
def score(
    heads: Heads,
    hidden: Tensor,
    segments: Sequence[Segment],
    objectives: Sequence[Objective],
    gradient: Tensor | None = None,
    share: TokenShard | None = None,
) -> list[ScoredTokens]:
    """Returns the result of each objective for hidden [n, hidden].

    Args:
        gradient: receives the gradient with respect to hidden, while those of adapters on the heads are added to their
            scratch; None if no gradients are needed.
        share: None if this rank has all tokens.
    """
    spans = _head_spans(heads, hidden, segments, objectives, share)
    if gradient is None:
        scores = _all_scores(spans, share)
        return [_evaluated(objective, scores) for objective in objectives]
    scorings = [_ObjectiveScoring(objective) for objective in objectives]
    if any(objective.loss.sequence_wise for objective in objectives):
        _score_divided_sequences(scorings, spans, share)
    parts = []
    for head, chunk, own in _span_chunks(spans):
        parts.append(head.scores(chunk))
        grad_scores = torch.zeros_like(parts[-1])
        for scoring in scorings:
            scoring.backward(parts[-1], own if share is None else share.in_micro_batch(own), grad_scores)
        head.backward(grad_scores, gradient[own])
    if share is None:
        return [ScoredTokens.of(each.objective, torch.cat(each.scores), join_outputs(each.losses)) for each in scorings]
    scores = share.joined(torch.cat(parts))
    return [_evaluated(objective, scores) for objective in objectives]


@dataclass(frozen=True, eq=False)
class _HeadSpan:
    """Neighbouring tokens scored by one head.

    start: the first of them in the micro-batch. first: the first of those that this rank scores, counted among all that
    it scores.
    """

    head: HeadPass
    start: int
    first: int
    num_tokens: int


def _head_spans(
    heads: Heads, hidden: Tensor, segments: Sequence[Segment], objectives: Sequence[Objective], share: TokenShard | None
) -> list[_HeadSpan]:
    """Divides the tokens that this rank scores into spans with the same head."""
    targets = _concatenate_targets([each.targets for each in objectives])
    targets = targets if share is None else share.of_scored(targets)
    spans = []
    for scores, members in groupby(objectives, key=lambda objective: objective.loss.scores):
        of_head = list(members)
        start, stop = of_head[0].start, of_head[-1].stop
        own = slice(start, stop)
        if share is not None:
            own = overlap(share.scored, start, stop if of_head[-1] is not objectives[-1] else share.num_padded)
        head = heads[scores].start_pass(hidden[own], clip_segments(segments, own), targets[own])
        spans.append(_HeadSpan(head, start, own.start, own.stop - own.start))
    return spans


def _span_chunks(spans: Sequence[_HeadSpan]) -> Iterator[tuple[HeadPass, slice, slice]]:
    """Yields the tokens to score at a time: their head, and where they are in its span and among all of this rank."""
    for span in spans:
        size = span.head.chunk_tokens
        for first in range(0, span.num_tokens, size):
            chunk = slice(first, min(first + size, span.num_tokens))
            yield span.head, chunk, slice(span.first + chunk.start, span.first + chunk.stop)


def _all_scores(spans: Sequence[_HeadSpan], share: TokenShard | None) -> Tensor:
    """Returns the scores of all tokens, also of those that other ranks score."""
    scores = torch.cat([head.scores(chunk) for head, chunk, _ in _span_chunks(spans)])
    return scores if share is None else share.joined(scores)


@dataclass(eq=False)
class _ObjectiveScoring:
    """An objective's scores and losses, collected chunk by chunk.

    grad_scores: the gradient with respect to all scores, if these are known before the first chunk.
    """

    objective: Objective
    scores: list[Tensor] = field(default_factory=list)
    losses: list[LossOutput] = field(default_factory=list)
    grad_scores: Tensor | None = None

    def backward(self, scores: Tensor, tokens: slice, grad_scores: Tensor) -> None:
        """Computes the gradient with respect to the scores of these tokens of the micro-batch, as far as they are the
        objective's."""
        objective, step = self.objective, tokens.step or 1
        taken = overlap(tokens, objective.start, objective.stop)
        if taken.start >= taken.stop:
            return
        first, stop = (tokens.start + step * bound - objective.start for bound in (taken.start, taken.stop))
        own = slice(first, stop, step)
        if self.grad_scores is None:
            with torch.enable_grad():
                leaf = in_shape_of(objective.targets, scores[taken]).detach().requires_grad_()
                output = objective.evaluate(leaf, own)
                (gradient,) = torch.autograd.grad(output.losses.sum(), leaf)
            self.scores.append(leaf.detach())
            self.losses.append(LossOutput(output.losses.detach(), output.metrics))
        else:
            gradient = self.grad_scores[own]
        in_shape_of(objective.targets, grad_scores[taken]).copy_(gradient)


def _score_divided_sequences(
    scorings: Sequence[_ObjectiveScoring], spans: Sequence[_HeadSpan], share: TokenShard | None
) -> None:
    """Computes all scores first for sequence-wise losses whose tokens are in several chunks: the loss of a whole
    sequence must be known before any gradient."""
    divided = []
    for scoring in scorings:
        objective, span = scoring.objective, [each for each in spans if each.start <= scoring.objective.start][-1]
        bounds = objective.start - span.start, objective.stop - 1 - span.start
        is_divided = share is not None or len({bound // span.head.chunk_tokens for bound in bounds}) > 1
        if objective.loss.sequence_wise and is_divided:
            divided.append(scoring)
    if not divided:
        return
    scores = _all_scores(spans, share)
    for scoring in divided:
        tokens = slice(scoring.objective.start, scoring.objective.stop)
        grad_scores = torch.empty_like(scores[tokens])
        scoring.backward(scores[tokens], tokens, grad_scores)
        scoring.grad_scores = in_shape_of(scoring.objective.targets, grad_scores)


def _evaluated(objective: Objective, scores: Tensor) -> ScoredTokens:
    """Returns the result, without gradients, for the scores of all tokens of the micro-batch."""
    own = in_shape_of(objective.targets, scores[objective.start : objective.stop])
    return ScoredTokens.of(objective, own, objective.evaluate(own, slice(None)))


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
