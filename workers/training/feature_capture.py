"""Stores the hidden states of a pass as features for draft training.

The pass of a capture request does nothing else. A policy's pass with capture_for also trains the policy, so that one
forward serves both.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from shutil import disk_usage
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...schemas.errors import OperationError
from ...schemas.training import FeatureLocation
from ..batch.micro_batch import MicroBatch, MicroBatchSegment
from ..drafts.algorithms.draft_programs import DRAFT_PROGRAMS
from ..drafts.sequences.captured_features import CapturedFeatures, FeatureKind, TargetRepr
from ..drafts.training.feature_source import TargetFeatures
from ..drafts.version import version_of_parts
from ..models.model import BaseModel
from ..parallel.token_shard import TokenShard
from ..planner.footprint import gigabytes
from ..registry.model_registry import ModelRegistry
from ..state.trainable import Trainable
from .rank_operation import RankOperation
from .scoring_pass import RunMicroBatch, ScoringPassRunner

logger = logging.getLogger(__name__)


def store_features(
    directory: Path,
    kind: FeatureKind,
    operation: RankOperation,
    segment: MicroBatchSegment,
    target_features: TargetFeatures | None,
) -> OSError | None:
    """Stores the features of the segment's examples that have none yet.

    Args:
        target_features: those of the micro-batch; None if another rank stores them.
    Returns:
        The error of the last example that could not be stored.
    """
    if target_features is None:
        return None
    failure: OSError | None = None
    for example, tokens in _examples_of(segment):
        features = operation.stored.get(example)
        try:
            if features is None:
                address = kind.address(operation.batch.examples[example].tokens)
                features = CapturedFeatures.store(directory, address, kind, target_features.stored(tokens, kind))
            operation.record_features(example, features)
        except OSError as error:
            failure = error
    return failure


def write_failure_message(directory: Path, error: OSError) -> str:
    """Returns the error message for features that could not be stored."""
    try:
        free = f"{gigabytes(disk_usage(directory).free)} are free there"
    except OSError:
        free = "it does not exist"
    return (
        f"features cannot be written to {directory}: {error}; {free}: make room on this disk, call release_features for"
        " features that are no longer needed, or start the server with --feature-bytes that fit on it"
    )


class CapturingPassRunner:
    """The PassStrategy of passes in which a policy's operation captures features.

    The features have the version of the policy's current weights, which is that of a draft whose target was saved with
    these weights. If features cannot be stored, they are missing from the result; the operation still succeeds.
    """

    def __init__(self, base: BaseModel, models: ModelRegistry, scoring: ScoringPassRunner) -> None:
        self._base, self._models, self._scoring = base, models, scoring
        self._versions: WeakKeyDictionary[Trainable, tuple[int, str]] = WeakKeyDictionary()

    def check(self, run_id: str, location: FeatureLocation) -> None:
        """Raises OperationError if the run is not a policy."""
        program = self._models.get(run_id).program
        if not program.samples:
            raise OperationError(f"capture_for is only for policies, and this is a {program.role}: leave it out")
        num_layers = int(self._base.config.get_text_config().num_hidden_layers)
        assert all(layer < num_layers for layer in location.layers), "the draft has the same base model"

    def plan(self, operations: Sequence[RankOperation]) -> dict[str, str]:
        """Returns the version by run of this rank's part of the weights, for runs that capture features.

        These runs must be on the device.
        """
        run_ids = {each.run_id for each in operations if each.policy_capture is not None}
        return {run_id: self._version(self._models.get(run_id)) for run_id in run_ids}

    def start(
        self,
        operations: Sequence[RankOperation],
        models: Sequence[Trainable],
        num_lanes: int,
        plans: Sequence[Mapping[str, str]] = (),
    ) -> RunMicroBatch:
        of_ranks = plans or [self.plan(operations)]
        run_ids = {each.run_id for each in operations if each.policy_capture is not None}
        versions = {run_id: version_of_parts([of_rank[run_id] for of_rank in of_ranks]) for run_id in run_ids}
        hidden_states = partial(self._hidden_states, operations, versions)
        return self._scoring.start(operations, models, num_lanes, hidden_states=hidden_states)

    def _hidden_states(
        self,
        operations: Sequence[RankOperation],
        versions: Mapping[str, str],
        micro_batch: MicroBatch,
        share: TokenShard,
    ) -> Tensor:
        """Returns the hidden states of the base model, and stores those of the layers that operations capture."""
        locations = [operations[segment.operation].policy_capture for segment in micro_batch.segments]
        layers = sorted({layer for location in locations if location is not None for layer in location.layers})
        if not layers:
            return self._base.shared_hidden_states(micro_batch, share)
        captured = dict.fromkeys(layers, torch.empty(0))
        hidden = self._base.shared_hidden_states(micro_batch, share, captured)
        gathered = {layer: _gather_on_first(each, share) for layer, each in captured.items()}
        needs_last = any(each is not None and _target_repr(each) is not None for each in locations)
        last = _gather_on_first(hidden, share) if needs_last else None
        of_layers = {layer: each for layer, each in gathered.items() if each is not None}
        for segment, location in zip(micro_batch.segments, locations, strict=True):
            if location is not None and of_layers:
                operation = operations[segment.operation]
                self._store(operation, location, segment, versions[operation.run_id], of_layers, last)
        return hidden

    def _store(
        self,
        operation: RankOperation,
        location: FeatureLocation,
        segment: MicroBatchSegment,
        version: str,
        of_layers: Mapping[int, Tensor],
        last: Tensor | None,
    ) -> None:
        """Stores the features of one segment.

        `of_layers` has the hidden states of all tokens by layer, `last` the final ones if the draft's algorithm reads
        them.
        """
        captured, directory = (
            torch.cat([of_layers[layer] for layer in location.layers], dim=-1),
            Path(location.directory),
        )
        # Embeddings are not stored: the draft looks them up in its target.
        target_features = TargetFeatures(captured, captured, last)
        hidden = captured.shape[1] // len(location.layers)
        kind = FeatureKind(version, tuple(location.layers), _target_repr(location), hidden, self._base.dtype)
        failure = store_features(directory, kind, operation, segment, target_features)
        if failure is not None and not operation.has_warned:
            operation.has_warned = True
            message = write_failure_message(directory, failure)
            logger.warning(
                "run %s continues without the features it should have captured: %s", operation.run_id, message
            )

    def _version(self, model: Trainable) -> str:
        """Returns the version of the model's weights; it is computed only after a change."""
        num_changes, version = self._versions.get(model, (-1, ""))
        if num_changes != model.vectors.num_changes:
            version = self._models.version_of(model)
            self._versions[model] = model.vectors.num_changes, version
        return version


def _target_repr(location: FeatureLocation) -> TargetRepr | None:
    assert location.algorithm is not None
    return DRAFT_PROGRAMS[location.algorithm].algorithm.target_repr


def _examples_of(segment: MicroBatchSegment) -> Iterator[tuple[int, slice]]:
    """Yields the index of each example, and the slice of its tokens in the micro-batch."""
    for example, (start, stop) in zip(segment.examples, pairwise(segment.bounds), strict=True):
        yield example, slice(segment.start + start, segment.start + stop)


def _gather_on_first(hidden: Tensor, share: TokenShard) -> Tensor | None:
    """Gathers hidden states of the tokens `share.hidden` to those of all tokens, on the first of the ranks that run
    them; returns None elsewhere."""
    scored = share.select_scored(hidden.detach())
    return scored if share.is_all else share.joined_at_first(scored)
