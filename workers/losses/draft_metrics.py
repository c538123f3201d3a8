"""Metrics of a draft's predictions by distance from the anchor, shared by the losses of drafts."""

from torch import Tensor

from .draft_scores import DraftScores


def draft_token_metrics(scores: DraftScores, weights: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns for each metric and each position from 1 the sum over predictions with a weight, and their number.
    `weights` is [m, depth]."""
    counts = scores.exists * (weights != 0)
    kinds = {
        "accuracy": scores.correct,
        "acceptance": scores.acceptance.detach(),
        "greedy": scores.greedy,
        "sampled": scores.sampled,
    }
    nums = counts.sum(0)
    return {
        f"{name}/{number + 1}": ((values[:, number] * counts[:, number]).sum(), nums[number])
        for name, values in kinds.items()
        for number in range(counts.shape[1])
    }
