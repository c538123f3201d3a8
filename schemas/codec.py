"""Bytes <-> the types of this package: protobuf, JSON and zstd. The only file that knows wire formats.

What a client sent is refused with RequestError and a reason; what a server sent (the decoders for our client) with
ValueError. Arrays come out little-endian, C-contiguous, writable and of the dtypes that the types promise.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from . import trainhouse_wire_pb2 as wire
from .errors import RequestError
from .sampling import SampledSequence, SampleResponse, TopkLogprobs
from .training import Datum, ForwardBackwardOutput, ForwardBackwardRequest, ProvenanceSpan

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

MAX_DENSE_BYTES = 1 << 30
"""Most bytes that the sparse tensors of one request may take once dense."""

JsonObject: TypeAlias = dict[str, object]
"""An object as `json` reads and writes it."""


class Invalid(ValueError):
    """Bytes or JSON that are not what the protocol says; RequestError(400) where a client sent them."""


# Requests ------------------------------------------------------------------------------------------------------------


def decode_forward_backward(
    body: bytes, content_type: str, max_dense_bytes: int = MAX_DENSE_BYTES
) -> ForwardBackwardRequest:
    """A forward_backward body: the SDK's protobuf, the JSON of SDK 0.25, or flat JSON with plain lists.

    Loss inputs come out as the loss functions take them: `target_tokens` int64, all others float32, CSR made dense.
    Raises RequestError: 400 with the place and the reason, 415 for another content type.
    """
    with _refused():
        if is_protobuf(content_type):
            return _request_from_protobuf(body, _Budget(max_dense_bytes))
        if is_json(content_type):
            return _request_from_json(body, _Budget(max_dense_bytes))
    raise RequestError(f"content type {_shown(content_type)} is not supported: send {PROTOBUF} or {JSON}", 415)


def encode_forward_backward_request(request: ForwardBackwardRequest) -> bytes:
    """The protobuf body of a forward_backward (see ForwardBackwardRequest). Raises ValueError on an unknown dtype."""
    message = wire.ForwardBackwardRequest(
        model_id=request.model_id, seq_id=request.seq_id, loss_fn=request.loss_fn, forward_only=request.forward_only
    )
    if request.loss_weight != 1.0:
        message.loss_weight = request.loss_weight
    for key, value in request.loss_fn_config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config_v2[key].number = value
    for datum in request.data:
        _datum_to_protobuf(datum, message.data.add())
    return message.SerializeToString()


@dataclass(frozen=True)
class PeekedOperation:
    """The address of an operation, as far as it could be read."""

    model_id: str | None = None
    seq_id: int | None = None


def peek_operation(prefix: bytes, content_type: str) -> PeekedOperation:
    """model_id and seq_id from the first bytes of a body that is too large or too broken to decode.

    The prefix may be zstd-compressed. Never raises; what cannot be read is None.
    """
    prefix = prefix[:_PEEK_BYTES]
    if prefix.startswith(_ZSTD_MAGIC):
        prefix = _decompressed_prefix(prefix)
    return _peek_protobuf(prefix) if is_protobuf(content_type) else _peek_json(prefix)


def decompress(body: bytes, content_encoding: str | None, limit_bytes: int) -> bytes:
    """The body without its Content-Encoding (none, identity or zstd), of at most `limit_bytes`.

    Raises RequestError: 400 truncated or corrupt, 413 over the limit, 415 another encoding.
    """
    encoding = (content_encoding or "identity").strip().lower()
    if encoding == "identity":
        if len(body) > limit_bytes:
            raise RequestError(f"the body has {len(body)} bytes; the limit is {limit_bytes}", 413)
        return body
    if encoding == "zstd":
        return _decompress_zstd(body, limit_bytes)
    raise RequestError(f"content encoding {_shown(encoding)} is not supported: send zstd or none", 415)


def is_protobuf(content_type: str) -> bool:
    return _media_type(content_type) in (PROTOBUF, "application/protobuf")


def is_json(content_type: str) -> bool:
    media_type = _media_type(content_type)
    return media_type in ("", JSON) or media_type.endswith("+json")


def tensor_from_json(
    value: object, fill: float = 0, name: str = "tensor", max_dense_bytes: int = MAX_DENSE_BYTES
) -> np.ndarray:
    """A dense int64 or float32 array from JSON TensorData {data, dtype, shape?, sparse_crow_indices?, ...}.

    fill: the value of the cells that a CSR tensor leaves out (-1 for target_prompt_logprobs). Raises RequestError.
    """
    with _refused(), _at(name):
        return _tensor_from_json(value, fill, _Budget(max_dense_bytes), integer=None)


def tensor_to_json(array: np.ndarray) -> JsonObject:
    """Dense TensorData: {data, dtype, shape}, NaN and infinities as null."""
    array = _public_dtype(array)
    return {"data": _numbers(array), "dtype": array.dtype.name, "shape": list(array.shape)}


@dataclass(frozen=True, eq=False)
class CsrLayout:
    """Which cells of a [rows, columns] tensor a CSR tensor lists: crow_indices int64 [rows + 1], col_indices int64."""

    shape: tuple[int, int]
    crow_indices: np.ndarray
    col_indices: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """int64: the row of each listed cell."""
        return np.repeat(np.arange(self.shape[0], dtype=np.int64), np.diff(self.crow_indices))


def csr_layout_from_json(value: object) -> CsrLayout | None:
    """The layout of JSON TensorData, None where it is dense: the answer to a CSR question keeps its layout.

    Raises RequestError.
    """
    with _refused():
        tensor = _json_object(value, "the tensor")
        return _csr_layout_from_json(tensor, _json_shape(tensor)) if _is_csr(tensor) else None


# Results -------------------------------------------------------------------------------------------------------------


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
    _parse(message, body)
    outputs = [datum for record in message.loss_fn_outputs for datum in _read_record(record)]
    return ForwardBackwardOutput(tuple(outputs), dict(message.metrics), message.loss_fn_output_type)


def encode_sample_response(response: SampleResponse, target_layout: CsrLayout | None = None) -> bytes:
    """Protobuf. target_layout: that of the request's target_prompt_logprobs, if it was CSR."""
    message = wire.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        _write_sequence(sequence, message.sequences.add())
    if response.prompt_logprobs is not None:
        message.prompt_logprobs = _bytes(response.prompt_logprobs, np.float32)
    if response.topk_prompt_logprobs is not None:
        _write_topk(response.topk_prompt_logprobs, message.topk_prompt_logprobs)
    if response.target_prompt_logprobs is not None:
        _write_target_logprobs(response.target_prompt_logprobs, target_layout, message.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None and response.prompt_alt_logprobs is not None:
        _write_tensor(response.prompt_alt_tokens, message.prompt_alt_tokens.tokens)
        _write_tensor(response.prompt_alt_logprobs, message.prompt_alt_tokens.logprobs)
    return message.SerializeToString()


def encode_sample_response_json(response: SampleResponse) -> JsonObject:
    """For a reply in JSON: what was not asked for is absent, NaN is null, tensors are dense TensorData.

    Top-k rows are lists of [token_id, logprob], null where nothing was scored.
    """
    answer: JsonObject = {"sequences": [_sequence_to_json(sequence) for sequence in response.sequences]}
    if response.prompt_logprobs is not None:
        answer["prompt_logprobs"] = _numbers(response.prompt_logprobs)
    if response.topk_prompt_logprobs is not None:
        answer["topk_prompt_logprobs"] = _topk_to_json(response.topk_prompt_logprobs)
    if response.target_prompt_logprobs is not None:
        answer["target_prompt_logprobs"] = tensor_to_json(response.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None and response.prompt_alt_logprobs is not None:
        answer["prompt_alt_tokens"] = {
            "tokens": tensor_to_json(response.prompt_alt_tokens),
            "logprobs": tensor_to_json(response.prompt_alt_logprobs),
        }
    return {**answer, "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens, "type": "sample"}


def decode_sample_response(body: bytes) -> SampleResponse:
    """From protobuf. Raises ValueError."""
    message = wire.SampleResponse()
    _parse(message, body)
    budget = _Budget(MAX_DENSE_BYTES)
    has_alternatives = message.HasField("prompt_alt_tokens")
    return SampleResponse(
        sequences=tuple(_read_sequence(sequence) for sequence in message.sequences),
        prompt_logprobs=_array(message.prompt_logprobs, np.float32) if message.prompt_logprobs else None,
        topk_prompt_logprobs=_read_topk(message.topk_prompt_logprobs) if message.topk_prompt_logprobs.k else None,
        target_prompt_logprobs=_read_tensor(message.target_prompt_logprobs, budget)
        if message.HasField("target_prompt_logprobs")
        else None,
        prompt_alt_tokens=_read_tensor(message.prompt_alt_tokens.tokens, budget).astype(np.int32)
        if has_alternatives
        else None,
        prompt_alt_logprobs=_read_tensor(message.prompt_alt_tokens.logprobs, budget) if has_alternatives else None,
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
    )


# Refusing ------------------------------------------------------------------------------------------------------------


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except Invalid as error:
        raise RequestError(str(error), 400) from None


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Says where in the request an Invalid arose."""
    try:
        yield
    except Invalid as error:
        raise Invalid(f"{place}: {error}") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class _Budget:
    """Bounds what the sparse tensors of one request allocate together."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def take(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        if self.num_bytes < 0:
            raise Invalid(
                f"sparse tensors of one request exceed the limit of dense bytes by {-self.num_bytes}: "
                "send fewer datums in one call, or narrower tensors"
            )


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


# Protobuf requests ---------------------------------------------------------------------------------------------------


def _parse(
    message: wire.ForwardBackwardRequest | wire.ForwardBackwardOutput | wire.SampleResponse, body: bytes
) -> None:
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Invalid(f"the body is not a valid protobuf {type(message).__name__}: {error}") from None


def _request_from_protobuf(body: bytes, budget: _Budget) -> ForwardBackwardRequest:
    message = wire.ForwardBackwardRequest()
    _parse(message, body)
    return _checked(
        ForwardBackwardRequest(
            model_id=message.model_id,
            seq_id=message.seq_id,
            data=tuple(_datum_from_protobuf(index, datum, budget) for index, datum in enumerate(message.data)),
            loss_fn=message.loss_fn,
            loss_fn_config=_loss_config_from_protobuf(message),
            forward_only=message.forward_only,
            loss_weight=message.loss_weight if message.HasField("loss_weight") else 1.0,
        )
    )


def _checked(request: ForwardBackwardRequest) -> ForwardBackwardRequest:
    if not request.model_id:
        raise Invalid("model_id is missing: send the id that create_model answered")
    if not request.data:
        raise Invalid("data is empty: send at least one datum")
    if not math.isfinite(request.loss_weight):
        raise Invalid(f"loss_weight is {request.loss_weight}: it must be finite")
    return request


def _loss_config_from_protobuf(message: wire.ForwardBackwardRequest) -> Mapping[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    return {
        key: value.text if value.WhichOneof("value") == "text" else value.number
        for key, value in message.loss_fn_config_v2.items()
    }


def _datum_from_protobuf(index: int, message: wire.Datum, budget: _Budget) -> Datum:
    try:
        return Datum(
            tokens=_tokens_from_protobuf(message.model_input),
            loss_fn_inputs={
                name: _input_from_protobuf(name, tensor, budget) for name, tensor in message.loss_fn_inputs.items()
            },
            model_input_spans=tuple(_span_from_protobuf(span) for span in message.model_input_spans),
            loss_fn_input_spans=tuple(_span_from_protobuf(span) for span in message.loss_fn_input_spans),
        )
    except Invalid as error:
        raise Invalid(f"data[{index}]: {error}") from None


def _tokens_from_protobuf(chunks: Sequence[wire.Chunk]) -> np.ndarray:
    pieces = [_chunk_tokens(chunk) for chunk in chunks]
    if not pieces or not any(piece.size for piece in pieces):
        raise Invalid("model_input has no tokens")
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _chunk_tokens(chunk: wire.Chunk) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind == "encoded_text":
        return _array(chunk.encoded_text.tokens, np.int32)
    raise Invalid(_refusal_of_chunk(kind))


def _refusal_of_chunk(kind: object) -> str:
    return f"a model_input chunk of type {_shown(kind)} is not supported: send encoded_text chunks only"


def _input_from_protobuf(name: str, tensor: wire.Tensor, budget: _Budget) -> np.ndarray:
    try:
        return _as_loss_input(name, _read_tensor(tensor, budget))
    except Invalid as error:
        raise Invalid(f"loss_fn_inputs[{_shown(name)}]: {error}") from None


def _is_integer_input(name: str) -> bool:
    return name == "target_tokens"


def _as_loss_input(name: str, array: np.ndarray) -> np.ndarray:
    """The dtype that losses take: int64 for target_tokens, float32 for everything else."""
    if not _is_integer_input(name):
        return _to_float32(array)
    if array.dtype.kind == "f":
        raise Invalid(f"{name} must be int64, not {array.dtype.name}")
    return array.astype(np.int64, copy=False)


def _span_from_protobuf(message: wire.ProvenanceSpan) -> ProvenanceSpan:
    match message.WhichOneof("span"):
        case "prompt_tokens":
            span = message.prompt_tokens
            return _checked_span(ProvenanceSpan("prompt", span.sequence_id, span.offset, span.length))
        case "sampled_tokens":
            span = message.sampled_tokens
            return _checked_span(ProvenanceSpan("sampled", span.sequence_id, span.offset, span.length))
        case _:
            raise Invalid("a provenance span says neither prompt_tokens nor sampled_tokens")


def _checked_span(span: ProvenanceSpan) -> ProvenanceSpan:
    if not span.sequence_id or span.offset < 0 or span.length < 0:
        raise Invalid(f"provenance span {_shown(span)} needs a sequence_id, offset >= 0 and length >= 0")
    return span


def _datum_to_protobuf(datum: Datum, message: wire.Datum) -> None:
    message.model_input.add().encoded_text.tokens = _bytes(datum.tokens, np.int32)
    for name, array in datum.loss_fn_inputs.items():
        _write_tensor(array, message.loss_fn_inputs[name])
    for span in datum.model_input_spans:
        _write_span(span, message.model_input_spans.add())
    for span in datum.loss_fn_input_spans:
        _write_span(span, message.loss_fn_input_spans.add())


def _write_span(span: ProvenanceSpan, message: wire.ProvenanceSpan) -> None:
    arm = message.prompt_tokens if span.kind == "prompt" else message.sampled_tokens
    arm.sequence_id, arm.offset, arm.length = span.sequence_id, span.offset, span.length


# Tensors in protobuf -------------------------------------------------------------------------------------------------

_DTYPES: dict[int, np.dtype] = {
    wire.DTYPE_FLOAT32: np.dtype("<f4"),
    wire.DTYPE_INT64: np.dtype("<i8"),
    wire.DTYPE_INT32: np.dtype("<i4"),
    wire.DTYPE_BFLOAT16: np.dtype("<u2"),
}
_DTYPE_NUMBERS: dict[str, wire.DType] = {
    "float32": wire.DTYPE_FLOAT32,
    "int64": wire.DTYPE_INT64,
    "int32": wire.DTYPE_INT32,
}
_MAX_DIMENSIONS = 8


def _array(data: bytes, dtype: np.typing.DTypeLike) -> np.ndarray:
    """A writable copy: torch warns about arrays over read-only bytes."""
    little = np.dtype(dtype).newbyteorder("<")
    if len(data) % little.itemsize:
        raise Invalid(f"{len(data)} bytes are not a whole number of {little.name} values")
    return np.frombuffer(data, dtype=little).astype(dtype)


def _bytes(array: np.ndarray, dtype: np.typing.DTypeLike) -> bytes:
    return array.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()


def _widened(data: bytes, dtype_number: int) -> np.ndarray:
    """Flat values; bfloat16 (the upper half of a float32) comes out as float32."""
    dtype = _DTYPES.get(dtype_number)
    if dtype is None:
        raise Invalid(f"unknown dtype {dtype_number}: send 1 float32, 2 int64, 3 int32 or 4 bfloat16")
    values = _array(data, dtype)
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype_number == wire.DTYPE_BFLOAT16 else values


def _read_tensor(tensor: wire.Tensor, budget: _Budget) -> np.ndarray:
    """Dense, whichever encoding; without a shape one-dimensional."""
    shape = _checked_shape(tensor.shape)
    match tensor.WhichOneof("encoding"):
        case "dense":
            return _shaped(_widened(tensor.dense, tensor.dtype), shape)
        case "sparse_csr":
            csr = tensor.sparse_csr
            crow_indices, col_indices = _array(csr.crow_indices, np.int64), _array(csr.col_indices, np.int64)
            values = _widened(csr.values, tensor.dtype)
            return _densified(values, _checked_csr(shape, crow_indices, col_indices), 0, budget)
        case _:
            # proto3 writes nothing for an empty tensor whose bytes were never set
            return _shaped(_widened(b"", tensor.dtype), shape)


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > _MAX_DIMENSIONS or any(not 0 <= size < 2**31 for size in shape):
        raise Invalid(f"shape {_shown(list(shape))} is out of bounds: at most {_MAX_DIMENSIONS} sizes from 0 to 2^31-1")
    return tuple(shape)


def _shaped(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if not shape:
        return values
    if values.size != math.prod(shape):
        raise Invalid(f"shape {list(shape)} asks for {math.prod(shape)} values; the tensor has {values.size}")
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
        raise Invalid(f"a CSR column index lies outside of the {num_columns} columns")
    layout = CsrLayout((num_rows, num_columns), crow_indices, col_indices)
    rows = layout.rows
    if ((np.diff(col_indices) <= 0) & (rows[1:] == rows[:-1])).any():
        raise Invalid("CSR column indices must rise within a row")
    return layout


def _densified(values: np.ndarray, layout: CsrLayout, fill: float, budget: _Budget) -> np.ndarray:
    if values.size != layout.col_indices.size:
        raise Invalid(f"a CSR tensor has {values.size} values for {layout.col_indices.size} column indices")
    budget.take(math.prod(layout.shape) * values.itemsize)
    dense = np.full(layout.shape, fill, dtype=values.dtype)
    dense[layout.rows, layout.col_indices] = values
    return dense


def _to_float32(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def _public_dtype(array: np.ndarray) -> np.ndarray:
    """float32 or int64, the two dtypes that TensorData names."""
    return _to_float32(array) if array.dtype.kind == "f" else array.astype(np.int64, copy=False)


def _write_tensor(array: np.ndarray, message: wire.Tensor) -> None:
    array = array if array.dtype.name in _DTYPE_NUMBERS else _public_dtype(array)
    message.dense = _bytes(array, array.dtype)
    message.dtype = _DTYPE_NUMBERS[array.dtype.name]
    message.shape.extend(array.shape)


# JSON requests -------------------------------------------------------------------------------------------------------


def _request_from_json(body: bytes, budget: _Budget) -> ForwardBackwardRequest:
    request = _json_object(_loaded(body), "the body")
    forward_only = request.get("forward_only", "forward_input" in request)
    nested = request.get("forward_backward_input", request.get("forward_input"))
    content = request if nested is None else _json_object(nested, "forward_backward_input")
    data = _json_list(content.get("data", []), "data")
    return _checked(
        ForwardBackwardRequest(
            model_id=_json_text(request.get("model_id", ""), "model_id"),
            seq_id=_json_integer(request.get("seq_id"), "seq_id"),
            data=tuple(_datum_from_json(index, datum, budget) for index, datum in enumerate(data)),
            loss_fn=_json_text(content.get("loss_fn", ""), "loss_fn"),
            loss_fn_config=_loss_config_from_json(content.get("loss_fn_config")),
            forward_only=_json_boolean(forward_only, "forward_only"),
            loss_weight=_json_number(request.get("loss_weight", 1.0), "loss_weight"),
        )
    )


def _loaded(body: bytes) -> object:
    try:
        return json.loads(body)
    except RecursionError:
        raise Invalid("the body is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise Invalid(f"the body is not valid JSON: {error}") from None


def _datum_from_json(index: int, value: object, budget: _Budget) -> Datum:
    with _at(f"data[{index}]"):
        datum = _json_object(value, "a datum")
        inputs = _json_object(datum.get("loss_fn_inputs", {}), "loss_fn_inputs")
        return Datum(
            tokens=_tokens_from_json(datum.get("model_input")),
            loss_fn_inputs={name: _input_from_json(name, tensor, budget) for name, tensor in inputs.items()},
            model_input_spans=_spans_from_json(datum.get("model_input_spans"), "model_input_spans"),
            loss_fn_input_spans=_spans_from_json(datum.get("loss_fn_input_spans"), "loss_fn_input_spans"),
        )


def _tokens_from_json(value: object) -> np.ndarray:
    """`model_input`: {"chunks": [...]}, or the token ids as a plain list."""
    if isinstance(value, list):
        chunks: list[object] = [{"type": "encoded_text", "tokens": value}]
    else:
        chunks = _json_list(_json_object(value, "model_input").get("chunks"), "model_input.chunks")
    pieces = [_chunk_tokens_from_json(chunk) for chunk in chunks]
    if not pieces or not any(piece.size for piece in pieces):
        raise Invalid("model_input has no tokens")
    return np.concatenate(pieces)


def _chunk_tokens_from_json(value: object) -> np.ndarray:
    chunk = _json_object(value, "a chunk")
    kind = chunk.get("type", "encoded_text")
    if kind != "encoded_text":
        raise Invalid(_refusal_of_chunk(kind))
    with _at("tokens"):
        tokens = _numeric(_json_list(chunk.get("tokens"), "tokens"), integer=True)
        if tokens.ndim != 1:
            raise Invalid("token ids must be a flat list")
        if tokens.size and not -(2**31) <= tokens.min() <= tokens.max() < 2**31:
            raise Invalid("a token id does not fit 32 bits")
        return tokens.astype(np.int32)


def _input_from_json(name: str, value: object, budget: _Budget) -> np.ndarray:
    _json_text(name, "an input name")
    with _at(f"loss_fn_inputs[{_shown(name)}]"):
        if isinstance(value, list):
            return _as_loss_input(name, _numeric(value, integer=_is_integer_input(name)))
        return _as_loss_input(name, _tensor_from_json(value, 0, budget, integer=_is_integer_input(name)))


def _tensor_from_json(value: object, fill: float, budget: _Budget, integer: bool | None) -> np.ndarray:
    """integer: the dtype where the tensor names none (None: it must name one)."""
    tensor = _json_object(value, "a tensor")
    dtype = tensor.get("dtype", {True: "int64", False: "float32", None: None}[integer])
    if dtype not in ("int64", "float32"):
        raise Invalid(f"unknown dtype {_shown(dtype)}: send int64 or float32")
    values = _numeric(_json_list(tensor.get("data"), "data"), integer=dtype == "int64")
    shape = _json_shape(tensor)
    if _is_csr(tensor):
        return _densified(values.reshape(-1), _csr_layout_from_json(tensor, shape), fill, budget)
    return _shaped(values, shape)


def _is_csr(tensor: JsonObject) -> bool:
    return tensor.get("sparse_crow_indices") is not None


def _json_shape(tensor: JsonObject) -> tuple[int, ...]:
    shape = tensor.get("shape")
    if shape is None:
        return ()
    return _checked_shape([_json_integer(size, "shape") for size in _json_list(shape, "shape")])


def _csr_layout_from_json(tensor: JsonObject, shape: tuple[int, ...]) -> CsrLayout:
    crow_indices = _numeric(_json_list(tensor["sparse_crow_indices"], "sparse_crow_indices"), integer=True)
    col_indices = _numeric(_json_list(tensor.get("sparse_col_indices"), "sparse_col_indices"), integer=True)
    return _checked_csr(shape, crow_indices.reshape(-1), col_indices.reshape(-1))


def _numeric(values: Sequence[object], integer: bool) -> np.ndarray:
    """A list, nested or not, as int64 or float32; never rounds a fraction to an integer."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise Invalid("nested lists must be rectangular") from None
    if array.size == 0:
        return array.astype(np.int64 if integer else np.float32)
    if integer and array.dtype.kind != "i":
        raise Invalid(f"expected 64-bit integers, not {_shown(values[0])} ...")
    if array.dtype.kind not in "biuf":
        raise Invalid(f"expected numbers, not {_shown(values[0])} ...")
    return array.astype(np.int64) if integer else _to_float32(array)


def _spans_from_json(value: object, place: str) -> tuple[ProvenanceSpan, ...]:
    return tuple(_span_from_json(_json_object(span, place)) for span in _json_list(value or [], place))


def _span_from_json(span: JsonObject) -> ProvenanceSpan:
    kind = span.get("kind")
    if kind not in ("prompt", "sampled"):
        raise Invalid(f"provenance span kind {_shown(kind)} must be prompt or sampled")
    return _checked_span(
        ProvenanceSpan(
            kind="prompt" if kind == "prompt" else "sampled",
            sequence_id=_json_text(span.get("sequence_id", ""), "sequence_id"),
            offset=_json_integer(span.get("offset", 0), "offset"),
            length=_json_integer(span.get("length"), "length"),
        )
    )


def _loss_config_from_json(value: object) -> Mapping[str, float | str]:
    config = _json_object({} if value is None else value, "loss_fn_config")
    return {
        _json_text(key, "a loss_fn_config key"): _json_text(entry, key)
        if isinstance(entry, str)
        else _json_number(entry, f"loss_fn_config[{_shown(key)}]")
        for key, entry in config.items()
    }


def _json_object(value: object, what: str) -> JsonObject:
    if not isinstance(value, dict):
        raise Invalid(f"{what} must be an object, not {_shown(value)}")
    return value


def _json_list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise Invalid(f"{what} must be a list, not {_shown(value)}")
    return value


def _json_text(value: object, what: str) -> str:
    # JSON can spell half a surrogate pair, which no database or header takes.
    if not isinstance(value, str) or (not value.isascii() and re.search("[\ud800-\udfff]", value)):
        raise Invalid(f"{what} must be a string, not {_shown(value)}")
    return value


def _json_integer(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise Invalid(f"{what} must be an integer, not {_shown(value)}")
    return value


def _json_number(value: object, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e308:
        raise Invalid(f"{what} must be a number, not {_shown(value)}")
    return float(value)


def _json_boolean(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise Invalid(f"{what} must be true or false, not {_shown(value)}")
    return value


# Forward/backward outputs --------------------------------------------------------------------------------------------


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
    arrays = arrays if arrays[0].dtype.name in _DTYPE_NUMBERS else [_public_dtype(array) for array in arrays]
    message.data = b"".join([_bytes(array, array.dtype) for array in arrays])
    message.offsets = _bytes(np.cumsum([0, *(array.nbytes for array in arrays)]), np.int64)
    message.dtype = _DTYPE_NUMBERS[arrays[0].dtype.name]
    message.trailing_shape.extend(arrays[0].shape[1:])


def _read_record(record: wire.ArrayRecord) -> list[dict[str, np.ndarray]]:
    columns = {name: _read_batched(batched) for name, batched in record.fields.items()}
    if any(len(column) != record.num_datums for column in columns.values()):
        raise Invalid(f"an output record of {record.num_datums} datums has a field of another length")
    return [{name: column[index] for name, column in columns.items()} for index in range(record.num_datums)]


def _read_batched(message: wire.BatchedTensor) -> list[np.ndarray]:
    values = _widened(message.data, message.dtype)
    offsets = _array(message.offsets, np.int64) // _DTYPES[message.dtype].itemsize
    trailing_shape = _checked_shape(message.trailing_shape)
    if not offsets.size or offsets[0] != 0 or offsets[-1] != values.size or (np.diff(offsets) < 0).any():
        raise Invalid("the offsets of an output field do not tile its data")
    row = math.prod(trailing_shape)
    return [
        _shaped(values[start:stop], ((stop - start) // row if row else 0, *trailing_shape))
        for start, stop in itertools.pairwise(offsets.tolist())
    ]


# Sample responses ----------------------------------------------------------------------------------------------------


def _write_sequence(sequence: SampledSequence, message: wire.SampledSequence) -> None:
    message.stop_reason = wire.STOP_REASON_STOP if sequence.stop_reason == "stop" else wire.STOP_REASON_LENGTH
    message.tokens = _bytes(sequence.tokens, np.int32)
    message.logprobs = _bytes(sequence.logprobs, np.float32)
    if sequence.topk_logprobs is not None:
        _write_topk(sequence.topk_logprobs, message.topk_sampled_logprobs)


def _write_topk(topk: TopkLogprobs, message: wire.TopkLogprobs) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = _bytes(topk.token_ids, np.int32)
    message.logprobs = _bytes(topk.logprobs, np.float32)


def _write_target_logprobs(logprobs: np.ndarray, layout: CsrLayout | None, message: wire.Tensor) -> None:
    if layout is None:
        return _write_tensor(logprobs, message)
    message.dtype = wire.DTYPE_FLOAT32
    message.shape.extend(layout.shape)
    message.sparse_csr.values = _bytes(logprobs[layout.rows, layout.col_indices], np.float32)
    message.sparse_csr.crow_indices = _bytes(layout.crow_indices, np.int64)
    message.sparse_csr.col_indices = _bytes(layout.col_indices, np.int64)
    return None


def _read_sequence(message: wire.SampledSequence) -> SampledSequence:
    return SampledSequence(
        stop_reason="length" if message.stop_reason == wire.STOP_REASON_LENGTH else "stop",
        tokens=_array(message.tokens, np.int32),
        logprobs=_array(message.logprobs, np.float32),
        topk_logprobs=_read_topk(message.topk_sampled_logprobs) if message.topk_sampled_logprobs.k else None,
    )


def _read_topk(message: wire.TopkLogprobs) -> TopkLogprobs:
    shape = (message.length, message.k)
    return TopkLogprobs(
        token_ids=_shaped(_array(message.token_ids, np.int32), shape),
        logprobs=_shaped(_array(message.logprobs, np.float32), shape),
    )


def _sequence_to_json(sequence: SampledSequence) -> JsonObject:
    answer: JsonObject = {
        "stop_reason": sequence.stop_reason,
        "tokens": sequence.tokens.tolist(),
        "logprobs": _numbers(sequence.logprobs),
    }
    if sequence.topk_logprobs is not None:
        answer["topk_logprobs"] = _topk_to_json(sequence.topk_logprobs)
    return answer


_EMPTY_LOGPROB = -99999.0


def _topk_to_json(topk: TopkLogprobs) -> list[list[list[float]] | None]:
    rows = zip(topk.token_ids.tolist(), topk.logprobs.tolist(), strict=True)
    cells = (
        [[token, logprob] for token, logprob in zip(*row, strict=True) if logprob != _EMPTY_LOGPROB] for row in rows
    )
    return [row or None for row in cells]


def _numbers(array: np.ndarray) -> list[float | None]:
    """Flat; what JSON cannot say is None."""
    values = array.ravel().tolist()
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return values
    return [value if math.isfinite(value) else None for value in values]


# Peeking -------------------------------------------------------------------------------------------------------------

_PEEK_BYTES = 1 << 20
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_ID_BYTES = 1024


def _peek_protobuf(prefix: bytes) -> PeekedOperation:
    """Fields 1 and 2 of ForwardBackwardRequest, as far as the bytes go."""
    found: dict[int, bytes | int] = {}
    for number, value in _protobuf_fields(prefix):
        found.setdefault(number, value)
        if 1 in found and 2 in found:
            break
    model_id, seq_id = found.get(1), found.get(2)
    return PeekedOperation(
        _peeked_id(model_id) if isinstance(model_id, bytes) else None,
        seq_id if isinstance(seq_id, int) and seq_id < 2**31 else None,
    )


def _peeked_id(model_id: bytes) -> str | None:
    try:
        return model_id.decode() if 0 < len(model_id) <= _MAX_ID_BYTES else None
    except UnicodeDecodeError:
        return None


def _protobuf_fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(field number, value) of varint and length-delimited fields until the bytes end or make no sense."""
    position = 0
    while (tag := _varint(data, position)) is not None:
        number, wire_type, position = tag.value >> 3, tag.value & 7, tag.end
        if wire_type in (1, 5):
            position += 8 if wire_type == 1 else 4
            continue
        if wire_type not in (0, 2) or (value := _varint(data, position)) is None:
            return
        position = value.end
        if wire_type == 0:
            yield number, value.value
            continue
        position += value.value
        if position > len(data):
            return
        yield number, data[value.end : position]


@dataclass(frozen=True)
class _Varint:
    value: int
    end: int


def _varint(data: bytes, position: int) -> _Varint | None:
    value = 0
    for index, byte in enumerate(data[position : position + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return _Varint(value, position + index + 1)
    return None


_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}\[\]:]|[^\s{}\[\],:"]++')


def _peek_json(prefix: bytes) -> PeekedOperation:
    """The values of the keys at the top level of an object that may be cut off or broken anywhere."""
    text = prefix.decode(errors="replace")
    if not text.lstrip().startswith("{"):
        return PeekedOperation()
    found: dict[str, str] = {}
    depth, key, previous = 0, "", ""
    for token in _JSON_TOKENS.findall(text):
        if depth == 1 and previous == ":" and key in ('"model_id"', '"seq_id"'):
            found.setdefault(key, token)
        depth += (token in "{[") - (token in "}]")
        key, previous = previous, token
        if len(found) == 2:
            break
    model_id, seq_id = found.get('"model_id"', ""), found.get('"seq_id"', "")
    return PeekedOperation(_peeked_text(model_id), int(seq_id) if re.fullmatch("[0-9]{1,18}", seq_id) else None)


def _peeked_text(token: str) -> str | None:
    if not token.startswith('"'):
        return None
    try:
        return _peeked_id(json.loads(token).encode())
    except ValueError:
        return None


# zstd ----------------------------------------------------------------------------------------------------------------

_SLICE_BYTES = 1024
"""Input given to the decompressor at a time: 1 KiB grows to 32 MiB at the most, so a bomb is stopped soon."""


def _decompress_zstd(body: bytes, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    for piece in _zstd_pieces(body):
        size += len(piece)
        if size > limit_bytes:
            raise RequestError(f"the body has more than {limit_bytes} bytes once decompressed, which is the limit", 413)
        pieces.append(piece)
    return b"".join(pieces)


def _zstd_pieces(body: bytes) -> Iterator[bytes]:
    """What the one frame in `body` decompresses to. Raises RequestError on anything else."""
    try:
        import zstandard  # not in the bare client install
    except ImportError:
        raise RequestError("this server cannot read zstd: send the body uncompressed", 415) from None
    frame = zstandard.ZstdDecompressor().decompressobj()
    try:
        for start in range(0, len(body), _SLICE_BYTES):
            if frame.eof:
                break
            yield frame.decompress(body[start : start + _SLICE_BYTES])
            end = min(start + _SLICE_BYTES, len(body))
            if frame.eof and (frame.unused_data or end < len(body)):
                raise RequestError("the zstd body goes on after its frame: send one frame")
    except zstandard.ZstdError as error:
        raise RequestError(f"the body is not valid zstd: {error}") from None
    if not frame.eof:
        raise RequestError(f"the zstd body is truncated after {len(body)} bytes")


def _decompressed_prefix(prefix: bytes) -> bytes:
    pieces: list[bytes] = []
    try:
        for piece in _zstd_pieces(prefix):
            pieces.append(piece)
            if sum(map(len, pieces)) > _PEEK_BYTES:
                break
    except RequestError:
        pass  # cut off or broken; what came before is what can be peeked at
    return b"".join(pieces)[:_PEEK_BYTES]
