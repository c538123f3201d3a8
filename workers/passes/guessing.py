"""Guessing: passes of drafts: the target runs without gradients, and then the draft over what the target had inside."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ...schemas.training import FeaturePlace, ForwardBackwardRequest
from ..attention import Packing, pack_lengths
from ..batch import MicroBatch, MicroBatchSegment, part_of
from ..drafts.features import Features
from ..drafts.model import DraftModel
from ..drafts.scores import Slopes
from ..drafts.stored import Stored, address_of
from ..drafts.strategy import DraftPass, Labels
from ..drafts.teacher import HookedTarget, Inside, StoredFeatures, Teacher
from ..heads import LogprobHead
from ..heads.head import chunks
from ..lora import LoraPair, Segment
from ..lora.segment import within
from ..losses.loss import LossOutput
from ..model import BaseModel
from ..models import Models
from ..objective import Objective
from ..parallel.rows import TokenShare
from .capturing import keep_features
from .progress import Scores, Task


@dataclass(frozen=True)
class Needed:
    """Which teachers have to tell something of a micro-batch."""

    target: bool
    stored: bool

    @staticmethod
    def by(stored: Sequence[Stored | None]) -> "Needed":
        """stored: of each sequence."""
        return Needed(any(each is None for each in stored), any(each is not None for each in stored))

    @staticmethod
    def by_any(needs: Sequence["Needed"]) -> "Needed":
        return Needed(any(each.target for each in needs), any(each.stored for each in needs))


class Guessing:
    def __init__(
        self, base: BaseModel, models: Models, head: LogprobHead, share_of: Callable[[MicroBatch], TokenShare]
    ) -> None:
        """head: of what the target says. share_of: which tokens of a micro-batch are this rank's."""
        self._base, self._models, self._head, self._share_of = base, models, head, share_of

    def stored(self, request: ForwardBackwardRequest, place: FeaturePlace, numbers: Sequence[int]) -> dict[int, Stored]:
        """By row, the features that data of a draft refer to and that there are; of a capture, those that there are
        already. numbers: of the rows. Raises OperationError where they are not what the draft is to be told."""
        if request.model_id not in self._models.drafts:
            raise OperationError("only drafts are told of features: leave out feature_ref, and capture with a draft")
        draft, found = self._models.drafts.get(request.model_id), {}
        for row, (number, datum) in enumerate(zip(numbers, request.data, strict=True)):
            address = draft.feature_kind.address(datum.tokens)
            referred = address_of(datum.feature_ref) if datum.feature_ref else address if place.captures else None
            features = None if referred is None else Stored.find(Path(place.directory), referred)
            if features is not None:
                features.check(draft.feature_kind, address, number)
                found[row] = features
        return found

    def run(
        self,
        trains: bool,
        needed: Needed | None,
        micro_batch: MicroBatch,
        tasks: list[Task],
        segments: list[Segment],
    ) -> None:
        """Tasks of one draft. trains: whether its gradients are wanted. needed: by all ranks that cannot go on alone;
        None = this one can."""
        draft = self._models.drafts.get(tasks[0].run_id)
        inside = self._inside(draft, needed, micro_batch, tasks)
        told = _Told(self._head, micro_batch.positions, inside, self._mask(draft.shape.mask_token))
        with self._head.in_use():
            for objective in micro_batch.objectives:
                for part in micro_batch.segments_of(objective):
                    task = tasks[part.operation]
                    if task.captures_to is not None:
                        keep_features(task.captures_to, draft.feature_kind, task, part, inside)
                        continue
                    features = told.of(part, within(segments, slice(part.start, part.stop)))
                    task.take(part, self._scored(draft, features, objective, part, task, trains))

    def _inside(self, draft: DraftModel, needed: Needed | None, micro_batch: MicroBatch, tasks: list[Task]) -> Inside:
        """The target runs over the sequences alone that nothing is stored of."""
        rows = list(micro_batch.packed_rows())
        stored = [tasks[row.operation].stored.get(row.row) for row in rows]
        needed = needed or Needed.by(stored)
        hooked = HookedTarget(self._base, self._models.adapters, draft, self._share_of)
        found = [features for features in stored if features is not None]
        read = StoredFeatures(self._base, draft, found)
        if not (needed.stored and needed.target):
            alone: Teacher = read if needed.stored else hooked
            return alone.inside(micro_batch)
        parts = []
        for teacher, is_stored in ((hooked, False), (read, True)):
            own = [
                (row.start, row.stop) for row, each in zip(rows, stored, strict=True) if (each is not None) is is_stored
            ]
            places = [torch.arange(*bounds, device=self._base.device) for bounds in own]
            of_rows = torch.cat([torch.empty(0, dtype=torch.int64, device=self._base.device), *places])
            parts.append((of_rows, teacher.inside(part_of(micro_batch, own))))
        return Inside.together(parts)

    def _mask(self, token: int | None) -> Tensor | None:
        """[hidden]. Ranks may keep the embedding in parts, and all of them ask in each micro-batch."""
        if token is None:
            return None
        return self._base.embedded(torch.tensor([token], device=self._base.device)).squeeze(0)

    def _scored(
        self,
        draft: DraftModel,
        features: Features,
        objective: Objective,
        part: MicroBatchSegment,
        task: Task,
        trains: bool,
    ) -> Scores:
        rows = slice(part.start - objective.start, part.stop - objective.start)
        numbers = [task.operation.numbers[datum] for datum in part.datums]
        labels = Labels(objective.targets[rows], objective.inputs["weights"][rows], numbers)
        with torch.set_grad_enabled(trains):
            guesses = draft.network(trains).over(features, labels, objective.config, self._head.chunk_rows)
        found = _Found(torch.zeros_like(labels.weights))
        for chunk in chunks(guesses.num_rows, guesses.chunk_rows):
            _score(guesses, chunk, objective, found, trains)
        if trains:
            guesses.close()
        return found.scores()


