"""DraftScores: how well a draft guesses what its target says, by guess."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftScores:
    """Of m rows, each with `depth` guesses of tokens further and further ahead: all [m, depth], float32 at least.

    cross_entropy: of the draft's distribution with what it is to learn, the target's or a token. acceptance: the
    probability that the target accepts a token that the draft draws, sum of min(p, q), both at temperature 1; with a
    token to learn, that token's. correct: whether its likeliest token is the target's, or that token. covered: whether
    the draft can say it. exists: whether there is such a guess; all else is 0 where there is none. greedy, sampled: the
    products of correct, or of acceptance, along the guesses that were made from the same place, up to this one.
    """

    cross_entropy: Tensor
    acceptance: Tensor
    correct: Tensor
    covered: Tensor
    exists: Tensor
    greedy: Tensor
    sampled: Tensor

    def leaves(self) -> tuple["DraftScores", list[Tensor]]:
        """The same ones, and of these what losses have gradients by."""
        cross_entropy, acceptance = (each.detach().requires_grad_() for each in (self.cross_entropy, self.acceptance))
        return replace(self, cross_entropy=cross_entropy, acceptance=acceptance), [cross_entropy, acceptance]


@dataclass(frozen=True, eq=False)
class Slopes:
    """The gradient of a loss by cross_entropy and acceptance, [m, depth]."""

    cross_entropy: Tensor
    acceptance: Tensor

    @staticmethod
    def of(losses: Tensor, leaves: list[Tensor]) -> "Slopes":
        found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        return Slopes(
            *(torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found, strict=True))
        )
