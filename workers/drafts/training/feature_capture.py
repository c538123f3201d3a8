"""Stores the hidden states of a pass as features for draft training.

The pass of a capture request does nothing else. A policy's pass with capture_for also trains the policy, so that one
forward serves both.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from shutil import disk_usage
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import Tensor

from ....schemas.errors import OperationError
from ....schemas.training import DraftFeatures
from ...batch.micro_batch import MicroBatch, MicroBatchSegment
from ...batch.validated import ModelLimits, validate_request
from ...heads import LogprobHead
from ...lora import Segment
from ...models.model import BaseModel
from ...parallel.expert_counts import ExpertCounts
from ...parallel.token_shard import TokenShard
from ...registry.model_registry import ModelRegistry
from ...resources.machine import gigabytes
from ...shapes.logit_budget import LogitBudget
from ...state.trainable import Trainable
from ...training.rank_part import FinishedParts, RankPart
from ...training.scoring import RunMicroBatch, ScoringStrategy
from ..algorithms.draft_programs import DRAFT_PROGRAMS
from ..model.draft_kind import target_versions
from ..model.version import version_of_parts
from ..sequences.captured_features import CapturedFeatures, FeatureKind
from ..sequences.target_form import Kept, target_form
from .feature_source import TargetFeatures
from .target_outputs import TargetOutputs

logger = logging.getLogger(__name__)

FEATURES = "features"
"""Key of a datum's output that holds the address of its features and their size in bytes."""


def stored_of(operation: RankPart) -> Mapping[int, CapturedFeatures]:
    return operation.prepared or {}


def capture_directory(operation: RankPart) -> Path | None:
    """Returns the directory for features if the part only captures, else None."""
    location = operation.sent.request.features
    return Path(location.directory) if location is not None and location.captures else None


def store_features(
    directory: Path,
    kind: FeatureKind,
    operation: RankPart,
    segment: MicroBatchSegment,
    chunks_of: Callable[[slice], Iterable[Kept]],
) -> str | None:
    """Stores the features of the segment's examples that have none yet.

    Args:
        chunks_of: computes what is stored of these tokens of the micro-batch, chunk by chunk.
    Returns:
        Why the last example that could not be stored could not; None if all are.
    """
    failure: str | None = None
    for example, tokens in examples_of(segment):
        features = stored_of(operation).get(example)
        try:
            if features is None:
                address = kind.address(operation.batch.examples[example].tokens)
                num_tokens = tokens.stop - tokens.start
                features = CapturedFeatures.store(directory, address, kind, num_tokens, chunks_of(tokens))
            address = f"{features.address} {features.num_bytes}".encode()
            outputs = operation.finished.outputs.setdefault(operation.batch.datum_indices[example], {})
            outputs[FEATURES] = np.frombuffer(address, np.uint8)
        except OSError as error:
            failure = _write_failure(directory, error)
    return failure


def _write_failure(directory: Path, error: OSError) -> str:
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

    def __init__(self, base: BaseModel, models: ModelRegistry, scoring: ScoringStrategy) -> None:
        self._base, self._models, self._scoring = base, models, scoring
        self._head = LogprobHead(base, scoring.head_chunk_tokens)  # computes the policies' logits
        self._versions: WeakKeyDictionary[Trainable, tuple[int, str]] = WeakKeyDictionary()
        self._warned: WeakSet[FinishedParts] = WeakSet()

    def read(self, operation: RankPart, limits: ModelLimits) -> None:
        part, location, program = operation.sent, operation.sent.request.features, operation.model.program
        if location is None or location.draft is None:
            self._scoring.read(operation, limits)
            return
        operation.batch = validate_request(part.request, limits, part.data_share, program.losses)
        if not program.samples:
            raise OperationError(f"capture_for is only for policies, and this is a {program.role}: leave it out")
        num_layers = int(self._base.config.get_text_config().num_hidden_layers)
        assert all(layer < num_layers for layer in location.draft.layers), "the draft has the same base model"

    def plan(self, operations: Sequence[RankPart]) -> dict[str, str]:
        """Returns the version by run of this rank's part of the weights, for runs that capture features.

        These runs must be on the device.
        """
        models = {each.run_id: each.model for each in operations if _wanted_features(each) is not None}
        return {run_id: self._version(model) for run_id, model in models.items()}

    def start(
        self,
        operations: Sequence[RankPart],
        num_lanes: int,
        plans: Sequence[Mapping[str, str]] = (),
    ) -> RunMicroBatch:
        of_ranks = plans or [self.plan(operations)]
        run_ids = {each.run_id for each in operations if _wanted_features(each) is not None}
        versions = {run_id: version_of_parts([of_rank[run_id] for of_rank in of_ranks]) for run_id in run_ids}
        kinds = [
            None if (capture := _wanted_features(each)) is None else self._kind(capture, versions[each.run_id])
            for each in operations
        ]
        capture = _PolicyCapture(self._base, self._head, operations, kinds, num_lanes, self._warned)
        return self._scoring.start(operations, num_lanes, hidden_states=capture.hidden_states)

    def _kind(self, wanted: DraftFeatures, version: str) -> FeatureKind:
        """Returns the kind of features that a draft wants of weights with this version."""
        base, target_repr = self._base, DRAFT_PROGRAMS[wanted.algorithm].algorithm.default_target_repr
        hidden = int(base.config.get_text_config().hidden_size)
        form = None
        if target_repr is not None:
            vocabulary = torch.from_numpy(np.frombuffer(wanted.vocabulary, np.int32).astype(np.int64)).to(base.device)
            form = target_form(
                wanted.target_repr or target_repr,
                wanted.target_top_k,
                hidden,
                base.vocab_size,
                vocabulary,
                base.logit_cap,
            )
        return FeatureKind(version, tuple(wanted.layers), form, hidden, base.dtype)

    def _version(self, model: Trainable) -> str:
        """Returns the version of the model's weights; it is computed only after a change."""
        num_changes, version = self._versions.get(model, (-1, ""))
        if num_changes != model.vectors.num_changes:
            version = target_versions(self._models).of(model)
            self._versions[model] = model.vectors.num_changes, version
        return version


