"""TokenShare: which tokens of a micro-batch a rank runs, and which of their hidden states it scores."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .mesh import Mesh


class TokenShare:
    """Ranks along sp run as many tokens each, in their order, and ranks along tp score as many of these each.

    Where attention goes around a ring, a rank's tokens lie `ring` places apart (SequenceSplit); else they are
    neighbours. What is missing at the end is filled up with tokens of no sequence. num_filled: with these. tokens:
    those that this rank runs. rows: those that it scores, of which it has the targets. hidden: those of which it has
    the hidden states in the end.
    """

    def __init__(self, num_tokens: int, mesh: Mesh, sharded: bool = False, ring: int = 1) -> None:
        """sharded: whether ranks along tp have hidden states of the tokens alone that they score."""
        self.num_tokens = num_tokens
        self._ring = ring
        self._sharded = sharded and mesh.along("tp").size > 1
        self._scorers, self._among_tokens = mesh.along("sp", "tp"), mesh.along("tp")
        each = -(-num_tokens // self._scorers.size)
        self.num_filled = each * self._scorers.size
        self.tokens = _part(self.num_filled, mesh.along("sp").index, mesh.along("sp").size, ring)
        self.rows = _part(self.num_filled, self._scorers.index, self._scorers.size, ring)

    @property
    def is_all(self) -> bool:
        return self._scorers.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks that run these tokens."""
        return self._scorers.index == 0

    @property
    def hidden(self) -> slice:
        return self.rows if self._sharded else self.tokens

    @property
    def own_of_tokens(self) -> slice | None:
        """Which of the tokens that it runs those are that a rank has alone between linear layers; None = all."""
        return self._rows_of(self.tokens) if self._sharded else None

    @property
    def num_missing(self) -> int:
        return self.num_filled - self.num_tokens

    def of_tokens(self, whole: Tensor) -> Tensor:
        """[num_tokens, ...] -> of those that this rank runs."""
        return self._filled(whole)[self.tokens]

    def of_rows(self, whole: Tensor) -> Tensor:
        """[num_tokens, ...] -> of those that this rank scores."""
        return self._filled(whole)[self.rows]

    def places(self, rows: slice) -> slice:
        """Where some of the rows that this rank scores, counted from its first, are among all."""
        first = self.rows.start
        return slice(first + self._ring * rows.start, first + self._ring * rows.stop, self._ring)

    def scored(self, hidden: Tensor) -> Tensor:
        """Of the hidden states that this rank has those that it scores."""
        return hidden[self._rows_of(self.hidden)]

    def joined(self, own: Tensor) -> Tensor:
        """What each rank has of its rows [rows, ...] -> [num_tokens, ...]."""
        return self._in_order(self._scorers.joined(own))

    def joined_at_first(self, own: Tensor) -> Tensor | None:
        """As `joined`, for the first of the ranks that run these tokens; None elsewhere."""
        parts = self._scorers.at_first(own)
        return None if parts is None else self._in_order(torch.cat(parts))

    def joined_to_hidden(self, own: Tensor) -> Tensor:
        """What each rank has of its rows -> of the hidden states that this rank has."""
        return own if self._sharded else self._among_tokens.joined(own)

    def _in_order(self, of_ranks: Tensor) -> Tensor:
        """[num_filled, ...], what one rank has behind what the one before has -> [num_tokens, ...]."""
        by_stripe = of_ranks.unflatten(0, (self._ring, -1))
        return by_stripe.transpose(0, 1).flatten(0, 1)[: self.num_tokens]

    def _rows_of(self, some: slice) -> slice:
        """This rank's rows among `some` of the tokens, counted from their first."""
        first = (self.rows.start - some.start) // self._ring
        return slice(first, first + number_of(self.rows))

    def _filled(self, whole: Tensor) -> Tensor:
        if not self.num_missing:
            return whole
        return pad(whole, (0, 0) * (whole.dim() - 1) + (0, self.num_missing))


def scored_rows(num_tokens: int, index: int, num_ranks: int, ring: int = 1) -> range:
    """Of a micro-batch of so many tokens those that TokenShare has this rank score, of the ranks along sp and tp."""
    rows = _part(-(-num_tokens // num_ranks) * num_ranks, index, num_ranks, ring)
    return range(rows.start, min(rows.stop, num_tokens), rows.step)


def number_of(rows: slice) -> int:
    """How many these are."""
    return len(range(rows.start, rows.stop, rows.step or 1))


def overlap(rows: slice, start: int, stop: int) -> slice:
    """Which of some rows, counted from their first, lie in start:stop."""
    step, number = rows.step or 1, number_of(rows)
    first, end = (min(max(0, -((rows.start - bound) // step)), number) for bound in (start, stop))
    return slice(first, end)


def _part(size: int, index: int, num_parts: int, ring: int) -> slice:
    """Of the stripes one after the other, cut into equal parts."""
    each = size // num_parts
    stripe, place = divmod(index, num_parts // ring)
    first = stripe + ring * each * place
    return slice(first, first + ring * each, ring)
