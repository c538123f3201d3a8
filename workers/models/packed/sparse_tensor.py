"""Weights of which files hold the numbers that are not zero, and bits that say where these are."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...shapes.sparse_weights import SparseWeight
from .stored_tensor import Index, StoredTensor, spans

_BITS = torch.arange(8, dtype=torch.uint8)


class SparseTensor:
    """Implements StoredTensor for a sparse weight, with its zeros, in the dtype of its numbers."""

    def __init__(self, name: str, sparse: SparseWeight, stored: Mapping[str, StoredTensor]) -> None:
        """name: of the weight. Raises ValueError if files say that it has another shape."""
        self._name, self._sparse = name, sparse
        self._numbers, self._mask = stored[sparse.numbers], stored[sparse.mask]
        self._rows = None if sparse.rows is None else stored[sparse.rows][...].long()
        said, (rows, columns) = stored[sparse.true_shape][...].flatten()[:3].tolist(), sparse.shape
        least = columns if self._rows is None else columns - 7
        if len(said) != 2 or said[0] != rows or not least <= said[1] <= columns:
            raise ValueError(
                f"{sparse.true_shape} is {said}, but {name} is of {rows} x {columns}: download the model again"
            )
        self._shape = [rows, int(said[1])]

    def get_shape(self) -> Sequence[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self._numbers.get_dtype()

    def __getitem__(self, index: Index) -> Tensor:
        """Returns a part. An index is a slice of consecutive numbers, or the ellipsis for the whole.

        Raises:
            ValueError: there are not as many numbers as bits.
        """
        rows, columns = spans(index, self._shape)
        held = columns if self._rows is None else slice(0, self._shape[1])
        first, stop = held.start // 8, -(-held.stop // 8)
        bits = self._mask[rows, first:stop].unsqueeze(-1) >> _BITS & 1
        places = bits.flatten(1).bool()[:, : self._shape[1] - 8 * first]
        numbers = (
            self._of_halves(rows, first, places) if self._rows is None else self._of_rows(rows, places, self._rows)
        )
        dense = torch.zeros(places.shape, dtype=numbers.dtype)
        dense[places] = numbers
        part = dense[:, columns.start - 8 * first : columns.stop - 8 * first]
        return part.contiguous().view(torch.float8_e4m3fn) if self.get_dtype() == "F8_E4M3" else part.contiguous()

    def _of_halves(self, rows: slice, first: int, places: Tensor) -> Tensor:
        if (places.unflatten(1, (-1, 4)).sum(-1) != 2).any():
            raise ValueError(f"{self._sparse.mask} has not two bits of each four: download the model again")
        return _as_bytes(self._numbers[rows, 4 * first : 4 * first + places.shape[1] // 2]).flatten()

    def _of_rows(self, rows: slice, places: Tensor, starts: Tensor) -> Tensor:
        counts = places.sum(1)
        first = int(starts[rows.start]) if rows.start < rows.stop else 0
        expected = first + counts.cumsum(0) - counts
        stop, most = first + int(counts.sum()), self._numbers.get_shape()[0]
        if not torch.equal(starts[rows], expected) or not 0 <= first <= stop <= most:
            raise ValueError(
                f"{self._sparse.rows} and {self._sparse.mask} are not of the same numbers in rows {rows.start} to"
                f" {rows.stop - 1}, or not of {most}: download the model again"
            )
        return _as_bytes(self._numbers[first:stop])


def _as_bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8) if numbers.element_size() == 1 else numbers
