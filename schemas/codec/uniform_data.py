"""Decodes data column by column if each datum has one chunk of tokens and the same dense inputs, as almost all requests
do.

Any other data, or invalid ones, are left to the decoder that takes one datum after the other and reports errors.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..training import Column, Datum, records_of
from . import trainhouse_wire_pb2 as wire
from .formats import Invalid, Rules
from .tensors import DTYPES, as_loss_input, decode_values


def decode_uniform_data(messages: Sequence[wire.Datum], rules: Rules) -> tuple[Datum, ...] | None:
    """Returns None if the data are not all plain, or have an unknown field that is refused.

    The arrays of one name are views of one array.
    """
    tokens = _TensorColumn(wire.DTYPE_INT32)
    inputs = {entry.key: _TensorColumn(entry.value.dtype) for entry in messages[0].loss_fn_inputs}
    try:
        if not all(_collect(message, tokens, inputs, rules) for message in messages):
            return None
        rows = tokens.column().arrays()
        columns = {}
        for name, pieces in inputs.items():
            values, shapes = pieces.column()
            columns[name] = Column(as_loss_input(name, values), shapes)
    except Invalid:
        return None
    return tuple(map(Datum, rows, records_of(columns, len(rows))))


class _TensorColumn:
    """Collects one tensor of each datum: its bytes, and its shape, which is empty if it was not given."""

    def __init__(self, dtype_number: wire.DType) -> None:
        self.dtype_number = dtype_number
        self.pieces: list[bytes] = []
        self.shapes: list[tuple[int, ...]] = []

    def column(self) -> Column:
        """Raises Invalid if bytes, dtype and shapes do not match."""
        sizes = np.fromiter(map(len, self.pieces), np.int64, len(self.pieces))
        item_bytes = DTYPES[self.dtype_number].itemsize if self.dtype_number in DTYPES else 0
        shapes = self._shapes() if any(self.shapes) else sizes[:, None] // max(item_bytes, 1)
        if not ((shapes.prod(axis=1) * item_bytes == sizes) & (shapes < 2**31).all(axis=1)).all():
            raise Invalid("a tensor does not match its shape")
        return Column(decode_values(bytearray().join(self.pieces), self.dtype_number), shapes)

    def _shapes(self) -> np.ndarray:
        if len(set(map(len, self.shapes))) > 1 or len(self.shapes[0]) > 2:
            raise Invalid("shapes of several dimensions, or of many")
        return np.array(self.shapes, np.int64)


def _collect(message: wire.Datum, tokens: _TensorColumn, inputs: Mapping[str, _TensorColumn], rules: Rules) -> bool:
    """Appends the datum's tensors to the pieces; returns False if the datum is not plain.

    Raises Invalid if it has an unknown field that is refused.
    """
    chunks, entries = message.model_input, message.loss_fn_inputs
    if len(chunks) != 1 or len(entries) != len(inputs) or message.feature_ref:
        return False
    if message.model_input_spans or message.loss_fn_input_spans:
        return False
    chunk = chunks[0]
    text = chunk.encoded_text
    rules.check_fields(message, chunk, text)
    tokens.pieces.append(text.tokens)
    for entry in entries:
        tensor, pieces = entry.value, inputs.get(entry.key)
        if pieces is None or tensor.dtype != pieces.dtype_number or not (dense := tensor.dense):
            return False
        rules.check_fields(entry, tensor)
        pieces.pieces.append(dense)
        pieces.shapes.append(tuple(tensor.shape))
        if len(pieces.pieces) != len(tokens.pieces):  # it has the name twice
            return False
    return bool(tokens.pieces[-1])
