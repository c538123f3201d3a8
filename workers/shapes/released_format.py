"""A format in which memory holds packed weights as their release does. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

Codes = Literal["float4", "float8", "integer"]
Scales = Literal["power of two", "bfloat16", "float32", "float8"]

_CODE_BITS: Mapping[Codes, int] = {"float4": 4, "float8": 8, "integer": 4}
_SCALE_BITS: Mapping[Scales, int] = {"power of two": 8, "bfloat16": 16, "float32": 32, "float8": 8}
# With float8 scales each row has a factor of its own, in 64 bits, since rows of several matrices may be in one.
_FACTOR_BITS = 64
# Blocks of fewer numbers would save little memory.
_LEAST_BLOCK = 8


@dataclass(frozen=True)
class ReleasedFormat:
    """Codes, and a scale for each block of them. Integer codes have 4 bits."""

    codes: Codes
    scales: Scales
    block: tuple[int, int | None]
    """Rows and columns that share a scale; None columns if a whole row shares one."""

    @property
    def code_bits(self) -> int:
        return _CODE_BITS[self.codes]

    def blocks(self, rows: int, columns: int) -> Iterator[tuple[int, int]]:
        """Yields sizes of blocks that divide a matrix evenly, largest first.

        Ranks' parts and merged matrices begin within the release's blocks, where smaller ones fit.
        """
        height, width = self.block[0], self.block[1] or columns
        before = None
        while height * width >= _LEAST_BLOCK:
            size = _dividing(height, rows), _dividing(width, columns)
            if size != before and prod(size) >= _LEAST_BLOCK:
                yield size
            before = size
            if self.block[1] is None:
                return
            height, width = max(1, height // 2), width // 2

    def bytes_of(self, shape: Sequence[int]) -> float | None:
        """Returns the bytes of weights of this shape [..., rows, columns], None if no block divides their matrices."""
        rows, columns = shape[-2:]
        block = next(self.blocks(rows, columns), None)
        if block is None or columns * self.code_bits % 8:
            return None
        bits = self.code_bits + _SCALE_BITS[self.scales] / prod(block)
        bits += _FACTOR_BITS / columns if self.scales == "float8" else 0
        return prod(shape) * bits / 8


def _dividing(size: int, number: int) -> int:
    """Returns the largest of size, size / 2, size / 4, ... that divides the number."""
    while size > 1 and number % size:
        size //= 2
    return max(1, size)
