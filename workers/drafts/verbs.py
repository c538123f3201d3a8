"""The worker's verbs for drafts: their targets, their vocabularies, and drafts that only propose tokens."""

from functools import partial
from pathlib import Path

import numpy as np

from ...schemas.errors import OperationError
from ...schemas.models import DraftConfig
from ..checkpoint import filled, is_snapshot, read_new_model
from ..checkpoint.description import CheckpointDescription
from ..parallel.mesh import Mesh
from ..registry.model_registry import ModelRegistry, trunk_id
from ..registry.programs import program_of
from ..state.moments import MOMENTS
from ..state.trainable import Trainable
from ..state.vectors import FORWARD_VECTORS
from ..training.pass_runner import PassRunner
from ..worker.rank_models import RankModels
from .model.draft_kind import target_versions
from .model.draft_model import DraftModel
from .model.version import version_of_parts


class DraftVerbs:
    """Acts on a rank's drafts. verbs: the methods that pools call as the worker's own."""

    verbs = ("set_target", "set_vocabulary", "vocabulary", "load_draft")

    def __init__(self, registry: ModelRegistry, models: RankModels, passes: PassRunner, mesh: Mesh) -> None:
        self._registry, self._models, self._passes, self._mesh = registry, models, passes, mesh

    def set_target(self, run_id: str, directory: str | None) -> None:
        """Makes the draft predict the policy saved in `directory`; None means the bare base model."""
        draft, target = self._draft(run_id), None
        if directory is not None:
            read = partial(read_new_model, self._registry, Path(directory))
            target = self._models.build_with_room(trunk_id(run_id), read, is_copy=True)
        versions = self._mesh.all_gather_object(target_versions(self._registry).of(target))
        if target is None:
            self._registry.drop(trunk_id(run_id))
        else:
            target = self._registry.put(trunk_id(run_id), target)
        draft.target, draft.target_version = target, version_of_parts(versions)
        self._passes.forget(run_id)

    def set_vocabulary(self, run_id: str, token_ids: np.ndarray) -> None:
        """Sets the tokens that a draft can propose, int64 ascending. Raises OperationError once it was trained."""
        draft = self._draft(run_id)
        self._passes.forget(run_id)
        with self._models.resident(run_id, FORWARD_VECTORS):
            draft.set_vocabulary(token_ids)

    def vocabulary(self, run_id: str) -> np.ndarray:
        """Returns the tokens that a draft can propose, int64. Raises OperationError if none were chosen."""
        draft = self._draft(run_id)
        if draft.missing_state is not None:
            raise OperationError(draft.missing_state)
        return draft.vocabulary.cpu().numpy()

    def load_draft(self, draft_id: str, directory: str) -> None:
        """Loads the weights of a draft checkpoint for speculative decoding; `drop_adapter` drops it."""
        self._models.put(draft_id, partial(self._read_proposing, Path(directory)))

    def after_load(self, run_id: str, directory: Path) -> None:
        """Restores the target of a draft from its snapshot; only earlier versions stored targets there."""
        if not isinstance(self._registry.get(run_id), DraftModel):
            return
        if is_snapshot(directory):
            target = directory / "target"
            self.set_target(run_id, str(target) if target.is_dir() else None)
        else:
            self._draft(run_id).has_loaded_weights = True

    def _read_proposing(self, directory: Path) -> Trainable:
        """Builds a draft that only proposes tokens, with the checkpoint's weights and vocabulary."""
        training = CheckpointDescription.read(directory).training
        if not isinstance(training, DraftConfig):
            raise OperationError(
                "the checkpoint is not a draft's: name a checkpoint of a model whose model_role is draft"
            )
        kind, program = self._registry.kinds[DraftConfig], program_of("draft", training)
        return filled(kind.build(training, program, MOMENTS["float32"], is_trained=False), directory)

    def _draft(self, run_id: str) -> DraftModel:
        """Returns the run's draft. Raises OperationError for other runs."""
        self._models.check_run(run_id)
        draft = self._registry.get(run_id)
        if not isinstance(draft, DraftModel):
            role = draft.program.role
            raise OperationError(f"run {run_id} is a {role}: only drafts have a target and their own vocabulary")
        return draft
