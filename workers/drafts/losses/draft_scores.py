"""Scores of a draft's predictions against its target or the text, and gradients by them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftScores:
    """Holds per-position scores of m rows of `depth` draft tokens: all [m, depth], at least float32, 0 where no token
    was predicted.

    cross_entropy: of the draft's distribution with what it learns, the target's distribution or a token of the text.
    acceptance: the probability that the target accepts a token that the draft samples, sum of min(p, q) at temperature
    1; the draft's probability of the token, if it learns a token.
    correct: 1 if the draft's likeliest token is the target's, or the token that it learns.
    covered: 1 if that token is in the draft's vocabulary. exists: 1 if a token was predicted.
    greedy, sampled: products of `correct` and of `acceptance` along the draft tokens that were predicted from the same
    token, up to this one.
    """

    cross_entropy: Tensor
    acceptance: Tensor
    correct: Tensor
    covered: Tensor
    exists: Tensor
    greedy: Tensor
    sampled: Tensor

    def where(self, is_counted: Tensor) -> "DraftScores":
        """Zeroes cross_entropy and acceptance of uncounted draft tokens, so that no NaN is multiplied by 0."""
        cross_entropy, acceptance = (torch.where(is_counted, x, 0.0) for x in (self.cross_entropy, self.acceptance))
        return replace(self, cross_entropy=cross_entropy, acceptance=acceptance)

    def metrics(self, weights: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns for each metric and position, from 1, the sum over predictions with a weight, and their number."""
        is_counted = (self.exists * weights) != 0
        kinds = {
            "accuracy": self.correct,
            "acceptance": self.acceptance.detach(),
            "greedy": self.greedy,
            "sampled": self.sampled,
        }
        sums = {name: torch.where(is_counted, values, 0.0).sum(0) for name, values in kinds.items()}
        nums = is_counted.sum(0).to(self.exists.dtype)
        return {
            f"{name}/{number + 1}": (values[number], nums[number])
            for name, values in sums.items()
            for number in range(len(nums))
        }

    def leaves(self) -> tuple["DraftScores", list[Tensor]]:
        """Returns a copy of the scores, and the two tensors in it by which losses have gradients."""
        cross_entropy, acceptance = (each.detach().requires_grad_() for each in (self.cross_entropy, self.acceptance))
        return replace(self, cross_entropy=cross_entropy, acceptance=acceptance), [cross_entropy, acceptance]


@dataclass(frozen=True, eq=False)
class DraftGradients:
    """The gradients of a loss by cross_entropy and acceptance, [m, depth] each."""

    cross_entropy: Tensor
    acceptance: Tensor

    @staticmethod
    def of(losses: Tensor, leaves: list[Tensor]) -> "DraftGradients":
        found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        return DraftGradients(
            *(torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found, strict=True))
        )
