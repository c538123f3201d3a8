"""Runs passes of draft models: the target runs without gradients, then the draft runs over its hidden states."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ....schemas.errors import OperationError
from ....schemas.training import FeatureLocation, ForwardBackwardRequest
from ...batch.micro_batch import MicroBatch, select_examples
from ...batch.validated import ModelLimits, ValidatedBatch, validate_request
from ...heads import LogprobHead
from ...lora import LoraPair, Segment
from ...losses.loss import Config, Loss, LossOutput
from ...models.model import BaseModel
from ...ops.linear import soft_cap_derivatives
from ...protocol.calls import Failure
from ...registry.model_registry import ModelRegistry
from ...shapes.layouts.flops import ModelFlops
from ...shapes.logit_budget import LogitBudget
from ...shapes.model_shape import ModelShape
from ...training.rank_part import PartialResult, RankPart, ScoredTokens
from ...training.scoring import RunMicroBatch, ScoringStrategy
from ..algorithms.algorithm import DraftPass, chunks
from ..losses.draft_scores import DraftGradients, DraftScores
from ..model.draft_model import DraftModel
from ..sequences.captured_features import CapturedFeatures, Checksums, address_of
from ..sequences.features import DraftInputs
from ..sequences.target_form import TargetDistribution
from .acceptance import Survivals, SurvivalTable, acceptance_lengths
from .feature_capture import (
    capture_directory,
    examples_of,
    store_features,
    stored_of,
)
from .feature_source import HookedTarget, TargetFeatures, stored_features
from .pass_flops import DraftSequence, draft_pass_flops
from .sharding import (
    DraftBatch,
    DraftBatchShare,
    DraftDistribution,
    FeatureExchange,
    draft_batches,
    gather_draft_batches,
    tokens_by_rank,
)
from .target_outputs import TargetLogits


def _no_loss(scores: object, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    raise AssertionError("a capture pass computes no loss")


# A capture pass stores the target's features for later passes, and predicts nothing.
_CAPTURES = {
    "capture": Loss(
        _no_loss, required=(), optional={"weights": lambda inputs, config: 1.0}, counted_by="weights", head="features"
    )
}


@dataclass(frozen=True)
class NeededSources:
    """The sources of target features that a micro-batch needs.

    target: the target must run. stored: captured features must be read.
    """

    target: bool
    stored: bool

    @staticmethod
    def for_examples(stored: Sequence[CapturedFeatures | None]) -> "NeededSources":
        return NeededSources(any(each is None for each in stored), any(each is not None for each in stored))

    @staticmethod
    def union(needs: Sequence["NeededSources"]) -> "NeededSources":
        return NeededSources(any(each.target for each in needs), any(each.stored for each in needs))


@dataclass(frozen=True)
class DraftPlan:
    """A rank's plan for drafts. stored: the indices of the examples whose features it has found, by work_number."""

    needed: NeededSources
    stored: Mapping[int, frozenset[int]]


