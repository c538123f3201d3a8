"""Drafts: all draft models of one base on this rank."""

from functools import cached_property

from ...schemas.models import DraftConfig
from ..config import OptimizerStates
from ..holder import Holder
from ..learner import Learner
from ..model import BaseModel
from ..moments import MOMENTS
from ..parallel.mesh import Mesh
from ..programs import Program
from ..residency import Residency
from .groups import DraftGroups
from .model import DraftModel
from .version import base_version, learned_version


class Drafts(Holder[DraftModel]):
    things = "drafts"

    def __init__(
        self,
        base: BaseModel,
        residency: Residency | None = None,
        optimizer_states: OptimizerStates = "float32",
        mesh: Mesh | None = None,
    ) -> None:
        """residency: None = all of them stay on the device. mesh: of the base model's ranks, None = one."""
        super().__init__(residency or Residency(base.device))
        self._base, self._moments = base, MOMENTS[optimizer_states]
        self._groups = DraftGroups.of(mesh or Mesh(), base.config.get_text_config().num_attention_heads)

    def build(self, draft: DraftConfig, program: Program) -> DraftModel:
        """One with zero weights and no id yet. Raises OperationError on what makes no such draft."""
        built = DraftModel(draft, self._base, program, self._moments, self._groups)
        built.target_version = self._base_version
        return built

    def version_of(self, target: Learner | None) -> str:
        """Of this rank's part of it, which is on the device; None = the bare base model."""
        return self._base_version if target is None else learned_version(self._base_version, target)

    @cached_property
    def _base_version(self) -> str:
        return base_version(self._base)
