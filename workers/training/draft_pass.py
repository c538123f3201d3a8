"""Runs passes of draft models: the target runs without gradients, then the draft runs over its hidden states."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ...schemas.training import FeatureLocation, ForwardBackwardRequest
from ..batch.micro_batch import MicroBatch, select_sequences
from ..batch.validated import ValidatedBatch
from ..drafts.algorithms.algorithm import DraftPass
from ..drafts.algorithms.logit_budget import LogitBudget
from ..drafts.draft_model import DraftModel
from ..drafts.groups import DraftGroups
from ..drafts.sequences.captured_features import CapturedFeatures, address_of
from ..drafts.sequences.features import DraftInputs
from ..drafts.training.acceptance import Survivals, SurvivalTable, acceptance_lengths
from ..drafts.training.feature_source import FeatureSource, HookedTarget, StoredFeatureSource, TargetFeatures
from ..drafts.training.sharding import (
    DraftBatch,
    DraftBatchShare,
    DraftDistribution,
    FeatureExchange,
    draft_batches,
    gather_draft_batches,
    tokens_by_rank,
)
from ..heads import LogprobHead
from ..heads.head import chunks
from ..lora import LoraPair, Segment
from ..losses.draft_scores import DraftGradients, DraftScores
from ..losses.loss import LossOutput
from ..models.model import BaseModel
from ..parallel.token_shard import TokenShard
from ..protocol.calls import Failure
from ..registry.model_registry import ModelRegistry
from .feature_capture import store_features, write_failure_message
from .operation_progress import HostScores, OperationTotals, Task


@dataclass(frozen=True)
class NeededSources:
    """The sources of target features that a micro-batch needs.

    target: the target must run. stored: captured features must be read.
    """

    target: bool
    stored: bool

    @staticmethod
    def for_sequences(stored: Sequence[CapturedFeatures | None]) -> "NeededSources":
        """Returns the sources needed for these sequences, of which each has captured features or None."""
        return NeededSources(any(each is None for each in stored), any(each is not None for each in stored))

    @staticmethod
    def union(needs: Sequence["NeededSources"]) -> "NeededSources":
        return NeededSources(any(each.target for each in needs), any(each.stored for each in needs))


class DraftPassRunner:
    def __init__(
        self, base: BaseModel, models: ModelRegistry, head: LogprobHead, share_of: Callable[[MicroBatch], TokenShard]
    ) -> None:
        """Creates the runner of draft passes.

        Args:
            head: computes the target's logits.
            share_of: returns this rank's share of a micro-batch's tokens.
        """
        self._base, self._models, self._head, self._share_of = base, models, head, share_of
        self._room = LogitBudget.on(base.device, head.chunk_rows)

    def stored(
        self, request: ForwardBackwardRequest, place: FeatureLocation, numbers: Sequence[int]
    ) -> dict[int, CapturedFeatures]:
        """Returns the captured features of a request's data, by row, as far as they are available.

        For a training request these are the features that the data refer to, for a capture request those that are
        already stored.

        Args:
            numbers: the data's indices in the whole operation.
        Raises:
            OperationError: the features do not fit the draft or the data.
        """
        if request.model_id not in self._models.drafts:
            raise OperationError("only drafts use features: leave out feature_ref, and capture with a draft")
        draft, found = self._models.drafts.get(request.model_id), {}
        kind = draft.feature_kind
        for row, (number, datum) in enumerate(zip(numbers, request.data, strict=True)):
            address = kind.address(datum.tokens)
            referred = address_of(datum.feature_ref) if datum.feature_ref else address if place.captures else None
            features = None if referred is None else CapturedFeatures.find(Path(place.directory), referred)
            if features is not None:
                features.check(kind, address, number)
                if features.is_complete(kind, len(datum.tokens)):
                    found[row] = features
        return found

    def run(self, trains: bool, needed: NeededSources | None, micro_batch: MicroBatch, tasks: list[Task]) -> None:
        """Runs a micro-batch of tasks of one draft.

        Args:
            trains: whether gradients are needed.
            needed: what any of the ranks that run together needs; None if this rank runs alone.
        """
        draft = self._models.drafts.get(tasks[0].run_id)
        needed = needed or NeededSources.for_sequences(_stored(micro_batch, tasks))
        captures = any(task.capture_directory is not None for task in tasks)
        # If false, `inside` has only the tokens that this rank scores.
        is_of_all = captures or needed.stored
        inside = (
            self._features_of_all_tokens(draft, needed, micro_batch, tasks)
            if is_of_all
            else self._hooked(draft).own(micro_batch)
        )
        for part in micro_batch.segments:
            if (directory := tasks[part.operation].capture_directory) is not None:
                own = inside if self._share_of(micro_batch).is_first else None
                trouble = store_features(directory, draft.feature_kind, tasks[part.operation], part, own)
                if trouble is not None:
                    tasks[part.operation].fail(Failure(write_failure_message(directory, trouble), "server"))
        if all(task.capture_directory is not None for task in tasks):
            return
        if is_of_all and draft.groups.num_micro_batches > 1:
            inside, is_of_all = inside.mapped(self._share_of(micro_batch).of_rows), False
        own = draft_batches(micro_batch, [task.operation.datum_indices for task in tasks])
        of_all = gather_draft_batches(draft.groups, own, self._base.device)
        lessons = [lesson for of_micro_batch in of_all for lesson in of_micro_batch]
        deal = DraftDistribution(draft.groups, lessons, [_halo(draft, tasks[lesson.task]) for lesson in lessons])
        if lessons and draft.groups.feature_team.size > 1:
            lengths = [sum(lesson.num_tokens for lesson in of_micro_batch) for of_micro_batch in of_all]
            inside = self._exchange_features(inside, is_of_all, draft.groups, deal, lengths)
        told = _TargetOutputs(self._head, inside, self._mask(draft.shape.mask_token))
        with self._head.gathered():
            for taken, known in deal.own():
                lesson, task = taken.lesson, tasks[taken.lesson.task]
                if task.capture_directory is not None:
                    continue
                found = _DraftResults(torch.zeros(len(taken.tokens), device=self._base.device))
                if taken.sequences:
                    self._score(draft, told.of(taken, known, draft), taken, task.operation, found, trains)
                of_ranks = draft.groups.feature_team.all_gather_object(found.finish(taken))
                if lesson.part is not None:
                    task.add_scores(lesson.part, _joined(lesson, of_ranks))

    def _features_of_all_tokens(
        self, draft: DraftModel, needed: NeededSources, micro_batch: MicroBatch, tasks: list[Task]
    ) -> TargetFeatures:
        """Returns the target's hidden states of all tokens. The target runs only over sequences without stored
        features."""
        stored, hooked = _stored(micro_batch, tasks), self._hooked(draft)
        if not needed.stored:
            return hooked.features(micro_batch)
        read = StoredFeatureSource(self._base, draft, [features for features in stored if features is not None])
        if not needed.target:
            return read.features(micro_batch)
        parts: list[tuple[Tensor, TargetFeatures]] = []
        teachers: list[tuple[FeatureSource, bool]] = [(hooked, False), (read, True)]
        for teacher, is_stored in teachers:
            rows = zip(micro_batch.packed_rows(), stored, strict=True)
            own = [(row.start, row.stop) for row, each in rows if (each is not None) is is_stored]
            places = [torch.arange(*bounds, device=self._base.device) for bounds in own]
            of_rows = torch.cat([torch.empty(0, dtype=torch.int64, device=self._base.device), *places])
            parts.append((of_rows, teacher.features(select_sequences(micro_batch, own))))
        return TargetFeatures.join(parts)

    def _hooked(self, draft: DraftModel) -> HookedTarget:
        return HookedTarget(self._base, self._models.adapters, draft, self._share_of)

    def _exchange_features(
        self,
        inside: TargetFeatures,
        is_of_all: bool,
        groups: DraftGroups,
        deal: DraftDistribution,
        lengths: Sequence[int],
    ) -> TargetFeatures:
        """Returns the hidden states of the tokens whose features this rank needs, exchanging them where necessary.

        Args:
            is_of_all: whether `inside` already has the tokens of all micro-batches.
            lengths: tokens of each of the audience's micro-batches.
        """
        want = [deal.wanted(index) for index in range(groups.feature_team.size)]
        if is_of_all:
            own = torch.from_numpy(want[groups.feature_team.index]).to(self._base.device)
            return inside.mapped(lambda whole: whole[own])
        have = tokens_by_rank(groups, lengths, self._base.sequence_split.ring)
        return inside.mapped(FeatureExchange(groups.feature_team, have, want, self._base.device).exchange)

    def _mask(self, token: int | None) -> Tensor | None:
        """Returns the embedding of the mask token, [hidden], None if the draft has no such token.

        All ranks call this in every micro-batch, because the embedding can be sharded over them.
        """
        if token is None:
            return None
        return self._base.embedded(torch.tensor([token], device=self._base.device)).squeeze(0)

    def _score(
        self,
        draft: DraftModel,
        features: DraftInputs,
        taken: DraftBatchShare,
        operation: ValidatedBatch,
        found: "_DraftResults",
        trains: bool,
    ) -> None:
        labels = taken.labels()
        with torch.set_grad_enabled(trains):
            guesses = draft.network(trains).training_pass(features, labels, operation.config, self._room)
        for chunk in chunks(guesses.num_rows, guesses.chunk_rows):
            _score(guesses, chunk, operation, found, trains)
        if trains:
            guesses.close()


def _halo(draft: DraftModel, task: Task) -> int:
    return 0 if task.capture_directory is not None else draft.lookahead(task.operation.config)


def find_stored_rows(begun: Sequence[Task | Failure]) -> dict[int, frozenset[int]]:
    """Returns, by index of the part, the rows of draft tasks whose features this rank has found."""
    tasks = ((number, each) for number, each in enumerate(begun) if isinstance(each, Task))
    return {number: frozenset(task.stored) for number, task in tasks if task.stored}


def drop_partly_stored(begun: Sequence[Task | Failure], of_ranks: Sequence[Mapping[int, frozenset[int]]]) -> None:
    """Drops stored features that another rank of the same sequences has not found, so that the target runs over these
    sequences on all of them.

    Args:
        of_ranks: the result of find_stored_rows on each of these ranks.
    """
    for number, task in enumerate(begun):
        if isinstance(task, Task) and task.stored:
            of_all = frozenset.intersection(*(rows.get(number, frozenset()) for rows in of_ranks))
            task.stored = {row: features for row, features in task.stored.items() if row in of_all}


def _stored(micro_batch: MicroBatch, tasks: Sequence[Task]) -> list[CapturedFeatures | None]:
    """Returns the stored features of each sequence, in order."""
    return [tasks[row.operation].stored.get(row.row) for row in micro_batch.packed_rows()]


@dataclass(frozen=True, eq=False)
class _TargetOutputs:
    """Holds the target's hidden states for some tokens of a micro-batch, and its head to compute logits from them."""

    head: LogprobHead
    inside: TargetFeatures
    mask: Tensor | None

    def of(self, taken: DraftBatchShare, rows: slice, draft: DraftModel) -> DraftInputs:
        """Returns the draft's input for the sequences that were taken; `rows` are their tokens in `inside`."""
        inside = self.inside.mapped(lambda known: known[rows])
        segment = Segment(0, len(inside.captured), draft)

        def logits(some: Tensor) -> Tensor:
            assert inside.last is not None
            return self.head.logits_of_segments(inside.last[some], [Segment(0, len(some), draft)])

        positions = taken.positions(inside.captured.device)
        head = _TargetHead(self.head, None if segment.adapter is None else segment.adapter.unembed)
        stretch = taken.stretch(draft.groups.mesh.along("sp"))
        told = inside.embedded, inside.captured
        return DraftInputs(positions, taken.packing, *told, logits, self.mask, head, stretch)


