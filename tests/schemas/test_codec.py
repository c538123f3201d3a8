"""The codec compared with the official SDK's conversions and with its own JSON form, and on hostile bytes."""

import json
import pickle
import re
import struct
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from tinker import types as sdk
from tinker.proto import request_conv, response_conv
from tinker.proto import tinker_public_pb2 as public_pb
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest as SdkRequest
from tinker.types.provenance_spans import PromptProvenanceSpan, SampledProvenanceSpan
from trainhouse.schemas import codec
from trainhouse.schemas.codec import trainhouse_wire_pb2 as wire
from trainhouse.schemas.drafts import BuildVocabMapRequest, CaptureRequest
from trainhouse.schemas.errors import RequestError
from trainhouse.schemas.sampling import GuessCounts, SampledSequence, SampleRequest, SampleResponse, TopkLogprobs
from trainhouse.schemas.training import (
    Datum,
    DraftFeatures,
    FeatureLocation,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    OptimStepRequest,
    ProvenanceSpan,
)

# One datum: tokens 1, 2, 3; targets 2, 3, 4; weights 0, 1, 1; cross_entropy; model "M"; seq 1. Recorded on the wire.
CAPTURED = bytes.fromhex(
    "0a014d10011a640a100a0e0a0c010000000200000003000000121e0a077765696768747312130a0c000000000000803f0000803f1801220103"
    "12300a0d7461726765745f746f6b656e73121f0a180200000000000000030000000000000004000000000000001802220103"
    "220d63726f73735f656e74726f7079"
)


def sdk_request(data: list[sdk.Datum], **changes: object) -> bytes:
    """Returns the protobuf that the SDK sends."""
    content = {"data": data, "loss_fn": "cross_entropy", "loss_fn_config": None, **changes}
    request = SdkRequest(
        model_id="s:train:0",
        seq_id=7,
        forward_backward_input=ForwardBackwardInput(**content),  # pyright: ignore[reportArgumentType]
    )
    return request_conv.forward_backward_request_to_proto(request).SerializeToString()


def sdk_datum(tokens: list[int], **inputs: torch.Tensor | sdk.TensorData) -> sdk.Datum:
    tensors = {
        name: value if isinstance(value, sdk.TensorData) else sdk.TensorData.from_torch(value)
        for name, value in inputs.items()
    }
    return sdk.Datum(model_input=sdk.ModelInput.from_ints(tokens), loss_fn_inputs=tensors)


def decode(body: bytes) -> ForwardBackwardRequest:
    return codec.decode_forward_backward(body, codec.PROTOBUF)


def decode_json(value: object) -> ForwardBackwardRequest:
    return codec.decode_forward_backward(json.dumps(value).encode(), codec.JSON)


def assert_same_array(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def assert_same_request(found: ForwardBackwardRequest, expected: ForwardBackwardRequest) -> None:
    for name in ("model_id", "seq_id", "loss_fn", "loss_fn_config", "forward_only", "loss_weight", "capture_for"):
        assert getattr(found, name) == getattr(expected, name)
    assert len(found.data) == len(expected.data)
    for ours, theirs in zip(found.data, expected.data, strict=True):
        assert_same_array(ours.tokens, theirs.tokens)
        assert ours.feature_ref == theirs.feature_ref
        assert ours.loss_fn_inputs.keys() == theirs.loss_fn_inputs.keys()
        for name, array in ours.loss_fn_inputs.items():
            assert_same_array(array, theirs.loss_fn_inputs[name])
        assert ours.model_input_spans == theirs.model_input_spans
        assert ours.loss_fn_input_spans == theirs.loss_fn_input_spans


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def int64(values: object) -> np.ndarray:
    return np.array(values, np.int64)


def float32(values: object) -> np.ndarray:
    return np.array(values, np.float32)


# forward_backward requests


def test_the_captured_request_decodes_and_encodes_to_the_same_message() -> None:
    request = decode(CAPTURED)
    inputs = {"target_tokens": int64([2, 3, 4]), "weights": float32([0, 1, 1])}
    assert_same_request(request, ForwardBackwardRequest("M", 1, (Datum(int32(1, 2, 3), inputs),), "cross_entropy"))
    ours, theirs = public_pb.ForwardBackwardRequest(), public_pb.ForwardBackwardRequest()
    ours.ParseFromString(codec.encode_forward_backward_request(request))
    theirs.ParseFromString(CAPTURED)
    assert ours == theirs


def test_dense_inputs_of_the_sdk_decode_for_one_and_two_dimensions() -> None:
    targets = torch.tensor([[3, 4, 5], [6, 7, 8]])
    weights = torch.tensor([[0.5, -1.25, 0.0], [1.0, 2.0, 3.0]])
    request = decode(
        sdk_request(
            [
                sdk_datum([1, 2], target_tokens=targets, weights=weights),
                sdk_datum([9], target_tokens=torch.tensor([1]), weights=torch.tensor([1.0])),
            ]
        )
    )
    assert (request.model_id, request.seq_id, request.loss_fn) == ("s:train:0", 7, "cross_entropy")
    assert_same_array(request.data[0].loss_fn_inputs["target_tokens"], targets.numpy())
    assert_same_array(request.data[0].loss_fn_inputs["weights"], weights.numpy())
    assert_same_array(request.data[1].loss_fn_inputs["target_tokens"], int64([1]))


def test_sparse_inputs_of_the_sdk_decode_to_dense_with_zeros() -> None:
    targets = torch.zeros(6, 8, dtype=torch.int64)
    targets[1, 3], targets[5, 0], targets[5, 7] = 11, 12, 13
    weights = targets * 0.5
    sparse = sdk.TensorData.from_torch_sparse
    assert sparse(targets).sparse_crow_indices is not None
    request = decode(sdk_request([sdk_datum([1] * 6, target_tokens=sparse(targets), weights=sparse(weights))]))
    assert_same_array(request.data[0].loss_fn_inputs["target_tokens"], targets.numpy())
    assert_same_array(request.data[0].loss_fn_inputs["weights"], weights.numpy())


def test_several_text_chunks_are_one_token_sequence() -> None:
    chunks: list[sdk.ModelInputChunk] = [sdk.EncodedTextChunk(tokens=[1, 2]), sdk.EncodedTextChunk(tokens=[3])]
    datum = sdk.Datum(
        model_input=sdk.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": sdk.TensorData([1, 2, 3], "int64")}
    )
    assert_same_array(decode(sdk_request([datum])).data[0].tokens, int32(1, 2, 3))


def test_the_second_config_map_wins_and_the_first_serves_old_clients() -> None:
    datum = sdk_datum([1], target_tokens=torch.tensor([1]))
    body = sdk_request([datum], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.8, "mode": "strict"})
    assert decode(body).loss_fn_config == {"clip_low_threshold": 0.8, "mode": "strict"}
    old = public_pb.ForwardBackwardRequest()
    old.ParseFromString(body)
    old.ClearField("loss_fn_config_v2")
    assert decode(old.SerializeToString()).loss_fn_config == {"clip_low_threshold": 0.8}


