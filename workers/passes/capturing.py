"""Capturing: what passes put aside for drafts: in those of a capture nothing else; in those of policies, whose forward
then serves both, beside what they are for."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ...schemas.training import FeaturePlace
from ..batch import MicroBatch, MicroBatchSegment
from ..drafts.stored import LAST, FeatureKind, Stored
from ..drafts.teacher import Inside
from ..learner import Learner
from ..lora import Adapter
from ..model import BaseModel
from ..models import Models
from ..programs import PROGRAMS
from ..verbs import Failure
from .progress import Task


def keep_features(directory: Path, kind: FeatureKind, task: Task, part: MicroBatchSegment, inside: Inside) -> None:
    """Of the segment's rows, where there are none yet. inside: of the micro-batch. Fails the operation where there is
    no room."""
    for row, (start, stop) in zip(part.datums, pairwise(part.bounds), strict=True):
        features = task.stored.get(row)
        if features is None:
            kept = inside.stored(slice(part.start + start, part.start + stop), LAST in kind.layers)
            address = kind.address(task.operation.rows[row].tokens)
            try:
                features = Stored.keep(directory, address, kind, kept)
            except OSError as error:
                task.fail(Failure(f"no room for features in {directory}: {error}", "server"))
                return
        task.kept(row, features.address, features.num_bytes)


class CapturingBeside:
    """Of policies that are adapters. What they put aside is of their weights of now: of the version that a draft is
    aimed at whose target was saved with these."""

    def __init__(self, base: BaseModel, models: Models) -> None:
        self._base, self._models = base, models
        self._versions: WeakKeyDictionary[Learner, tuple[int, str]] = WeakKeyDictionary()

    def check(self, run_id: str, place: FeaturePlace) -> None:
        """Raises OperationError."""
        model = self._models.get(run_id)
        if not (model.program.samples and isinstance(model, Adapter)):
            raise OperationError("capture_for is of policies that train LoRA: leave it out, and capture with the draft")
        if self._base.spec.tp * self._base.spec.sp * self._base.spec.ep > 1:
            raise OperationError(
                f"ranks that run {self._base.spec} capture nothing beside a pass: leave out capture_for, and capture"
                " with the draft"
            )
        num_layers = int(self._base.config.get_text_config().num_hidden_layers)
        assert all(layer < num_layers for layer in place.layers), "a draft of the same base model has no others"

    def wanted(self, micro_batch: MicroBatch, tasks: list[Task]) -> dict[int, Tensor] | None:
        """By layer, what is to be captured: see FusedTrunk.hidden_states."""
        places = [tasks[each.operation].captures_beside for each in micro_batch.segments]
        layers = {layer for place in places if place is not None for layer in place.layers}
        return dict.fromkeys(sorted(layers), torch.empty(0)) if layers else None

    def keep(
        self, micro_batch: MicroBatch, tasks: list[Task], captured: Mapping[int, Tensor] | None, hidden: Tensor
    ) -> None:
        """hidden: the last ones, of all tokens."""
        for part in micro_batch.segments if captured is not None else ():
            task = tasks[part.operation]
            if (place := task.captures_beside) is not None and captured is not None:
                of_layers = torch.cat([captured[layer].detach() for layer in place.layers], dim=-1)
                # Embeddings are not kept: they are frozen.
                inside = Inside(of_layers, of_layers, hidden.detach())
                keep_features(Path(place.directory), self._kind(task, place), task, part, inside)

    def _kind(self, task: Task, place: FeaturePlace) -> FeatureKind:
        assert place.algorithm is not None
        strategy = PROGRAMS[place.algorithm].strategy
        assert strategy is not None
        layers = *map(str, place.layers), *([LAST] if strategy.hears_target else [])
        dtype = str(self._base.dtype).removeprefix("torch.")
        return FeatureKind(self._version(self._models.get(task.run_id)), layers, dtype)

    def _version(self, model: Learner) -> str:
        """Made anew only after a change."""
        num_changes, version = self._versions.get(model, (-1, ""))
        if num_changes != model.num_changes:
            version = self._models.drafts.version_of(model)
            self._versions[model] = model.num_changes, version
        return version