class DraftStrategy:
    """The PassStrategy of drafts."""

    def __init__(self, base: BaseModel, models: ModelRegistry, scoring: ScoringStrategy) -> None:
        self._base, self._models, self._mesh, self._shard_of = base, models, scoring.mesh, scoring.shard_of
        self._head = head = LogprobHead(base, scoring.head_chunk_tokens)  # computes the target's logits
        self._checksums = Checksums()
        self._budget = LogitBudget.on(base.device.type == "cpu", head.chunk_tokens)
        self._flops = ModelFlops(base.shape) if isinstance(base.shape, ModelShape) else None

    def read(self, operation: RankPart, limits: ModelLimits) -> None:
        """Validates the part's data and finds the captured features of its examples."""
        draft, part, location = self._draft(operation.run_id), operation.sent, operation.sent.request.features
        losses = _CAPTURES if location is not None and location.captures else draft.program.losses
        operation.batch = validate_request(part.request, limits, part.data_share, losses)
        if losses is not _CAPTURES and draft.missing_state is not None:
            raise OperationError(draft.missing_state)
        if location is not None:
            operation.prepared = self.find_stored(part.request, location, operation.batch.datum_indices)

    def find_stored(
        self, request: ForwardBackwardRequest, location: FeatureLocation, datum_indices: Sequence[int]
    ) -> dict[int, CapturedFeatures]:
        """Returns the captured features of a request's data, by index of the example, as far as they are available.

        For a training request these are the features that the data refer to, for a capture request those that are
        already stored.

        Args:
            datum_indices: the data's indices in the whole operation.
        Raises:
            OperationError: the features do not fit the draft or the data.
        """
        draft = self._draft(request.model_id)
        if location.captures and draft.needs_vocabulary_to_capture and draft.missing_state is not None:
            raise OperationError(draft.missing_state)
        kind = draft.feature_kind
        stored: dict[int, CapturedFeatures] = {}
        for example, (datum_index, datum) in enumerate(zip(datum_indices, request.data, strict=True)):
            address = kind.address(datum.tokens)
            referred = address_of(datum.feature_ref) if datum.feature_ref else address if location.captures else None
            features = None if referred is None else CapturedFeatures.find(Path(location.directory), referred)
            if features is not None:
                features.check(kind, address, datum_index)
                if features.is_complete(kind, len(datum.tokens)) and self._checksums.match(features):
                    stored[example] = features
        return stored

    def plan(self, operations: Sequence[RankPart]) -> DraftPlan:
        """Returns the sources of features that this rank's share of the data needs, and what it has found."""
        found = [stored_of(each).get(example) for each in operations for example in range(len(each.batch.examples))]
        stored = {each.sent.work_number: frozenset(stored_of(each)) for each in operations if stored_of(each)}
        return DraftPlan(NeededSources.for_examples(found), stored)

    def start(
        self,
        operations: Sequence[RankPart],
        num_lanes: int,
        plans: Sequence[DraftPlan] = (),
    ) -> RunMicroBatch:
        needed = NeededSources.union([each.needed for each in plans]) if plans else None
        if plans:
            _drop_partly_stored(operations, [plans[rank].stored for rank in self._mesh.along("sp", "tp").ranks])
        if self._flops is not None:
            for operation in operations:
                if capture_directory(operation) is None:
                    operation.flops = self._num_flops(self._flops, operation)
        return partial(self._run, operations, not operations[0].forward_only, needed)

    def _run(
        self,
        operations: Sequence[RankPart],
        trains: bool,
        needed: NeededSources | None,
        micro_batch: MicroBatch,
    ) -> None:
        """Runs a micro-batch of operations of one draft.

        Args:
            trains: whether gradients are needed.
            needed: what any of the ranks that run together needs; None if this rank runs alone.
        """
        draft = self._draft(operations[0].run_id)
        needed = needed or NeededSources.for_examples(_stored(micro_batch, operations))
        captures = [capture_directory(operation) is not None for operation in operations]
        # Otherwise the features are those of the tokens that this rank scores.
        covers_all = needed.stored or any(captures)
        if covers_all:
            features = self._features_of_all_tokens(draft, needed, micro_batch, operations)
        else:
            features = self._hooked(draft).own(micro_batch)
        if any(captures):
            self._store(draft, features, micro_batch, operations)
        if all(captures):
            return
        own = draft_batches(micro_batch, [operation.batch.datum_indices for operation in operations])
        by_micro_batch = gather_draft_batches(draft.groups, own, self._base.device)
        batches = [batch for of_micro_batch in by_micro_batch for batch in of_micro_batch]
        lookaheads = [
            0 if captures[each.operation] else draft.lookahead(operations[each.operation].batch.config)
            for each in batches
        ]
        distribution = DraftDistribution(draft.groups, batches, lookaheads)
        if batches and draft.groups.feature_team.size > 1:
            lengths = [sum(batch.num_tokens for batch in of_micro_batch) for of_micro_batch in by_micro_batch]
            features = self._exchange(draft, features, covers_all, micro_batch, distribution, lengths)
        mask = self._mask_embedding(draft)
        with self._head.gathered():
            for share, rows in distribution.own_shares():
                if captures[share.batch.operation]:
                    continue
                operation, scores = operations[share.batch.operation], _ShareScores(share, self._base.device)
                if share.sequences:
                    inputs = self._inputs(draft, features.mapped(lambda whole, rows=rows: whole[rows]), mask, share)
                    self._score(draft, inputs, operation.batch, scores, trains)
                if trains:
                    draft.end_backward()
                of_ranks = draft.groups.feature_team.all_gather_object(scores.finish())
                if (segment := share.batch.segment) is not None:
                    operation.add_scores(segment, _merge(share.batch, segment.start, of_ranks))
        if trains:
            for _ in range(draft.groups.num_micro_batches - len(batches)):
                draft.end_backward()  # other ranks may have more

    def _num_flops(self, target: ModelFlops, operation: RankPart) -> float:
        """Returns the operations that this rank's share of an operation's data needs."""
        batch = operation.batch
        sequences = [
            DraftSequence(example.inputs["weights"], number, index in stored_of(operation))
            for index, (example, number) in enumerate(zip(batch.examples, batch.datum_indices, strict=True))
        ]
        draft = self._draft(operation.run_id)
        return draft_pass_flops(draft, target, sequences, batch.config, trains=not operation.forward_only)

    def _features_of_all_tokens(
        self, draft: DraftModel, needed: NeededSources, micro_batch: MicroBatch, operations: Sequence[RankPart]
    ) -> TargetFeatures:
        """Returns the features of all tokens. The target runs only over examples without stored features."""
        stored, hooked = _stored(micro_batch, operations), self._hooked(draft)
        if not needed.stored:
            return hooked.features(micro_batch)
        read = partial(stored_features, self._base, draft, [features for features in stored if features is not None])
        if not needed.target:
            return read(micro_batch)
        parts: list[tuple[Tensor, TargetFeatures]] = []
        tokens_of = [tokens for segment in micro_batch.segments for _, tokens in examples_of(segment)]
        examples = [(tokens.start, tokens.stop) for tokens in tokens_of]
        for features_of, is_stored in ((hooked.features, False), (read, True)):
            own = [bounds for bounds, each in zip(examples, stored, strict=True) if (each is not None) is is_stored]
            tokens = [torch.arange(*bounds, device=self._base.device) for bounds in own]
            of_source = torch.cat([torch.empty(0, dtype=torch.int64, device=self._base.device), *tokens])
            parts.append((of_source, features_of(select_examples(micro_batch, own))))
        return TargetFeatures.join(parts)

    def _draft(self, run_id: str) -> DraftModel:
        draft = self._models.get(run_id)
        assert isinstance(draft, DraftModel)
        return draft

    def _hooked(self, draft: DraftModel) -> HookedTarget:
        return HookedTarget(self._base, self._models.lora, draft, self._shard_of)

    def _store(
        self, draft: DraftModel, features: TargetFeatures, micro_batch: MicroBatch, operations: Sequence[RankPart]
    ) -> None:
        """Stores the features of operations that capture. They must cover all tokens."""
        kind, share = draft.feature_kind, self._shard_of(micro_batch)
        chunk_tokens = self._budget.chunk_rows(1, draft.shape.target_vocabulary)
        chunks_of = partial(features.stored, kind=kind, logits=self._logits(draft), chunk_tokens=chunk_tokens)
        stores = share is None or share.is_first  # else another rank does
        with self._head.gathered() if kind.stores_logits else nullcontext():
            for segment in micro_batch.segments:
                operation = operations[segment.operation]
                if (directory := capture_directory(operation)) is not None and stores:
                    failure = store_features(directory, kind, operation, segment, chunks_of)
                    if failure is not None:
                        operation.fail(Failure(failure, "server"))

    def _logits(self, draft: DraftModel) -> TargetLogits:
        return lambda hidden: self._head.uncapped_logits(hidden, [Segment(0, len(hidden), draft)])

    def _exchange(
        self,
        draft: DraftModel,
        features: TargetFeatures,
        covers_all: bool,
        micro_batch: MicroBatch,
        distribution: DraftDistribution,
        lengths: Sequence[int],
    ) -> TargetFeatures:
        """Returns the features of the tokens that this rank needs, exchanging them where necessary.

        Args:
            covers_all: whether `features` covers all tokens of this rank's micro-batch.
            lengths: tokens of each of the feature team's micro-batches.
        """
        groups = draft.groups
        needed = [distribution.needed_tokens(index) for index in range(groups.feature_team.size)]
        if covers_all and groups.num_micro_batches == 1:
            own = torch.from_numpy(needed[groups.feature_team.index]).to(self._base.device)
            return features.mapped(lambda whole: whole[own])
        if covers_all and (share := self._shard_of(micro_batch)) is not None:
            features = features.mapped(share.of_scored)
        computed = tokens_by_rank(groups, lengths, self._base.loaded.sequence_split.ring)
        return features.exchanged(FeatureExchange(groups.feature_team, computed, needed, self._base.device).exchange)

    def _mask_embedding(self, draft: DraftModel) -> Tensor | None:
        """Returns the embedding of the mask token, [hidden], None if the draft has no such token.

        All ranks call this in every micro-batch, because the embedding can be sharded over them.
        """
        if draft.shape.mask_token is None:
            return None
        return self._base.embedded(torch.tensor([draft.shape.mask_token], device=self._base.device)).squeeze(0)

    def _inputs(
        self, draft: DraftModel, features: TargetFeatures, mask: Tensor | None, share: DraftBatchShare
    ) -> DraftInputs:
        """Returns the draft's inputs for its share of a batch; `features` are those of the tokens that it needs."""

        def distribution(tokens: Tensor) -> TargetDistribution:
            form = draft.target_form
            assert features.outputs is not None and form is not None
            return form.distribution(features.outputs.kept(tokens, form, self._logits(draft)))

        adapter = Segment(0, len(features.captured), draft).adapter
        return DraftInputs(
            positions=share.positions(features.captured.device),
            packing=share.packing,
            embedded=features.embedded,
            captured=features.captured,
            distribution=distribution,
            shard=share.shard(draft.groups.mesh.along("sp")),
            mask=mask,
            head=_TargetHead(self._head, None if adapter is None else adapter.unembed),
        )

    def _score(
        self, draft: DraftModel, inputs: DraftInputs, operation: ValidatedBatch, scores: "_ShareScores", trains: bool
    ) -> None:
        with torch.set_grad_enabled(trains):
            network = draft.network(trains)
            draft_pass = network.training_pass(inputs, scores.share.labels(), operation.config, self._budget)
        for chunk in chunks(draft_pass.num_rows, draft_pass.chunk_rows):
            _score_chunk(draft_pass, chunk, operation, scores, trains)
        if trains:
            draft.sum_collected_gradients()
            draft_pass.close()


