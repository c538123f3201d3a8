"""What the losses of drafts tell of guesses: how good those are, by how far ahead they look."""

from collections.abc import Mapping
from itertools import count

from torch import Tensor

from ..drafts.scores import DraftScores


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


def acceptance_lengths(ratios: Mapping[str, float]) -> dict[str, float]:
    """Tokens that a pass of the target gives, with all these guesses made each time: those that it accepts and its own.
    By guesses of the likeliest token, and of tokens drawn, at temperature 1."""
    return {f"acceptance_length/{kind}": 1.0 + sum(_survivals(ratios, kind)) for kind in ("greedy", "sampled")}


def _survivals(ratios: Mapping[str, float], kind: str) -> list[float]:
    survivals: list[float] = []
    for number in count(1):
        if (survival := ratios.get(f"{kind}/{number}")) is None:
            break
        survivals.append(survival)
    return survivals