def test_provenance_spans_of_the_sdk_decode() -> None:
    datum = sdk.Datum(
        model_input=sdk.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": sdk.TensorData([2, 3, 4], "int64")},
        model_input_spans=[
            PromptProvenanceSpan(sequence_id="a:0", length=2),
            SampledProvenanceSpan(sequence_id="a:0", length=1),
        ],
        loss_fn_input_spans=[SampledProvenanceSpan(sequence_id="a:0", offset=4, length=3)],
    )
    found = decode(sdk_request([datum])).data[0]
    assert found.model_input_spans == (ProvenanceSpan("prompt", "a:0", 0, 2), ProvenanceSpan("sampled", "a:0", 0, 1))
    assert found.loss_fn_input_spans == (ProvenanceSpan("sampled", "a:0", 4, 3),)


def full_request() -> ForwardBackwardRequest:
    span = ProvenanceSpan("sampled", "x", 1, 2)
    inputs = {"target_tokens": int64([[2, 3], [4, 5]]), "weights": float32([[0.5, -1], [0, np.nan]])}
    return ForwardBackwardRequest(
        model_id="s:train:3",
        seq_id=2**31 - 1,
        data=(
            Datum(int32(1, 2), inputs, (ProvenanceSpan("prompt", "x", 0, 2),), (span,)),
            Datum(int32(5), {}, feature_ref="a"),
        ),
        loss_fn="gspo",
        loss_fn_config={"clip": 0.25, "name": "text"},
        forward_only=True,
        loss_weight=0.125,
        capture_for="s:train:4",
    )


def test_requests_of_our_client_decode_to_the_same_request() -> None:
    assert_same_request(decode(codec.encode_forward_backward_request(full_request())), full_request())


def test_our_client_encodes_requests_as_the_sdk_does() -> None:
    inputs = {"target_tokens": int64([[2, 3], [4, 5]]), "weights": float32([[0.5, -1], [0, 2]])}
    ours, theirs = public_pb.ForwardBackwardRequest(), public_pb.ForwardBackwardRequest()
    ours.ParseFromString(
        codec.encode_forward_backward_request(
            ForwardBackwardRequest("s:train:0", 7, (Datum(int32(1, 2), inputs),), "cross_entropy")
        )
    )
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    theirs.ParseFromString(sdk_request([sdk_datum([1, 2], **tensors)]))
    assert ours == theirs


def test_decoded_arrays_are_writable() -> None:
    datum = decode(CAPTURED).data[0]
    assert datum.tokens.flags.writeable
    assert all(array.flags.writeable for array in datum.loss_fn_inputs.values())


def tensor_request(tensor: public_pb.Tensor, name: str = "weights", num_before: int = 0) -> bytes:
    """Returns a request whose last datum has the tensor, after `num_before` valid data."""
    message = public_pb.ForwardBackwardRequest(model_id="M", seq_id=1, loss_fn="cross_entropy")
    sound = dense(float32([0, 1]).tobytes(), 1, [2])
    for one in [*[sound] * num_before, tensor]:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = int32(1, 2).tobytes()
        datum.loss_fn_inputs[name].CopyFrom(one)
    return message.SerializeToString()


def test_all_four_dtypes_decode_to_the_dtypes_of_the_losses() -> None:
    halves = torch.tensor([1.5, -0.25]).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    dense: list[tuple[int, bytes]] = [
        (1, float32([1.5, -0.25]).tobytes()),
        (4, halves),
    ]
    for dtype, data in dense:
        body = tensor_request(public_pb.Tensor(dense=data, dtype=dtype, shape=[2]))  # pyright: ignore
        assert_same_array(decode(body).data[0].loss_fn_inputs["weights"], float32([1.5, -0.25]))
    for dtype, data in [(2, int64([3, 4]).tobytes()), (3, int32(3, 4).tobytes())]:
        tensor = public_pb.Tensor(dense=data, dtype=dtype, shape=[2])  # pyright: ignore
        targets = decode(tensor_request(tensor, "target_tokens")).data[0].loss_fn_inputs["target_tokens"]
        assert_same_array(targets, int64([3, 4]))
        assert_same_array(decode(tensor_request(tensor)).data[0].loss_fn_inputs["weights"], float32([3, 4]))


def many_data(num_data: int, num_targets: int = 0) -> list[Datum]:
    """Returns data of 2, 3, 4, ... tokens."""

    def datum(length: int) -> Datum:
        shape = (length, num_targets) if num_targets else length
        inputs = {"target_tokens": np.full(shape, length, np.int64), "weights": np.full(shape, 0.5, np.float32)}
        return Datum(np.arange(length, dtype=np.int32), inputs)

    return [datum(length) for length in range(2, 2 + num_data)]