@dataclass(frozen=True, eq=False)
class _TargetHead:
    """Implements TargetHead."""

    head: LogprobHead
    pair: LoraPair | None

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden, self.pair)

    def backward(self, gradient: Tensor) -> Tensor:
        gradient = gradient.to(self.head.unembedding.dtype)
        of_hidden = self.head.product(gradient, self.head.unembedding.t())
        if self.pair is not None:
            self.pair.backward_of_x(gradient, of_hidden)
        return of_hidden


@dataclass(frozen=True, eq=False)
class _RankResults:
    """A rank's result of a lesson.

    scores: over all tokens of the lesson. survivals: None if the rank predicted no tokens.
    """

    scores: HostScores
    survivals: Survivals | None


@dataclass(eq=False)
class _DraftResults:
    """Accumulates a rank's results of a lesson, chunk by chunk.

    losses: float32 [n], for each token the summed losses of the draft tokens predicted after it.
    """

    losses: Tensor
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    denominator: float = 0.0
    book: SurvivalTable | None = None

    def add(self, scores: DraftScores, losses: Tensor, places: Tensor, output: LossOutput) -> None:
        self.losses.index_add_(0, places.flatten(), losses.detach().flatten())
        for name, (numerator, denominator) in output.ratios.items():
            so_far = self.ratios.get(name, (0.0, 0.0))
            self.ratios[name] = so_far[0] + float(numerator), so_far[1] + float(denominator)
        self.denominator += 0.0 if output.denominator is None else float(output.denominator)
        self.book = self.book or SurvivalTable(len(self.losses), places.shape[1], places.device)
        self.book.add(scores, places)

    def finish(self, taken: DraftBatchShare) -> _RankResults:
        losses = np.zeros(taken.lesson.num_tokens, np.float32)
        losses[taken.tokens] = self.losses.cpu().numpy()
        survivals = self.book and self.book.of(taken.tokens)
        return _RankResults(HostScores(losses, losses, {}, self.ratios, self.denominator), survivals)


