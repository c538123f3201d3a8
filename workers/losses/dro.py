"""DRO (arXiv 2405.19107, 2501.12599): -sum (l A - beta/2 (l - q)^2)."""

from collections.abc import Mapping

from torch import Tensor

from .loss import Config, Loss, LossOutput
from .ratio import RATIO_INPUTS, mask_uncounted


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    counted = mask_uncounted(logprobs, inputs)
    # In this order a beta of 0 gives 0, however large the square.
    penalty = 0.5 * config["beta"] * counted.log_ratio * counted.log_ratio
    return LossOutput(penalty - counted.policy_logprobs * counted.advantages, {"kl": counted.kl()})


DRO = Loss(dro, required=RATIO_INPUTS, config={"beta": 0.05})