SPANS = (ProvenanceSpan("sampled", "q", 0, 2),)
BATCHES = {
    "plain": many_data(20),
    "of several targets": many_data(20, num_targets=3),
    "of one and of several targets": [*many_data(9), *many_data(9, num_targets=2)],
    "with one that has another input": [*many_data(9), Datum(int32(1), {"target_tokens": int64([1])})],
    "with one that has other names": [*many_data(9), Datum(int32(1), {"a": int64([1]), "b": float32([1])})],
    "with one of another dtype": [*many_data(9), Datum(int32(1), {"target_tokens": int32(1), "weights": int64([1])})],
    "with one that has spans": [*many_data(9), replace(many_data(1)[0], model_input_spans=SPANS)],
    "with one that has an empty input": [
        *many_data(9),
        Datum(int32(1), {"target_tokens": int64([]), "weights": float32([])}),
    ],
    "without inputs": [Datum(int32(*range(1, 2 + i))) for i in range(9)],
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_decodes_like_its_data_one_by_one(name: str) -> None:
    request = ForwardBackwardRequest("M", 1, tuple(BATCHES[name]), "cross_entropy")
    found = decode(codec.encode_forward_backward_request(request))
    alone = [decode(codec.encode_forward_backward_request(replace(request, data=(datum,)))) for datum in request.data]
    assert_same_request(found, replace(request, data=tuple(one.data[0] for one in alone)))
    for datum in found.data:
        assert all(array.flags.writeable for array in (datum.tokens, *datum.loss_fn_inputs.values()))


def test_a_batch_without_shapes_and_in_bfloat16_decodes() -> None:
    halves = torch.tensor([1.5, -0.25]).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    message = public_pb.ForwardBackwardRequest(model_id="M", seq_id=1)
    for _ in range(9):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = int32(1, 2).tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(dense(int32(3, 4).tobytes(), 3, []))
        datum.loss_fn_inputs["weights"].CopyFrom(dense(halves, 4, [2]))
    for datum in decode(message.SerializeToString()).data:
        assert_same_array(datum.loss_fn_inputs["target_tokens"], int64([3, 4]))
        assert_same_array(datum.loss_fn_inputs["weights"], float32([1.5, -0.25]))


def csr(shape: list[int], crow: list[int], cols: list[int], num_values: int | None = None) -> public_pb.Tensor:
    values = np.ones(len(cols) if num_values is None else num_values, np.float32)
    return public_pb.Tensor(
        dtype=public_pb.DTYPE_FLOAT32,
        shape=shape,
        sparse_csr=public_pb.SparseCsr(
            values=values.tobytes(), crow_indices=int64(crow).tobytes(), col_indices=int64(cols).tobytes()
        ),
    )


def dense(data: bytes, dtype: int, shape: list[int]) -> public_pb.Tensor:
    return public_pb.Tensor(dense=data, dtype=dtype, shape=shape)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (dense(b"\0" * 8, 1, [3]), "shape [3] needs 3 values; the tensor has 2"),
        (dense(b"\0" * 7, 1, [2]), "7 bytes are not a whole number of float32 values"),
        (dense(b"\0" * 8, 0, [2]), "unknown dtype 0"),
        (dense(b"\0" * 8, 9, [2]), "unknown dtype 9"),
        (dense(b"", 1, [-1]), "out of bounds"),
        (dense(b"", 1, [0, 2**40]), "out of bounds"),
        (dense(b"", 1, [0] * 9), "out of bounds"),
        (csr([2, 2], [0, 1, 1], [5]), "outside of the 2 columns"),
        (csr([2, 2], [0, 1, 1], [-1]), "outside of the 2 columns"),
        (csr([2, 2], [0, 2, 1], [0]), "must rise from 0 to the 1"),
        (csr([2, 2], [1, 1, 1], [0]), "must rise from 0 to the 1"),
        (csr([2, 2], [0, 1], [0]), "needs 3 row pointers, not 2"),
        (csr([2, 3], [0, 2, 2], [1, 1]), "must rise within a row"),
        (csr([2, 2], [0, 1, 1], [0], num_values=3), "3 values for 1 column indices"),
        (csr([4], [0], []), "a shape of two sizes"),
        (csr([1, 2**31 - 1], [0, 0], []), "sparse tensors of one request exceed"),
    ],
)
@pytest.mark.parametrize("place", [0, 5])
def test_malformed_tensors_are_refused_with_the_place_and_the_reason(
    tensor: public_pb.Tensor, reason: str, place: int
) -> None:
    with pytest.raises(RequestError) as refusal:
        decode(tensor_request(tensor, num_before=place))
    assert refusal.value.status == 400
    assert str(refusal.value).startswith(f"data[{place}]: loss_fn_inputs['weights']: ")
    assert reason in str(refusal.value)


def test_the_limit_of_dense_bytes_holds_for_all_sparse_tensors_together() -> None:
    message = public_pb.ForwardBackwardRequest(model_id="M", seq_id=1, loss_fn="cross_entropy")
    for _ in range(4):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = int32(1).tobytes()
        datum.loss_fn_inputs["weights"].CopyFrom(csr([1, 100], [0, 0], []))
    body = message.SerializeToString()
    assert len(codec.decode_forward_backward(body, codec.PROTOBUF, max_dense_bytes=1600).data) == 4
    with pytest.raises(RequestError, match=r"^data\[3\]: .*exceed the limit of dense bytes by 1"):
        codec.decode_forward_backward(body, codec.PROTOBUF, max_dense_bytes=1599)


def test_float_target_tokens_are_refused() -> None:
    with pytest.raises(RequestError, match="target_tokens must be int64, not float32"):
        decode(tensor_request(dense(b"\0" * 8, 1, [2]), "target_tokens"))


def test_images_and_audio_are_refused_by_name() -> None:
    image = public_pb.Chunk(image=public_pb.ImageChunk(data=b"png", format="png"))
    audio = public_pb.Chunk(dmel=public_pb.DmelChunk(dmel=b"x"))
    for chunk, name in [(image, "image"), (audio, "dmel"), (public_pb.Chunk(), "None")]:
        message = public_pb.ForwardBackwardRequest(model_id="M", seq_id=1)
        message.data.add().model_input.append(chunk)
        with pytest.raises(RequestError, match=f"chunk of type '?{name}'? is not supported"):
            decode(message.SerializeToString())


def test_empty_batches_and_empty_sequences_are_refused() -> None:
    with pytest.raises(RequestError, match="data is empty"):
        decode(public_pb.ForwardBackwardRequest(model_id="M", seq_id=1).SerializeToString())
    message = public_pb.ForwardBackwardRequest(model_id="M", seq_id=1)
    message.data.add().model_input.add().encoded_text.tokens = b""
    with pytest.raises(RequestError, match=r"data\[0\]: model_input has no tokens"):
        decode(message.SerializeToString())


