"""Weights of bitsandbytes in 4 bits (Dettmers et al. 2023, QLoRA): codes are places in a table of 16 numbers, and
consecutive numbers share a scale, which may itself be a code with a scale.
"""

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from ....schemas.bounds import load_json
from ...models.stored.stored_tensor import NUMBERS_AT_ONCE, Index, StoredTensor, dtype_name, spans
from ..bitsandbytes import TableWeight
from .codes import looked_up

# What the JSON of a weight with the longest numbers takes several times.
_MOST_STATE_BYTES = 4096


class TableTensor:
    """Implements StoredTensor for a weight of [rows, columns] whose codes are one row of rows, by whole rows."""

    def __init__(self, name: str, packed: TableWeight, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> None:
        """name: of the weight. Raises ValueError if its tensors do not fit together."""
        self._name, self._packed, self._stored, self._dtype = name, packed, stored, dtype
        state = self._state()
        self._shape = [self._positive(state, "shape", each) for each in state.get("shape") or ()]
        rows, columns = self._shape if len(self._shape) == 2 else (0, 0)
        most = packed.num_numbers
        # A block is no larger than what it is of, so that no file decides how much memory is taken.
        self._block = min(most, self._positive(state, "blocksize", state.get("blocksize")))
        if not most - 8 < rows * columns <= most:
            raise self._wrong("shape", state.get("shape"), f"its codes are {most} numbers")
        self._check_size(packed.scales, ceil(rows * columns / self._block))
        self._check_size(packed.table, 16)
        table = stored[packed.table][...].float().flatten()
        every = torch.arange(256)
        self._pairs = torch.stack((table[every >> 4], table[every & 15]), 1)
        if packed.nested_scales is not None and packed.nested_table is not None:
            self._nested_block = min(most, self._positive(state, "nested_blocksize", state.get("nested_blocksize")))
            self._check_size(packed.nested_scales, ceil(rows * columns / self._block / self._nested_block))
            self._check_size(packed.nested_table, 256)
            offset = state.get("nested_offset")
            if not isinstance(offset, int | float):
                raise self._wrong("nested_offset", offset, "it must be a number")
            self._offset = float(offset)

    def get_shape(self) -> Sequence[int]:
        return self._shape

    def get_dtype(self) -> str:
        return dtype_name(self._dtype)

    def __getitem__(self, index: Index) -> Tensor:
        """Returns a part. An index is a slice of consecutive numbers, or the ellipsis for the whole."""
        rows, columns = spans(index, self._shape)
        out = torch.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=self._dtype)
        step = max(1, NUMBERS_AT_ONCE // self._shape[1])
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            out[part.start - rows.start : part.stop - rows.start] = self._rows(part)[:, columns]
        return out

    def _rows(self, rows: slice) -> Tensor:
        """Returns whole rows of the weight as float32."""
        width, block = self._shape[1], self._block
        first, stop = rows.start * width, rows.stop * width
        blocks = slice(first // block, -(-stop // block))
        scales = self._scales(blocks).repeat_interleave(block)[first - blocks.start * block :][: stop - first]
        return (self._numbers(first, stop) * scales).view(-1, width)

    def _numbers(self, first: int, stop: int) -> Tensor:
        """Returns numbers before they are scaled."""
        codes = self._stored[self._packed.codes]
        numbers = self._packed.num_numbers // _num_elements(codes)
        elements = slice(first // numbers, -(-stop // numbers))
        read = codes[elements] if len(codes.get_shape()) < 2 or codes.get_shape()[0] > 1 else codes[:, elements]
        return looked_up(read.reshape(1, -1), self._pairs).flatten()[first - elements.start * numbers :][: stop - first]

    def _scales(self, blocks: slice) -> Tensor:
        stored, packed = self._stored, self._packed
        scales = stored[packed.scales][blocks].flatten()
        if packed.nested_scales is None or packed.nested_table is None:
            return scales.float()
        nested = slice(blocks.start // self._nested_block, -(-blocks.stop // self._nested_block))
        of_nested = stored[packed.nested_scales][nested].float().repeat_interleave(self._nested_block)
        own = of_nested[blocks.start - nested.start * self._nested_block :][: len(scales)]
        return stored[packed.nested_table][...].float()[scales.int()] * own + self._offset

    def _state(self) -> Mapping[str, Any]:
        stored = self._stored[self._packed.state]
        if _num_elements(stored) > _MOST_STATE_BYTES:
            raise ValueError(
                f"{self._packed.state} has {_num_elements(stored)} bytes, more than {_MOST_STATE_BYTES}: download the"
                " model again"
            )
        try:
            state = load_json(bytes(stored[...].flatten().tolist()))
        except ValueError as error:
            raise ValueError(f"{self._packed.state} is no JSON ({error}): download the model again") from error
        if not isinstance(state, dict):
            raise ValueError(f"{self._packed.state} is no JSON object: download the model again")
        return state

    def _positive(self, state: Mapping[str, Any], key: str, value: object) -> int:
        if type(value) is not int or value < 1:
            raise self._wrong(key, state.get(key), "it must be at least 1")
        return value

    def _check_size(self, name: str, size: int) -> None:
        if _num_elements(self._stored[name]) != size:
            raise ValueError(
                f"{name} has {_num_elements(self._stored[name])} numbers, but {self._name} needs {size}: download the"
                " model again"
            )

    def _wrong(self, key: str, value: object, reason: str) -> ValueError:
        return ValueError(f"{self._packed.state} has {key} {value}, but {reason}: download the model again")


def _num_elements(stored: StoredTensor) -> int:
    return prod(stored.get_shape())
