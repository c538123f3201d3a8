"""Metrics of a draft's predictions by distance from the anchor, shared by the losses of drafts."""

import torch
from torch import Tensor

from .draft_scores import DraftScores


def draft_token_metrics(scores: DraftScores, weights: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns for each metric and each position from 1 the sum over predictions with a weight, and their number.
    `weights` is [m, depth]."""
    is_counted = (scores.exists * weights) != 0
    kinds = {
        "accuracy": scores.correct,
        "acceptance": scores.acceptance.detach(),
        "greedy": scores.greedy,
        "sampled": scores.sampled,
    }
    sums = {name: torch.where(is_counted, values, 0.0).sum(0) for name, values in kinds.items()}
    nums = is_counted.sum(0).to(scores.exists.dtype)
    return {
        f"{name}/{number + 1}": (values[number], nums[number])
        for name, values in sums.items()
        for number in range(len(nums))
    }