def test_unknown_content_types_are_refused_with_415() -> None:
    with pytest.raises(RequestError, match="x-www-form-urlencoded") as refusal:
        codec.decode_forward_backward(b"{}", "application/x-www-form-urlencoded")
    assert refusal.value.status == 415


@pytest.mark.slow
@pytest.mark.parametrize("message", [b"\x1a\x00", b"\x1a\x80\x20" + b"\x0a\x00" * 2048])
def test_a_body_of_millions_of_empty_messages_is_refused_before_it_is_parsed(message: bytes) -> None:
    body = message * ((17 << 20) // len(message))
    with pytest.raises(RequestError, match="more than 1000000 datums, chunks, inputs and spans"):
        decode(body)


def test_a_large_body_of_a_few_datums_decodes() -> None:
    tokens = np.zeros(5 << 20, np.int32)
    request = ForwardBackwardRequest("M", 1, (Datum(tokens, {"target_tokens": tokens.astype(np.int64)}),), "ppo")
    assert_same_request(decode(codec.encode_forward_backward_request(request)), request)


def test_too_much_json_is_refused_with_413() -> None:
    with pytest.raises(RequestError, match="bytes of JSON; the limit is 67108864: send protobuf") as refusal:
        codec.decode_forward_backward(b"[" + b"{}," * (24 << 20), codec.JSON)
    assert refusal.value.status == 413


# JSON requests


def test_json_of_the_old_sdk_decodes_like_its_protobuf() -> None:
    tensors = {
        "target_tokens": {"data": [2, 3, 4, 5], "dtype": "int64", "shape": [2, 2]},
        "weights": {"data": [0.5, 1, 0, 2], "dtype": "float32", "shape": [2, 2]},
    }
    chunks = [{"type": "encoded_text", "tokens": [1, 2]}]
    found = decode_json(
        {
            "model_id": "M",
            "seq_id": 4,
            "forward_backward_input": {
                "data": [{"model_input": {"chunks": chunks}, "loss_fn_inputs": tensors}],
                "loss_fn": "ppo",
                "loss_fn_config": {"clip_low_threshold": 0.5},
            },
        }
    )
    inputs = {"target_tokens": int64([[2, 3], [4, 5]]), "weights": float32([[0.5, 1], [0, 2]])}
    expected = ForwardBackwardRequest("M", 4, (Datum(int32(1, 2), inputs),), "ppo", {"clip_low_threshold": 0.5})
    assert_same_request(found, expected)


def test_flat_json_takes_plain_lists() -> None:
    found = decode_json(
        {
            "model_id": "M",
            "seq_id": 4,
            "forward_only": True,
            "loss_weight": 0.5,
            "capture_for": "s:train:4",
            "loss_fn": "cross_entropy",
            "data": [
                {
                    "model_input": [1, 2],
                    "loss_fn_inputs": {"target_tokens": [[2, 3], [4, 5]], "weights": [[1, 0], [0, 1.5]]},
                    "model_input_spans": [{"kind": "prompt", "sequence_id": "q", "length": 2}],
                    "feature_ref": "a",
                }
            ],
        }
    )
    inputs = {"target_tokens": int64([[2, 3], [4, 5]]), "weights": float32([[1, 0], [0, 1.5]])}
    datum = Datum(int32(1, 2), inputs, (ProvenanceSpan("prompt", "q", 0, 2),), feature_ref="a")
    expected = ForwardBackwardRequest("M", 4, (datum,), "cross_entropy", {}, True, 0.5, "s:train:4")
    assert_same_request(found, expected)


def test_sparse_json_tensors_decode_to_dense_with_the_given_fill() -> None:
    tensor = sdk.TensorData.from_torch_sparse(torch.tensor([[-1] * 9, [7] + [-1] * 8, [-1] * 9]), pad_value=-1)
    value = {
        "data": tensor.data,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "sparse_crow_indices": tensor.sparse_crow_indices,
        "sparse_col_indices": tensor.sparse_col_indices,
    }
    expected = np.full((3, 9), -1)
    expected[1, 0] = 7
    assert_same_array(codec.tensor_from_json(value, fill=-1), expected)
    assert_same_array(codec.tensor_from_json(codec.tensor_to_json(expected)), expected)


DATUM = {"model_input": [1, 2], "loss_fn_inputs": {"target_tokens": [2, 3]}}
REQUEST = {"model_id": "M", "seq_id": 1, "loss_fn": "cross_entropy", "data": [DATUM]}


def with_input(name: str, value: object) -> object:
    return {**REQUEST, "data": [{"model_input": [1, 2], "loss_fn_inputs": {name: value}}]}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "the body must be an object"),
        ({**REQUEST, "model_id": 3}, "model_id must be a string, not 3"),
        ({**REQUEST, "model_id": "\ud800"}, "neither NUL nor half a surrogate pair"),
        ({**REQUEST, "seq_id": "1"}, "seq_id must be an integer, not '1'"),
        ({**REQUEST, "seq_id": True}, "seq_id must be an integer, not True"),
        ({**REQUEST, "data": {}}, "data must be a list"),
        ({**REQUEST, "data": []}, "data is empty"),
        ({**REQUEST, "data": [3]}, "data[0]: a datum must be an object"),
        ({**REQUEST, "data": [DATUM, {"model_input": [1.5]}]}, "data[1]: tokens: expected 64-bit integers, not 1.5"),
        ({**REQUEST, "data": [{"model_input": [2**40]}]}, "does not fit 32 bits"),
        ({**REQUEST, "data": [{"model_input": [[1], [2]]}]}, "token ids must be a flat list"),
        ({**REQUEST, "data": [{"model_input": {"chunks": [{"type": "image"}]}}]}, "type 'image' is not supported"),
        ({**REQUEST, "loss_weight": float("inf")}, "loss_weight must be a number"),
        ({**REQUEST, "loss_fn_config": {"beta": None}}, "loss_fn_config['beta'] must be a number, not None"),
        ({**REQUEST, "forward_only": "yes"}, "forward_only must be true or false"),
        (with_input("weights", [1, [2]]), "loss_fn_inputs['weights']: nested lists must be rectangular"),
        (with_input("weights", ["x"]), "expected numbers, not 'x'"),
        (with_input("weights", [None]), "expected numbers, not None"),
        (with_input("weights", [0, "x", 1]), "expected numbers, not 'x'"),
        (with_input("weights", [1, 2**70]), f"expected numbers of 64 bits, not {2**70}"),
        (with_input("weights", [[0, 1], [0, None]]), "expected numbers, not None"),
        (with_input("target_tokens", [1, 2**70]), f"expected 64-bit integers, not {2**70}"),
        (with_input("target_tokens", [1, 2.5]), "expected 64-bit integers, not 2.5"),
        (with_input("weights", {"data": [1.0], "dtype": "float8"}), "unknown dtype 'float8'"),
        (with_input("weights", {"data": [1.0], "dtype": "float32", "shape": [2]}), "needs 2 values"),
    ],
)
def test_malformed_json_is_refused_with_the_place_and_the_reason(value: object, reason: str) -> None:
    with pytest.raises(RequestError) as refusal:
        decode_json(value)
    assert refusal.value.status == 400
    assert reason in str(refusal.value)


