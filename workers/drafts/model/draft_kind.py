"""Builds drafts for the registry of a rank's models."""

from ....schemas.models import DraftConfig, TrainingConfig
from ...models.model import BaseModel
from ...parallel.mesh import Mesh
from ...protocol.worker_config import WorkerConfig
from ...registry.model_registry import ModelRegistry
from ...state.moments import MomentFormat
from ...state.program import Program
from ..algorithms.draft_programs import DraftProgram
from .draft_model import DraftModel
from .groups import DraftGroups
from .version import TargetVersions


class DraftKind:
    """The ModelKind of drafts.

    versions: of the models that can be their targets.
    """

    name = DraftModel.kind

    def __init__(self, base: BaseModel, mesh: Mesh, config: WorkerConfig) -> None:
        """All ranks call this together. Raises ValueError if drafts cannot have the configured layout."""
        self._base, self.versions = base, TargetVersions(base)
        self._groups = DraftGroups.of(mesh, base.config, config.draft_parallel)

    def build(
        self, training: TrainingConfig, program: Program, moments: MomentFormat, is_trained: bool = True
    ) -> DraftModel:
        """Builds a draft that all ranks train together, or if it is not trained, one that only this rank has."""
        assert isinstance(training, DraftConfig) and isinstance(program, DraftProgram)
        groups = self._groups if is_trained else DraftGroups.alone()
        draft = DraftModel(training, self._base, program, moments, groups, is_trained)
        draft.target_version = self.versions.of(None)
        return draft


def target_versions(models: ModelRegistry) -> TargetVersions:
    kind = models.kinds[DraftConfig]
    assert isinstance(kind, DraftKind)
    return kind.versions
