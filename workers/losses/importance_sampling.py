"""Policy gradient with the importance ratio: -sum r A, r = exp(l - q)."""

from collections.abc import Mapping

from torch import Tensor

from .loss import Config, Loss, LossOutput
from .ratio import RATIO_INPUTS, mask_uncounted


def importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    counted = mask_uncounted(logprobs, inputs)
    return LossOutput(-counted.log_ratio.exp() * counted.advantages, {"kl": counted.kl()})


IMPORTANCE_SAMPLING = Loss(importance_sampling, required=RATIO_INPUTS)