def test_broken_json_is_refused() -> None:
    for body in (b"{", b"\xff", b"[" * 100_000, b'{"seq_id": ' + b"1" * 5000 + b"}"):
        with pytest.raises(RequestError, match="not valid JSON"):
            codec.decode_forward_backward(body, "application/json; charset=utf-8")


# Outputs


def ragged_output() -> ForwardBackwardOutput:
    """Returns outputs of shape [T], then of two different K, then of [T] again: four records."""
    generator = np.random.default_rng(0)
    shapes = [(3,), (5,), (2, 4), (3, 2), (1, 2), (4,), (0,)]
    outputs = tuple({"logprobs": generator.standard_normal(shape).astype(np.float32)} for shape in shapes)
    return ForwardBackwardOutput(outputs, {"loss:sum": 1.5, "num_tokens:sum": 24.0})


def test_outputs_with_ragged_trailing_shapes_reach_the_sdk_and_our_client_in_order() -> None:
    output = ragged_output()
    body = codec.encode_forward_backward_output(output)
    theirs, ours = response_conv.deserialize_forward_backward_output(body), codec.decode_forward_backward_output(body)
    assert theirs.metrics == ours.metrics == output.metrics
    assert len(theirs.loss_fn_outputs) == len(ours.loss_fn_outputs) == len(output.loss_fn_outputs)
    for expected, sdk_datum_, our_datum in zip(
        output.loss_fn_outputs, theirs.loss_fn_outputs, ours.loss_fn_outputs, strict=True
    ):
        assert_same_array(our_datum["logprobs"], expected["logprobs"])
        assert sdk_datum_["logprobs"].shape == list(expected["logprobs"].shape)
        assert_same_array(np.array(sdk_datum_["logprobs"].data, np.float32), expected["logprobs"].ravel())


def test_consecutive_outputs_with_one_trailing_shape_share_a_record() -> None:
    message = public_pb.ForwardBackwardOutput()
    message.ParseFromString(codec.encode_forward_backward_output(ragged_output()))
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1, 2, 2]


def test_outputs_of_several_fields_and_dtypes_reach_the_sdk() -> None:
    outputs = tuple({"logprobs": np.arange(n, dtype=np.float64), "ranks": np.arange(n, dtype=np.int32)} for n in (2, 3))
    body = codec.encode_forward_backward_output(ForwardBackwardOutput(outputs, {}))
    theirs = response_conv.deserialize_forward_backward_output(body).loss_fn_outputs
    assert [datum["ranks"].dtype for datum in theirs] == ["int64", "int64"]
    assert [datum["ranks"].data for datum in theirs] == [[0, 1], [0, 1, 2]]
    assert [datum["logprobs"].data for datum in theirs] == [[0.0, 1.0], [0.0, 1.0, 2.0]]


def test_feature_refs_are_kept_in_outputs_and_requests() -> None:
    output = ForwardBackwardOutput(({"logprobs": float32([1.5])},), {}, feature_refs=("a", None))
    decoded = codec.decode_forward_backward_output(codec.encode_forward_backward_output(output))
    assert decoded.feature_refs == ("a", None), "the second datum has no features"
    assert codec.encode_forward_backward_output_json(output)["feature_refs"] == ["a", None]
    assert "feature_refs" not in codec.encode_forward_backward_output_json(ForwardBackwardOutput((), {}))
    refs = [None if number % 3 else f"ref {number}" for number in range(20)]
    data = tuple(
        Datum(int32(5, number), {"weights": float32([0, 1])}, feature_ref=ref) for number, ref in enumerate(refs)
    )
    request = ForwardBackwardRequest(
        "m", 1, data, "eagle3", capture_for="b", features=FeatureLocation("c", draft=DraftFeatures("eagle3", (1,)))
    )
    decoded, pickled = decode(codec.encode_forward_backward_request(request)), pickle.loads(pickle.dumps(request))
    for found in (decoded, pickled):
        assert_same_request(found, request)
    assert pickled.features == request.features and decoded.features is None
    assert pickle.loads(pickle.dumps(output)).feature_refs == ("a", None)


def test_outputs_in_json_have_null_for_nan_and_infinity() -> None:
    output = ForwardBackwardOutput(({"logprobs": float32([[1.5], [np.nan]])},), {"loss:sum": float("inf")})
    text = json.dumps(codec.encode_forward_backward_output_json(output), allow_nan=False)
    assert json.loads(text) == {
        "loss_fn_output_type": "scalar",
        "loss_fn_outputs": [{"logprobs": {"data": [1.5, None], "dtype": "float32", "shape": [2, 1]}}],
        "metrics": {"loss:sum": None},
    }


def topk(num_rows: int, k: int, seed: int) -> TopkLogprobs:
    generator = np.random.default_rng(seed)
    ids = generator.integers(1, 99, (num_rows, k)).astype(np.int32)
    logprobs = -generator.random((num_rows, k)).astype(np.float32)
    ids[0], logprobs[0] = 0, -99999.0
    ids[1, 1:], logprobs[1, 1:] = 0, -99999.0
    return TopkLogprobs(ids, logprobs)


