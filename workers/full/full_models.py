"""The registry of all fully fine-tuned models of one base model on this rank."""

from ...schemas.errors import OperationError
from ...schemas.models import FullConfig, TrainingConfig
from ..models.model import BaseModel
from ..programs.policy import POLICY
from ..protocol.worker_config import OptimizerStateDtype
from ..state.moments import MOMENTS
from ..state.program import Program
from ..state.residency import Residency
from ..state.resident_models import ResidentModels
from .weights import FullWeights


class FullModels(ResidentModels[FullWeights]):
    kind_name = "full_models"

    def __init__(
        self,
        base: BaseModel,
        most: int,
        residency: Residency | None = None,
        optimizer_states: OptimizerStateDtype = "float32",
    ) -> None:
        """Creates an empty registry.

        Args:
            most: the number of models from which `check_room` refuses another copy. The server limits how many runs are
                created.
            residency: None = all models stay on the device.
        """
        super().__init__(residency or Residency(base.device))
        self._base, self._most = base, most
        self._moments = MOMENTS[optimizer_states]

    def build(self, full: FullConfig, program: Program) -> FullWeights:
        """Returns a model with zero weights and no id yet. Raises OperationError if the base model cannot be fully
        trained."""
        if self._base.is_quantized:
            raise OperationError(
                "full fine-tuning needs an unquantized base model: train LoRA, or start the server without"
                " --base-quantization"
            )
        if buffers := self._base.saved_buffers:
            raise OperationError(
                f"{self._base.config.model_type} models have a buffer {buffers[0]}, which would be neither trained nor"
                " saved with the weights: train LoRA"
            )
        return FullWeights(full, self._base, program, self._moments)

    def is_overwritten(self, model_id: str, training: TrainingConfig) -> bool:
        """True if copying a policy to this id overwrites the weights that the id has now."""
        model = self._models.get(model_id)
        if model is None or self.is_shared(model_id):
            return False
        return model.training == training and model.program is POLICY

    def check_room(self, model_id: str) -> None:
        """Raises OperationError if a copy with this id would exceed the limit on models."""
        num_others = len({id(self.get(each)) for each in self if each != model_id})
        if num_others >= self._most:
            raise OperationError(
                f"there are {num_others} models with full weights, trained ones and copies for samplers, and"
                " max_full_models allows no more: save with kind inflight, which updates one copy, end a session that"
                " has some, or start the server with a higher --max-full-models; models that are not in use are"
                " offloaded to disk"
            )
