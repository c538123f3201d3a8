"""Reads packed weights of files as the numbers that they stand for.

transformers reads a model's tensors as slices of files, each rank its own part. Here a slice of a packed weight reads
the codes and scales of that part alone, and dequantizes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig, modeling_utils

from ..shapes.packed_weights import (
    PackedWeight,
    Quantization,
    TensorHeader,
    grid_of,
    packed_weights,
    unpacked_names,
)

# Numbers that are dequantized at a time: their float32 and those of their scales stay in a core's cache.
_NUMBERS_AT_ONCE = 1 << 18
# The numbers of 4 bits, by code: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, E2M1).
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

Index = Any


class StoredTensor(Protocol):
    """A tensor in a file, as safetensors' slices and transformers know it."""

    def get_shape(self) -> Sequence[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Index) -> Tensor: ...


@contextmanager
def dequantizing(config: PreTrainedConfig, dtype: torch.dtype) -> Iterator[None]:
    """Makes `from_pretrained` with this config read packed weights as numbers of `dtype`, while inside.

    Removes the config's `quantization_config`, so that the model counts as one that never was quantized.
    """
    quantization = Quantization.of(config.to_dict())
    for each in (config, config.get_text_config()):
        vars(each).pop("quantization_config", None)
    hooked: Any = modeling_utils
    load = hooked.convert_and_load_state_dict_in_model

    def load_dequantized(model: Any, state_dict: Mapping[str, StoredTensor], **options: Any) -> Any:
        return load(model=model, state_dict=dequantized_tensors(state_dict, quantization, dtype), **options)

    hooked.convert_and_load_state_dict_in_model = load_dequantized
    try:
        yield
    finally:
        hooked.convert_and_load_state_dict_in_model = load


