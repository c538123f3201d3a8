"""EAGLE-3's losses (arXiv 2503.01840): sum over draft tokens k = 1, 2, ... of decay^(k-1) w l_k, with the weight w of
the predicted token, and only where the draft's vocabulary contains the target's likeliest token.

kl: l is the cross-entropy with the target's distribution. lk_alpha: -log a, where a is the probability that the target
accepts the draft's token. lk_lambda: v l_kl + (1 - v) (1 - a) with v = lk_scale exp(-lk_decay sg(a)) (arXiv 2602.23881,
which computes v from a mean over the batch; here each draft token has its own v, so that splitting a batch changes
nothing).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...losses.loss import Config, Loss, LossOutput, count_problem
from .draft_scores import DraftScores

# Replaces an acceptance of 0, which has no logarithm.
_MIN_ACCEPTANCE = 1e-12

# Draft tokens are computed one after the other, each with all earlier ones in memory.
_MAX_DRAFT_TOKENS = 32


def eagle3(scores: DraftScores, inputs: Mapping[str, Tensor], config: Config) -> LossOutput:
    counted = inputs["weights"] * scores.covered
    depth = counted.shape[1]
    decay = torch.as_tensor([config["decay"] ** k for k in range(depth)], dtype=counted.dtype, device=counted.device)
    losses = counted * decay * _token_losses(scores.where(counted != 0), config)
    return LossOutput(losses, ratios=scores.metrics(inputs["weights"]), denominator=counted[:, 0].sum())


def _token_losses(scores: DraftScores, config: Config) -> Tensor:
    """Returns the loss of each draft token, [m, depth]."""
    match config["objective"]:
        case "lk_alpha":
            return -scores.acceptance.clamp(min=_MIN_ACCEPTANCE).log()
        case "lk_lambda":
            share = config["lk_scale"] * torch.exp(-config["lk_decay"] * scores.acceptance.detach())
            return share * scores.cross_entropy + (1 - share) * (1 - scores.acceptance)
        case _:
            return scores.cross_entropy


def _problem(config: Config) -> str | None:
    length, decay = config["ttt_length"], config["decay"]
    if length > _MAX_DRAFT_TOKENS:
        return f"ttt_length is {length:g}: a draft predicts at most {_MAX_DRAFT_TOKENS} tokens ahead"
    if not 0 <= decay <= 1:
        return f"decay is {decay:g}: it must be between 0 and 1"
    return count_problem("ttt_length", length)


EAGLE3 = Loss(
    eagle3,
    required=(),
    optional={"weights": lambda inputs, config: 1.0},
    config={"ttt_length": 7, "decay": 0.8, "lk_scale": 1.0, "lk_decay": 3.0},
    problem=_problem,
    choices={"objective": ("kl", "lk_alpha", "lk_lambda")},
    counted_by="weights",
    head="losses",
)