@dataclass(frozen=True, eq=False)
class _Told:
    """What the target had inside, for a whole micro-batch."""

    head: LogprobHead
    positions: Tensor
    inside: Inside
    mask: Tensor | None

    def of(self, part: MicroBatchSegment, segments: list[Segment]) -> Features:
        rows, lengths = slice(part.start, part.stop), [stop - start for start, stop in pairwise(part.bounds)]
        last = None if self.inside.last is None else self.inside.last[rows]

        def logits(some: slice) -> Tensor:
            assert last is not None
            return self.head.logits_of_segments(last[some], within(segments, some))

        packing = Packing(pack_lengths(lengths))
        adapter = segments[0].adapter
        head = _TargetHead(self.head, None if adapter is None else adapter.unembed)
        inside = self.inside.embedded[rows], self.inside.captured[rows]
        return Features(self.positions[rows], packing, *inside, logits, self.mask, head)


@dataclass(frozen=True, eq=False)
class _TargetHead:
    """See TargetHead."""

    head: LogprobHead
    pair: LoraPair | None

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden, self.pair)

    def backward(self, gradient: Tensor) -> Tensor:
        gradient = gradient.to(self.head.unembedding.dtype)
        of_hidden = self.head.product(gradient, self.head.unembedding.t())
        if self.pair is not None:
            self.pair.frozen_backward(gradient, of_hidden)
        return of_hidden


@dataclass(eq=False)
class _Found:
    """losses: float32 [n], of each token the summed losses of what was guessed behind it."""

    losses: Tensor
    ratios: dict[str, tuple[float, float]] = field(default_factory=dict)
    denominator: float = 0.0

    def add(self, losses: Tensor, places: Tensor, ratios: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self.losses.index_add_(0, places.flatten(), losses.detach().flatten())
        for name, (numerator, denominator) in ratios.items():
            so_far = self.ratios.get(name, (0.0, 0.0))
            self.ratios[name] = so_far[0] + float(numerator), so_far[1] + float(denominator)

    def scores(self) -> Scores:
        losses: np.ndarray = self.losses.cpu().numpy()
        return Scores(losses, losses, {}, self.ratios, self.denominator)


def _score(guesses: DraftPass, rows: slice, objective: Objective, found: _Found, trains: bool) -> None:
    with torch.no_grad():
        scores, leaves = guesses.scores(rows).leaves()
    with torch.enable_grad():
        output: LossOutput = objective.loss.function(scores, {"weights": guesses.weights(rows)}, objective.config)
        losses = objective.weight * output.losses
        slopes = Slopes.of(losses, leaves) if trains else None
    found.add(losses, guesses.places(rows), output.ratios)
    found.denominator += 0.0 if output.denominator is None else float(output.denominator)
    if slopes is not None:
        with torch.no_grad():
            guesses.backward(slopes)
