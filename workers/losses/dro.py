"""DRO (arXiv 2405.19107, 2501.12599): -sum (l A - beta/2 (l - q)^2)."""

from collections.abc import Mapping

from torch import Tensor

from .loss import Config, Loss, LossOutput
from .ratio import RATIO_INPUTS, mask_uncounted


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    sampled = mask_uncounted(logprobs, inputs)
    penalty = 0.5 * config["beta"] * sampled.log_ratio.square()
    return LossOutput(penalty - sampled.logprobs * sampled.advantages, {"kl": sampled.kl()})


DRO = Loss(dro, required=RATIO_INPUTS, config={"beta": 0.05})
