"""Drafts: all draft models of one base on this rank."""

from ...schemas.models import DraftConfig
from ..config import OptimizerStates
from ..holder import Holder
from ..model import BaseModel
from ..moments import MOMENTS
from ..parallel.mesh import Mesh
from ..programs import Program
from ..residency import Residency
from .groups import DraftGroups
from .model import DraftModel


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
        return DraftModel(draft, self._base, program, self._moments, self._groups)
