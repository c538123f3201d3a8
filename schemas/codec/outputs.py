"""forward_backward outputs: records of datums that share their trailing shapes."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from .. import trainhouse_wire_pb2 as wire
from ..training import ForwardBackwardOutput
from .formats import parse_protobuf
from .invalid import Invalid
from .tensors import (
    DTYPE_NUMBERS,
    DTYPES,
    array_of,
    bytes_of,
    checked_shape,
    public_dtype,
    shaped,
    tensor_to_json,
    widened,
)
from .values import JsonObject


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """Protobuf. All datums must have the same output names."""
    message = wire.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics)
    outputs = [{name: _at_least_1d(array) for name, array in datum.items()} for datum in output.loss_fn_outputs]
    for _, datums in itertools.groupby(outputs, key=_record_key):
        _write_record(list(datums), message.loss_fn_outputs.add())
    return message.SerializeToString()


def encode_forward_backward_output_json(output: ForwardBackwardOutput) -> JsonObject:
    """For a reply in JSON; NaN and infinities are null."""
    return {
        "loss_fn_output_type": output.loss_fn_output_type,
        "loss_fn_outputs": [
            {name: tensor_to_json(_at_least_1d(array)) for name, array in datum.items()}
            for datum in output.loss_fn_outputs
        ],
        "metrics": {name: value if math.isfinite(value) else None for name, value in output.metrics.items()},
    }


def decode_forward_backward_output(body: bytes) -> ForwardBackwardOutput:
    """From protobuf. Raises ValueError."""
    message = wire.ForwardBackwardOutput()
    parse_protobuf(message, body)
    outputs = [datum for record in message.loss_fn_outputs for datum in _read_record(record)]
    return ForwardBackwardOutput(tuple(outputs), dict(message.metrics), message.loss_fn_output_type)


def _at_least_1d(array: np.ndarray) -> np.ndarray:
    """The wire cannot say rank 0."""
    return array.reshape(1) if array.ndim == 0 else array


def _record_key(datum: Mapping[str, np.ndarray]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple((name, array.dtype.str, array.shape[1:]) for name, array in datum.items())


def _write_record(datums: Sequence[Mapping[str, np.ndarray]], record: wire.ArrayRecord) -> None:
    record.num_datums = len(datums)
    for name in datums[0]:
        _write_batched([datum[name] for datum in datums], record.fields[name])


def _write_batched(arrays: Sequence[np.ndarray], message: wire.BatchedTensor) -> None:
    arrays = arrays if arrays[0].dtype.name in DTYPE_NUMBERS else [public_dtype(array) for array in arrays]
    message.data = b"".join([bytes_of(array, array.dtype) for array in arrays])
    message.offsets = bytes_of(np.cumsum([0, *(array.nbytes for array in arrays)]), np.int64)
    message.dtype = DTYPE_NUMBERS[arrays[0].dtype.name]
    message.trailing_shape.extend(arrays[0].shape[1:])


def _read_record(record: wire.ArrayRecord) -> list[dict[str, np.ndarray]]:
    columns = {name: _read_batched(batched) for name, batched in record.fields.items()}
    if any(len(column) != record.num_datums for column in columns.values()):
        raise Invalid(f"an output record of {record.num_datums} datums has a field of another length")
    return [{name: column[index] for name, column in columns.items()} for index in range(record.num_datums)]


def _read_batched(message: wire.BatchedTensor) -> list[np.ndarray]:
    values = widened(message.data, message.dtype)
    offsets = array_of(message.offsets, np.int64) // DTYPES[message.dtype].itemsize
    trailing_shape = checked_shape(message.trailing_shape)
    if not offsets.size or offsets[0] != 0 or offsets[-1] != values.size or (np.diff(offsets) < 0).any():
        raise Invalid("the offsets of an output field do not tile its data")
    row = math.prod(trailing_shape)
    return [
        shaped(values[start:stop], ((stop - start) // row if row else 0, *trailing_shape))
        for start, stop in itertools.pairwise(offsets.tolist())
    ]
