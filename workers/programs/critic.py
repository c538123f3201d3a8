"""Critics: one value per token, from a linear head over the base model that is trained together with the run's LoRA."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..losses import VALUE_LOSSES
from ..state.flat_params import WholeMatrix
from ..state.program import Base, Program

if TYPE_CHECKING:
    from ..state.trainable import Trainable

# The names that transformers' models for sequence and token classification use for their heads.
WEIGHT, BIAS = "score.weight", "score.bias"


def _value_head_matrices(base: Base) -> Sequence[WholeMatrix]:
    return WholeMatrix(WEIGHT, (1, base.unembedding.shape[1])), WholeMatrix(BIAS, (1,))


def _initialize(model: "Trainable", generator: torch.Generator) -> None:
    """Draws the head such that values are at most about 1: Huang et al., The N+ Implementation Details of RLHF with PPO
    (2024), section 5."""
    weight = model.tensor(WEIGHT)
    drawn = torch.empty(weight.shape).normal_(std=1 / math.sqrt(weight.numel() + 1), generator=generator)
    weight.copy_(drawn)


CRITIC = Program(
    "critic",
    "values",
    VALUE_LOSSES,
    samples=False,
    matrices=_value_head_matrices,
    initialize=_initialize,
    peft_task="TOKEN_CLS",
    peft_modules=("score",),
)
