"""A body of many small parts holds the event loop for tens of milliseconds at most, valid or not.

Time is that of this thread, in units of a loop that takes about ten milliseconds.
"""

import gc
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
from google.protobuf.message import Message
from pydantic import BaseModel
from trainhouse.schemas.checkpoints import SaveWeightsExternalRequest, SaveWeightsRequest
from trainhouse.schemas.codec import JSON, PROTOBUF, decode_model
from trainhouse.schemas.codec import trainhouse_wire_pb2 as wire
from trainhouse.schemas.drafts import BuildVocabMapRequest, CaptureRequest, ReleaseFeaturesRequest
from trainhouse.schemas.errors import RequestError
from trainhouse.schemas.models import CreateModelRequest, CreateSessionRequest
from trainhouse.schemas.sampling import SampleRequest
from trainhouse.schemas.training import OptimStepRequest
from trainhouse.schemas.verbs import FORWARD_BACKWARD
from trainhouse.server.http.bodies import (
    PROCESS_JSON_BYTES,
    QUICK_BYTES,
    UNLIMITED,
    Body,
    Decoder,
    decode_body,
    decoder_of,
)
from trainhouse.server.http.digests import decode_with_digest

MOST_UNITS = 10
PROTOBUF_TOKEN = b"\1\0\0\0"
FLOAT32 = wire.DTYPE_FLOAT32
Decode = Callable[[bytes], object]


def seconds(call: Callable[[], object]) -> float:
    """Returns the shortest of three times of this thread, without garbage collection of what others hold."""
    gc.collect()
    gc.disable()
    try:
        return min(_seconds(call) for _ in range(3))
    finally:
        gc.enable()


def _seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def unit() -> float:
    return seconds(lambda: sum(number * number for number in range(200_000)))


def units_of(decode: Decode, body: bytes) -> float:
    def run() -> None:
        try:
            decode_with_digest(decode, body)
        except RequestError:
            return

    return seconds(run) / unit()


def filled(before: str, part: str, after: str, size: int) -> bytes:
    """Returns `before`, as many parts as fit, and `after`. A % in the part is its number."""
    num = (size - len(before) - len(after)) // (len(part.replace("%", "12345")) + 1)
    return (before + ",".join(part.replace("%", str(index)) for index in range(num)) + after).encode()


def one_datum(message: wire.ForwardBackwardRequest) -> wire.Datum:
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = PROTOBUF_TOKEN
    return datum


# Each adds one small part to a pass, whose first datum has one token.
PROTOBUF_PARTS: dict[str, Callable[[wire.ForwardBackwardRequest, int], Message | None]] = {
    "protobuf: empty datums": lambda message, index: message.data.add(),
    "protobuf: datums": lambda message, index: one_datum(message),
    "protobuf: datums, of which one has two chunks": lambda message, index: (
        message.data[0].model_input.add(encoded_text={"tokens": PROTOBUF_TOKEN}) if index == 0 else one_datum(message)
    ),
    "protobuf: chunks without type": lambda message, index: message.data[0].model_input.add(),
    "protobuf: empty chunks": lambda message, index: message.data[0].model_input.add(encoded_text={}),
    "protobuf: chunks": lambda message, index: message.data[0].model_input.add(encoded_text={"tokens": PROTOBUF_TOKEN}),
    "protobuf: spans": lambda message, index: message.data[0].model_input_spans.add(prompt_tokens={"sequence_id": "a"}),
    "protobuf: empty spans": lambda message, index: message.data[0].loss_fn_input_spans.add(),
    "protobuf: inputs": lambda message, index: message.data[0].loss_fn_inputs.add(
        key=str(index), value={"dtype": FLOAT32}
    ),
    "protobuf: sparse inputs": lambda message, index: message.data[0].loss_fn_inputs.add(
        key=str(index), value={"dtype": FLOAT32, "shape": [0, 0], "sparse_csr": {"crow_indices": bytes(8)}}
    ),
    "protobuf: equal inputs": lambda message, index: message.data[0].loss_fn_inputs.add(
        key="a", value={"dtype": FLOAT32}
    ),
    "protobuf: shapes": lambda message, index: message.data[0].loss_fn_inputs.add(key="a", value={"shape": [0] * 9}),
    "protobuf: options": lambda message, index: message.loss_fn_config_v2.add(key=str(index), value={"number": 1}),
}


def protobuf_of(name: str, size: int) -> bytes:
    message = wire.ForwardBackwardRequest(model_id="m", seq_id=1)
    one_datum(message)
    index = 0
    while message.ByteSize() < size - 100:
        for _ in range(256):
            PROTOBUF_PARTS[name](message, index)
            index += 1
    return message.SerializeToString()