@dataclass(frozen=True, eq=False)
class _PolicyCapture:
    """Runs the base model in a pass of policies, and stores features.

    kinds: of the features that each operation captures, None = it captures none.
    warned: of operations for which a warning about features that could not be stored was logged.
    """

    base: BaseModel
    head: LogprobHead
    operations: Sequence[RankPart]
    kinds: Sequence[FeatureKind | None]
    num_lanes: int
    warned: WeakSet[FinishedParts]

    def hidden_states(
        self, micro_batch: MicroBatch, share: TokenShard | None, expert_counts: ExpertCounts | None
    ) -> Tensor:
        """Returns the hidden states of the base model, and stores those of the layers that operations capture."""
        kinds = [self.kinds[segment.operation] for segment in micro_batch.segments]
        layers = sorted({layer for kind in kinds if kind is not None for layer in kind.layers})
        captured = dict.fromkeys(layers, torch.empty(0))
        hidden = self.base.shared_hidden_states(micro_batch, share, expert_counts, captured or None)
        of_layers = {layer: _gather_on_first(each, share) for layer, each in captured.items()}
        needs_last = any(kind is not None and kind.form is not None for kind in kinds)
        last = _gather_on_first(hidden, share) if needs_last else None
        # All ranks enter together, even if a micro-batch of theirs captures nothing.
        stores_logits = any(kind is not None and kind.stores_logits for kind in self.kinds)
        with torch.no_grad(), self.head.gathered() if stores_logits else nullcontext():
            for segment, kind in zip(micro_batch.segments, kinds, strict=True):
                if kind is not None:
                    self._store(kind, segment, of_layers, last)
        return hidden

    def _store(
        self,
        kind: FeatureKind,
        segment: MicroBatchSegment,
        of_layers: Mapping[int, Tensor | None],
        last: Tensor | None,
    ) -> None:
        """Stores the features of one segment.

        `of_layers` has the hidden states of all tokens by layer, None if another rank stores them, `last` the final
        ones if the draft's algorithm reads them.
        """
        layers = [each for layer in kind.layers if (each := of_layers[layer]) is not None]
        if not layers:
            return
        operation = self.operations[segment.operation]
        location = operation.sent.request.features
        assert location is not None
        directory, captured = Path(location.directory), torch.cat(layers, dim=-1)
        # Embeddings are not stored: the draft looks them up in its target.
        outputs = None if last is None else TargetOutputs(last)
        features = TargetFeatures(captured, captured, outputs if kind.form is not None else None)
        budget = LogitBudget.on(self.base.device.type == "cpu", self.head.chunk_tokens)
        chunks_of = partial(
            features.stored,
            kind=kind,
            logits=lambda each: self.head.uncapped_logits(each, [Segment(0, len(each), operation.model)]),
            chunk_tokens=budget.chunk_rows(self.num_lanes, self.num_lanes * self.base.vocab_size),
        )
        failure = store_features(directory, kind, operation, segment, chunks_of)
        if failure is not None and operation.finished not in self.warned:
            self.warned.add(operation.finished)
            logger.warning(
                "run %s continues without the features it should have captured: %s", operation.run_id, failure
            )


def _wanted_features(operation: RankPart) -> DraftFeatures | None:
    """Returns the features that a policy's part captures in addition to training, None if it does not."""
    location = operation.sent.request.features
    return None if location is None else location.draft


def examples_of(segment: MicroBatchSegment) -> Iterator[tuple[int, slice]]:
    """Yields the index of each example, and the slice of its tokens in the micro-batch."""
    for example, (start, stop) in zip(segment.examples, pairwise(segment.bounds), strict=True):
        yield example, slice(segment.start + start, segment.start + stop)


def _gather_on_first(hidden: Tensor, share: TokenShard | None) -> Tensor | None:
    """Gathers hidden states of the tokens `share.hidden` to those of all tokens, on the first of the ranks that run
    them; returns None elsewhere."""
    own = hidden.detach()
    return own if share is None else share.joined_at_first(share.select_scored(own))
