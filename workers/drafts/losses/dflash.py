"""DFlash's losses: sum over draft tokens k = 1, 2, ... of a block of d_k w l_k, with the weight w of the predicted
token and its cross-entropy l.

ce: d_k = exp(-(k - 1) / gamma), and "mean" divides by the sum of d w (Chen et al., DFlash (2026), arXiv 2602.06036).
dpace: d_k = sum over j >= k of P_j, with P_j = product over i <= j of (1 - alpha) q_i + alpha, both over draft tokens
with a weight; q_i = exp(-l_i), without a gradient (D-PACE, arXiv 2605.18810, equations 7 to 9). Here "mean" divides by
the sum of the first w of each block, which is the number of blocks if all weights are 1.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...losses.loss import Config, Loss, LossOutput, count_problem
from .draft_scores import DraftScores


def dflash(scores: DraftScores, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    """Computes the loss. num_anchors and seed are read earlier, when the blocks are sampled."""
    weights = inputs["weights"] * scores.exists
    counts = weights != 0
    cross_entropy = scores.where(counts).cross_entropy
    if config["objective"] == "dpace":
        decay, denominator = _confidence(cross_entropy.detach(), counts, config["alpha"]), weights[:, 0].sum()
    else:
        steps = torch.arange(weights.shape[1], dtype=weights.dtype, device=weights.device)
        decay = torch.exp(-steps / config["gamma"])
        denominator = (decay * weights).sum()
    return LossOutput(
        decay * weights * cross_entropy, ratios=scores.metrics(inputs["weights"]), denominator=denominator
    )


def _confidence(cross_entropy: Tensor, counts: Tensor, alpha: float) -> Tensor:
    """Returns d of dpace, [m, depth]."""
    acceptance = torch.where(counts, (1 - alpha) * torch.exp(-cross_entropy) + alpha, 1.0).cumprod(1) * counts
    return acceptance.flip(1).cumsum(1).flip(1)


def _problem(config: Config) -> str | None:
    if config["gamma"] <= 0:
        return f"gamma is {config['gamma']:g}: it must be above 0"
    return count_problem("num_anchors", config["num_anchors"])


DFLASH = Loss(
    dflash,
    required=(),
    optional={"weights": lambda inputs, config: 1.0},
    config={"gamma": 7.0, "alpha": 0.5, "num_anchors": 512, "seed": 0},
    problem=_problem,
    choices={"objective": ("ce", "dpace")},
    counted_by="weights",
    head="losses",
)
