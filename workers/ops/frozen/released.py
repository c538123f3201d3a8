"""Frozen weights as their release packed them, dequantized for as long as a product with them takes.

A weight is packed by its numbers: codes and scales of the release's format that give each number back bit for bit, so
that neither the layout of files nor how ranks divide weights matters. Formats: OCP Microscaling Formats 1.0 (MXFP4),
DeepSeek-V3 technical report (2024), section 3.3 (FP8 in blocks), NVIDIA's NVFP4, groups of 4-bit integers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ...shapes.packed_format import ReleasedFormat, Scales

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The sizes of numbers of 4 bits, by the lower three bits of their codes; the highest is the sign."""

# Numbers whose float32 exist at a time: on the CPU they stay in a core's cache.
_ON_CPU, _ON_DEVICES = 1 << 18, 1 << 25


@dataclass(frozen=True)
class PackedNumbers:
    """Numbers of several matrices, each a code times the scale of its block.

    codes: float8 [matrices, rows, columns]; uint8 with half the columns for codes of 4 bits, the first in the lowest
    bits. scales: [matrices, blocks along rows, blocks along columns], in the dtype that memory holds. factors: float64,
    with which the scales of a row, [matrices, rows, 1], or of a column, [matrices, 1, columns], are multiplied.
    block: rows and columns that share a scale.
    """

    format: ReleasedFormat
    block: tuple[int, int]
    codes: Tensor
    scales: Tensor
    factors: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes, self.scales) if self.factors is None else (self.codes, self.scales, self.factors)

    def numbers(self, matrices: slice, rows: slice) -> Tensor:
        """Returns rows of some matrices, which begin and end with blocks, as float32 [matrices, rows, columns]."""
        height, width = self.block
        of_rows = slice(rows.start // height, -(-rows.stop // height))
        scales = float_scales(self.scales[matrices, of_rows], self.format.scales, self._factors(matrices, of_rows))
        numbers = unpacked(self.codes[matrices, rows], self.format)
        blocks = numbers.view(len(numbers), scales.shape[1], height, scales.shape[2], width)
        return blocks.mul_(scales[:, :, None, :, None]).view_as(numbers)

    def _factors(self, matrices: slice, rows: slice) -> Tensor | None:
        if self.factors is None:
            return None
        return self.factors[matrices] if self.factors.shape[1] == 1 else self.factors[matrices, rows]


class ReleasedWeight:
    """Holds a weight packed. `dequantize` returns exactly the numbers that were packed."""

    requires_grad = False
    grad = None

    def __init__(self, packed: PackedNumbers, shape: torch.Size, dtype: torch.dtype, is_transposed: bool) -> None:
        """is_transposed: whether the rows of the packed numbers are the weight's columns."""
        self.shape = shape
        self._packed, self._dtype, self._is_transposed = packed, dtype, is_transposed

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._packed.tensors

    def dequantize(self) -> Tensor:
        """Returns the weight in its original dtype and memory layout."""
        packed = self._packed
        num_columns = packed.codes.shape[2] * 8 // (packed.format.code_bits * packed.codes.itemsize)
        size = (*packed.codes.shape[:2], num_columns)
        out = torch.empty(size, dtype=self._dtype, device=packed.codes.device)
        at_once = _ON_CPU if out.device.type == "cpu" else _ON_DEVICES
        for matrices, rows in parts(size, packed.block[0], at_once):
            out[matrices, rows] = packed.numbers(matrices, rows)
        if not self._is_transposed:
            return out.view(self.shape)
        return out.view(*self.shape[:-2], self.shape[-1], self.shape[-2]).mT


def parts(size: Sequence[int], height: int, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Yields slices of the matrices and the rows of [matrices, rows, columns], with about as many numbers at once.

    Rows begin at multiples of the height.
    """
    num_matrices, num_rows, num_columns = size
    rows_at_once = at_once // num_columns
    matrix_step = max(1, rows_at_once // num_rows)
    row_step = max(1, rows_at_once // height) * height
    for first in range(0, num_matrices, matrix_step):
        for row in range(0, num_rows, row_step):
            yield slice(first, min(first + matrix_step, num_matrices)), slice(row, min(row + row_step, num_rows))


def float_scales(scales: Tensor, kind: Scales, factors: Tensor | None = None) -> Tensor:
    """Returns scales as float32."""
    if kind == "power of two":
        return (scales.int() << 23).view(torch.float32)  # the exponent's bits
    return scales.float() if factors is None else (scales.double() * factors).float()


def unpacked(codes: Tensor, format: ReleasedFormat) -> Tensor:
    """Returns the numbers of codes as float32 [..., columns]."""
    if format.codes == "float8":
        return codes.float()
    # A pair of numbers is looked up as one complex number, several times as fast.
    pairs = torch.view_as_complex(_pairs(format, codes.device)).index_select(0, codes.flatten().int())
    return torch.view_as_real(pairs).view(*codes.shape[:-1], 2 * codes.shape[-1])


def _pairs(format: ReleasedFormat, device: torch.device) -> Tensor:
    """Returns the two numbers of each byte [256, 2]."""
    every = torch.arange(256, device=device)
    sizes = torch.tensor(FLOAT4, device=device)
    of_codes = torch.cat((sizes, -sizes)) if format.codes == "float4" else torch.arange(-8.0, 8.0, device=device)
    return of_codes[torch.stack((every & 15, every >> 4), 1)]


def matrices_of(weight: Tensor) -> Tensor:
    """Returns a weight [..., rows, columns] as [matrices, rows, columns]."""
    return weight.reshape(prod(weight.shape[:-2]), *weight.shape[-2:])
