"""The division of one dimension of a matrix over the ranks of a team."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """A rank's part of a dimension.

    axis: the mesh axis along which the ranks differ. size, index: their number, and this rank's index.
    sections: sizes of the parts of the dimension that are divided separately, as in a fused projection; each is a
    multiple of `size`.
    """

    axis: str
    size: int
    index: int
    sections: tuple[int, ...]

    @property
    def own_size(self) -> int:
        return sum(self.sections) // self.size

    def slices(self, part: int, num_parts: int) -> list[slice]:
        """Returns this rank's slices of the whole dimension, or those of one of `num_parts` equal parts of them."""
        ends, sizes = accumulate(self.sections), [size // self.size for size in self.sections]
        starts = [end - size * (self.size - self.index) for end, size in zip(ends, sizes, strict=True)]
        first, stop = part * self.own_size // num_parts, (part + 1) * self.own_size // num_parts
        found = []
        for start, size in zip(starts, sizes, strict=True):
            inside = slice(start + max(0, first), start + min(size, stop))
            if inside.start < inside.stop:
                found.append(inside)
            first, stop = first - size, stop - size
        return found

    def part(self, whole: Tensor, dim: int) -> Tensor:
        return torch.cat([one.chunk(self.size, dim)[self.index] for one in whole.split(self.sections, dim)], dim)

    def whole(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Assembles the whole from the parts of all ranks, in rank order."""
        by_section = zip(*(part.split([one // self.size for one in self.sections], dim) for part in parts), strict=True)
        return torch.cat([piece for pieces in by_section for piece in pieces], dim)
