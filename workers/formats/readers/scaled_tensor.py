"""Weights whose numbers are a code times the scale of a block of rows and columns."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from ...models.stored.stored_tensor import NUMBERS_AT_ONCE, Index, Mirrored, StoredTensor, dtype_name, spans
from ..packed_weight import PackedWeight, grid_of
from .codes import Codes


class ScaledTensor:
    """Implements StoredTensor for a packed weight."""

    def __init__(self, name: str, packed: PackedWeight, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> None:
        """name: of the weight.

        Raises:
            ValueError: the files say that it has another shape than its codes, or that these are not in rows.
        """
        self._name, self._packed, self._dtype = name, packed, dtype
        self._stored = {name: Mirrored(stored[name]) if packed.is_mirrored else stored[name] for name in packed.names}
        self._codes = Codes(packed, stored[packed.codes].get_dtype())
        self._grid = grid_of(packed.shape, self._stored[packed.scales].get_shape())
        self._check_layout()
        shape = [*packed.shape[:-1], self._num_columns()]
        self._shape = [*shape[:-2], shape[-1], shape[-2]] if packed.transposed else shape

    def _check_layout(self) -> None:
        if self._packed.layout is None:
            return
        value = self._stored[self._packed.layout][...].flatten()[:2].tolist()
        if value != [0]:
            raise ValueError(
                f"{self._packed.layout} is {', '.join(map(str, value)) or 'empty'}, but only 0, codes in rows, can be"
                " read: save the model again with a current bitsandbytes"
            )

    def _num_columns(self) -> int:
        padded, true_shape = self._packed.shape[-1], self._packed.true_shape
        if true_shape is None:
            return padded
        stored, groups = self._stored[true_shape][...].flatten(), self._packed.groups
        columns = int(stored[-1]) if len(stored) else 0
        least = padded - self._packed.numbers + 1 if groups is None else self._stored[groups].get_shape()[0]
        if not least <= columns <= (padded if groups is None else least):
            raise ValueError(
                f"{true_shape} says that {self._name} has {columns} columns, but its codes are of {padded}: download"
                " the model again"
            )
        return columns

    def get_shape(self) -> Sequence[int]:
        return self._shape

    def get_dtype(self) -> str:
        return dtype_name(self._dtype)

    def __getitem__(self, index: Index) -> Tensor:
        """Returns a part. An index is a slice of consecutive numbers, or the ellipsis for the whole."""
        *lead, rows, columns = spans(index, self._shape)
        if self._packed.transposed:
            return self._read(tuple(lead), columns, rows).transpose(-1, -2).contiguous()
        return self._read(tuple(lead), rows, columns)

    def _read(self, lead: tuple[slice, ...], rows: slice, columns: slice) -> Tensor:
        sizes = [each.stop - each.start for each in (*lead, rows, columns)]
        num_rows, num_columns = prod(sizes[:-1]), sizes[-1]
        first = self._codes.first_column(columns)
        own = slice(columns.start - first, columns.stop - first)
        held = self._codes.elements_of(columns)
        codes = self._stored[self._packed.codes][(*lead, rows, held)].reshape(num_rows, -1)
        scales, zeros, groups = self._scales(lead), self._zero_points(lead), self._groups(columns)
        scale_rows = self._scale_rows(prod(sizes[:-2]), rows)
        out = torch.empty(num_rows, num_columns, dtype=self._dtype)
        step = max(1, NUMBERS_AT_ONCE // max(1, num_columns))
        for part in (slice(start, start + step) for start in range(0, num_rows, step)):
            values = self._codes.unpacked(codes[part])[:, own]
            if zeros is not None:
                values = values - self._spread(zeros[scale_rows[part]], columns, groups)
            out[part] = values * self._spread(scales[scale_rows[part]], columns, groups)
        return out.view(sizes)

    def _scale_rows(self, num_matrices: int, rows: slice) -> Tensor:
        """Returns the row of scales for each row of all matrices that are read."""
        within = torch.arange(rows.start, rows.stop) // self._packed.block[0]
        return (torch.arange(num_matrices).unsqueeze(1) * self._grid[0] + within).flatten()

    def _groups(self, columns: slice) -> Tensor | None:
        """Returns the column of scales for each of these columns, None if columns in a row share one.

        Raises:
            ValueError: there is no such column of scales.
        """
        if self._packed.groups is None:
            return None
        groups = self._stored[self._packed.groups][...]
        if (groups < 0).all():  # compressed-tensors writes -1 where the order of columns is their own
            return None
        wrong = groups[(groups < 0) | (groups >= self._grid[1])]
        if len(wrong):
            raise ValueError(
                f"{self._packed.groups} has group {int(wrong[0])}, but {self._name} has groups 0 to"
                f" {self._grid[1] - 1}: download the model again"
            )
        return groups[columns].long()

    def _spread(self, of_blocks: Tensor, columns: slice, groups: Tensor | None) -> Tensor:
        """Returns for each of these columns the number of its block, or [rows, 1] if they are in one block."""
        if groups is not None:
            return of_blocks.index_select(1, groups)
        width = self._packed.block[1]
        first, stop = columns.start // width, -(-columns.stop // width)
        touched = of_blocks[:, first:stop]
        if stop - first == 1:
            return touched
        repeated = touched.unsqueeze(-1).expand(-1, -1, width).flatten(1)
        return repeated[:, columns.start - first * width : columns.stop - first * width]

    def _scales(self, lead: tuple[slice, ...]) -> Tensor:
        """Returns float32 [matrices that are read * rows of scales, columns of scales]."""
        packed, num_matrices = self._packed, prod(each.stop - each.start for each in lead)
        scales = self._of_matrices(packed.scales, lead)
        if scales.dtype == torch.uint8:
            is_float8 = packed.factor or packed.divisor
            scales = scales.view(torch.float8_e4m3fn if is_float8 else torch.float8_e8m0fnu)
        scales = scales.float().reshape(-1, self._grid[0] * self._grid[1])
        if packed.factor is not None:
            scales = scales * self._of_matrices(packed.factor, lead).float().reshape(-1, 1)
        if packed.divisor is not None:
            scales = scales / self._of_matrices(packed.divisor, lead).float().reshape(-1, 1)
        return (scales / packed.denominator).expand(num_matrices, -1).reshape(-1, self._grid[1])

    def _zero_points(self, lead: tuple[slice, ...]) -> Tensor | None:
        """Returns float32 in the shape of the scales, or None if there are none."""
        if self._packed.zero_points is None:
            return None
        zeros, axis = self._of_matrices(self._packed.zero_points, lead), self._packed.zero_point_axis
        if axis is not None:
            words = zeros.transpose(axis, -1).flatten(0, -2)
            unpacked = self._codes.unpacked(words, plus_one=self._packed.low_zero_points)[:, : self._grid[axis]]
            zeros = unpacked.unflatten(0, zeros.transpose(axis, -1).shape[:-1]).transpose(axis, -1)
        return zeros.float().reshape(-1, self._grid[1])

    def _of_matrices(self, name: str, lead: tuple[slice, ...]) -> Tensor:
        """Returns a small tensor, and if it has a part for each matrix of a stack, those of the ones that are read."""
        stored = self._stored[name]
        return stored[lead] if lead and list(stored.get_shape()[: len(lead)]) == self._shape[:-2] else stored[...]
