"""Formats in which files hold weights in fewer bits, and memory too where it can. Those of files are a plugin: a file
and a row each in `workers/formats`. Imports no torch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

from ..protocol.plugins import plugin_rows
from .name_patterns import NamePatterns

Codes = Literal["float4", "float8", "integer"]
Scales = Literal["power of two", "bfloat16", "float32", "float8"]

_CODE_BITS: Mapping[Codes, int] = {"float4": 4, "float8": 8, "integer": 4}
_SCALE_BITS: Mapping[Scales, int] = {"power of two": 8, "bfloat16": 16, "float32": 32, "float8": 8}
# With float8 scales each row has a factor of its own, in 64 bits, since rows of several matrices may be in one.
_FACTOR_BITS = 64
# Blocks of fewer numbers would save little memory.
_LEAST_BLOCK = 8


@dataclass(frozen=True)
class TensorHeader:
    dtype: str
    """The name that safetensors gives it."""
    shape: tuple[int, ...]


Tensors = Mapping[str, TensorHeader]
"""The tensors of files by name."""


class Packed(Protocol):
    """A packed weight. What reads its numbers is in the table READERS by its type."""

    @property
    def names(self) -> set[str]:
        """The tensors in files that make up this weight."""
        ...

    @property
    def num_numbers(self) -> int: ...


@dataclass(frozen=True)
class Grouping:
    """The way the weights of some modules are packed."""

    bits: int
    """The bits of a code."""
    size: int | None
    """Columns that share a scale, None if a whole row does."""
    is_float: bool = False
    """True if codes are floats (MXFP6), not integers."""
    targets: NamePatterns | None = None
    """The modules packed this way, by name; None for all modules that no other grouping names."""


@dataclass(frozen=True)
class Quantization:
    """The parts of a `quantization_config` that shapes in files do not show."""

    method: str = ""
    blocks: tuple[tuple[int, int], ...] = ()
    """Possible rows and columns that share a scale."""
    groupings: tuple[Grouping, ...] = ()
    low_zero_points: bool = True
    """True if files of GPTQ hold zero points less one."""

    def groupings_of(self, module: str) -> Sequence[Grouping]:
        """Returns how the weight of a module may be packed."""
        named = [each for each in self.groupings if each.targets is not None and each.targets.match(module)]
        return named or [each for each in self.groupings if each.targets is None] or self.groupings


@dataclass(frozen=True)
class ReleasedFormat:
    """A format in which memory holds weights as their release does: codes, and a scale for each block of them. Integer
    codes have 4 bits."""

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


@dataclass(frozen=True)
class PackedFormat:
    """A format of packed weights: how they are found, and what `quantization_config` says of them.

    `given` is a release's `quantization_config`, which may be wrong in any way.
    """

    find: Callable[[str, Tensors, Quantization], tuple[str, Packed] | None]
    """Returns the weight whose codes are the tensor of this name, with the name that it has in an unpacked model; None
    if the tensor is no weight's codes in this format."""
    settings: Callable[[Any], Quantization] = lambda given: Quantization()
    """Returns what `given` says in the format's own way. Raises ValueError if such weights cannot be read."""
    kept: Callable[[Any], Iterable[ReleasedFormat]] = lambda given: ()
    """Returns the formats in which memory can hold the weights."""


def packed_formats() -> Mapping[str, PackedFormat]:
    """Returns the formats by `quant_method` in a config.json."""
    return plugin_rows("workers.formats.rows", "METHODS")


def _dividing(size: int, number: int) -> int:
    """Returns the largest of size, size / 2, size / 4, ... that divides the number."""
    while size > 1 and number % size:
        size //= 2
    return max(1, size)