def full_sample_response() -> SampleResponse:
    return SampleResponse(
        sequences=(
            SampledSequence("stop", int32(5, 6), float32([-0.5, -1.5]), topk(2, 3, 0)),
            SampledSequence("length", int32(7), float32([-2.5])),
        ),
        prompt_logprobs=float32([np.nan, -1, -2]),
        topk_prompt_logprobs=topk(3, 2, 1),
        target_prompt_logprobs=float32([[-1, 0], [-3, -4]]),
        prompt_alt_tokens=np.array([[1, 2], [3, 4]], np.int32),
        prompt_alt_logprobs=float32([[-1, -2], [-3, -4]]),
        prompt_cache_hit_tokens=2,
    )


def test_a_full_sample_response_reaches_the_sdk() -> None:
    response = full_sample_response()
    found = response_conv.deserialize_sample_response(codec.encode_sample_response(response))
    assert [sequence.stop_reason for sequence in found.sequences] == ["stop", "length"]
    assert [sequence.tokens for sequence in found.sequences] == [[5, 6], [7]]
    assert [sequence.logprobs for sequence in found.sequences] == [[-0.5, -1.5], [-2.5]]
    expected_topk, found_topk = response.sequences[0].topk_logprobs, found.sequences[0].topk_logprobs_np
    assert expected_topk is not None and found_topk is not None
    assert_same_array(found_topk.token_ids, expected_topk.token_ids)
    assert_same_array(found_topk.logprobs, expected_topk.logprobs)
    assert found.prompt_logprobs == [None, -1, -2]
    rows = found.topk_prompt_logprobs
    assert rows is not None and rows[0] is None and len(rows[1] or []) == 1 and len(rows[2] or []) == 2
    assert found.target_prompt_logprobs is not None and found.prompt_alt_tokens is not None
    assert found.target_prompt_logprobs.tolist() == [[-1, 0], [-3, -4]]
    assert found.prompt_alt_tokens.tokens.tolist() == [[1, 2], [3, 4]]
    assert found.prompt_alt_tokens.logprobs.tolist() == [[-1, -2], [-3, -4]]
    assert found.prompt_cache_hit_tokens == 2


def test_target_logprobs_keep_the_sparse_layout_of_the_request() -> None:
    requested = {
        "data": [7, 8, 9],
        "dtype": "int64",
        "shape": [2, 3],
        "sparse_crow_indices": [0, 1, 3],
        "sparse_col_indices": [2, 0, 1],
    }
    layout = codec.csr_layout_from_json(requested)
    response = SampleResponse((), target_prompt_logprobs=float32([[0, 0, -1], [-2, -3, 0]]))
    found = response_conv.deserialize_sample_response(codec.encode_sample_response(response, layout))
    tensor = found.target_prompt_logprobs
    assert tensor is not None
    assert (tensor.data, tensor.sparse_crow_indices, tensor.sparse_col_indices) == ([-1, -2, -3], [0, 1, 3], [2, 0, 1])
    assert codec.csr_layout_from_json({"data": [1], "dtype": "int64", "shape": [1, 1]}) is None


def same_topk(found: TopkLogprobs | None, expected: TopkLogprobs | None) -> bool:
    if found is None or expected is None:
        return found is expected
    same_ids = np.array_equal(found.token_ids, expected.token_ids)
    return same_ids and np.array_equal(found.logprobs, expected.logprobs)


def test_a_full_sample_response_reaches_our_decoder() -> None:
    response = full_sample_response()
    found = codec.decode_sample_response(codec.encode_sample_response(response))
    for ours, theirs in zip(found.sequences, response.sequences, strict=True):
        assert ours.stop_reason == theirs.stop_reason
        assert_same_array(ours.tokens, theirs.tokens)
        assert_same_array(ours.logprobs, theirs.logprobs)
        assert same_topk(ours.topk_logprobs, theirs.topk_logprobs)
    assert same_topk(found.topk_prompt_logprobs, response.topk_prompt_logprobs)
    for name in ("prompt_logprobs", "target_prompt_logprobs", "prompt_alt_tokens", "prompt_alt_logprobs"):
        assert_same_array(getattr(found, name), getattr(response, name))
    assert found.prompt_cache_hit_tokens == 2


def test_draft_counts_are_in_both_formats_and_the_sdk_ignores_them() -> None:
    response = replace(full_sample_response(), guesses=GuessCounts(5, 18, 3, (3, 1, 1)))
    body = codec.encode_sample_response(response)
    assert codec.decode_sample_response(body).guesses == response.guesses
    answer = json.loads(json.dumps(codec.encode_sample_response_json(response)))
    counts = {"passes": 5, "drafted": 18, "accepted": 3, "by_accepted": [3, 1, 1], "acceptance_length": 1.6}
    assert answer["guesses"] == counts
    theirs = response_conv.deserialize_sample_response(body)
    assert [list(each.tokens) for each in theirs.sequences] == [each.tokens.tolist() for each in response.sequences]
    assert theirs.prompt_cache_hit_tokens == 2


def test_a_minimal_sample_response_has_no_optional_fields() -> None:
    response = SampleResponse((SampledSequence("length", int32(), float32([])),))
    found = codec.decode_sample_response(codec.encode_sample_response(response))
    assert found.prompt_logprobs is found.topk_prompt_logprobs is found.target_prompt_logprobs is None
    assert found.prompt_alt_tokens is found.prompt_alt_logprobs is found.sequences[0].topk_logprobs is None
    assert found.guesses is None
    assert codec.encode_sample_response_json(response) == {
        "sequences": [{"stop_reason": "length", "tokens": [], "logprobs": []}],
        "prompt_cache_hit_tokens": 0,
        "type": "sample",
    }


def test_a_sample_response_in_json_has_the_rows_that_the_sdk_shows() -> None:
    response = full_sample_response()
    theirs = response_conv.deserialize_sample_response(codec.encode_sample_response(response)).topk_prompt_logprobs
    text = json.dumps(codec.encode_sample_response_json(response), allow_nan=False)
    answer = json.loads(text)
    assert answer["prompt_logprobs"] == [None, -1, -2]
    assert answer["topk_prompt_logprobs"] == [None if row is None else list(map(list, row)) for row in theirs or []]
    assert answer["target_prompt_logprobs"] == {"data": [-1, 0, -3, -4], "dtype": "float32", "shape": [2, 2]}
    assert answer["prompt_alt_tokens"]["tokens"] == {"data": [1, 2, 3, 4], "dtype": "int64", "shape": [2, 2]}


