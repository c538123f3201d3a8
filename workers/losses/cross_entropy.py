"""Weighted negative log-likelihood, -sum w l. Weights may be negative or fractional, and are 1 if absent."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .loss import Config, Loss, LossOutput


def cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    weights = inputs["weights"]
    return LossOutput(-weights * torch.where(weights != 0, logprobs, 0.0))


CROSS_ENTROPY = Loss(
    cross_entropy,
    required=(),
    optional={"weights": lambda inputs, config: 1.0},
    counted_by="weights",
    allows_top_k_targets=True,
)
