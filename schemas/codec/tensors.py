"""Converts arrays to and from the tensors of both formats: dense, and CSR, which is made dense within a limit."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..training import TENSOR_FIELDS
from . import trainhouse_wire_pb2 as wire
from .formats import MAX_DENSE_BYTES, Invalid, Rules, at_place, refused_with_400, show_value
from .values import JsonObject, json_integer, json_list, json_object, rows_of, without_rows

TARGETS = "target_tokens"
"""The one input of losses that is integer."""

_MAX_DIMENSIONS = 8
DTYPES: dict[int, np.dtype] = {
    wire.DTYPE_FLOAT32: np.dtype("<f4"),
    wire.DTYPE_INT64: np.dtype("<i8"),
    wire.DTYPE_INT32: np.dtype("<i4"),
    wire.DTYPE_BFLOAT16: np.dtype("<u2"),
}


DTYPE_NUMBERS: dict[str, wire.DType] = {
    "float32": wire.DTYPE_FLOAT32,
    "int64": wire.DTYPE_INT64,
    "int32": wire.DTYPE_INT32,
}


@dataclass(frozen=True, eq=False)
class CsrLayout:
    """The positions of the cells that a CSR tensor of shape [rows, columns] lists.

    crow_indices: int64 [rows + 1]. col_indices: int64, one per cell.
    """

    shape: tuple[int, int]
    crow_indices: np.ndarray
    col_indices: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Returns the row of each listed cell, int64."""
        return np.repeat(np.arange(self.shape[0], dtype=np.int64), np.diff(self.crow_indices))


def tensor_from_json(
    value: object, fill: float = 0, name: str = "tensor", max_dense_bytes: int = MAX_DENSE_BYTES
) -> np.ndarray:
    """Returns a dense int64 or float32 array from JSON TensorData {data, dtype, shape?, sparse_crow_indices?, ...}.

    Args:
        fill: value of the cells that a CSR tensor omits (-1 for target_prompt_logprobs).
    Raises:
        RequestError: the tensor is invalid, or too large when made dense.
    """
    rules = Rules(max_dense_bytes, ignore_unknown=True, was_accepted=True)  # the request's fields have been checked
    with refused_with_400(), at_place(name):
        return dense_from_json(value, fill, rules, integer=None)


def tensor_to_json(array: np.ndarray) -> JsonObject:
    """Returns dense TensorData: {data, dtype, shape}, with NaN and infinities as null."""
    return json_object(without_rows(tensor_rows(array)), "a tensor")


def tensor_rows(array: np.ndarray) -> JsonObject:
    """Returns the same as `tensor_to_json`, with its data as JsonRows."""
    array = public_dtype(array)
    return {"data": rows_of(array), "dtype": array.dtype.name, "shape": list(array.shape)}


def csr_layout_from_json(value: object) -> CsrLayout | None:
    """Returns the layout of JSON TensorData, or None if it is dense: the response to a CSR request has the same layout.

    Raises RequestError.
    """
    with refused_with_400():
        tensor = json_object(value, "the tensor")
        return _csr_layout_from_json(tensor, _json_shape(tensor)) if _is_csr(tensor) else None


def read_tensor(tensor: wire.Tensor, rules: Rules) -> np.ndarray:
    """Returns the tensor made dense, from either encoding; without a shape it is one-dimensional."""
    shape = checked_shape(tensor.shape)
    rules.check_fields(tensor)
    match tensor.WhichOneof("encoding"):
        case "dense":
            return reshape_checked(decode_values(tensor.dense, tensor.dtype), shape)
        case "sparse_csr":
            csr = tensor.sparse_csr
            rules.check_fields(csr)
            crow_indices, col_indices = (
                array_from_bytes(csr.crow_indices, np.int64),
                array_from_bytes(csr.col_indices, np.int64),
            )
            values = decode_values(csr.values, tensor.dtype)
            return _densified(values, _checked_csr(shape, crow_indices, col_indices), 0, rules)
        case _:
            # proto3 writes nothing for an empty tensor whose bytes were never set
            return reshape_checked(decode_values(b"", tensor.dtype), shape)


