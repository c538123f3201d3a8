"""Squared error of a critic's values, sum w (v - R)^2 / 2, clipped as for PPO's critics if `old_values` are given.

The clipped error is the larger of the errors of v and of old + clamp(v - old, -clip, clip) (Schulman et al., PPO
(2017), as in OpenAI's baselines and TRL).
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from .loss import Arrays, Config, Loss, LossOutput


def value_mse(values: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    weights = inputs["weights"]
    values, returns, old = (
        torch.where(weights != 0, each, 0.0) for each in (values, inputs["returns"], inputs["old_values"])
    )
    error, clip = (values - returns).square(), config["clip"]
    # Absent old values are NaN, and comparisons with NaN are false.
    is_far = (values - old).abs() > clip
    near = torch.where(is_far, old + torch.clamp(values - old, -clip, clip), values)
    clipped_error = (near - returns).square()
    is_clipped = is_far & (clipped_error > error) & (weights != 0)
    return LossOutput(0.5 * weights * torch.maximum(error, clipped_error), {"clip_fraction": is_clipped.float()})


def _none(inputs: Arrays, config: Config) -> float:
    return np.nan


def _problem(config: Config) -> str | None:
    clip = config["clip"]
    return f"clip is {clip}: it is a distance and must not be negative, try 0.2" if clip < 0 else None


VALUE_MSE = Loss(
    value_mse,
    required=("returns",),
    optional={"weights": lambda inputs, config: 1.0, "old_values": _none},
    config={"clip": 0.2},
    problem=_problem,
    counted_by="weights",
    head="values",
)
