"""Columns: many small arrays as one large one, which is how a batch travels between processes.

A pickled array costs an object or two each way, a thousand of them a thousand; a column costs one, and the arrays are
views of it again.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

_KIND = attrgetter("dtype", "ndim")


class Column(NamedTuple):
    """Arrays of one dtype and as many dimensions each, one after another.

    values: all of their elements. shapes: int64 [arrays, dimensions].
    """

    values: np.ndarray
    shapes: np.ndarray

    def arrays(self) -> list[np.ndarray]:
        """Views of `values`."""
        stops = self.shapes.prod(axis=1).cumsum().tolist()
        flat = [self.values[start:stop] for start, stop in pairwise([0, *stops])]
        if self.shapes.shape[1] == 1:
            return flat
        return [array.reshape(shape) for array, shape in zip(flat, self.shapes.tolist(), strict=True)]


Columns = Mapping[str, Column]


def column_of(arrays: Sequence[np.ndarray]) -> Column | None:
    """None where they do not fit one: another dtype, or another number of dimensions."""
    if len(set(map(_KIND, arrays))) > 1:
        return None
    if arrays[0].ndim == 1:
        return Column(np.concatenate(arrays), np.fromiter(map(len, arrays), np.int64, len(arrays))[:, None])
    shapes = np.array([array.shape for array in arrays], np.int64)
    return Column(np.concatenate([array.ravel() for array in arrays]), shapes)


def columns_of(records: Sequence[Mapping[str, np.ndarray]]) -> Columns | None:
    """name -> that array of all records; None where they differ in their names, or a name's arrays fit no column."""
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
    """What `columns_of` was given."""
    if not columns:
        return [{} for _ in range(num_records)]
    rows = zip(*(column.arrays() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]