# Peeking


def test_model_id_and_seq_id_are_read_from_a_prefix() -> None:
    body = codec.encode_forward_backward_request(full_request())
    expected = codec.PeekedOperation("s:train:3", 2**31 - 1)
    assert codec.peek_operation(body[:20], codec.PROTOBUF) == expected
    assert codec.peek_operation(body + b"\xff\xff", codec.PROTOBUF) == expected
    assert codec.peek_operation(body[:13], codec.PROTOBUF) == codec.PeekedOperation("s:train:3", None)
    compressed = zstandard.compress(body + np.random.default_rng(0).bytes(400_000))  # several blocks
    assert codec.peek_operation(compressed[: len(compressed) // 2], codec.PROTOBUF) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"model_id": "a:train:0", "seq_id": 12, "data": [{"model_in', ("a:train:0", 12)),
        ('{"data": [{"seq_id": 5, "model_id": "no"}], "seq_id":12,"model_id":"a\\u0062" oops', ("ab", 12)),
        ('{"type": "seq_id", "model_id": "x", "seq_id": 12}', ("x", 12)),
        ('{"type": "model_id", "model_id": "x", "seq_id": "12"}', ("x", None)),
        ('{"model_id": "unfinished', (None, None)),
        ('{"seq_id": -1, "model_id": null', (None, None)),
        ('["model_id", "x"]', (None, None)),
    ],
)
def test_model_id_and_seq_id_are_read_from_broken_json(text: str, expected: tuple[object, object]) -> None:
    peeked = codec.peek_operation(text.encode(), codec.JSON)
    assert (peeked.model_id, peeked.seq_id) == expected


# zstd


def test_zstd_bodies_decompress_up_to_the_limit() -> None:
    body = bytes(range(256)) * 40
    for compressed in (zstandard.compress(body), zstandard.ZstdCompressor(write_content_size=False).compress(body)):
        assert codec.decompress(compressed, "zstd", len(body)) == body
        with pytest.raises(RequestError) as refusal:
            codec.decompress(compressed, "ZSTD", len(body) - 1)
        assert refusal.value.status == 413
    assert codec.decompress(body, None, len(body)) == codec.decompress(body, "identity", len(body)) == body


def test_a_zstd_bomb_is_stopped_at_the_limit() -> None:
    bomb = zstandard.compress(bytes(256 << 20))
    assert len(bomb) < 50_000
    with pytest.raises(RequestError) as refusal:
        codec.decompress(bomb, "zstd", 1 << 20)
    assert refusal.value.status == 413


def _flip(body: bytes) -> bytes:
    return body[:20] + bytes([body[20] ^ 0xFF]) + body[21:]


def test_the_size_of_a_zstd_body_is_known_before_it_is_decompressed() -> None:
    body = bytes(5000)
    for declares in (True, False):
        compressed = zstandard.ZstdCompressor(write_content_size=declares).compress(body)
        assert codec.decompressed_size(compressed, " ZSTD", 5000) == 5000
        with pytest.raises(RequestError, match="more than 4999 bytes") as refusal:
            codec.decompressed_size(compressed, "zstd", 4999)
        assert refusal.value.status == 413
    assert codec.decompressed_size(body, None, 1) == 5000


def test_a_zstd_body_larger_than_it_declares_is_refused() -> None:
    """zstd itself notices only at the end, when all bytes are in memory."""
    params = zstandard.ZstdCompressionParameters.from_level(3, window_log=10)
    compressed = zstandard.ZstdCompressor(compression_params=params).compress(np.random.default_rng(0).bytes(1 << 20))
    assert (1 << 20).to_bytes(4, "little") in compressed[:10]
    wrong = compressed.replace((1 << 20).to_bytes(4, "little"), (1 << 19).to_bytes(4, "little"), 1)
    assert codec.decompressed_size(wrong, "zstd", 1 << 20) == 1 << 19
    with pytest.raises(RequestError, match=r"more than the 524288 bytes that it declares"):
        codec.decompress(wrong, "zstd", 1 << 20)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda body: body[:-3], "truncated"),
        (lambda body: body[:9], "truncated"),
        (lambda _: b"", "truncated"),
        (lambda _: b"not zstd", "not valid zstd"),
        (lambda body: body + b"x", "has data after its frame"),
        (lambda body: body + body, "has data after its frame"),
    ],
)
def test_damaged_zstd_is_refused(damage: Callable[[bytes], bytes], reason: str) -> None:
    body = zstandard.compress(np.random.default_rng(0).bytes(5000))
    with pytest.raises(RequestError, match=reason) as refusal:
        codec.decompress(damage(body), "zstd", 1 << 20)
    assert refusal.value.status == 400


def test_a_corrupt_frame_is_refused_by_its_checksum() -> None:
    body = zstandard.ZstdCompressor(write_checksum=True).compress(np.random.default_rng(0).bytes(5000))
    with pytest.raises(RequestError, match="not valid zstd"):
        codec.decompress(_flip(body), "zstd", 1 << 20)


def test_other_content_encodings_are_refused_with_415() -> None:
    with pytest.raises(RequestError, match="'br' is not supported: send zstd or none") as refusal:
        codec.decompress(b"", "br", 10)
    assert refusal.value.status == 415


@pytest.mark.parametrize(
    ("prefix", "content_type"),
    [
        (b'{"' + b'\\"' * 500_000, codec.JSON),
        (b"{" + b'"",' * 300_000, codec.JSON),
        (bytes(1 << 20), codec.PROTOBUF),
        (b"\x1a\x00" * (1 << 19), codec.PROTOBUF),
        (zstandard.compress(bytes(1 << 26)), codec.PROTOBUF),
    ],
    ids=["string without end", "many strings", "zeros", "empty messages", "bomb"],
)
def test_peeking_into_a_hostile_prefix_is_fast(prefix: bytes, content_type: str) -> None:
    began_at = time.thread_time()
    assert codec.peek_operation(prefix, content_type) == codec.PeekedOperation()
    assert time.thread_time() - began_at < 0.5


# Arbitrary input


def attempt(operation: Callable[[], object], allowed: type[Exception]) -> None:
    try:
        operation()
    except allowed:
        return


