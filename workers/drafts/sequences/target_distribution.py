"""The target's distribution at some positions, as far as a draft learns from it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TargetDistribution:
    """The target's distribution at m positions.

    restricted: [m, V], its distribution restricted to the draft's vocabulary.
    share: [m, 1], the probability that it gives to the draft's vocabulary.
    top_token: int64 [m], the likeliest among all tokens.
    covered: bool [m], True where the draft's vocabulary contains it.
    """

    restricted: Tensor
    share: Tensor
    top_token: Tensor
    covered: Tensor

    @staticmethod
    def of(logits: Tensor, vocabulary: Tensor) -> "TargetDistribution":
        """Returns the distribution with these logits, [m, target's vocabulary]. `vocabulary` is the draft's, int64 [V],
        ascending."""
        top_token = logits.argmax(-1)
        if len(vocabulary) == logits.shape[1]:
            covered = torch.ones_like(top_token, dtype=torch.bool)
            return TargetDistribution(logits.softmax(-1), logits.new_ones(len(logits), 1), top_token, covered)
        return TargetDistribution.within(
            logits[:, vocabulary], logits.logsumexp(-1, keepdim=True), top_token, vocabulary
        )

    @staticmethod
    def within(own: Tensor, logsumexp: Tensor, top_token: Tensor, vocabulary: Tensor) -> "TargetDistribution":
        """Returns the distribution with these logits of the draft's vocabulary, [m, V].

        Args:
            logsumexp: [m, 1], of the logits of all tokens.
        """
        share = (own.logsumexp(-1, keepdim=True) - logsumexp).exp()
        return TargetDistribution(own.softmax(-1), share, top_token, torch.isin(top_token, vocabulary))
