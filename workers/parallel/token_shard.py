"""Divides the tokens of a micro-batch over ranks: which tokens a rank runs, and which of their hidden states it
scores."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .mesh import Mesh


class TokenShard:
    """A rank's share of a micro-batch's tokens, where ranks divide them; a rank that runs all of them has none.

    Ranks along sp run equally many tokens, in order, and ranks along tp each score an equal part of these. With ring
    attention, a rank's tokens are `ring` positions apart (see SequenceSplit); otherwise they are contiguous. The end is
    padded with tokens of no sequence.
    """

    def __init__(self, num_tokens: int, mesh: Mesh, sharded: bool = False, ring: int = 1) -> None:
        """Computes the share. `sharded` says whether ranks along tp have hidden states only of the tokens that they
        score."""
        runners, self._among_tokens, self._scorers = (mesh.along(*axes) for axes in (("sp",), ("tp",), ("sp", "tp")))
        self._ring, self._sharded = ring, sharded and self._among_tokens.size > 1
        self.is_first = self._scorers.index == 0
        """True if this is the first of the ranks that run these tokens."""
        self.num_tokens = num_tokens
        self.num_padding = -num_tokens % self._scorers.size
        self.num_padded = num_tokens + self.num_padding
        self.tokens = _part(self.num_padded, runners.index, runners.size, ring)
        """The tokens that this rank runs."""
        self.scored = _part(self.num_padded, self._scorers.index, self._scorers.size, ring)
        """The tokens that this rank scores, and has the targets of."""
        self.hidden = self.scored if self._sharded else self.tokens
        """The tokens whose final hidden states this rank has."""
        self.own_of_tokens = self._scored_within(self.tokens) if self._sharded else None
        """The places in `tokens` of this rank's own between linear layers, None = all."""

    def of_tokens(self, whole: Tensor) -> Tensor:
        """Selects the tokens that this rank runs from [num_tokens, ...]."""
        return self._filled(whole)[self.tokens]

    def of_scored(self, whole: Tensor) -> Tensor:
        """Selects the tokens that this rank scores from [num_tokens, ...]."""
        return self._filled(whole)[self.scored]

    def in_micro_batch(self, scored: slice) -> slice:
        """Returns which tokens of the micro-batch some of this rank's scored tokens are.

        Args:
            scored: counted from the first one that this rank scores.
        """
        first = self.scored.start
        return slice(first + self._ring * scored.start, first + self._ring * scored.stop, self._ring)

    def select_scored(self, hidden: Tensor) -> Tensor:
        """Selects the hidden states that this rank scores from those that it has."""
        return hidden[self._scored_within(self.hidden)]

    def joined(self, own: Tensor) -> Tensor:
        """Gathers the ranks' scored tokens [scored, ...] to all tokens [num_tokens, ...]."""
        return self._in_order(self._scorers.all_gather(own))

    def joined_at_first(self, own: Tensor) -> Tensor | None:
        """Gathers like `joined`, but on the first of the ranks that run these tokens only. Returns None elsewhere."""
        parts = self._scorers.gather_at_first(own)
        return None if parts is None else self._in_order(torch.cat(parts))

    def joined_to_hidden(self, own: Tensor) -> Tensor:
        """Gathers the ranks' scored tokens to the tokens whose hidden states this rank has."""
        return own if self._sharded else self._among_tokens.all_gather(own)

    def _in_order(self, of_ranks: Tensor) -> Tensor:
        """Reorders the ranks' concatenated tokens [num_padded, ...] to those of the micro-batch [num_tokens, ...]."""
        by_stripe = of_ranks.unflatten(0, (self._ring, -1))
        return by_stripe.transpose(0, 1).flatten(0, 1)[: self.num_tokens]

    def _scored_within(self, tokens: slice) -> slice:
        """Returns which of these tokens, counted from their first, this rank scores."""
        first = (self.scored.start - tokens.start) // self._ring
        return slice(first, first + num_tokens_in(self.scored))

    def _filled(self, whole: Tensor) -> Tensor:
        if not self.num_padding:
            return whole
        return pad(whole, (0, 0) * (whole.dim() - 1) + (0, self.num_padding))


def scored_tokens(num_tokens: int, index: int, num_ranks: int, ring: int = 1) -> range:
    """Returns the tokens that TokenShard lets rank `index` of the ranks along sp and tp score."""
    scored = _part(-(-num_tokens // num_ranks) * num_ranks, index, num_ranks, ring)
    return range(scored.start, min(scored.stop, num_tokens), scored.step)


def num_tokens_in(tokens: slice) -> int:
    return len(range(tokens.start, tokens.stop, tokens.step or 1))


def _part(size: int, index: int, num_parts: int, ring: int) -> slice:
    """Returns part `index` of the concatenated stripes, cut into `num_parts` equal parts."""
    each = size // num_parts
    stripe, place = divmod(index, num_parts // ring)
    first = stripe + ring * each * place
    return slice(first, first + ring * each, ring)
