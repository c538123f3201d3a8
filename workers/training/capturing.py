"""Capturing: what passes put aside for drafts: in those of a capture nothing else; in those of policies, whose forward
then serves both, beside what they are for."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from shutil import disk_usage
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ...schemas.training import FeaturePlace
from ..batch.micro_batch import MicroBatch, MicroBatchSegment
from ..drafts.algorithms.programs import DRAFT_PROGRAMS
from ..drafts.sequences.stored import FeatureKind, Stored, TargetRepr
from ..drafts.training.teacher import Inside
from ..drafts.version import version_of_parts
from ..models.model import BaseModel
from ..parallel.rows import TokenShare
from ..planner.footprint import gigabytes
from ..registry.models import Models
from ..state.trainable import Learner
from .progress import Task

logger = logging.getLogger(__name__)


def keep_features(
    directory: Path, kind: FeatureKind, task: Task, part: MicroBatchSegment, inside: Inside | None
) -> OSError | None:
    """Of the segment's rows, where there are none yet. inside: of the micro-batch; None: another rank keeps them.
    Returns what was wrong with the last that could not be kept."""
    trouble: OSError | None = None
    for row, tokens in _rows_of(part):
        features = task.stored.get(row)
        try:
            if features is None and inside is not None:
                address = kind.address(task.operation.rows[row].tokens)
                features = Stored.keep(directory, address, kind, inside.stored(tokens, kind))
            task.kept(row, features if inside is not None else None)
        except OSError as error:
            trouble = error
    return trouble


def no_room(directory: Path, error: OSError) -> str:
    """What is to be said of it."""
    try:
        free = f"{gigabytes(disk_usage(directory).free)} are free there"
    except OSError:
        free = "it is not there"
    return (
        f"features cannot be written to {directory}: {error}; {free}: make room on this disk, release_features of what"
        " is not needed, or serve with --feature-bytes for which it has room"
    )


class CapturingBeside:
    """Of policies. What they put aside is of their weights of now: of the version that a draft is aimed at whose target
    was saved with these. What cannot be kept is not there, and nothing else is different."""

    def __init__(self, base: BaseModel, models: Models) -> None:
        self._base, self._models = base, models
        self._versions: WeakKeyDictionary[Learner, tuple[int, str]] = WeakKeyDictionary()

    def check(self, run_id: str, place: FeaturePlace) -> None:
        """Raises OperationError."""
        program = self._models.get(run_id).program
        if not program.samples:
            raise OperationError(f"capture_for is of policies, and this is a {program.role}: leave it out")
        num_layers = int(self._base.config.get_text_config().num_hidden_layers)
        assert all(layer < num_layers for layer in place.layers), "a draft of the same base model has no others"

    def versions(self, tasks: Sequence[Task]) -> dict[str, str]:
        """By run, of this rank's parts of those that put features aside, which are on the device."""
        run_ids = {task.run_id for task in tasks if task.captures_beside is not None}
        return {run_id: self._version(self._models.get(run_id)) for run_id in run_ids}

    def wanted(self, micro_batch: MicroBatch, tasks: list[Task]) -> dict[int, Tensor] | None:
        """By layer, what is to be captured: see FusedTrunk.hidden_states."""
        places = [tasks[each.operation].captures_beside for each in micro_batch.segments]
        layers = {layer for place in places if place is not None for layer in place.layers}
        return dict.fromkeys(sorted(layers), torch.empty(0)) if layers else None

    def keep(
        self,
        micro_batch: MicroBatch,
        tasks: list[Task],
        captured: Mapping[int, Tensor] | None,
        hidden: Tensor,
        share: TokenShare,
    ) -> None:
        """hidden: the last ones. captured and they are of `share.hidden`; of ranks that share out tokens the first one
        gets those of all, and all of them ask at once."""
        if captured is None:
            return
        places = [tasks[part.operation].captures_beside for part in micro_batch.segments]
        told = {layer: _at_first(each, share) for layer, each in captured.items()}
        tells_last = any(place is not None and _target_repr(place) is not None for place in places)
        last = _at_first(hidden, share) if tells_last else None
        here = {layer: each for layer, each in told.items() if each is not None}
        for part, place in zip(micro_batch.segments, places, strict=True):
            if place is not None and here:
                self._keep(tasks[part.operation], place, part, here, last)

    def _keep(
        self, task: Task, place: FeaturePlace, part: MicroBatchSegment, told: Mapping[int, Tensor], last: Tensor | None
    ) -> None:
        """told: by layer, of all tokens. last: hidden states, of which the target's words are made."""
        of_layers, directory = torch.cat([told[layer] for layer in place.layers], dim=-1), Path(place.directory)
        # Embeddings are not kept: a draft has those of its target.
        inside = Inside(of_layers, of_layers, last)
        hidden = of_layers.shape[1] // len(place.layers)
        kind = FeatureKind(task.version, tuple(place.layers), _target_repr(place), hidden, self._base.dtype)
        trouble = keep_features(directory, kind, task, part, inside)
        if trouble is not None and not task.progress.has_warned:
            task.progress.has_warned = True
            message = no_room(directory, trouble)
            logger.warning("run %s goes on without what it was to capture: %s", task.run_id, message)

    def _version(self, model: Learner) -> str:
        """Made anew only after a change."""
        num_changes, version = self._versions.get(model, (-1, ""))
        if num_changes != model.num_changes:
            version = self._models.drafts.version_of(model)
            self._versions[model] = model.num_changes, version
        return version


def take_versions(tasks: Sequence[Task], of_ranks: Sequence[Mapping[str, str]]) -> None:
    """of_ranks: what each says of the parts that it has (CapturingBeside.versions)."""
    for task in tasks:
        if task.captures_beside is not None:
            task.version = version_of_parts([versions[task.run_id] for versions in of_ranks])


def _target_repr(place: FeaturePlace) -> TargetRepr | None:
    assert place.algorithm is not None
    return DRAFT_PROGRAMS[place.algorithm].strategy.target_repr


def _rows_of(part: MicroBatchSegment) -> Iterator[tuple[int, slice]]:
    """Each row, and its tokens in the micro-batch."""
    for row, (start, stop) in zip(part.datums, pairwise(part.bounds), strict=True):
        yield row, slice(part.start + start, part.start + stop)


def _at_first(hidden: Tensor, share: TokenShare) -> Tensor | None:
    """Of `share.hidden` -> of all tokens, for the first of the ranks that run them; None elsewhere."""
    scored = share.scored(hidden.detach())
    return scored if share.is_all else share.joined_at_first(scored)