def dequantized_tensors(
    stored: Mapping[str, StoredTensor], quantization: Quantization, dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """Returns the tensors of files by name, packed ones as dequantized numbers of `dtype`.

    Raises:
        ValueError: a weight is packed in a way that is not known.
    """
    headers = {name: TensorHeader(each.get_dtype(), tuple(each.get_shape())) for name, each in stored.items()}
    packed = packed_weights(headers, quantization)
    plain = {name: stored[name] for name in unpacked_names(headers, packed)}
    return plain | {name: DequantizedTensor(each, stored, dtype) for name, each in packed.items()}


class DequantizedTensor:
    """Implements StoredTensor for a packed weight."""

    def __init__(self, packed: PackedWeight, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> None:
        self._packed, self._stored, self._dtype = packed, stored, dtype
        self._table = _table(packed, stored[packed.codes].get_dtype())
        self._grid = grid_of(packed.shape, stored[packed.scales].get_shape())
        num_columns = packed.shape[-1] if packed.true_shape is None else int(stored[packed.true_shape][...][-1])
        shape = [*packed.shape[:-1], num_columns]
        self._shape = [*shape[:-2], shape[-1], shape[-2]] if packed.transposed else shape

    def get_shape(self) -> Sequence[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "BF16" if self._dtype == torch.bfloat16 else "F32"

    def __getitem__(self, index: Index) -> Tensor:
        """Returns a part. An index is a slice of consecutive numbers, or the ellipsis for the whole."""
        *lead, rows, columns = _spans(index, self._shape)
        if self._packed.transposed:
            return self._read(tuple(lead), columns, rows).transpose(-1, -2).contiguous()
        return self._read(tuple(lead), rows, columns)

    def _read(self, lead: tuple[slice, ...], rows: slice, columns: slice) -> Tensor:
        sizes = [each.stop - each.start for each in (*lead, rows, columns)]
        num_rows, num_columns = prod(sizes[:-1]), sizes[-1]
        numbers = self._packed.numbers
        held = slice(columns.start // numbers, -(-columns.stop // numbers))
        own = slice(columns.start - held.start * numbers, columns.stop - held.start * numbers)
        codes = self._stored[self._packed.codes][(*lead, rows, held)].reshape(num_rows, -1)
        scales, zeros = self._scales(lead), self._zero_points(lead)
        scale_rows = self._scale_rows(prod(sizes[:-2]), rows)
        out = torch.empty(num_rows, num_columns, dtype=self._dtype)
        step = max(1, _NUMBERS_AT_ONCE // max(1, num_columns))
        for part in (slice(start, start + step) for start in range(0, num_rows, step)):
            values = _unpacked(codes[part], self._table)[:, own]
            if zeros is not None:
                values = values - self._spread(zeros[scale_rows[part]], columns)
            out[part] = values * self._spread(scales[scale_rows[part]], columns)
        return out.view(sizes)

    def _scale_rows(self, num_matrices: int, rows: slice) -> Tensor:
        """Returns the row of scales for each row of all matrices that are read."""
        within = torch.arange(rows.start, rows.stop) // self._packed.block[0]
        return (torch.arange(num_matrices).unsqueeze(1) * self._grid[0] + within).flatten()

    def _spread(self, of_blocks: Tensor, columns: slice) -> Tensor:
        """Returns for each of these columns the number of its block, or [rows, 1] if they are in one block."""
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
            has_two_levels = packed.factor or packed.divisor
            scales = scales.view(torch.float8_e4m3fn if has_two_levels else torch.float8_e8m0fnu)
        scales = scales.float().reshape(-1, self._grid[0] * self._grid[1])
        if packed.factor is not None:
            scales = scales * self._of_matrices(packed.factor, lead).float().reshape(-1, 1)
        if packed.divisor is not None:
            scales = scales / self._of_matrices(packed.divisor, lead).float().reshape(-1, 1)
        return scales.expand(num_matrices, -1).reshape(-1, self._grid[1])

    def _zero_points(self, lead: tuple[slice, ...]) -> Tensor | None:
        """Returns float32 in the shape of the scales, or None if there are none."""
        if self._packed.zero_points is None:
            return None
        zeros = self._of_matrices(self._packed.zero_points, lead)
        if zeros.dtype == torch.int32:  # packed along columns
            unpacked = _unpacked(zeros.transpose(-1, -2).flatten(0, -2).contiguous(), self._table)
            zeros = unpacked.view(*zeros.shape[:-2], self._grid[1], -1).transpose(-1, -2)[..., : self._grid[0], :]
        return zeros.float().reshape(-1, self._grid[1])

    def _of_matrices(self, name: str, lead: tuple[slice, ...]) -> Tensor:
        """Returns a small tensor, and if it has a part for each matrix of a stack, those of the ones that are read."""
        stored = self._stored[name]
        return stored[lead] if lead and list(stored.get_shape()[: len(lead)]) == self._shape[:-2] else stored[...]


def _spans(index: Index, shape: Sequence[int]) -> list[slice]:
    given = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
    whole = [slice(None)] * (len(shape) - len(given))
    return [slice(*each.indices(size)[:2]) for each, size in zip((*given, *whole), shape, strict=True)]


def _table(packed: PackedWeight, dtype: str) -> Tensor:
    """Returns the numbers that each byte of codes stands for, the first in its lowest bits: [256, numbers]."""
    every = torch.arange(256, dtype=torch.uint8)
    if packed.kind == "float8":
        return every.view(torch.float8_e5m2 if dtype == "F8_E5M2" else torch.float8_e4m3fn).float().unsqueeze(1)
    if packed.kind == "float4":
        return torch.tensor(_FLOAT4)[torch.stack((every & 15, every >> 4), 1).int()]
    if dtype == "I8":
        return every.view(torch.int8).float().unsqueeze(1)
    shifts = torch.arange(0, 8, packed.bits, dtype=torch.uint8)
    return (every.unsqueeze(1) >> shifts & (1 << packed.bits) - 1).float() - (1 << (packed.bits - 1))


def _unpacked(codes: Tensor, table: Tensor) -> Tensor:
    """Returns the numbers of [rows, elements] of codes as float32 [rows, numbers]."""
    of_bytes = codes.view(torch.uint8).flatten().int()
    if table.shape[1] != 2:
        return table.index_select(0, of_bytes).view(len(codes), -1)
    # A pair of numbers is looked up as one complex number, several times as fast.
    return torch.view_as_real(torch.view_as_complex(table).index_select(0, of_bytes)).view(len(codes), -1)
