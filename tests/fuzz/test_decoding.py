"""Decoders of arbitrary bytes return a value or raise RequestError, in time and memory bounded by the size of the
body."""

import json
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from trainhouse.schemas import codec
from trainhouse.schemas.chats.openai import ChatCompletionRequest, decoder
from trainhouse.schemas.checkpoints import LoadWeightsRequest
from trainhouse.schemas.codec import decode_model
from trainhouse.schemas.codec import trainhouse_wire_pb2 as wire
from trainhouse.schemas.errors import RequestError
from trainhouse.schemas.futures import RetrieveFuturesRequest
from trainhouse.schemas.models import CreateModelRequest, CreateSessionRequest
from trainhouse.schemas.sampling import SampleRequest
from trainhouse.schemas.training import ForwardBackwardRequest, OptimStepRequest

from .effort import MANY, effort

FEW = 100
_DENSE_BYTES = 1 << 20
_DECOMPRESSED_BYTES = 1 << 16
_SECONDS = 2.0
_BYTES_PER_BYTE = 400
"""Memory per byte of a body: JSON or protobuf needs only two bytes for a Python object."""
_FIXED_BYTES = 4 << 20

both = pytest.mark.parametrize(
    "num_examples", [FEW, pytest.param(MANY, marks=[pytest.mark.full, pytest.mark.timeout(7200)])]
)


@contextmanager
def bounded(num_bytes: int) -> Iterator[None]:
    """Asserts that the block raises nothing but RequestError and stays within these bytes of memory and _SECONDS."""
    tracemalloc.start()
    began_at = time.thread_time()
    try:
        yield
    except RequestError as error:
        assert error.message and 400 <= error.status < 500
        json.dumps({"detail": error.message}, ensure_ascii=False).encode()
    finally:
        seconds = time.thread_time() - began_at
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < num_bytes, f"{peak} bytes"
    assert seconds < _SECONDS, f"{seconds} s"


def decode_both(body: bytes) -> None:
    for content_type in (codec.PROTOBUF, codec.JSON):
        with bounded(_BYTES_PER_BYTE * len(body) + 4 * _DENSE_BYTES + _FIXED_BYTES):
            decoded = codec.decode_forward_backward(body, content_type, _DENSE_BYTES)
            assert isinstance(decoded, ForwardBackwardRequest) and decoded.data
        with bounded(_FIXED_BYTES):
            codec.peek_operation(body, content_type)


# Protobuf

SIZES = st.sampled_from([0, 1, 2, 3, 4, -1, -8, 2**31 - 1, 2**31, 2**62, -(2**63), 2**63 - 1])
INDICES = st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**63 - 1, -(2**63)]), max_size=5)
RAW = st.binary(max_size=24) | st.sampled_from([b"", bytes(4), bytes(8), bytes(16), b"\xff" * 8, b"\x00\x00\xc0\x7f"])


@st.composite
def hostile_tensors(draw: st.DrawFn) -> wire.Tensor:
    tensor = wire.Tensor(dtype=draw(st.integers(0, 7)))  # pyright: ignore[reportArgumentType]
    shape = tensor.DESCRIPTOR.fields_by_name["shape"]
    assert shape.cpp_type == shape.CPPTYPE_INT64
    tensor.shape.extend(draw(st.lists(SIZES, max_size=10)))
    match draw(st.sampled_from(["dense", "sparse", "none"])):
        case "dense":
            tensor.dense = draw(RAW)
        case "sparse":
            tensor.sparse_csr.values = draw(RAW)
            for part in ("crow_indices", "col_indices"):
                packed = draw(INDICES.map(lambda values: struct.pack(f"<{len(values)}q", *values)) | RAW)
                setattr(tensor.sparse_csr, part, packed)
    return tensor


@st.composite
def hostile_requests(draw: st.DrawFn) -> bytes:
    """Draws requests of one datum or of several equal ones, which may be decoded by columns."""
    message = wire.ForwardBackwardRequest(model_id=draw(st.text(max_size=3)), seq_id=draw(st.integers(-5, 2**31 - 1)))
    message.loss_fn = "cross_entropy"
    tensors = draw(st.dictionaries(st.sampled_from(["weights", "target_tokens", ""]), hostile_tensors(), max_size=2))
    tokens = draw(RAW)
    for _ in range(draw(st.sampled_from([1, 5]))):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens
        for name, tensor in tensors.items():
            datum.loss_fn_inputs.add(key=name, value=tensor)
    return message.SerializeToString()


@st.composite
def damaged(draw: st.DrawFn, bodies: st.SearchStrategy[bytes]) -> bytes:
    body = bytearray(draw(bodies))
    for _ in range(draw(st.integers(1, 3))):
        position = draw(st.integers(0, len(body)))
        body[position : position + draw(st.integers(0, 4))] = draw(st.binary(max_size=6))
    return bytes(body)


@pytest.mark.slow
@both
def test_protobuf_of_any_kind_is_decoded_or_refused(num_examples: int) -> None:
    @effort(num_examples)
    @given(body=hostile_requests() | damaged(hostile_requests()) | st.binary(max_size=300))
    def decode(body: bytes) -> None:
        decode_both(body)

    decode()


# zstd

