"""Parts shared by policy-gradient losses: the counted positions, and the bounds on the probability ratio."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .loss import Arrays, Config, Fill

RATIO_INPUTS = ("logprobs", "advantages")


@dataclass(frozen=True, eq=False)
class SampledLogprobs:
    """Log-probabilities of sampled tokens, 0 where A = 0.

    logprobs: of the policy in training. sampler_logprobs: of the policy that sampled.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.sampler_logprobs

    def kl(self) -> Tensor:
        """Estimates the divergence of the policy in training from the sampler's, E_q[q - l], per position."""
        return -self.log_ratio.detach()


def mask_uncounted(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> SampledLogprobs:
    """Sets log-probabilities at positions with A = 0 to 0, so that a non-finite one is never multiplied by 0."""
    advantages = inputs["advantages"]
    is_counted = advantages != 0
    return SampledLogprobs(
        torch.where(is_counted, logprobs, 0.0), torch.where(is_counted, inputs["logprobs"], 0.0), advantages
    )


def clip(ratio: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return torch.clamp(ratio, inputs["clip_low_threshold"], inputs["clip_high_threshold"])


def is_clipped(ratio: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns which counted positions have a ratio outside the bounds."""
    outside = (ratio < inputs["clip_low_threshold"]) | (ratio > inputs["clip_high_threshold"])
    return outside & (inputs["advantages"] != 0)


def clip_config(low: float, high: float) -> dict[str, float]:
    """Returns the defaults of the bounds. They apply to the ratio itself: 0.8 is 1 - 0.2."""
    return {"clip_low_threshold": low, "clip_high_threshold": high}


def clip_inputs() -> dict[str, Fill]:
    """Returns the bounds as optional inputs, for clients that set them token by token."""
    return {name: _config_value(name) for name in clip_config(0, 0)}


def _config_value(name: str) -> Fill:
    def fill(inputs: Arrays, config: Config) -> np.ndarray | float:
        return config[name]

    return fill
