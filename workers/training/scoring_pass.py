"""Runs micro-batches of models with heads: hidden states, scores and losses, and gradients."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ..batch.micro_batch import MicroBatch
from ..batch.validated import ModelLimits, validate_request
from ..heads import HEADS
from ..lora import Adapter, LoraLayers, Segment
from ..lora.segment import clip_segments, overlap
from ..models.model import BaseModel
from ..parallel.expert_counts import ExpertCounts
from ..parallel.mesh import Mesh
from ..parallel.token_shard import TokenShard
from .rank_part import RankPart
from .scoring import Heads, score

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

    def read(self, operation: RankPart, limits: ModelLimits) -> None:
        part = operation.part
        if part.request.features is not None:
            raise OperationError("only drafts use features: leave out feature_ref, and capture with a draft")
        operation.batch = validate_request(part.request, limits, part.data_share, operation.model.program.losses)

    def plan(self, operations: Sequence[RankPart]) -> None:
        """Returns None: other ranks need to know nothing of these operations in advance."""

    def start(
        self,
        operations: Sequence[RankPart],
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
            by_run = {operation.run_id: operation.model for operation in operations}
            in_order = (by_run[run_id] for run_id in sorted(by_run))
            expert_adapters = [model for model in in_order if isinstance(model, Adapter)]
        hidden_states = hidden_states or self._base.shared_hidden_states
        return _JointPass(self, heads, operations, expert_adapters, hidden_states).run

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
    operations: Sequence[RankPart]
    expert_adapters: list[Adapter]
    hidden_states: HiddenStates

    def run(self, micro_batch: MicroBatch) -> None:
        strategy, trains = self.strategy, not self.operations[0].forward_only
        share = strategy.shard_of(micro_batch)
        segments, scored = _segments(micro_batch, self.operations, share)
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
                    for scores in sorted({each.batch.loss.scores for each in self.operations}):
                        held.enter_context(self.heads[scores].gathered())
                objectives = micro_batch.objectives
                found = score(self.heads, own, scored, objectives, gradient, share) if objectives else ()
            for objective, result in zip(objectives, found, strict=True):
                for segment in objective.segments:
                    self.operations[segment.operation].add_scores(segment, result)
            if counts is not None:
                for segment, of_layers in zip(micro_batch.segments, counts.by_segment(), strict=True):
                    self.operations[segment.operation].add_expert_counts(segment, of_layers)
            if gradient is not None:
                grad_hidden = gradient if share is None else share.joined_to_hidden(gradient)
                for segment in micro_batch.segments:
                    if self.operations[segment.operation].failure:  # other operations share the backward pass
                        tokens = slice(segment.start, segment.stop)
                        grad_hidden[tokens if share is None else overlap(share.hidden, tokens.start, tokens.stop)] = 0
                if hidden.requires_grad:
                    hidden.backward(grad_hidden)


def _segments(
    micro_batch: MicroBatch, operations: Sequence[RankPart], share: TokenShard | None
) -> tuple[list[Segment], list[Segment]]:
    """Returns the segments of the tokens that this rank runs, and of those that it scores, with neighbours of the same
    model merged. No adapter adapts a share's padding."""
    segments: list[Segment] = []
    for each in micro_batch.segments:
        model = operations[each.operation].model
        start = segments.pop().start if segments and segments[-1].model is model else each.start
        segments.append(Segment(start, each.stop, model))
    if share is None:
        return segments, segments
    if share.num_padding:
        segments.append(Segment(share.num_tokens, share.num_padded, None))
    return clip_segments(segments, share.tokens), clip_segments(segments, share.scored)
