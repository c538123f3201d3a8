"""CISPO (arXiv 2506.13585): the clipped ratio is a weight without a gradient, -sum sg(clip(r, low, high)) l A."""

from collections.abc import Mapping

from torch import Tensor

from .loss import Config, Loss, LossOutput
from .ratio import RATIO_INPUTS, clip, clip_config, clip_inputs, clip_problem, is_clipped, mask_uncounted


def cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    counted = mask_uncounted(logprobs, inputs)
    ratio = counted.log_ratio.detach().exp()
    losses = -(clip(ratio, inputs) * counted.advantages) * counted.policy_logprobs
    return LossOutput(losses, {"kl": counted.kl(), "clip_fraction": is_clipped(ratio, inputs)})


CISPO = Loss(cispo, required=RATIO_INPUTS, optional=clip_inputs(), config=clip_config(0.0, 4.0), problem=clip_problem)
