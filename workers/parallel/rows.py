"""TokenShare: which tokens of a micro-batch a rank runs, and which of their hidden states it scores."""

from torch import Tensor
from torch.nn.functional import pad

from .mesh import Mesh


class TokenShare:
    """Ranks along sp run as many tokens each, in their order, and ranks along tp score as many of these each.

    What is missing at the end is filled up with tokens of no sequence. num_filled: with these. tokens: those that this
    rank runs. rows: those that it scores, of which it has the targets. hidden: those of which it has the hidden states
    in the end.
    """

    def __init__(self, num_tokens: int, mesh: Mesh, sharded: bool = False) -> None:
        """sharded: whether ranks along tp have hidden states of the tokens alone that they score."""
        self.num_tokens = num_tokens
        self._sharded = sharded and mesh.along("tp").size > 1
        self._scorers, self._among_tokens = mesh.along("sp", "tp"), mesh.along("tp")
        each = -(-num_tokens // self._scorers.size)
        self.num_filled = each * self._scorers.size
        self.tokens = _part(self.num_filled, mesh.along("sp").index, mesh.along("sp").size)
        self.rows = _part(self.num_filled, self._scorers.index, self._scorers.size)

    @property
    def is_all(self) -> bool:
        return self._scorers.size == 1

    @property
    def hidden(self) -> slice:
        return self.rows if self._sharded else self.tokens

    @property
    def own_of_tokens(self) -> slice | None:
        """Which of the tokens that it runs those are that a rank has alone between linear layers; None = all."""
        first = self.tokens.start
        return slice(self.rows.start - first, self.rows.stop - first) if self._sharded else None

    @property
    def num_missing(self) -> int:
        return self.num_filled - self.num_tokens

    def of_tokens(self, whole: Tensor) -> Tensor:
        """[num_tokens, ...] -> of those that this rank runs."""
        return self._filled(whole)[self.tokens]

    def of_rows(self, whole: Tensor) -> Tensor:
        """[num_tokens, ...] -> of those that this rank scores."""
        return self._filled(whole)[self.rows]

    def scored(self, hidden: Tensor) -> Tensor:
        """Of the hidden states that this rank has those that it scores."""
        first = self.hidden.start
        return hidden[self.rows.start - first : self.rows.stop - first]

    def joined(self, own: Tensor) -> Tensor:
        """What each rank has of its rows [rows, ...] -> [num_tokens, ...]."""
        return self._scorers.joined(own)[: self.num_tokens]

    def joined_to_hidden(self, own: Tensor) -> Tensor:
        """What each rank has of its rows -> of the hidden states that this rank has."""
        return own if self._sharded else self._among_tokens.joined(own)

    def _filled(self, whole: Tensor) -> Tensor:
        if not self.num_missing:
            return whole
        return pad(whole, (0, 0) * (whole.dim() - 1) + (0, self.num_missing))


def _part(size: int, index: int, num_parts: int) -> slice:
    each = size // num_parts
    return slice(each * index, each * (index + 1))
