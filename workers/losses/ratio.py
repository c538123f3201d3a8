"""Parts shared by policy-gradient losses: the counted positions, and the bounds on the probability ratio.

In the formulas of these losses, l and q are the log-probabilities of a token by the policy in training and by the one
that sampled it, r = exp(l - q), A is the advantage, and sg passes no gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .loss import Arrays, Config, Fill

RATIO_INPUTS = ("logprobs", "advantages")


@dataclass(frozen=True, eq=False)
class CountedLogprobs:
    """Log-probabilities of sampled tokens, 0 where A = 0: by the policy in training, and by the one that sampled."""

    policy_logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return self.policy_logprobs - self.sampler_logprobs

    def kl(self) -> Tensor:
        """Estimates the divergence of the policy in training from the sampler's, E_q[q - l], per position."""
        return -self.log_ratio.detach()


def mask_uncounted(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> CountedLogprobs:
    """Sets log-probabilities at positions with A = 0 to 0, so that a non-finite one is never multiplied by 0."""
    advantages = inputs["advantages"]
    is_counted = advantages != 0
    return CountedLogprobs(
        torch.where(is_counted, logprobs, 0.0), torch.where(is_counted, inputs["logprobs"], 0.0), advantages
    )


def clipped_losses(ratio: Tensor, log_ratio: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns -min(r A, clip(r) A) with r = `ratio` exp(`log_ratio`).

    Where the minimum is a bound or A = 0, nothing is computed from the ratio: it may be infinite, and 0 x inf is NaN.
    """
    advantages, whole = inputs["advantages"], ratio * log_ratio.detach().exp()
    bound = torch.where(advantages > 0, inputs["clip_high_threshold"], inputs["clip_low_threshold"])
    is_bound = torch.where(advantages > 0, whole > bound, (advantages < 0) & (whole < bound))
    is_unused = is_bound | (advantages == 0)
    used = torch.where(is_unused, 0.0, ratio) * torch.where(is_unused, 0.0, log_ratio).exp()
    return -torch.where(is_bound, bound, used) * advantages


def clip(ratio: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return torch.clamp(ratio, inputs["clip_low_threshold"], inputs["clip_high_threshold"])


def is_clipped(ratio: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns which counted positions have a ratio outside the bounds."""
    outside = (ratio < inputs["clip_low_threshold"]) | (ratio > inputs["clip_high_threshold"])
    return outside & (inputs["advantages"] != 0)


def clip_config(low: float, high: float) -> dict[str, float]:
    """Returns the defaults of the bounds. They apply to the ratio itself: 0.8 is 1 - 0.2."""
    return {"clip_low_threshold": low, "clip_high_threshold": high}


def clip_problem(config: Config) -> str | None:
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if low <= high:
        return None
    return (
        f"clip_low_threshold {low} exceeds clip_high_threshold {high}: they are bounds on the ratio itself, such as 0.8"
        " and 1.2"
    )


def clip_inputs() -> dict[str, Fill]:
    """Returns the bounds as optional inputs, for clients that set them token by token.

    Absent ones are filled in from the config, so that losses read the bounds from their inputs only.
    """
    return {name: _config_value(name) for name in clip_config(0, 0)}


def _config_value(name: str) -> Fill:
    def fill(inputs: Arrays, config: Config) -> np.ndarray | float:
        return config[name]

    return fill