@st.composite
def damaged_requests(draw: st.DrawFn) -> bytes:
    """Draws a valid body with a few bytes changed, inserted or cut."""
    plain = ForwardBackwardRequest("M", 1, tuple(many_data(6)), "cross_entropy")
    body = bytearray(codec.encode_forward_backward_request(draw(st.sampled_from([full_request(), plain]))))
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, max(len(body) - 1, 0)))
        length = draw(st.integers(0, 4))
        body[position : position + length] = draw(st.binary(max_size=6))
    return bytes(body)


@settings(max_examples=300, deadline=None)
@given(body=st.one_of(st.binary(max_size=200), damaged_requests()))
@example(struct.pack("<q", -1))
def test_bytes_of_any_kind_raise_nothing_but_a_request_error(body: bytes) -> None:
    attempt(lambda: codec.decode_forward_backward(body, codec.PROTOBUF), RequestError)
    attempt(lambda: codec.decode_forward_backward(body, codec.JSON), RequestError)
    attempt(lambda: codec.decompress(body, "zstd", 1 << 20), RequestError)
    attempt(lambda: codec.decode_forward_backward_output(body), ValueError)
    attempt(lambda: codec.decode_sample_response(body), ValueError)
    codec.peek_operation(body, codec.PROTOBUF)
    codec.peek_operation(body, codec.JSON)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["data", "dtype", "shape", "chunks", "tokens", "type", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(value=JSON_VALUES, place=st.sampled_from(["data", "model_input", "inputs", "weights", "config", "spans"]))
def test_json_of_any_shape_raises_nothing_but_a_request_error(value: object, place: str) -> None:
    datum = {
        "model_input": value if place == "model_input" else [1],
        "loss_fn_inputs": value if place == "inputs" else {"weights": value if place == "weights" else [1]},
        "model_input_spans": value if place == "spans" else [],
    }
    request = {
        **REQUEST,
        "data": value if place == "data" else [datum],
        "loss_fn_config": value if place == "config" else {},
    }
    attempt(lambda: decode_json(request), RequestError)
    attempt(lambda: codec.tensor_from_json(value), RequestError)
    attempt(lambda: codec.csr_layout_from_json(value), RequestError)


def test_json_in_pieces_is_the_same_text_as_a_whole() -> None:
    random = np.random.default_rng(0)

    def top(num: int, k: int) -> TopkLogprobs:
        logprobs = random.random((num, k), np.float32)
        logprobs[0], logprobs[1, 1:] = -99999.0, -99999.0
        return TopkLogprobs(random.integers(0, 9, (num, k), np.int32), logprobs)

    scores = np.where(random.random(70_000) < 0.1, np.nan, 0.5).astype(np.float32)
    sequences = tuple(
        SampledSequence("stop", np.arange(num, dtype=np.int32), np.ones(num, np.float32), each)
        for num, each in ((0, None), (40_000, None), (3, top(3, 2)))
    )
    drawn = random.integers(0, 9, (6000, 5), np.int32)
    response = SampleResponse(
        sequences, scores, top(9000, 7), scores[:100].reshape(50, 2), drawn, drawn.astype(np.float32), 3
    )
    response = replace(response, guesses=GuessCounts(1, 2, 3, (4, 5)))
    pieces = list(codec.sample_response_json_pieces(response))
    text = json.dumps(codec.encode_sample_response_json(response), allow_nan=False, separators=(",", ":"))
    assert b"".join(pieces).decode() == text
    assert len(pieces) > 10 and max(map(len, pieces)) < 1_000_000
    again = codec.decode_sample_response(codec.encode_sample_response(response))
    assert json.loads(text) == json.loads(json.dumps(codec.encode_sample_response_json(again)))

    outputs = ForwardBackwardOutput(tuple({"logprobs": scores[:num]} for num in (0, 1, 30_000)), {"loss:sum": np.inf})
    joined = b"".join(codec.forward_backward_output_json_pieces(outputs)).decode()
    assert joined == json.dumps(codec.encode_forward_backward_output_json(outputs), separators=(",", ":"))


@pytest.mark.parametrize(
    ("message", "wrong", "words"),
    [
        (CaptureRequest, {"data": [{"model_input": [5, [6]]}]}, "data.0.model_input.1 is [6]: it should be a valid"),
        (
            CaptureRequest,
            {"data": [{"model_input": {"chunks": [{"tokens": 3}]}}]},
            "chunks.0.tokens is 3: it should",
        ),
        (OptimStepRequest, {"gradient_scale": "x"}, "gradient_scale is 'x': it should be a number"),
        (BuildVocabMapRequest, {"counts": {"a": 1}}, "counts.a is 'a': it should be a valid integer"),
        (SampleRequest, {"prompt": {"chunks": []}, "sampling_params": {"stop": [5, "a"]}}, "element 1 is 'a'"),
    ],
)
def test_errors_name_fields_without_the_alternatives_of_their_types(
    message: type[BaseModel], wrong: dict, words: str
) -> None:
    with pytest.raises(RequestError) as refused:
        codec.decode_model(message, json.dumps({"model_id": "m"} | wrong).encode())
    assert words in refused.value.message and not re.search(r"\w\[|constrained|ModelInput|\.float", str(refused.value))


def test_of_inputs_with_the_same_name_the_last_counts_as_in_a_map() -> None:
    message = wire.ForwardBackwardRequest(model_id="m")
    names = ["aa", "bb", "ab", "ab"]  # each name four times, as in data of the same inputs
    for pair in names:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.int32(7).tobytes()
        for number, name in enumerate(pair):
            values = np.float32([number]).tobytes()
            datum.loss_fn_inputs.add(key=name, value=wire.Tensor(dense=values, dtype=wire.DTYPE_FLOAT32))
    decoded = codec.decode_forward_backward(message.SerializeToString(), codec.PROTOBUF)
    assert [dict(datum.loss_fn_inputs) for datum in decoded.data] == [
        {"a": 1.0},
        {"b": 1.0},
        *[{"a": 0.0, "b": 1.0}] * 2,
    ]
    as_maps = public_pb.ForwardBackwardRequest.FromString(message.SerializeToString())
    assert [sorted(datum.loss_fn_inputs) for datum in as_maps.data] == [["a"], ["b"], ["a", "b"], ["a", "b"]]
