"""PPO's clipped objective (arXiv 1707.06347): -sum min(r A, clip(r, low, high) A)."""

from collections.abc import Mapping

from torch import Tensor

from .loss import Config, Loss, LossOutput
from .ratio import RATIO_INPUTS, clip_config, clip_inputs, clip_problem, clipped_losses, is_clipped, mask_uncounted


def ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    counted = mask_uncounted(logprobs, inputs)
    ratio = counted.log_ratio.detach().exp()
    losses = clipped_losses(ratio.new_ones(()), counted.log_ratio, inputs)
    return LossOutput(losses, {"kl": counted.kl(), "clip_fraction": is_clipped(ratio, inputs)})


PPO = Loss(ppo, required=RATIO_INPUTS, optional=clip_inputs(), config=clip_config(0.8, 1.2), problem=clip_problem)
