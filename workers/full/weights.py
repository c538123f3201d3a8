"""The weights of a fully fine-tuned model, with a view of its flat vectors for each parameter."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...schemas.errors import OperationError
from ...schemas.models import FullConfig
from ..models.model import BaseModel
from ..shapes.layouts.flops import OwnFlops
from ..state.flat_params import FlatLayout
from ..state.moments import MomentFormat
from ..state.program import Program
from ..state.trainable import SEED_MASK, Trainable
from .full_parameters import buffers_of, parameters_of


class FullWeights(Trainable):
    """A fully fine-tuned model. Views are named as parameters in transformers, or as the program names its additional
    ones."""

    kind = "full_models"
    replaces_base = is_exclusive = True

    def __init__(self, full: FullConfig, base: BaseModel, program: Program, moments: MomentFormat) -> None:
        """Raises OperationError if the base model cannot be fully trained."""
        if base.weights.is_quantized:
            raise OperationError(
                "full fine-tuning needs an unquantized base model: train LoRA, or start the server without"
                " --base-quantization"
            )
        self.full = self.training = full
        layout = FlatLayout(parameters_of(base, program))
        super().__init__(layout, base.device, base.dtype, program, partial(_views, layout), moments)
        self.flops = OwnFlops(head=program.flops(base), trains_base=True, has_logits=program.scores == "logprobs")
        self._base = base

    @property
    def config(self) -> PreTrainedConfig:
        """Returns the base model's config."""
        return self._base.config

    @property
    def source(self) -> str:
        """Returns the name or path that the base model was loaded from."""
        return self._base.source

    def buffers(self) -> dict[str, Tensor]:
        """Returns what is saved with the weights but not trained, such as corrections of routers, by names in files."""
        return buffers_of(self._base)

    def initialize(self) -> None:
        """Copies the base model's weights, and initializes those that the program adds."""
        views = _views(self.layout, self.weights)
        for name, value in self._base.weights.own_parameters().items():
            if name in views:
                views[name].copy_(value)
        generator = torch.Generator().manual_seed((self.full.seed or 0) & SEED_MASK)
        self.program.initialize(self, generator)


def _views(layout: FlatLayout, vector: Tensor) -> Mapping[str, Tensor]:
    return {str(matrix.key): layout.view(vector, matrix.key) for matrix in layout.matrices}