PASS = '{"model_id":"m","data":[{"model_input":[1]'
SAMPLE = '{"prompt":{"chunks":[{"tokens":[1]}'
PARAMS = SAMPLE + ']},"sampling_params":{'
MODEL = '{"session_id":"s","model_seq_id":0,"base_model":"b"'
JSON_PARTS: dict[str, tuple[type[BaseModel] | None, str, str, str]] = {
    "JSON: empty data": (None, '{"model_id":"m","data":[', "{}", "]}"),
    "JSON: lists as data": (None, '{"model_id":"m","data":[', "[]", "]}"),
    "JSON: data": (None, '{"model_id":"m","data":[', '{"model_input":[1]}', "]}"),
    "JSON: chunks of a pass": (None, '{"data":[{"model_input":{"chunks":[', '{"tokens":[1]}', "]}}]}"),
    "JSON: empty chunks of a pass": (None, '{"data":[{"model_input":{"chunks":[', '{"tokens":[]}', "]}}]}"),
    "JSON: inputs": (None, PASS + ',"loss_fn_inputs":{', '"%":[]', "}}]}"),
    "JSON: tensors": (None, PASS + ',"loss_fn_inputs":{', '"%":{"data":[]}', "}}]}"),
    "JSON: rows": (None, PASS + ',"loss_fn_inputs":{"a":[', "[1]", "]}}]}"),
    "JSON: ragged rows": (None, PASS + ',"loss_fn_inputs":{"a":[', "[]", ",[1]]}}]}"),
    "JSON: spans": (None, PASS + ',"model_input_spans":[', '{"kind":"prompt","sequence_id":"a","length":0}', "]}]}"),
    "JSON: options": (None, PASS + '}],"loss_fn_config":{', '"%":1', "}}"),
    "JSON: unknown fields of a pass": (None, PASS + "}],", '"%":1', "}"),
    "JSON: chunks": (SampleRequest, SAMPLE + ",", '{"tokens":[1]}', "]}}"),
    "JSON: empty chunks": (SampleRequest, SAMPLE + ",", '{"tokens":[]}', "]}}"),
    "JSON: chunks without fields": (SampleRequest, SAMPLE + ",", "{}", "]}}"),
    "JSON: chunks of another type": (SampleRequest, SAMPLE + ",", '{"type":"image"}', "]}}"),
    "JSON: tokens": (SampleRequest, '{"prompt":{"chunks":[{"tokens":[', "1", "]}]}}"),
    "JSON: stop tokens": (SampleRequest, PARAMS + '"stop":[', "1", "]}}"),
    "JSON: stop strings": (SampleRequest, PARAMS + '"stop":[', '""', "]}}"),
    "JSON: biases": (SampleRequest, PARAMS + '"logit_bias":{', '"%":1', "}}}"),
    "JSON: parts of a schema": (SampleRequest, PARAMS + '"constraint":{"json_schema":{"a":[', "{}", "]}}}}"),
    "JSON: fields of a schema": (SampleRequest, PARAMS + '"constraint":{"json_schema":{', '"%":[]', "}}}}"),
    "JSON: targets": (SampleRequest, SAMPLE + ']},"target_prompt_logprobs":{"dtype":"int64","data":[', "[1]", "]}}"),
    "JSON: empty targets": (
        SampleRequest,
        SAMPLE + ']},"target_prompt_logprobs":{"dtype":"int64","data":[',
        "[]",
        "]}}",
    ),
    "JSON: captured data": (CaptureRequest, '{"model_id":"m","data":[', '{"model_input":[1]}', "]}"),
    "JSON: captured chunks": (
        CaptureRequest,
        '{"model_id":"m","data":[{"model_input":{"chunks":[',
        '{"tokens":[]}',
        "]}}]}",
    ),
    "JSON: sequences": (BuildVocabMapRequest, '{"model_id":"m","tokens":[', "[]", "]}"),
    "JSON: counts": (BuildVocabMapRequest, '{"model_id":"m","counts":{', '"%":1', "}}"),
    "JSON: metadata": (CreateModelRequest, MODEL + ',"user_metadata":{', '"%":1', "}}"),
    "JSON: layers": (CreateModelRequest, MODEL + ',"draft":{"algorithm":"eagle3","capture_layers":[', "1", "]}}"),
    "JSON: tags": (CreateSessionRequest, '{"sdk_version":"0","tags":[', '""', "]}"),
    "JSON: metadata of a checkpoint": (
        SaveWeightsRequest,
        '{"model_id":"m","path":"a","user_metadata":{',
        '"%":""',
        "}}",
    ),
    "JSON: recipients": (SaveWeightsExternalRequest, '{"model_id":"m","age_encryption_recipients":[', '""', "]}"),
    "JSON: references": (ReleaseFeaturesRequest, '{"model_id":"m","feature_refs":[', '""', "]}"),
    "JSON: optimizer's parameters": (OptimStepRequest, '{"model_id":"m","adam_params":{', '"%":1', "}}"),
}


def body_of(name: str, size: int) -> tuple[Decode, bytes]:
    """Returns a body of about this size, and its decoder."""
    if name in PROTOBUF_PARTS:
        return decoder_of(FORWARD_BACKWARD, PROTOBUF).decode, protobuf_of(name, size)
    model, before, part, after = JSON_PARTS[name]
    decode = decoder_of(FORWARD_BACKWARD, JSON).decode if model is None else partial(decode_model, model)
    return decode, filled(before, part, after, size)


@pytest.mark.parametrize("name", [*PROTOBUF_PARTS, *JSON_PARTS])
def test_what_is_decoded_on_the_event_loop_is_decoded_quickly(name: str) -> None:
    assert units_of(*body_of(name, QUICK_BYTES)) < MOST_UNITS


def test_the_measure_sees_a_body_that_takes_long() -> None:
    assert units_of(*body_of("protobuf: sparse inputs", 16 * QUICK_BYTES)) > MOST_UNITS


@pytest.mark.parametrize(
    "name",
    [
        *("protobuf: empty datums", "protobuf: chunks without type", "protobuf: empty spans"),
        *("JSON: chunks without fields", "JSON: chunks of another type", "JSON: empty data"),
    ],
)
def test_the_first_wrong_part_ends_the_decoding_of_a_large_body(name: str) -> None:
    decode, body = body_of(name, PROCESS_JSON_BYTES)
    with pytest.raises(RequestError):
        decode(body)
    assert units_of(decode, body) < MOST_UNITS


@pytest.mark.anyio
async def test_larger_bodies_are_decoded_in_a_thread() -> None:
    here = threading.get_ident()
    for size in (QUICK_BYTES - 1, QUICK_BYTES):
        where = await decode_body(Body(bytes(size), UNLIMITED), Decoder(lambda body: threading.get_ident()))
        assert (where == here) == (size < QUICK_BYTES)