CONTENTS = st.binary(max_size=200) | st.sampled_from(
    [bytes(_DECOMPRESSED_BYTES + change) for change in (-1, 0, 1, 2**22)]
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    content = draw(CONTENTS)
    for _ in range(draw(st.integers(1, 3))):
        compressor = zstandard.ZstdCompressor(
            write_content_size=draw(st.booleans()), write_checksum=draw(st.booleans())
        )
        content = compressor.compress(content)
    match draw(st.sampled_from(["whole", "cut", "more", "twice"])):
        case "cut":
            return content[: draw(st.integers(0, len(content)))]
        case "more":
            return content + draw(st.binary(min_size=1, max_size=5))
        case "twice":
            return content * 2
    return content


@both
def test_zstd_of_any_kind_is_decompressed_within_the_limit_or_refused(num_examples: int) -> None:
    @effort(num_examples)
    @given(body=frames() | damaged(frames()) | st.binary(max_size=100))
    @example(body=zstandard.compress(bytes(1 << 26)))
    def decompress(body: bytes) -> None:
        # A slice of a kilobyte grows to 128 KiB blocks; the pieces are joined into a second copy.
        with bounded(3 * _DECOMPRESSED_BYTES + (36 << 20)):
            size = codec.decompressed_size(body, "zstd", _DECOMPRESSED_BYTES)
            assert size <= _DECOMPRESSED_BYTES
            assert len(codec.decompress(body, "zstd", _DECOMPRESSED_BYTES)) <= size
        with bounded(_FIXED_BYTES + (36 << 20)):
            codec.peek_operation(body, codec.PROTOBUF)

    decompress()


# JSON

NUMBERS = st.sampled_from(
    [
        "0",
        "-1",
        "1.5",
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
        "-Infinity",
        "1" * 400,
        "9" * 5000,
        str(2**63),
        "-0",
        "1e-400",
    ]
)
TEXTS = st.sampled_from(
    ['"\\ud800"', '"\\u0000"', '"int64"', '"float32"', '"' + "a" * 3000 + '"', '"\\udfff\\ud800"', '"é"']
)
TENSOR_WORDS = ["data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices"]
WORDS = [*TENSOR_WORDS, "chunks", "tokens", "type", "\\ud800", "x"]
REQUEST_WORDS = [
    "session_id",
    "model_id",
    "prompt",
    "sampling_params",
    "lora_config",
    "adam_params",
    "messages",
    "tags",
]
PLACES = ["data", "model_input", "weights", "target_tokens", "loss_fn_config"]


def _object(pairs: list[tuple[str, str]]) -> str:
    """Formats a JSON object, in which a key may occur twice."""
    return "{" + ", ".join(f'"{key}": {value}' for key, value in pairs) + "}"


JSON_TEXTS = st.recursive(
    NUMBERS | TEXTS | st.sampled_from(["null", "true", "[]", "{}", "[" * 90 + "]" * 90, "[" * 5000 + "]" * 5000]),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(st.tuples(st.sampled_from(WORDS), inner), max_size=5).map(_object)
    ),
    max_leaves=10,
)


@st.composite
def tensors(draw: st.DrawFn) -> str:
    """Draws tensors that are almost valid, so that late checks are reached, too."""
    lists = st.lists(NUMBERS | st.sampled_from(["0", "1", "2"]), max_size=4).map(lambda items: f"[{', '.join(items)}]")
    names = draw(st.lists(st.sampled_from(TENSOR_WORDS), unique=True))
    pairs = [(name, draw(TEXTS if name == "dtype" else lists | JSON_TEXTS)) for name in names]
    return _object(pairs)


@both
def test_json_of_any_kind_is_decoded_or_refused(num_examples: int) -> None:
    @effort(num_examples)
    @given(value=JSON_TEXTS | tensors(), place=st.sampled_from(PLACES))
    def decode(value: str, place: str) -> None:
        parts = {"model_input": "[1]", "weights": "[1]", "target_tokens": "[1]"} | {place: value}
        inputs = _object([(name, parts[name]) for name in ("weights", "target_tokens")])
        datum = _object([("model_input", parts["model_input"]), ("loss_fn_inputs", inputs)])
        data = value if place == "data" else f"[{datum}]"
        fields = [("model_id", '"M"'), ("loss_fn", '"cross_entropy"'), ("data", data)]
        decode_both(_object([*fields, ("loss_fn_config", parts.get("loss_fn_config", "{}"))]).encode())

    decode()


@both
def test_tensors_of_any_kind_in_json_are_decoded_or_refused(num_examples: int) -> None:
    @effort(num_examples)
    @given(text=tensors() | JSON_TEXTS)
    def decode(text: str) -> None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return
        limit = _BYTES_PER_BYTE * len(text) + 4 * _DENSE_BYTES + _FIXED_BYTES
        with bounded(limit):
            assert codec.tensor_from_json(value, max_dense_bytes=_DENSE_BYTES).dtype in (np.int64, np.float32)
        with bounded(limit):
            codec.csr_layout_from_json(value)

    decode()


REQUESTS: dict[str, Callable[[bytes], object]] = {
    "load_weights": partial(decode_model, LoadWeightsRequest),
    "create_model": partial(decode_model, CreateModelRequest),
    "create_session": partial(decode_model, CreateSessionRequest),
    "optim_step": partial(decode_model, OptimStepRequest),
    "retrieve_futures": partial(decode_model, RetrieveFuturesRequest),
    "asample": partial(decode_model, SampleRequest),
    "chat": decoder(ChatCompletionRequest),
}


@both
def test_requests_of_any_kind_are_decoded_or_refused(num_examples: int) -> None:
    objects = st.lists(st.tuples(st.sampled_from([*REQUEST_WORDS, *WORDS]), JSON_TEXTS), max_size=6).map(_object)

    @effort(num_examples)
    @given(kind=st.sampled_from(list(REQUESTS)), text=objects | JSON_TEXTS)
    def decode(kind: str, text: str) -> None:
        with bounded(_BYTES_PER_BYTE * len(text) + _FIXED_BYTES):
            REQUESTS[kind](text.encode())

    decode()
