"""Tensors in files, of which parts are read by slices."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

# Numbers that are dequantized at a time: their float32 and those of their scales stay in a core's cache.
NUMBERS_AT_ONCE = 1 << 18

Index = Any


class StoredTensor(Protocol):
    """A tensor in a file, as safetensors' slices and transformers know it."""

    def get_shape(self) -> Sequence[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Index) -> Tensor: ...


class Mirrored:
    """Implements StoredTensor for a tensor whose dimensions are in the other order in the file."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored

    def get_shape(self) -> Sequence[int]:
        return self._stored.get_shape()[::-1]

    def get_dtype(self) -> str:
        return self._stored.get_dtype()

    def __getitem__(self, index: Index) -> Tensor:
        part = self._stored[(*reversed(spans(index, self.get_shape())),)]
        return part.permute(*reversed(range(part.dim())))


class Dequantized(ABC):
    """Implements StoredTensor for a weight of [rows, columns] whose columns are read all at once."""

    _shape: Sequence[int]
    _dtype: torch.dtype

    @abstractmethod
    def _rows(self, rows: slice) -> Tensor:
        """Returns whole rows of the weight as float32."""

    def get_shape(self) -> Sequence[int]:
        return self._shape

    def get_dtype(self) -> str:
        return dtype_name(self._dtype)

    def __getitem__(self, index: Index) -> Tensor:
        """Returns a part. An index is a slice of consecutive numbers, or the ellipsis for the whole.

        Reads the codes of all columns of these rows.
        """
        rows, columns = spans(index, self._shape)
        out = torch.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=self._dtype)
        step = max(1, NUMBERS_AT_ONCE // self._shape[1])
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            out[part.start - rows.start : part.stop - rows.start] = self._rows(part)[:, columns]
        return out


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name that safetensors gives the dtype of dequantized numbers."""
    return "BF16" if dtype == torch.bfloat16 else "F32"


def spans(index: Index, shape: Sequence[int]) -> list[slice]:
    """Returns a slice with ends for each dimension. An index is slices of consecutive numbers, or the ellipsis."""
    given = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
    whole = [slice(None)] * (len(shape) - len(given))
    return [slice(*each.indices(size)[:2]) for each, size in zip((*given, *whole), shape, strict=True)]
