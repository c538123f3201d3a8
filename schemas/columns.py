"""Packs many small arrays into a few large ones, the format in which a batch is sent between processes.

Pickling costs an object or two per array in each direction. A column is pickled as one array, and the small arrays
become views of it on the other side.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

_KIND = attrgetter("dtype", "ndim")


class Column(NamedTuple):
    """Concatenated arrays of the same dtype and number of dimensions.

    values: all of their elements, flat. shapes: int64 [arrays, dimensions].
    """

    values: np.ndarray
    shapes: np.ndarray

    def arrays(self) -> list[np.ndarray]:
        """Returns the arrays as views of `values`."""
        stops = self.shapes.prod(axis=1).cumsum().tolist()
        flat = [self.values[start:stop] for start, stop in pairwise([0, *stops])]
        if self.shapes.shape[1] == 1:
            return flat
        return [array.reshape(shape) for array, shape in zip(flat, self.shapes.tolist(), strict=True)]


Columns = Mapping[str, Column]


def column_of(arrays: Sequence[np.ndarray]) -> Column | None:
    """Returns the arrays as a column, None if their dtypes or numbers of dimensions differ."""
    if len(set(map(_KIND, arrays))) > 1:
        return None
    if arrays[0].ndim == 1:
        return Column(np.concatenate(arrays), np.fromiter(map(len, arrays), np.int64, len(arrays))[:, None])
    shapes = np.array([array.shape for array in arrays], np.int64)
    return Column(np.concatenate([array.ravel() for array in arrays]), shapes)


def columns_of(records: Sequence[Mapping[str, np.ndarray]]) -> Columns | None:
    """Returns a column of all records' arrays for each name.

    Returns None if the records differ in their names, or if the arrays of a name do not fit into a column.
    """
    columns: dict[str, Column] = {}
    names = records[0].keys()
    if any(record.keys() != names for record in records):
        return None
    for name in names:
        column = column_of([record[name] for record in records])
        if column is None:
            return None
        columns[name] = column
    return columns


def records_of(columns: Columns, num_records: int) -> list[dict[str, np.ndarray]]:
    """Returns the records that `columns_of` packed."""
    if not columns:
        return [{} for _ in range(num_records)]
    rows = zip(*(column.arrays() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]
