"""Zero: gradients and optimizer states of a model whose weights are whole on several ranks, a part on each of them.

Rajbhandari et al., ZeRO (2020), https://arxiv.org/abs/1910.02054, stage 2.
"""

import torch
from torch import Tensor

from ..parallel.mesh import Mesh, Team
from .flat_params import Layout
from .moments import EightBitMoments

# Of numbers that are put together on the device at a time.
_MOST = 1 << 24


class Zero:
    """Parts of vectors [P] of a layout, for the ranks that do not differ along tp. size: of each. own: where this one's
    lies."""

    def __init__(self, layout: Layout, mesh: Mesh) -> None:
        """layout: whose size is a multiple of `multiple_of`."""
        self._layout, self._mesh = layout, mesh
        self._team = mesh.beside("tp")
        self.size = layout.size // self._team.size
        self.own = slice(self._team.index * self.size, (self._team.index + 1) * self.size)

    @staticmethod
    def multiple_of(mesh: Mesh) -> int:
        """Of numbers: parts are whole blocks of what moments are held in."""
        return mesh.beside("tp").size * EightBitMoments.block

    def summed(self, vector: Tensor) -> Tensor:
        """This rank's part of the sum over all ranks. vector: [P], which is used up."""
        if self._tp.index > 0:
            for repeated in self._layout.repeated:
                vector[repeated].zero_()
        part = self._team.summed_part(vector)
        self._tp.sum(self._alike(part))
        return part

    def whole(self, part: Tensor) -> Tensor:
        """[P], in host memory."""
        if len(part) <= _MOST:
            return self._team.joined(part).cpu()
        whole = torch.empty(self._team.size, len(part), dtype=part.dtype)
        for start in range(0, len(part), _MOST):
            some = slice(start, start + _MOST)
            whole[:, some] = self._team.joined(part[some]).unflatten(0, (self._team.size, -1))
        return whole.flatten()

    def join(self, vector: Tensor) -> None:
        """Of a vector [P] all parts, of which each rank has changed its own, in place."""
        if self._team.size > 1:
            self._team.joining(vector[self.own].clone(), into=vector).wait()

    def norm(self, part: Tensor) -> float:
        """Of the whole vector."""
        alike = self._alike(part)
        squares = torch.tensor([_squares(part) - _squares(alike), _squares(alike)], dtype=torch.float64)
        self._tp.sum(squares[:1])
        return float(self._team.sum(squares).sum().sqrt())

    @property
    def _tp(self) -> Team:
        return self._mesh.along("tp")

    def _alike(self, part: Tensor) -> Tensor:
        """What of this rank's part those along tp have, too."""
        region = self._layout.regions.get((), slice(0, 0))
        first, stop = (min(max(bound - self.own.start, 0), len(part)) for bound in (region.start, region.stop))
        return part[first:stop]


def _squares(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2
