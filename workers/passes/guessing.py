"""Guessing: passes of drafts: the target runs without gradients, and then the draft over what the target had inside."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..batch import MicroBatch
from ..drafts.features import Features
from ..drafts.groups import DraftGroups
from ..drafts.lessons import Carrier, Deal, Taken, had_by, lessons_of, lessons_of_all
from ..drafts.model import DraftModel
from ..drafts.scores import Slopes
from ..drafts.strategy import DraftPass
from ..heads import LogprobHead
from ..heads.head import chunks
from ..lora import LoraPair, Segment
from ..lora.segment import within
from ..losses.loss import LossOutput
from ..model import BaseModel
from ..models import Models
from ..operation import Operation
from ..parallel.rows import TokenShare
from ..trunk import EMBEDDING
from .progress import Scores, Task, Totals


class Guessing:
    def __init__(self, base: BaseModel, models: Models, head: LogprobHead) -> None:
        """head: of what the target says."""
        self._base, self._models, self._head = base, models, head

    def run(
        self, trains: bool, micro_batch: MicroBatch, tasks: list[Task], segments: list[Segment], share: TokenShare
    ) -> None:
        """Tasks of one draft. trains: whether its gradients are wanted."""
        draft = self._models.drafts.get(tasks[0].run_id)
        own = lessons_of(micro_batch, [task.operation.numbers for task in tasks])
        told = self._told(draft, micro_batch, segments, share)
        of_all = lessons_of_all(draft.groups, own, self._base.device)
        lessons = [lesson for of_micro_batch in of_all for lesson in of_micro_batch]
        deal = Deal(draft.groups, lessons, [draft.halo(tasks[lesson.task].operation.config) for lesson in lessons])
        if lessons:
            told = self._dealt(told, draft.groups, deal, [sum(each.num_tokens for each in some) for some in of_all])
        with self._head.in_use():
            for taken, known in deal.own():
                lesson, task = taken.lesson, tasks[taken.lesson.task]
                found = _Found(torch.zeros(len(taken.tokens), device=self._base.device))
                if taken.sequences:
                    self._score(draft, told.of(taken, known, draft), taken, task.operation, found, trains)
                scores = _summed(draft.groups.audience.exchange(found.scores(taken)))
                if lesson.part is not None:
                    task.take(lesson.part, scores)

    @torch.no_grad()
    def _told(self, draft: DraftModel, micro_batch: MicroBatch, segments: list[Segment], share: TokenShare) -> "_Told":
        """Of the tokens that this rank scores."""
        assert draft.draft.capture_layers is not None
        captured: dict[int, Tensor] = dict.fromkeys((EMBEDDING, *draft.draft.capture_layers), torch.empty(0))
        with self._models.adapters.applied(within(segments, share.tokens)):
            last = self._base.shared_hidden_states(micro_batch, share, captured)
        of_layers = torch.cat([share.scored(captured[layer]) for layer in draft.draft.capture_layers], dim=-1)
        inside = share.scored(captured[EMBEDDING]), of_layers, share.scored(last)
        return _Told(self._head, *inside, self._mask(draft.shape.mask_token))

    def _dealt(self, told: "_Told", groups: DraftGroups, deal: Deal, lengths: Sequence[int]) -> "_Told":
        """Of the tokens that this rank's draft has to know. lengths: of the audience's micro-batches, in tokens."""
        if groups.audience.size == 1:
            return told
        have = had_by(groups, lengths, self._base.sequence_split.ring)
        want = [deal.wanted(index) for index in range(groups.audience.size)]
        return told.brought(Carrier(groups.audience, have, want, self._base.device))

    def _mask(self, token: int | None) -> Tensor | None:
        """[hidden]. Ranks may keep the embedding in parts, and all of them ask in each micro-batch."""
        if token is None:
            return None
        return self._base.embedded(torch.tensor([token], device=self._base.device)).squeeze(0)

    def _score(
        self, draft: DraftModel, features: Features, taken: Taken, operation: Operation, found: "_Found", trains: bool
    ) -> None:
        labels = taken.labels()
        with torch.set_grad_enabled(trains):
            guesses = draft.network(trains).over(features, labels, operation.config, self._head.chunk_rows)
        for chunk in chunks(guesses.num_rows, guesses.chunk_rows):
            _score(guesses, chunk, operation, found, trains)
        if trains:
            guesses.close()


@dataclass(frozen=True, eq=False)
class _Told:
    """What the target had inside, for some tokens of a micro-batch."""

    head: LogprobHead
    embedded: Tensor
    captured: Tensor
    last: Tensor
    mask: Tensor | None

    def brought(self, carrier: Carrier) -> "_Told":
        embedded, captured, last = (carrier.brought(each) for each in (self.embedded, self.captured, self.last))
        return replace(self, embedded=embedded, captured=captured, last=last)

    def of(self, taken: Taken, rows: slice, draft: DraftModel) -> Features:
        """rows: those that have to be known of what was taken."""
        last = self.last[rows]
        segment = Segment(0, len(last), draft)

        def logits(some: slice) -> Tensor:
            return self.head.logits_of_segments(last[some], within([segment], some))

        positions = taken.positions(last.device)
        head = _TargetHead(self.head, None if segment.adapter is None else segment.adapter.unembed)
        inside = self.embedded[rows], self.captured[rows]
        stretch = taken.stretch(draft.groups.mesh.along("sp"))
        return Features(positions, taken.packing, *inside, logits, self.mask, head, stretch)


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

    def add(self, losses: Tensor, places: Tensor, output: LossOutput) -> None:
        self.losses.index_add_(0, places.flatten(), losses.detach().flatten())
        for name, (numerator, denominator) in output.ratios.items():
            so_far = self.ratios.get(name, (0.0, 0.0))
            self.ratios[name] = so_far[0] + float(numerator), so_far[1] + float(denominator)
        self.denominator += 0.0 if output.denominator is None else float(output.denominator)

    def scores(self, taken: Taken) -> Scores:
        """Of all tokens of the lesson."""
        losses = np.zeros(taken.lesson.num_tokens, np.float32)
        losses[taken.tokens] = self.losses.cpu().numpy()
        return Scores(losses, losses, {}, self.ratios, self.denominator)


def _summed(of_ranks: Sequence[Scores]) -> Scores:
    """Of ranks that had some of the guesses each."""
    if len(of_ranks) == 1:
        return of_ranks[0]
    losses, totals = sum(each.losses for each in of_ranks), Totals()
    assert isinstance(losses, np.ndarray)
    for each in of_ranks:
        totals.add(Totals(ratios=each.ratios, denominator=each.denominator))
    return Scores(losses, losses, {}, totals.ratios, totals.denominator)


def _score(guesses: DraftPass, rows: slice, operation: Operation, found: _Found, trains: bool) -> None:
    with torch.no_grad():
        scores, leaves = guesses.scores(rows).leaves()
    with torch.enable_grad():
        output: LossOutput = operation.loss.function(scores, {"weights": guesses.weights(rows)}, operation.config)
        losses = operation.weight * output.losses
        slopes = Slopes.of(losses, leaves) if trains else None
    found.add(losses, guesses.places(rows), output)
    if slopes is not None:
        with torch.no_grad():
            guesses.backward(slopes)
