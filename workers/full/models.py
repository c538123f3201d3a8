"""FullModels: all models of one base on this rank that have weights of their own."""

from ...schemas.errors import OperationError
from ...schemas.models import FullConfig, TrainingConfig
from ..models.model import BaseModel
from ..programs.policy import POLICY
from ..protocol.config import OptimizerStates
from ..state.holder import Holder
from ..state.moments import MOMENTS
from ..state.program import Program
from ..state.residency import Residency
from .weights import FullWeights


class FullModels(Holder[FullWeights]):
    things = "full_models"

    def __init__(
        self,
        base: BaseModel,
        most: int,
        residency: Residency | None = None,
        optimizer_states: OptimizerStates = "float32",
    ) -> None:
        """most: how many there may be before one more copy; who lets runs be created bounds their number.

        residency: None = all of them stay on the device.
        """
        super().__init__(residency or Residency(base.device))
        self._base, self._most = base, most
        self._moments = MOMENTS[optimizer_states]

    def build(self, full: FullConfig, program: Program) -> FullWeights:
        """One with zero weights and no id yet. Raises OperationError where the base model cannot be trained."""
        if self._base.is_quantized:
            raise OperationError(
                "all weights of a model can be trained where its base model is whole: train LoRA, or serve without"
                " --base-quantization"
            )
        if buffers := self._base.saved_buffers:
            raise OperationError(
                f"{self._base.config.model_type} models keep {buffers[0]} beside their weights, which is neither"
                " trained nor saved with them here: train LoRA"
            )
        return FullWeights(full, self._base, program, self._moments)

    def is_overwritten(self, model_id: str, training: TrainingConfig) -> bool:
        """Whether a copy of a policy, of this id, takes the place of the weights that are there."""
        model = self._models.get(model_id)
        if model is None or self.is_shared(model_id):
            return False
        return model.training == training and model.program is POLICY

    def check_room(self, model_id: str) -> None:
        """For a copy of this id. Raises OperationError where there are as many as there may be."""
        num_others = len({id(self.get(each)) for each in self if each != model_id})
        if num_others >= self._most:
            raise OperationError(
                f"there are {num_others} models with weights of their own, fully trained ones and copies of them for"
                " samplers, which is all that max_full_models allows: save with kind inflight, which moves one copy"
                " forward, end a session that has some, or serve with more --max-full-models, of which those that are"
                " not in use wait on disk"
            )