def _drop_partly_stored(operations: Sequence[RankPart], of_ranks: Sequence[Mapping[int, frozenset[int]]]) -> None:
    """Drops stored features that another rank of the same examples has not found, so that the target runs over these
    examples on all of them.

    Args:
        of_ranks: DraftPlan.stored of each of these ranks.
    """
    for operation in operations:
        if stored := stored_of(operation):
            work_number = operation.sent.work_number
            on_all = frozenset.intersection(*(found.get(work_number, frozenset()) for found in of_ranks))
            operation.prepared = {example: each for example, each in stored.items() if example in on_all}


def _stored(micro_batch: MicroBatch, operations: Sequence[RankPart]) -> list[CapturedFeatures | None]:
    segments = micro_batch.segments
    return [stored_of(operations[each.operation]).get(example) for each in segments for example in each.examples]


@dataclass(eq=False)
class _TargetHead:
    """Implements TargetHead."""

    head: LogprobHead
    pair: LoraPair | None
    _capped: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head.logits(hidden, self.pair)
        self._capped = logits if self.head.cap is not None else None
        return logits

    def backward(self, gradient: Tensor) -> Tensor:
        if self.head.cap is not None and self._capped is not None:
            gradient = gradient * soft_cap_derivatives(self._capped, self.head.cap)
        gradient = gradient.to(self.head.unembedding.dtype)
        of_hidden = self.head.product(gradient, self.head.unembedding.t())
        if self.pair is not None:
            self.pair.backward_of_x(gradient, of_hidden)
        return of_hidden


