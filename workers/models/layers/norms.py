"""The norms of decoder layers."""

from typing import Any

import torch
from torch import Tensor

from ...ops.fused import RmsNorm, add_rms_norm
from ...ops.norms.layer_norm import LayerNorm, layer_norm
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


def add_norm(hidden: Tensor, update: Tensor | None, norm: RmsNorm | None) -> tuple[Tensor, Tensor]:
    """Returns the sum of both, and its norm; without a norm the sum twice."""
    if norm is not None and not isinstance(norm, LayerNorm):
        return add_rms_norm(hidden, update, norm)
    total = hidden if update is None else hidden + update
    return total, total if norm is None else layer_norm(total, norm)
