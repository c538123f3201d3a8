"""Weights of which files hold codes and scales, as most formats do; and what fits together. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from ..shapes.packed_format import Quantization, Tensors

WORDS = {"I32", "U32"}
"""Dtypes of integers into which codes and zero points are packed."""

CodeKind = Literal["float8", "float6", "float4", "integer"]


@dataclass(frozen=True)
class PackedWeight:
    """A weight of which files hold codes and scales: each number is a code times the scale of its block.

    Names are those of tensors in files.
    """

    kind: CodeKind
    """The kind of the codes: floats, or integers of which zero is the middle one."""
    codes: str
    scales: str
    shape: tuple[int, ...]
    """The shape of the codes' numbers. The last dimension may be padded, see `true_shape`."""
    numbers: int
    """The numbers in `elements` elements of the codes' last dimension."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    bits: int = 0
    """The bits of an integer code."""
    elements: int = 1
    factor: str | None = None
    """All scales are multiplied by this number."""
    divisor: str | None = None
    """All scales are divided by this number."""
    denominator: int = 1
    """All scales are divided by it, too."""
    zero_points: str | None = None
    """These are subtracted from the codes."""
    zero_point_axis: int | None = None
    """The dimension along which zero points are packed as the codes are, None if they are not."""
    low_zero_points: bool = False
    """True if packed zero points are one too low."""
    true_shape: str | None = None
    """A tensor that holds the shape without padding."""
    groups: str | None = None
    """A tensor that holds the column of scales for each column of numbers."""
    layout: str | None = None
    """A tensor that holds the layout of the codes as bitsandbytes numbers it, 0 if they are in rows."""
    order: tuple[int, ...] = ()
    """The places in an element at which its numbers are."""
    is_mirrored: bool = False
    """True if codes, scales and zero points are transposed in files."""
    transposed: bool = False
    """True if the last two dimensions of the weight are swapped in files."""

    @property
    def names(self) -> set[str]:
        """The tensors in files that make up this weight."""
        every = (self.codes, self.scales, self.factor, self.divisor, self.zero_points)
        every += (self.true_shape, self.groups, self.layout)
        return {name for name in every if name is not None}

    @property
    def num_numbers(self) -> int:
        return prod(self.shape)


def matrix_shape(codes: str, scales: str, tensors: Tensors) -> tuple[int, ...]:
    """Returns the shape of codes, which have rows and columns. Raises ValueError if they have not."""
    if len(tensors[codes].shape) < 2:
        raise unfitting((codes, scales), tensors)
    return tensors[codes].shape


def integer_weight(bits: int, codes: str, scales: str, shape: tuple[int, ...]) -> PackedWeight:
    """Returns a weight whose codes are packed into 32-bit integers, across their borders if they do not divide them."""
    numbers, elements = (32 // bits, 1) if 32 % bits == 0 else (32, bits)
    return PackedWeight("integer", codes, scales, shape, numbers, (1, 1), bits, elements)


def unfitting(names: Sequence[str], tensors: Tensors) -> ValueError:
    """Returns an error that names these tensors and their sizes."""
    sizes = ", ".join(f"{name} of {tensors[name].dtype} {sized(tensors[name].shape)}" for name in names)
    return ValueError(f"these do not fit together: {sizes}: download the model again, or use another release")


def sized(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "1"


def grid_of(shape: Sequence[int], scales: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns of the scales of a matrix, or of each matrix in a stack.

    Scales can lack dimensions, the last ones first, or have ones after each.
    """
    of_matrix = scales[len(shape) - 2 :]
    if prod(scales) == 1 or not of_matrix:
        return 1, 1
    if len(of_matrix) == 4:
        return of_matrix[0], of_matrix[2]
    return of_matrix[0], (of_matrix[1] if len(of_matrix) == 2 else 1)


def block_of(packed: PackedWeight, scales: Sequence[int], quantization: Quantization) -> tuple[int, int]:
    """Returns the rows and columns that share a scale."""
    (rows, columns), (across, along) = packed.shape[-2:], grid_of(packed.shape, scales)
    for block in quantization.blocks:
        if (ceil(rows / block[0]), ceil(columns / block[1])) == (across, along):
            return block
    for each in quantization.groupings_of(packed.codes.rpartition(".")[0]) if packed.kind == "integer" else ():
        per_element = packed.numbers / packed.elements
        if each.size and rows == across and fits_groups(columns, per_element, each.size, along):
            return 1, each.size
    if not across or not along or rows % across or columns % along:
        raise ValueError(f"{packed.codes} of {rows} x {columns} has {across} x {along} scales: use another release")
    return rows // across, columns // along


def fits_groups(columns: int, per_element: float, size: int, num_groups: int) -> bool:
    """True if there can be as many groups of this size in a row, whose last element may be padded."""
    return ceil((columns - per_element + 1) / size) <= num_groups <= ceil(columns / size)


def checked(packed: PackedWeight, tensors: Tensors) -> PackedWeight:
    """Returns the weight.

    Raises:
        ValueError: it has no numbers, or not as many zero points or groups of columns as it needs.
    """
    if not packed.num_numbers:
        codes = tensors[packed.codes]
        raise ValueError(
            f"{packed.codes} of {codes.dtype} {sized(codes.shape)} has no numbers: download the model again"
        )
    step = -1 if packed.is_mirrored else 1
    of_scales = tensors[packed.scales].shape[::step]
    num_matrices, grid = prod(packed.shape[:-2]), grid_of(packed.shape, of_scales)
    for name, size in ((packed.scales, prod(grid)), (packed.factor, 1), (packed.divisor, 1)):
        if name is not None and prod(tensors[name].shape) not in (size, size * num_matrices):
            raise unfitting((packed.codes, name), tensors)
    if packed.zero_points is not None:
        expected = [*grid]
        if packed.zero_point_axis is not None:
            expected[packed.zero_point_axis] = ceil(expected[packed.zero_point_axis] * packed.bits / 32)
            fits = [*tensors[packed.zero_points].shape[::step][-2:]] == expected
            fits = fits and tensors[packed.zero_points].dtype in WORDS
        else:
            fits = prod(tensors[packed.zero_points].shape) == prod(of_scales)
        if not fits:
            raise unfitting((packed.codes, packed.scales, packed.zero_points), tensors)
    if packed.groups is not None:
        columns, of_groups = packed.shape[-1], tensors[packed.groups].shape
        padding = packed.numbers - 1 if packed.true_shape is not None else 0
        fits = len(of_groups) == 1 and columns - padding <= of_groups[0] <= columns
        if not fits or tensors[packed.groups].dtype not in ("I32", "I64"):
            raise unfitting((packed.codes, packed.groups), tensors)
    return packed
