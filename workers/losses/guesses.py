"""What the losses of drafts tell of guesses: how good those are, by how far ahead they look."""

from torch import Tensor

from .draft_scores import DraftScores


def guess_ratios(scores: DraftScores, weights: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each number of a guess from 1, the sums over those that count, and their number. weights: [m, depth]."""
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
