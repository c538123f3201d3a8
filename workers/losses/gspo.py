"""GSPO, token variant (arXiv 2507.18071): one clipped ratio per sequence, with a gradient for each token.

s = exp(mean over sequence_ratio_mask of (l - q)), s_t = sg(s) exp(l - sg(l)), -sum min(s_t A, clip(s_t, low, high) A).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .loss import Config, Loss, LossOutput
from .ratio import RATIO_INPUTS, clip_config, clip_inputs, clip_problem, clipped_losses, is_clipped, mask_uncounted


def gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    counted = mask_uncounted(logprobs, inputs)
    in_ratio = inputs["sequence_ratio_mask"] != 0
    # Summed in float64: terms of both signs may exceed float32 while their mean does not.
    log_ratio = torch.where(in_ratio, logprobs.detach().double() - inputs["logprobs"], 0.0)
    mean = log_ratio.sum() / in_ratio.sum().clamp(min=1)
    ratio = mean.float().exp().expand_as(logprobs)
    losses = clipped_losses(ratio, counted.policy_logprobs - counted.policy_logprobs.detach(), inputs)
    return LossOutput(losses, {"kl": counted.kl(), "clip_fraction": is_clipped(ratio, inputs)})


GSPO = Loss(
    gspo,
    required=RATIO_INPUTS,
    optional=clip_inputs() | {"sequence_ratio_mask": lambda inputs, config: inputs["advantages"] != 0},
    config=clip_config(1 - 3e-4, 1 + 4e-4),
    problem=clip_problem,
    sequence_wise=True,
)