@dataclass(frozen=True, eq=False)
class _RankScores:
    """A rank's scores of a draft batch.

    losses: float32, of all tokens of the batch: the summed losses of the draft tokens predicted after each.
    totals: ratios and denominator. survivals: None if the rank predicted no tokens.
    """

    losses: np.ndarray
    totals: PartialResult
    survivals: Survivals | None


class _ShareScores:
    """Accumulates this rank's scores of its share of a draft batch, chunk by chunk."""

    def __init__(self, share: DraftBatchShare, device: torch.device) -> None:
        self.share = share
        self._losses = torch.zeros(len(share.tokens), device=device)
        self._totals, self._survivals = PartialResult(), None

    def add(self, scores: DraftScores, losses: Tensor, label_indices: Tensor, output: LossOutput) -> None:
        self._losses.index_add_(0, label_indices.flatten(), losses.detach().flatten())
        ratios = {name: (float(top), float(bottom)) for name, (top, bottom) in output.ratios.items()}
        denominator = 0.0 if output.denominator is None else float(output.denominator)
        self._totals.add(PartialResult(ratios=ratios, denominator=denominator))
        if self._survivals is None:
            self._survivals = SurvivalTable(len(self._losses), label_indices.shape[1], label_indices.device)
        self._survivals.add(scores, label_indices)

    def finish(self) -> _RankScores:
        losses = np.zeros(self.share.batch.num_tokens, np.float32)
        losses[self.share.tokens] = self._losses.cpu().numpy()
        return _RankScores(losses, self._totals, self._survivals and self._survivals.survivals(self.share.tokens))


