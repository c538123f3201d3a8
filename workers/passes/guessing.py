"""Guessing: passes of drafts: the target runs without gradients, and then the draft over what the target had inside."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..attention import Packing, pack_lengths
from ..batch import MicroBatch, MicroBatchSegment
from ..drafts.features import Features
from ..drafts.model import DraftModel
from ..drafts.scores import Slopes
from ..drafts.strategy import DraftPass, Labels
from ..heads import LogprobHead
from ..heads.head import chunks
from ..lora import LoraPair, Segment
from ..lora.segment import within
from ..losses.loss import LossOutput
from ..model import BaseModel
from ..models import Models
from ..objective import Objective
from ..parallel.rows import TokenShare
from ..trunk import EMBEDDING
from .progress import Scores, Task


class Guessing:
    def __init__(self, base: BaseModel, models: Models, head: LogprobHead) -> None:
        """head: of what the target says."""
        self._base, self._models, self._head = base, models, head

    def run(
        self, trains: bool, micro_batch: MicroBatch, tasks: list[Task], segments: list[Segment], share: TokenShare
    ) -> None:
        """Tasks of one draft. trains: whether its gradients are wanted."""
        draft = self._models.drafts.get(tasks[0].run_id)
        told = self._told(draft, micro_batch, segments, share)
        with self._head.in_use():
            for objective in micro_batch.objectives:
                for part in micro_batch.segments_of(objective):
                    task = tasks[part.operation]
                    features = told.of(part, within(segments, slice(part.start, part.stop)))
                    task.take(part, self._scored(draft, features, objective, part, task, trains))

    @torch.no_grad()
    def _told(self, draft: DraftModel, micro_batch: MicroBatch, segments: list[Segment], share: TokenShare) -> "_Told":
        assert draft.draft.capture_layers is not None
        captured: dict[int, Tensor] = dict.fromkeys((EMBEDDING, *draft.draft.capture_layers), torch.empty(0))
        with self._models.adapters.applied(within(segments, share.tokens)):
            last = self._base.shared_hidden_states(micro_batch, share, captured)
        of_layers = torch.cat([captured[layer] for layer in draft.draft.capture_layers], dim=-1)
        return _Told(
            self._head, micro_batch.positions, captured[EMBEDDING], of_layers, last, self._mask(draft.shape.mask_token)
        )

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
    embedded: Tensor
    captured: Tensor
    last: Tensor
    mask: Tensor | None

    def of(self, part: MicroBatchSegment, segments: list[Segment]) -> Features:
        rows, lengths = slice(part.start, part.stop), [stop - start for start, stop in pairwise(part.bounds)]
        last = self.last[rows]

        def logits(some: slice) -> Tensor:
            return self.head.logits_of_segments(last[some], within(segments, some))

        packing = Packing(pack_lengths(lengths))
        adapter = segments[0].adapter
        head = _TargetHead(self.head, None if adapter is None else adapter.unembed)
        inside = self.embedded[rows], self.captured[rows]
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