def write_tensor(array: np.ndarray, message: wire.Tensor) -> None:
    array = array if array.dtype.name in DTYPE_NUMBERS else public_dtype(array)
    message.dense = array_to_bytes(array, array.dtype)
    message.dtype = DTYPE_NUMBERS[array.dtype.name]
    message.shape.extend(array.shape)


def write_target_logprobs(logprobs: np.ndarray, layout: CsrLayout | None, message: wire.Tensor) -> None:
    if layout is None:
        return write_tensor(logprobs, message)
    message.dtype = wire.DTYPE_FLOAT32
    message.shape.extend(layout.shape)
    message.sparse_csr.values = array_to_bytes(logprobs[layout.rows, layout.col_indices], np.float32)
    message.sparse_csr.crow_indices = array_to_bytes(layout.crow_indices, np.int64)
    message.sparse_csr.col_indices = array_to_bytes(layout.col_indices, np.int64)
    return None


def dense_from_json(value: object, fill: float, rules: Rules, integer: bool | None) -> np.ndarray:
    """Returns TensorData as a dense array.

    Args:
        integer: the dtype if the tensor names none; None: it must name one.
    """
    tensor = json_object(value, "a tensor")
    rules.check_names(tensor, "a tensor", TENSOR_FIELDS)
    dtype = tensor.get("dtype", {True: "int64", False: "float32", None: None}[integer])
    if dtype not in ("int64", "float32"):
        raise Invalid(f"unknown dtype {show_value(dtype)}: send int64 or float32")
    values = numeric_array(json_list(tensor.get("data"), "data"), integer=dtype == "int64")
    shape = _json_shape(tensor)
    if not _is_csr(tensor) and tensor.get("sparse_col_indices") is not None and not rules.was_accepted:
        raise Invalid("a tensor has sparse_col_indices but no sparse_crow_indices: send both or neither")
    if _is_csr(tensor):
        return _densified(values.reshape(-1), _csr_layout_from_json(tensor, shape), fill, rules)
    return reshape_checked(values, shape)


def _is_csr(tensor: JsonObject) -> bool:
    return tensor.get("sparse_crow_indices") is not None


def _json_shape(tensor: JsonObject) -> tuple[int, ...]:
    shape = tensor.get("shape")
    if shape is None:
        return ()
    return checked_shape([json_integer(size, "shape") for size in json_list(shape, "shape")])


def _csr_layout_from_json(tensor: JsonObject, shape: tuple[int, ...]) -> CsrLayout:
    crow_indices = numeric_array(json_list(tensor["sparse_crow_indices"], "sparse_crow_indices"), integer=True)
    col_indices = numeric_array(json_list(tensor.get("sparse_col_indices"), "sparse_col_indices"), integer=True)
    return _checked_csr(shape, crow_indices.reshape(-1), col_indices.reshape(-1))


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > _MAX_DIMENSIONS or any(not 0 <= size < 2**31 for size in shape):
        raise Invalid(
            f"shape {show_value(list(shape))} is out of bounds: at most {_MAX_DIMENSIONS} sizes from 0 to 2^31-1"
        )
    return tuple(shape)