def _merge(batch: DraftBatch, start: int, of_ranks: Sequence[_RankScores]) -> ScoredTokens:
    """Merges the scores of ranks that each scored some of the draft tokens."""
    losses, totals = sum(each.losses for each in of_ranks), PartialResult()
    assert isinstance(losses, np.ndarray)
    for each in of_ranks:
        totals.add(each.totals)
    survivals = [each.survivals for each in of_ranks if each.survivals is not None]
    lengths = acceptance_lengths(survivals, batch.labels.weights.cpu().numpy(), batch.lengths)
    return ScoredTokens(start, losses, losses, {}, totals.ratios | lengths, totals.denominator)


def _score_chunk(
    draft_pass: DraftPass, rows: slice, operation: ValidatedBatch, share_scores: _ShareScores, trains: bool
) -> None:
    with torch.no_grad():
        scores, leaves = draft_pass.scores(rows).leaves()
    with torch.enable_grad():
        output: LossOutput = operation.loss.function(scores, {"weights": draft_pass.weights(rows)}, operation.config)
        losses = operation.weight * output.losses
        gradients = DraftGradients.of(losses, leaves) if trains else None
    share_scores.add(scores, losses, draft_pass.label_indices(rows), output)
    if gradients is not None:
        with torch.no_grad():
            draft_pass.backward(gradients)