def _joined(lesson: DraftBatch, of_ranks: Sequence[_RankResults]) -> HostScores:
    """Merges the results of ranks that each scored some of the draft tokens."""
    losses, totals = sum(each.scores.losses for each in of_ranks), OperationTotals()
    assert isinstance(losses, np.ndarray)
    for each in of_ranks:
        totals.add(OperationTotals(ratios=each.scores.ratios, denominator=each.scores.denominator))
    survivals = [each.survivals for each in of_ranks if each.survivals is not None]
    lengths = acceptance_lengths(survivals, lesson.labels.weights.cpu().numpy(), lesson.lengths)
    return HostScores(losses, losses, {}, totals.ratios | lengths, totals.denominator)


def _score(guesses: DraftPass, rows: slice, operation: ValidatedBatch, found: _DraftResults, trains: bool) -> None:
    with torch.no_grad():
        scores, leaves = guesses.scores(rows).leaves()
    with torch.enable_grad():
        output: LossOutput = operation.loss.function(scores, {"weights": guesses.weights(rows)}, operation.config)
        losses = operation.weight * output.losses
        slopes = DraftGradients.of(losses, leaves) if trains else None
    found.add(scores, losses, guesses.places(rows), output)
    if slopes is not None:
        with torch.no_grad():
            guesses.backward(slopes)
