"""The target's distribution at some positions, and the forms in which a draft reads it.

Logits of the target pass through `kept` and then `distribution`, both if the target runs in the pass and if what is
kept was stored before. So both give the same numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....schemas.training import TargetRepr
from ...ops.linear import soft_capped
from ...shapes.draft_sizes import FeatureColumn, target_columns, vocabulary_hash

HIDDEN_STATE = "hidden_state"

Kept = Mapping[str, Tensor]
"""Tensors [m, width] by name: those parts of the logits of m tokens that are kept."""


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
        """Returns the distribution of logits [m, target's vocabulary] for the draft's tokens, int64 [V], ascending."""
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


@dataclass(frozen=True, eq=False)
class TargetForm:
    """Keeps all logits. They are also what is computed from stored hidden states.

    name: names the form, and everything that determines it. columns: what is stored of a token.
    vocabulary: the draft's, int64 [V], ascending. vocab_size, cap: the target's vocabulary and the cap of its logits.
    """

    name: str
    columns: Mapping[str, FeatureColumn]
    vocabulary: Tensor
    vocab_size: int
    cap: float | None

    @property
    def stores_logits(self) -> bool:
        """True if something computed from logits is stored, False if hidden states are."""
        return self.name != HIDDEN_STATE

    def kept(self, logits: Tensor) -> Kept:
        """Returns what is kept of the target's logits before the cap, [m, target's vocabulary]. May overwrite them."""
        return {"logits": logits}

    def distribution(self, kept: Kept) -> TargetDistribution:
        """Returns the target's distribution. May overwrite what was kept."""
        return TargetDistribution.of(self._capped(kept["logits"]), self.vocabulary)

    def _capped(self, logits: Tensor) -> Tensor:
        return soft_capped(logits.float(), self.cap)


class LogitsOfVocabulary(TargetForm):
    """Keeps the logits of the draft's vocabulary, the normalizer of all logits and the likeliest token: the
    distribution is that of all logits."""

    def kept(self, logits: Tensor) -> Kept:
        own = logits[:, self.vocabulary]
        capped = self._capped(logits)
        top_token = capped.argmax(-1, keepdim=True).int()
        return {"pruned_logits": own, "logsumexp": capped.logsumexp(-1, keepdim=True), "top_token": top_token}

    def distribution(self, kept: Kept) -> TargetDistribution:
        own, top_token = self._capped(kept["pruned_logits"]), kept["top_token"].squeeze(1).long()
        return TargetDistribution.within(own, kept["logsumexp"], top_token, self.vocabulary)


class TopLogits(TargetForm):
    """Keeps the largest logits of each token, and the normalizer of the rest, whose probability r is then spread evenly
    over the tokens that were not kept.

    A draft token's acceptance changes by r at most, and so do `share` and each probability.
    """

    def kept(self, logits: Tensor) -> Kept:
        top, token_ids = logits.topk(self.columns["pruned_logits"].width)
        rest = self._capped(logits).scatter_(1, token_ids, -torch.inf).logsumexp(-1, keepdim=True)
        return {"pruned_logits": top, "token_ids": token_ids.int(), "rest_logsumexp": rest}

    def distribution(self, kept: Kept) -> TargetDistribution:
        top, token_ids = self._capped(kept["pruned_logits"]), kept["token_ids"].long()
        other = kept["rest_logsumexp"] - math.log(self.vocab_size - top.shape[1])
        logits = other.expand(-1, self.vocab_size).scatter(1, token_ids, top)
        return TargetDistribution.of(logits, self.vocabulary)


def target_form(
    target_repr: TargetRepr, top_k: int | None, hidden: int, vocab_size: int, vocabulary: Tensor, cap: float | None
) -> TargetForm:
    """Returns the form of a draft with this configuration.

    Args:
        hidden, vocab_size, cap: of the target.
        vocabulary: the draft's; may be empty if only `kept` is used and logits are not pruned to it.
    """
    columns = target_columns(target_repr, hidden, vocab_size, len(vocabulary), top_k)
    if target_repr != "pruned_logits":
        return TargetForm(target_repr, columns, vocabulary, vocab_size, cap)
    if top_k is not None:
        return TopLogits(f"pruned_logits of the top {top_k}", columns, vocabulary, vocab_size, cap)
    hashed = vocabulary_hash(vocabulary.cpu().numpy().astype("<i8").tobytes())
    return LogitsOfVocabulary(f"pruned_logits of vocabulary {hashed}", columns, vocabulary, vocab_size, cap)
