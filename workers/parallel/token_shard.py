"""Divides the tokens of a micro-batch over ranks: which tokens a rank runs, and which of their hidden states it
scores."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .mesh import Mesh


class TokenShard:
    """A rank's share of a micro-batch's tokens.

    Ranks along sp run equally many tokens, in order, and ranks along tp each score an equal part of these. With ring
    attention, a rank's tokens are `ring` positions apart (see SequenceSplit); otherwise they are contiguous. The end is
    padded with tokens of no sequence.

    is_all: this rank alone runs all of them. is_first: it is the first of the ranks that run them.
    num_padded: the number of tokens with padding. num_padding: of padding. tokens: those that this rank runs.
    scored: those that it scores, and has the targets of. hidden: those whose final hidden states it has.
    own_of_tokens: which of the tokens that it runs are its own between linear layers, None = all.
    """

    def __init__(self, num_tokens: int, mesh: Mesh, sharded: bool = False, ring: int = 1) -> None:
        """Computes the share. `sharded` says whether ranks along tp have hidden states only of the tokens that they
        score."""
        self.num_tokens, self._ring = num_tokens, ring
        self._scorers, self._among_tokens, sp = mesh.along("sp", "tp"), mesh.along("tp"), mesh.along("sp")
        self._sharded = sharded and self._among_tokens.size > 1
        self.is_all, self.is_first = self._scorers.size == 1, self._scorers.index == 0
        each = -(-num_tokens // self._scorers.size)
        self.num_padded = each * self._scorers.size
        self.num_padding = self.num_padded - num_tokens
        self.tokens = _part(self.num_padded, sp.index, sp.size, ring)
        self.scored = _part(self.num_padded, self._scorers.index, self._scorers.size, ring)
        first = (self.scored.start - self.tokens.start) // ring
        own = slice(first, first + each)
        self.hidden, self.own_of_tokens = (self.scored, own) if self._sharded else (self.tokens, None)
        self._own_of_hidden = slice(0, each) if self._sharded else own

    def of_tokens(self, whole: Tensor) -> Tensor:
        """Selects the tokens that this rank runs from [num_tokens, ...]."""
        return whole if self.is_all else self._filled(whole)[self.tokens]

    def of_scored(self, whole: Tensor) -> Tensor:
        """Selects the tokens that this rank scores from [num_tokens, ...]."""
        return whole if self.is_all else self._filled(whole)[self.scored]

    def in_micro_batch(self, scored: slice) -> slice:
        """Returns which tokens of the micro-batch some of this rank's scored tokens are.

        Args:
            scored: counted from the first one that this rank scores.
        """
        first = self.scored.start
        return slice(first + self._ring * scored.start, first + self._ring * scored.stop, self._ring)

    def select_scored(self, hidden: Tensor) -> Tensor:
        """Selects the hidden states that this rank scores from those that it has."""
        return hidden[self._own_of_hidden]

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


def overlap(tokens: slice, start: int, stop: int) -> slice:
    """Returns which of `tokens`, counted from their first, are in start:stop."""
    step, number = tokens.step or 1, num_tokens_in(tokens)
    first, end = (min(max(0, -((tokens.start - bound) // step)), number) for bound in (start, stop))
    return slice(first, end)


def _part(size: int, index: int, num_parts: int, ring: int) -> slice:
    """Returns part `index` of the concatenated stripes, cut into `num_parts` equal parts."""
    each = size // num_parts
    stripe, place = divmod(index, num_parts // ring)
    first = stripe + ring * each * place
    return slice(first, first + ring * each, ring)
