"""FullWeights: a model's own weights, all of them, with a view of its vectors for each parameter."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...schemas.models import FullConfig
from ..models.model import BaseModel
from ..state.flat_params import Layout
from ..state.moments import Moments
from ..state.program import Program
from ..state.trainable import SEED_MASK, Learner
from .parameters import parameters_of


class FullWeights(Learner):
    """Views are by the names of parameters in transformers' model, and of what the program learns beside them."""

    def __init__(self, full: FullConfig, base: BaseModel, program: Program, moments: Moments) -> None:
        self.full = self.training = full
        layout = Layout(parameters_of(base, program))
        super().__init__(layout, base.device, base.dtype, program, partial(_views, layout))
        self._base = base
        self.moments = moments

    @property
    def config(self) -> PreTrainedConfig:
        """The base model's."""
        return self._base.config

    @property
    def source(self) -> str:
        """Where the base model was loaded from."""
        return self._base.source

    def initialize(self) -> None:
        """Those of the base model, and what the program draws."""
        views = _views(self.layout, self.weights)
        for name, value in self._base.own_parameters().items():
            if name in views:
                views[name].copy_(value)
        generator = torch.Generator().manual_seed((self.full.seed or 0) & SEED_MASK)
        self.program.initialize(self, generator)


def _views(layout: Layout, vector: Tensor) -> Mapping[str, Tensor]:
    return {str(matrix.key): layout.view(vector, matrix.key) for matrix in layout.matrices}
