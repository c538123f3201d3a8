"""The registry of all draft models of one base model on this rank."""

from functools import cached_property

from ...schemas.models import DraftConfig
from ..models.model import BaseModel
from ..protocol.worker_config import OptimizerStateDtype
from ..state.moments import MOMENTS
from ..state.residency import Residency
from ..state.resident_models import ResidentModels
from ..state.trainable import Trainable
from .algorithms.draft_programs import DraftProgram
from .draft_model import DraftModel
from .groups import DraftGroups
from .version import base_version, learned_version


class DraftModels(ResidentModels[DraftModel]):
    kind_name = "drafts"

    def __init__(
        self,
        base: BaseModel,
        residency: Residency | None = None,
        optimizer_states: OptimizerStateDtype = "float32",
        groups: DraftGroups | None = None,
    ) -> None:
        """Creates an empty registry.

        Args:
            residency: None = all drafts stay on the device.
            groups: the ranks that train the drafts, None = this rank alone.
        """
        super().__init__(residency or Residency(base.device))
        self._base, self._moments = base, MOMENTS[optimizer_states]
        self._groups = groups or DraftGroups.alone()

    def build(self, draft: DraftConfig, program: DraftProgram, is_shared: bool = True) -> DraftModel:
        """Returns a draft with zero weights and no id yet.

        Args:
            is_shared: whether all ranks train it together; otherwise each rank has a draft for itself.
        Raises:
            OperationError: the configuration is not possible for this base model.
        """
        groups = self._groups if is_shared else DraftGroups.alone()
        built = DraftModel(draft, self._base, program, self._moments, groups)
        built.target_version = self._base_version
        return built

    def version_of(self, target: Trainable | None) -> str:
        """Returns the version of this rank's part of the target, which must be on the device. None = the bare base
        model."""
        return self._base_version if target is None else learned_version(self._base_version, target)

    @cached_property
    def _base_version(self) -> str:
        return base_version(self._base)
