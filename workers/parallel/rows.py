"""RowShare: which rows of a micro-batch a rank of a team scores."""

from torch import Tensor
from torch.nn.functional import pad

from .mesh import Team


class RowShare:
    """Of num_rows, as many for each rank of the team, in their order; the last may have fewer. rows: this rank's."""

    def __init__(self, num_rows: int, team: Team) -> None:
        self._num_rows, self._team = num_rows, team
        self._each = -(-num_rows // team.size)
        start = min(self._each * team.index, num_rows)
        self.rows = slice(start, min(start + self._each, num_rows))

    @property
    def is_all(self) -> bool:
        return self._team.size == 1

    def joined(self, own: Tensor) -> Tensor:
        """What each rank has of its rows [rows, ...], of all rows in order: [num_rows, ...]."""
        if self.is_all:
            return own
        filled = pad(own, (0, 0) * (own.dim() - 1) + (0, self._each - len(own)))
        return self._team.joined(filled)[: self._num_rows]
