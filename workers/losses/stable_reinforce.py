"""REINFORCE with a capped ratio and a penalty on drift. The objective is ours, since the hosted service does not
publish its own.

-sum sg(min(r, 2)) l A + kl_coeff/2 sum (l - q)^2, both over positions with A != 0; r and the penalty apply only where a
sampler drew the token (elsewhere q is unknown and r = 1). The server fills `logprobs` and `sampled_mask` from what was
recorded when the sequences were sampled.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .loss import Config, Loss, LossOutput
from .ratio import RATIO_INPUTS, mask_uncounted

_RATIO_CAP = 2.0


def stable_reinforce(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    counted = mask_uncounted(logprobs, inputs)
    log_ratio = torch.where(inputs["sampled_mask"] != 0, counted.log_ratio, 0.0)
    ratio = log_ratio.detach().exp()
    losses = -ratio.clamp(max=_RATIO_CAP) * counted.policy_logprobs * counted.advantages
    losses = losses + 0.5 * config["kl_coeff"] * log_ratio * log_ratio
    return LossOutput(losses, {"kl": -log_ratio.detach(), "clip_fraction": ratio > _RATIO_CAP})


STABLE_REINFORCE = Loss(stable_reinforce, required=(*RATIO_INPUTS, "sampled_mask"), config={"kl_coeff": 0.01})
