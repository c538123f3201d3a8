"""Encodes and decodes forward_backward outputs, as records of datums that share their trailing shapes."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import numpy as np

from ..training import Columns, ForwardBackwardOutput, columns_of
from . import trainhouse_wire_pb2 as wire
from .formats import Invalid, parse_protobuf
from .tensors import (
    DTYPE_NUMBERS,
    DTYPES,
    array_from_bytes,
    array_to_bytes,
    checked_shape,
    decode_values,
    public_dtype,
    reshape_checked,
    tensor_rows,
)
from .values import JsonObject, json_object, json_pieces, without_rows


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """Encodes to protobuf. All datums must have the same output names."""
    refs = [ref or "" for ref in output.feature_refs]
    message = wire.ForwardBackwardOutput(
        loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics, feature_refs=refs
    )
    for num_datums, columns in _records(output.loss_fn_outputs):
        record = message.loss_fn_outputs.add()
        record.num_datums = num_datums
        for name, column in columns.items():
            values = column.values if column.values.dtype.name in DTYPE_NUMBERS else public_dtype(column.values)
            # Rank 0 cannot be represented, so a scalar becomes a row of one.
            stops = column.shapes.prod(axis=1).cumsum() * values.itemsize
            field = record.fields[name]
            field.data = array_to_bytes(values, values.dtype)
            field.offsets = array_to_bytes(np.concatenate(([0], stops)), np.int64)
            field.dtype = DTYPE_NUMBERS[values.dtype.name]
            field.trailing_shape.extend(column.shapes[0, 1:].tolist())
    return message.SerializeToString()


def encode_forward_backward_output_json(output: ForwardBackwardOutput) -> JsonObject:
    """Returns the output as a JSON object, with NaN and infinities as null."""
    return json_object(without_rows(_rows(output)), "an answer")


def forward_backward_output_json_pieces(output: ForwardBackwardOutput) -> Iterator[bytes]:
    """Yields the JSON text of `encode_forward_backward_output_json` in pieces."""
    return json_pieces(_rows(output))


def _rows(output: ForwardBackwardOutput) -> JsonObject:
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": [
            # A JSON list, like the protobuf message, cannot represent rank 0.
            {name: tensor_rows(np.atleast_1d(array)) for name, array in datum.items()}
            for datum in output.loss_fn_outputs
        ],
        "metrics": {name: value if math.isfinite(value) else None for name, value in output.metrics.items()},
        **({"feature_refs": list(output.feature_refs)} if output.feature_refs else {}),
    }


def decode_forward_backward_output(body: bytes) -> ForwardBackwardOutput:
    """Decodes protobuf. Raises ValueError."""
    message = wire.ForwardBackwardOutput()
    parse_protobuf(message, body)
    outputs = [datum for record in message.loss_fn_outputs for datum in _read_record(record)]
    refs = tuple(ref or None for ref in message.feature_refs)
    return ForwardBackwardOutput(tuple(outputs), dict(message.metrics), message.loss_fn_output_type, refs)


def _records(outputs: Sequence[Mapping[str, np.ndarray]]) -> Iterator[tuple[int, Columns]]:
    """Yields runs of datums whose tensors differ only in length: the number of datums, and their columns."""
    columns = columns_of(outputs) if outputs else None
    trailing = [] if columns is None else [column.shapes[:, 1:] for column in columns.values()]
    if columns is not None and all((shapes == shapes[0]).all() for shapes in trailing):
        yield len(outputs), columns
        return
    kinds = (tuple((name, a.dtype.str, a.ndim, a.shape[1:]) for name, a in datum.items()) for datum in outputs)
    for _, run in itertools.groupby(zip(kinds, outputs, strict=True), key=itemgetter(0)):
        datums = [datum for _, datum in run]
        yield len(datums), columns_of(datums) or {}


def _read_record(record: wire.ArrayRecord) -> list[dict[str, np.ndarray]]:
    columns = {name: _read_batched(batched) for name, batched in record.fields.items()}
    if any(len(column) != record.num_datums for column in columns.values()):
        raise Invalid(f"an output record of {record.num_datums} datums has a field of another length")
    return [{name: column[index] for name, column in columns.items()} for index in range(record.num_datums)]


def _read_batched(message: wire.BatchedTensor) -> list[np.ndarray]:
    values = decode_values(message.data, message.dtype)
    offsets = array_from_bytes(message.offsets, np.int64) // DTYPES[message.dtype].itemsize
    trailing_shape = checked_shape(message.trailing_shape)
    if not offsets.size or offsets[0] != 0 or offsets[-1] != values.size or (np.diff(offsets) < 0).any():
        raise Invalid("the offsets of an output field do not tile its data")
    row = math.prod(trailing_shape)
    return [
        reshape_checked(values[start:stop], ((stop - start) // row if row else 0, *trailing_shape))
        for start, stop in itertools.pairwise(offsets.tolist())
    ]
