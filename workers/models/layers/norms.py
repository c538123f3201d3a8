"""The norms of decoder layers."""

from typing import Any

import torch
from torch import Tensor

from ...ops.fused import LayerNorm, RmsNorm
from ...shapes.families import Family


def norm_of(module: Any, family: Family) -> RmsNorm:
    """Returns a norm of the family's kind for transformers' module."""
    adds_one = family.norm_weight_plus_one
    if not family.centers_norms:
        return rms_norm_of(module, adds_one)
    return LayerNorm(module.weight, _eps(module), adds_one, getattr(module, "bias", None))


def rms_norm_of(module: Any, adds_one: bool = False) -> RmsNorm:
    """Returns the norm of transformers' module. `adds_one`: whether 1 is added to its weight."""
    return RmsNorm(module.weight, _eps(module), adds_one)


def _eps(module: Any) -> Tensor:
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return torch.tensor(eps, device=module.weight.device)


class NoNorm:
    """Stands for the norm before a part that has none."""

    def add(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (sum, sum): the residual and, without a norm, the next input."""
        total = x if update is None else x + update
        return total, total