def reshape_checked(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if not shape:
        return values
    if values.size != math.prod(shape):
        raise Invalid(f"shape {list(shape)} needs {math.prod(shape)} values; the tensor has {values.size}")
    return values.reshape(shape)


def _checked_csr(shape: tuple[int, ...], crow_indices: np.ndarray, col_indices: np.ndarray) -> CsrLayout:
    if len(shape) != 2:
        raise Invalid(f"a CSR tensor needs a shape of two sizes, not {list(shape)}")
    num_rows, num_columns = shape
    if crow_indices.shape != (num_rows + 1,):
        raise Invalid(f"a CSR tensor of {num_rows} rows needs {num_rows + 1} row pointers, not {crow_indices.size}")
    if crow_indices[0] != 0 or crow_indices[-1] != col_indices.size or (np.diff(crow_indices) < 0).any():
        raise Invalid(f"CSR row pointers must rise from 0 to the {col_indices.size} column indices")
    if col_indices.size and (col_indices.min() < 0 or col_indices.max() >= num_columns):
        raise Invalid(f"a CSR column index is outside of the {num_columns} columns")
    layout = CsrLayout((num_rows, num_columns), crow_indices, col_indices)
    rows = layout.rows
    if ((np.diff(col_indices) <= 0) & (rows[1:] == rows[:-1])).any():
        raise Invalid("CSR column indices must rise within a row")
    return layout


def _densified(values: np.ndarray, layout: CsrLayout, fill: float, rules: Rules) -> np.ndarray:
    if values.size != layout.col_indices.size:
        raise Invalid(f"a CSR tensor has {values.size} values for {layout.col_indices.size} column indices")
    rules.take_dense(math.prod(layout.shape) * values.itemsize)
    dense = np.full(layout.shape, fill, dtype=values.dtype)
    dense[layout.rows, layout.col_indices] = values
    return dense


def decode_values(data: bytes | bytearray, dtype_number: int) -> np.ndarray:
    """Returns flat values; bfloat16 (the upper half of a float32) is converted to float32."""
    dtype = DTYPES.get(dtype_number)
    if dtype is None:
        raise Invalid(f"unknown dtype {dtype_number}: send 1 float32, 2 int64, 3 int32 or 4 bfloat16")
    values = array_from_bytes(data, dtype)
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype_number == wire.DTYPE_BFLOAT16 else values


def array_from_bytes(data: bytes | bytearray, dtype: np.typing.DTypeLike) -> np.ndarray:
    """Returns a writable array: a copy of bytes (torch warns about read-only arrays), a view of a bytearray."""
    little = np.dtype(dtype).newbyteorder("<")
    if len(data) % little.itemsize:
        raise Invalid(f"{len(data)} bytes are not a whole number of {little.name} values")
    return np.frombuffer(data, dtype=little).astype(dtype, copy=isinstance(data, bytes))


def array_to_bytes(array: np.ndarray, dtype: np.typing.DTypeLike) -> bytes:
    return array.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()


def as_loss_input(name: str, array: np.ndarray) -> np.ndarray:
    """Returns TARGETS as int64, and any other input as float32, the dtypes that losses take."""
    if name != TARGETS:
        return to_float32(array)
    if array.dtype.kind == "f":
        raise Invalid(f"{name} must be int64, not {array.dtype.name}")
    return array.astype(np.int64, copy=False)


def public_dtype(array: np.ndarray) -> np.ndarray:
    """Converts to float32 or int64, the two dtypes of TensorData."""
    return to_float32(array) if array.dtype.kind == "f" else array.astype(np.int64, copy=False)


def to_float32(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def numeric_array(values: Sequence[object], integer: bool) -> np.ndarray:
    """Converts a list, nested or not, to int64 or float32; never rounds a fraction to an integer."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise Invalid("nested lists must be rectangular") from None
    if array.size == 0:
        return array.astype(np.int64 if integer else np.float32)
    if integer and array.dtype.kind != "i":
        wrong = next((each for each in _flattened(values) if not _is_int64(each)), values[0])
        raise Invalid(f"expected 64-bit integers, not {show_value(wrong)}")
    if array.dtype.kind not in "biuf":
        others = (each for each in _flattened(values) if not isinstance(each, bool | float) and not _is_int64(each))
        wrong = next(others, values[0])
        kind = "numbers of 64 bits" if isinstance(wrong, int) else "numbers"
        raise Invalid(f"expected {kind}, not {show_value(wrong)}")
    return array.astype(np.int64) if integer else to_float32(array)


def _flattened(values: Sequence[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, list):
            yield from _flattened(value)
        else:
            yield value


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63
