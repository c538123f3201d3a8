"""Runs micro-batches of models with heads: hidden states, scores and losses, and their gradients.

Segments and objectives are in the order of the tokens, and the objectives cover all tokens. If ranks divide the tokens,
hidden, gradient and segments have those that this rank scores, `share.scored`; objectives and outputs have all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...schemas.errors import OperationError
from ..batch.micro_batch import MicroBatch, Objective, in_shape_of, join_outputs
from ..batch.validated import ModelLimits, validate_request
from ..heads import HEADS, Head, HeadPass
from ..lora import Adapter, LoraLayers, Segment
from ..lora.segment import clip_segments, overlap
from ..losses import LossOutput
from ..models.model import BaseModel
from ..parallel.expert_counts import ExpertCounts
from ..parallel.mesh import Mesh
from ..parallel.token_shard import TokenShard
from .rank_part import RankPart, ScoredTokens

# By name (see Loss.head).
Heads = Mapping[str, Head]

RunMicroBatch = Callable[[MicroBatch], None]

# Returns the hidden states of `share.hidden`, or of all tokens without a share, see BaseModel.shared_hidden_states.
HiddenStates = Callable[[MicroBatch, TokenShard | None, ExpertCounts | None], Tensor]


class ScoringStrategy:
    """The PassStrategy of models with heads."""

    def __init__(self, base: BaseModel, adapters: LoraLayers, mesh: Mesh, head_chunk_tokens: int) -> None:
        self._base, self.adapters, self.mesh = base, adapters, mesh
        self.head_chunk_tokens = head_chunk_tokens
        self._heads = {name: make(base, head_chunk_tokens) for name, make in HEADS.items()}
        self._has_all_tokens = mesh.spec.sp == mesh.spec.tp == 1
        self._exchanges_experts = mesh.along("ep").size > 1
        # Elsewhere each rank has the whole heads anyway.
        self.gathers_heads = base.weights.is_sharded
        # Ranks along tp route the same tokens.
        self.counts_experts = bool(base.experts) and mesh.along("tp").index == 0

    def read(self, part: RankPart, limits: ModelLimits) -> None:
        sent = part.sent
        if sent.request.features is not None:
            raise OperationError("only drafts use features: leave out feature_ref, and capture with a draft")
        part.batch = validate_request(sent.request, limits, sent.data_share, part.model.program.losses)

    def plan(self, parts: Sequence[RankPart]) -> None:
        """Returns None: other ranks need to know nothing of these operations in advance."""

    def start(
        self,
        parts: Sequence[RankPart],
        num_lanes: int,
        plans: Sequence[object] = (),
        hidden_states: HiddenStates | None = None,
    ) -> RunMicroBatch:
        """Returns the function that runs a micro-batch, see PassStrategy.

        Args:
            hidden_states: None for those of the base model.
        """
        heads = self._heads
        if num_lanes > 1:
            heads = {name: head.split_budget(num_lanes) for name, head in heads.items()}
        expert_adapters: list[Adapter] = []
        if self._exchanges_experts:  # their tokens can arrive from other ranks, which list them in the same order
            by_run = {part.run_id: part.model for part in parts}
            in_order = (by_run[run_id] for run_id in sorted(by_run))
            expert_adapters = [model for model in in_order if isinstance(model, Adapter)]
        hidden_states = hidden_states or self._base.shared_hidden_states
        return _JointPass(self, heads, parts, expert_adapters, hidden_states).run

    def shard_of(self, micro_batch: MicroBatch) -> TokenShard | None:
        """Returns this rank's shard of a micro-batch's tokens; None if it runs and scores all of them."""
        if self._has_all_tokens:
            return None
        ring = self._base.loaded.sequence_split.ring
        return TokenShard(len(micro_batch.tokens), self.mesh, self._base.shards_activations, ring)

    @torch.no_grad()
    def bare_hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """Returns the base model's final hidden states [tokens, hidden]. All ranks call this together, with the same
        tokens."""
        share = self.shard_of(micro_batch)
        with self.adapters.applied(()):
            hidden = self._base.shared_hidden_states(micro_batch, share)
        return hidden if share is None else share.joined(share.select_scored(hidden))


@dataclass(frozen=True, eq=False)
class _JointPass:
    """Runs the micro-batches that operations share.

    expert_adapters: those whose tokens can arrive from another rank of the expert-parallel group.
    """

    strategy: ScoringStrategy
    heads: Heads
    parts: Sequence[RankPart]
    expert_adapters: list[Adapter]
    hidden_states: HiddenStates

    def run(self, micro_batch: MicroBatch) -> None:
        strategy, trains = self.strategy, not self.parts[0].forward_only
        share = strategy.shard_of(micro_batch)
        segments, scored = _segments(micro_batch, self.parts, share)
        counts = None
        if strategy.counts_experts and micro_batch.segments:
            own_tokens = slice(0, len(micro_batch.tokens)) if share is None else share.tokens
            stops = [segment.stop for segment in micro_batch.segments]
            counts = ExpertCounts(own_tokens, stops, micro_batch.tokens.device)
        with torch.set_grad_enabled(trains), strategy.adapters.applied(segments, self.expert_adapters):
            hidden = self.hidden_states(micro_batch, share, counts)
            own = hidden.detach() if share is None else share.select_scored(hidden.detach())
            gradient = torch.zeros_like(own) if trains else None
            with ExitStack() as held:
                if strategy.gathers_heads:
                    # On all ranks alike, even if a micro-batch has no tokens for one of the heads.
                    for name in sorted({each.batch.loss.head for each in self.parts}):
                        held.enter_context(self.heads[name].gathered())
                objectives = micro_batch.objectives
                found = score(self.heads, own, scored, objectives, gradient, share) if objectives else ()
            for objective, result in zip(objectives, found, strict=True):
                for segment in objective.segments:
                    self.parts[segment.operation].add_scores(segment, result)
            if counts is not None:
                for segment, of_layers in zip(micro_batch.segments, counts.by_segment(), strict=True):
                    self.parts[segment.operation].add_expert_counts(segment, of_layers)
            if gradient is not None:
                grad_hidden = gradient if share is None else share.joined_to_hidden(gradient)
                for segment in micro_batch.segments:
                    if self.parts[segment.operation].failure:  # other operations share the backward pass
                        tokens = slice(segment.start, segment.stop)
                        grad_hidden[tokens if share is None else overlap(share.hidden, tokens.start, tokens.stop)] = 0
                if hidden.requires_grad:
                    hidden.backward(grad_hidden)


def _segments(
    micro_batch: MicroBatch, parts: Sequence[RankPart], share: TokenShard | None
) -> tuple[list[Segment], list[Segment]]:
    """Returns the segments of the tokens that this rank runs, and of those that it scores, with neighbours of the same
    model merged. No adapter adapts a share's padding."""
    segments: list[Segment] = []
    for each in micro_batch.segments:
        model = parts[each.operation].model
        start = segments.pop().start if segments and segments[-1].model is model else each.start
        segments.append(Segment(start, each.stop, model))
    if share is None:
        return segments, segments
    if share.num_padding:
        segments.append(Segment(share.num_tokens, share.num_padded, None))
    return clip_segments(segments, share.tokens), clip_segments(segments, share.scored)


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
            scoring.differentiate(parts[-1], own if share is None else share.in_micro_batch(own), grad_scores)
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
    targets = objectives[0].targets if len(objectives) == 1 else _concatenate_targets(objectives)
    targets = targets if share is None else share.of_scored(targets)
    spans = []
    for name, members in groupby(objectives, key=lambda objective: objective.loss.head):
        of_head = list(members)
        start, stop = of_head[0].start, of_head[-1].stop
        own = slice(start, stop)
        if share is not None:
            own = overlap(share.scored, start, stop if of_head[-1] is not objectives[-1] else share.num_padded)
        head = heads[name].start_pass(hidden[own], clip_segments(segments, own), targets[own])
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

    def differentiate(self, scores: Tensor, tokens: slice, grad_scores: Tensor) -> None:
        """Computes the loss of these tokens of the micro-batch, as far as they are the objective's, and its gradient
        with respect to their scores."""
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
        scoring.differentiate(scores[tokens], tokens, grad_scores)
        scoring.grad_scores = in_shape_of(scoring.objective.targets, grad_scores)


def _evaluated(objective: Objective, scores: Tensor) -> ScoredTokens:
    """Returns the result, without gradients, for the scores of all tokens of the micro-batch."""
    own = in_shape_of(objective.targets, scores[objective.start : objective.stop])
    return ScoredTokens.of(objective, own, objective.evaluate(own, slice(None)))


def _concatenate_targets(objectives: Sequence[Objective]) -> Tensor:
    """Concatenates targets [n] and [n, K] to [n] if all are [n], else to [n, largest K] with zeros where a token has
    fewer."""
    targets = [each.targets for each in objectives]
    if all(each.ndim == 1 for each in targets):
        return torch.cat(targets)
    columns = [each.reshape(len(each), -1) for each in targets]
    widest = max(each.shape[1] for each in columns)
    return torch.cat([pad(each, (0, widest - each.shape[1])) for each in columns])
