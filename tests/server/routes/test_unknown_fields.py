"""Every field that a request does not have is refused by its name, at every level of every verb, in both formats."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from fastapi import FastAPI
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from trainhouse.schemas.codec import JSON, PROTOBUF, decode_forward_backward, decode_model
from trainhouse.schemas.codec import trainhouse_wire_pb2 as wire
from trainhouse.schemas.errors import RequestError, UnknownField
from trainhouse.schemas.sampling import SampleRequest
from trainhouse.schemas.training import AdamParams, ForwardBackwardRequest, Request, parts_of
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.http.bodies import PROCESS_JSON_BYTES
from trainhouse.server.journal.journal import Header, JournalEntry
from trainhouse.server.journal.request_decoding import decode_entry
from trainhouse.server.serving.app import create_app
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.worker_config import ServedModel

from ..api import DRAFTS

pytestmark = pytest.mark.anyio

DISCARDED = {
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "POST /api/v1/auth/token",
    "POST /api/v1/telemetry",
}
"""Routes that read nothing of their body."""

WITHOUT_BODY = {"POST /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/publish"}
TENSORS = {"POST /api/v1/import_weights"}

PASSES = {"POST /api/v1/forward_backward", "POST /api/v1/forward", "POST /api/v1/create_evaluation"}
"""Routes whose JSON the codec reads."""

PARTS: dict[str, dict[str, object]] = {
    "TokenChunk": {"tokens": [1]},
    "ModelInput": {"chunks": [{"tokens": [1]}]},
    "Constraint": {"regex": "a"},
    "Captured": {"model_input": [1, 2]},
    "NewDraft": {"algorithm": "eagle3"},
    "CheckpointSchedule": {"every": 3},
    "LoggedMetrics": {"step": 1, "metrics": {}},
    "FinishReason": {"type": "success"},
    "SamplingSessionTarget": {"sampling_session_id": "s"},
}
"""The fields without which a part is not valid."""

LISTED = {"TokenChunk", "Captured", "LoggedMetrics"}
DATUM: dict[str, Any] = {
    "model_input": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
        "weights": {
            "data": [1.0],
            "dtype": "float32",
            "shape": [1, 2],
            "sparse_crow_indices": [0, 1],
            "sparse_col_indices": [1],
        },
    },
    "model_input_spans": [{"kind": "prompt", "sequence_id": "s", "offset": 0, "length": 2}],
    "loss_fn_input_spans": [{"kind": "sampled", "sequence_id": "s", "offset": 0, "length": 2}],
}
PASS: dict[str, Any] = {"data": [DATUM], "loss_fn": "cross_entropy", "loss_fn_config": {"beta": 1.0}}
FREE = {"loss_fn_inputs", "loss_fn_config", "user_metadata", "metrics", "counts", "json_schema", "logit_bias"}
"""Objects with names of the user's own."""


def requests_of(app: FastAPI) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields route, title of the schema and example of all JSON bodies, but for those of OpenAI and the console."""
    for path, methods in app.openapi()["paths"].items():
        for method, route in methods.items():
            content = route.get("requestBody", {}).get("content", {})
            if path.startswith("/api/") and "application/json" in content:
                body = content["application/json"]
                yield f"{method.upper()} {path}", body["schema"].get("title", ""), body["example"]


async def send(app: FastAPI, method: str, path: str, **content: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=20) as client:
        headers = {"X-API-Key": "tml-a", **content.pop("headers", {})}
        return await client.request(method, path, headers=headers, **content)


def all_requests(kind: type[Request] = Request) -> Iterator[type[Request]]:
    for each in kind.__subclasses__():
        yield each
        yield from all_requests(each)


MODELS = {
    each.__name__: each
    for each in all_requests()
    if each.__module__.startswith("trainhouse.schemas") and (DRAFTS or not each.__module__.endswith(".drafts"))
}


def bodies_with(kind: type[Request], body: dict[str, Any], extra: dict[str, object]) -> Iterator[tuple[str, Any]]:
    """Yields the body with `extra` at each level, and the name of the level."""
    yield kind.__name__, {**body, **extra}
    for field, parts in parts_of(kind).items():
        for part in parts:
            for name, inside in bodies_with(part, PARTS.get(part.__name__, {}), extra):
                yield name, {**body, field: [inside] if part.__name__ in LISTED else inside}


def with_key_at_each_level(value: Any, key: str, name: str = "") -> Iterator[Any]:
    """Yields the JSON value with one more key in each of its objects, but for those with free names."""
    if isinstance(value, list):
        for index, each in enumerate(value):
            for inside in with_key_at_each_level(each, key):
                yield [*value[:index], inside, *value[index + 1 :]]
    if isinstance(value, dict):
        if name not in FREE:
            yield {**value, key: 1}
        for field, each in value.items():
            for inside in with_key_at_each_level(each, key, field):
                yield {**value, field: inside}


async def test_each_route_is_checked_or_listed(app: FastAPI) -> None:
    checked = {route for route, title, _ in requests_of(app) if title in MODELS}
    posts = {
        f"{method.upper()} {path}"
        for path, methods in app.openapi()["paths"].items()
        for method in methods
        if path.startswith("/api/") and method in ("post", "put")
    }
    assert posts - checked == PASSES | DISCARDED | WITHOUT_BODY | TENSORS
    assert len(checked) > 25


async def test_each_verb_refuses_an_unknown_key_at_each_level(app: FastAPI) -> None:
    levels: set[str] = set()
    for route, title, example in requests_of(app):
        if title not in MODELS:
            continue
        method, path = route.split()
        for name, body in bodies_with(MODELS[title], example, {"zzz": 1}):
            levels.add(name)
            with pytest.raises(UnknownField, match=f"{name} has no zzz"):
                decode_model(MODELS[title], json.dumps(body).encode())
            if "{name}" not in path:  # of a checkpoint, whose existence is looked up first
                answer = await send(app, method, path.format(session_id="s", run_id="r"), json=body)
                assert answer.status_code == 400 and "has no zzz" in answer.json()["detail"], (route, name, answer.text)
    # Parts that no request has, and bases.
    assert {name for name, model in MODELS.items() if not model.__subclasses__()} - levels == set()


FREE_TYPES = {"OptimizerConfig", "FinishReason"}
"""Parts whose type says something: an optimizer, which is refused if it is not known, and how a session ended."""


async def test_a_type_is_accepted_only_where_sdks_send_it(app: FastAPI) -> None:
    for _, title, example in requests_of(app):
        for name, body in bodies_with(MODELS[title], example, {"type": "dora"}) if title in MODELS else ():
            if name not in FREE_TYPES:
                with pytest.raises(RequestError, match=r"has no type|type is 'dora'"):
                    decode_model(MODELS[title], json.dumps(body).encode())
    with pytest.raises(ValueError, match="AdamParams has no type"):
        AdamParams(type="adam")  # pyright: ignore[reportCallIssue]
    sent = {name for name in MODELS if "type" in getattr(getattr(tinker.types, name, None), "model_fields", {})}
    assert "SaveWeightsRequest" in sent and all("type" in MODELS[name].model_fields for name in sent)


def test_the_type_of_a_pass_is_its_verb() -> None:
    body = {"model_id": "m", **PASS}
    for verb in ("forward_backward", "forward"):
        decode = partial(decode_forward_backward, content_type="application/json", forward_only=verb == "forward")
        assert decode(json.dumps({**body, "type": verb}).encode()).data
        for wrong in with_key_at_each_level(body, "type"):
            with pytest.raises(RequestError, match=r"has no type|type is 1|of type 1 is not supported"):
                decode(json.dumps(wrong).encode())
        with pytest.raises(RequestError, match=f"type is 'optim_step': send {verb}, or leave it out"):
            decode(json.dumps({**body, "type": "optim_step"}).encode())


@pytest.mark.parametrize("nested", [None, "forward_backward_input", "forward_input"])
def test_the_json_of_a_pass_is_checked_at_each_level(nested: str | None) -> None:
    body = {"model_id": "m", "seq_id": 1, **(PASS if nested is None else {nested: PASS})}
    decode = partial(decode_forward_backward, content_type="application/json")
    assert decode(json.dumps(body).encode()).loss_fn == "cross_entropy"
    wrong = list(with_key_at_each_level(body, "zzz"))
    assert len(wrong) == 8 + (nested is not None)  # request, input, datum, model_input, chunk, 2 tensors, 2 spans
    for each in wrong:
        with pytest.raises(UnknownField, match="has no zzz: it has"):
            decode(json.dumps(each).encode())
        assert decode(json.dumps(each).encode(), ignore_unknown=True).data
    evaluation = {**body, "evaluation": {"name": "a", "every": 1, "zzz": 1}}
    with pytest.raises(UnknownField, match="evaluation has no zzz"):
        decode(json.dumps(evaluation).encode(), evaluates=True)


@pytest.mark.parametrize(
    ("title", "body", "words"),
    [
        ("CreateModelRequest", {"lora_config": {"target_modules": ["q_proj"]}}, "did you mean train_attn"),
        ("CreateModelRequest", {"lora_config": {"lora_alpha": 16}}, "did you mean alpha?"),
        ("CreateModelRequest", {"lora_config": {"r": 16}}, "did you mean rank?"),
        ("CreateModelRequest", {"lora_config": {"lora_dropout": 0.1}}, "LoraConfig has no lora_dropout: it has rank"),
        ("CreateModelRequest", {"rank": 16}, "did you mean lora_config.rank?"),
        ("SampleRequest", {"temperature": 0.5}, "did you mean sampling_params.temperature?"),
        ("SampleRequest", {"n": 4}, "did you mean num_samples?"),
        ("SampleRequest", {"max_tokens": 4}, "did you mean sampling_params.max_tokens?"),
        ("SampleRequest", {"num_sample": 4}, "did you mean num_samples?"),
        ("SampleRequest", {"target_prompt_logprobs": {"data": [], "strides": []}}, "target_prompt_logprobs.strides"),
        ("OptimStepRequest", {"learning_rate": 1e-4}, "did you mean adam_params.learning_rate?"),
        ("OptimStepRequest", {"lr": 1e-4}, "did you mean adam_params.learning_rate?"),
        ("SaveWeightsForSamplerRequest", {"overwrite": True}, "has no overwrite"),
        ("SaveWeightsExternalRequest", {"overwrite": True}, "has no overwrite"),
    ],
)
async def test_what_was_meant_is_suggested(app: FastAPI, title: str, body: dict[str, Any], words: str) -> None:
    example = next(example for _, named, example in requests_of(app) if named == title)
    with pytest.raises(UnknownField) as refused:
        decode_model(MODELS[title], json.dumps({**example, **body}).encode())
    assert words in refused.value.message and len(refused.value.message) < 500


def test_a_misspelt_field_of_a_pass_is_suggested() -> None:
    body = {"model_id": "m", **PASS, "loss_fn_confg": {}}
    with pytest.raises(UnknownField, match=r"did you mean loss_fn_config\?"):
        decode_forward_backward(json.dumps(body).encode(), "application/json")


def filled(descriptor: Any, without: tuple[str, ...] = ()) -> Message:
    """Returns a message with one entry in each field, and of each oneof in its last arm."""
    message = getattr(wire, descriptor.name)()
    for field in descriptor.fields:
        if field.name not in without:
            _fill(message, field)
    return message


def _fill(message: Message, field: FieldDescriptor) -> None:
    if (kind := field.message_type) is not None:
        target = getattr(message, field.name)
        (target.add() if field.is_repeated else target).CopyFrom(filled(kind))


def messages_in(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for entry in value if field.is_repeated else (value,):
                yield from messages_in(entry)


FIELD_50 = b"\x92\x03\x01a"


@pytest.mark.parametrize("is_uniform", [False, True])
def test_field_number_50_is_refused_at_each_level_of_protobuf(is_uniform: bool) -> None:
    valid = wire.ForwardBackwardRequest(model_id="m", seq_id=1)
    for _ in range(4 if is_uniform else 1):
        datum = valid.data.add()
        datum.model_input.add().encoded_text.tokens = b"abcd"
        datum.loss_fn_inputs.add(key="weights", value=wire.Tensor(dense=b"abcd", dtype=wire.DTYPE_FLOAT32))
    if not is_uniform:
        datum = valid.data[0]
        datum.model_input_spans.add().prompt_tokens.sequence_id = "a"
        datum.loss_fn_input_spans.add().sampled_tokens.sequence_id = "a"
        sparse = datum.loss_fn_inputs.add(key="sparse").value
        sparse.sparse_csr.crow_indices, sparse.dtype = bytes(8), wire.DTYPE_FLOAT32
        sparse.shape.extend([0, 1])
    valid.loss_fn_config_v2.add(key="beta").value.number = 1.0
    valid.loss_fn_config.add(key="beta", value=1.0)
    valid.evaluation.name, valid.evaluation.every = "a", 1
    decode = partial(decode_forward_backward, content_type=PROTOBUF, evaluates=True)
    assert len(decode(valid.SerializeToString()).data) == len(valid.data)
    num_levels, names = sum(1 for _ in messages_in(valid)), set()
    for level in range(num_levels):
        message = wire.ForwardBackwardRequest.FromString(valid.SerializeToString())
        part = list(messages_in(message))[level]
        part.MergeFromString(FIELD_50)
        names.add(part.DESCRIPTOR.name)
        with pytest.raises(UnknownField, match=f"{part.DESCRIPTOR.name} has no field 50: it has 1 ") as refused:
            decode(message.SerializeToString())
        assert refused.value.changes_results
        assert len(decode(message.SerializeToString(), ignore_unknown=True).data) == len(valid.data)
    parts = {each.DESCRIPTOR.name for each in messages_in(filled(wire.ForwardBackwardRequest.DESCRIPTOR))}
    parts -= {"ImageChunk", "ImageDimensions", "DmelChunk"}  # refused as a whole
    assert is_uniform or names >= parts, "each message that a request can hold is one of the levels"


def test_a_request_holds_no_maps_since_parsers_drop_unknown_fields_of_their_entries() -> None:
    for message in messages_in(filled(wire.ForwardBackwardRequest.DESCRIPTOR)):
        kinds = [each.message_type for each in message.DESCRIPTOR.fields if each.message_type is not None]
        assert not any(kind.GetOptions().map_entry for kind in kinds), message.DESCRIPTOR.name


async def test_an_unknown_field_uses_up_its_seq_id_and_names_itself_to_rest_clients(app: FastAPI) -> None:
    answer = await send(app, "POST", "/api/v1/forward_backward", json={"model_id": "m", **PASS, "zzz": 1})
    assert answer.status_code == 400 and "the request has no zzz" in answer.json()["detail"]
    body, headers = wire.ForwardBackwardRequest(model_id="m").SerializeToString() + FIELD_50, {"Content-Type": PROTOBUF}
    answer = await send(app, "POST", "/api/v1/forward", content=body, headers=headers)
    assert answer.status_code == 400 and "has no field 50" in answer.json()["detail"]


async def created(app: FastAPI, agent: str, sdk: str, **more: object) -> httpx.Response:
    body = {"sdk_version": sdk, **more}
    return await send(app, "POST", "/api/v1/create_session", json=body, headers={"User-Agent": agent})


async def test_a_newer_sdk_is_told_and_refused_only_where_results_would_change(app: FastAPI) -> None:
    newer, known = "AsyncTinker/Python 0.41.2", "AsyncTinker/Python 0.38.7"
    answer = await created(app, newer, "0.41.2", zzz=1)
    assert answer.status_code == 200
    assert "tested with SDKs up to 0.38, and this is 0.41.2" in answer.json()["warning_message"]
    assert answer.headers["x-deprecation-note"].startswith("ignored: bad request: CreateSessionRequest has no zzz")
    assert (await created(app, known, "0.38.7", zzz=1)).status_code == 400
    answer = await created(app, known, "0.38.7")
    said = {name: value for name, value in answer.json().items() if name != "info_message"}  # the console's address
    assert said == {"session_id": answer.json()["session_id"], "type": "create_session"}
    prompt = {"chunks": [{"tokens": [1]}]}
    wrong = {
        "asample": {"prompt": prompt, "zzz": 1},
        "sample": {"prompt": {**prompt, "zzz": 1}, "zzz": 2},
        "optim_step": {"model_id": "m", "adam_params": {"zzz": 1}},
        "forward_backward": {
            "model_id": "m",
            "zzz": 1,
            "forward_backward_input": {**PASS, "data": [{**DATUM, "zzz": 1}]},
        },
        "forward": {"model_id": "m", **PASS, "zzz": 1},
    }
    for verb, body in wrong.items():
        answer = await send(app, "POST", f"/api/v1/{verb}", json=body, headers={"User-Agent": newer})
        assert answer.status_code == 400 and "has no zzz" in answer.json()["detail"], verb
    body = {"model_id": "m", "zzz": 1, "forward_backward_input": PASS}
    answer = await send(app, "POST", "/api/v1/forward_backward", json=body, headers={"User-Agent": newer})
    assert answer.status_code == 404 and "there is no model m" in answer.json()["detail"]


async def test_an_operator_may_turn_refusals_into_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = (ServedModel("tiny/qwen3", str(tmp_path)),)
    config = ServerConfig.of(base_models=models, state_dir=tmp_path, unknown_fields="warn")
    app = create_app(config, WorkerDispatch(config.dispatch_config()))
    async with app.router.lifespan_context(app):
        for _ in range(2):
            answer = await created(app, "curl", "curl", **{"zz\r\nX-Injected: \u00e9": 1})
            assert answer.status_code == 200 and "x-injected" not in answer.headers
            assert "CreateSessionRequest has no 'zz" in answer.headers["x-deprecation-note"]
        body = {"model_id": "m", **PASS, "zzz": 1}
        answer = await send(app, "POST", "/api/v1/forward_backward", json=body)
        assert answer.status_code == 404 and "has no zzz" in answer.headers["x-deprecation-note"]
        content = wire.ForwardBackwardRequest(model_id="m", loss_fn="a").SerializeToString() + FIELD_50
        answer = await send(app, "POST", "/api/v1/forward", content=content, headers={"Content-Type": PROTOBUF})
        assert "has no field 50" in answer.headers["x-deprecation-note"]
    said = [one for one in caplog.messages if "CreateSessionRequest has no 'zz" in one]
    assert len(said) == 1 and "\n" not in said[0], "each of them once"


async def test_each_route_refuses_an_unknown_query_parameter(app: FastAPI) -> None:
    place = {"session_id": "s", "run_id": "r", "kind": "weights", "name": "a", "file": "b", "sampler_id": "x"}
    place |= {"request_id": "r", "key_id": "1"}
    refused, keyless = 0, set[str]()
    for path, methods in app.openapi()["paths"].items():
        for method, route in methods.items():
            if not path.startswith("/api/v1/"):
                continue
            known = [each["name"] for each in route.get("parameters", ()) if each["in"] == "query"]
            filled = path.replace("{name}/tokenizer", "tiny/qwen3/tokenizer").format(**place)
            body = {"json": {}} if method in ("post", "put") else {}
            answer = await send(app, method.upper(), filled, params={"zzz": "1"}, **body)
            if "has no zzz" not in answer.text:
                keyless.add(path)
                continue
            refused += 1
            assert answer.status_code == 400 and answer.json()["detail"].startswith(f"the query of {path} has no zzz")
            for name in known:
                answer = await send(app, method.upper(), filled, params={f"{name}x": "1"}, **body)
                assert f"did you mean {name}?" in answer.json()["detail"], (path, answer.text)
    assert refused > 40
    assert keyless == {"/api/v1/healthz", "/api/v1/readyz"}, "probes"


async def test_known_query_parameters_and_those_of_newer_sdks_are_taken(app: FastAPI) -> None:
    for path in ("training_runs?limit=5&access_scope=owned&project_id=p", "sessions?offset=1", "checkpoints?limit=1"):
        assert (await send(app, "GET", f"/api/v1/{path}")).status_code == 200
    newer = {"User-Agent": "AsyncTinker/Python 0.41.2"}
    answer = await send(app, "GET", "/api/v1/training_runs?zzz=1", headers=newer)
    assert answer.status_code == 200 and "has no zzz" in answer.headers["x-deprecation-note"]
    answer = await send(app, "POST", "/api/v1/asample?zzz=1", json={"prompt": {"chunks": [{"tokens": [1]}]}})
    assert answer.status_code == 400 and "it has none" in answer.json()["detail"], "busy routes bypass FastAPI"


@pytest.mark.parametrize("kind", ["optim_step", "sample", "create_model", "forward_backward"])
async def test_what_an_earlier_version_journaled_with_unknown_fields_is_read_again(kind: str) -> None:
    bodies = {
        "optim_step": {"model_id": "m", "learning_rate": 3},
        "sample": {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1], "x": 1}], "y": 1}, "temperature": 3},
        "create_model": {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": {"lora_alpha": 3}},
        "forward_backward": {"model_id": "m", **PASS, "loss_fn_confg": {}},
    }
    entry = JournalEntry(Header(kind, "t", "m", 1, "m:1"), json.dumps(bodies[kind]).encode(), 0)
    decoded = await decode_entry(entry)
    if isinstance(decoded, Request):
        assert decoded == type(decoded).model_validate(decoded.model_dump()), "nothing unknown is kept"
    large = replace(entry, body=entry.body + b" " * PROCESS_JSON_BYTES)
    assert type(await decode_entry(large)) is type(decoded), "in the decoder's process"


def protobuf_with(loss_fn_config: dict[str, float], loss_fn_config_v2: dict[str, wire.LossConfigValue]) -> bytes:
    message = wire.ForwardBackwardRequest(model_id="m")
    for key, number in loss_fn_config.items():
        message.loss_fn_config.add(key=key, value=number)
    for key, value in loss_fn_config_v2.items():
        message.loss_fn_config_v2.add(key=key, value=value)
    message.data.add().model_input.add().encoded_text.tokens = b"abcd"
    return message.SerializeToString()


def wire_option(**value: Any) -> wire.LossConfigValue:
    return wire.LossConfigValue(**value)


SPARSE = {"data": [1.0], "dtype": "float32", "shape": [1, 1]}
ROWS = [{"model_input": [1], "loss_fn_inputs": {"weights": SPARSE | {"sparse_col_indices": [0]}}}]
BOUNDS = {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}


@pytest.mark.parametrize(
    ("content_type", "body", "words"),
    [
        (PROTOBUF, protobuf_with({"a": 1}, {"b": wire_option(number=1)}), "is 1, but"),
        (PROTOBUF, protobuf_with({"a": 1}, {"a": wire_option(number=2)}), "has 2.0"),
        (PROTOBUF, protobuf_with({"a": 1}, {"a": wire_option(text="1")}), "has '1'"),
        (PROTOBUF, protobuf_with({}, {"a": wire_option()}), "neither number nor text"),
        (JSON, json.dumps({"model_id": "m", **PASS, "data": ROWS}).encode(), "send both or neither"),
        (JSON, json.dumps({"model_id": "m", **PASS, "type": "optim_step"}).encode(), "type is 'optim_step'"),
        (JSON, json.dumps({"model_id": "m", **PASS, "loss_fn": "ppo", "loss_fn_config": BOUNDS}).encode(), "contain 1"),
    ],
)
async def test_what_would_have_no_effect_is_refused_but_runs_if_an_earlier_version_accepted_it(
    content_type: str, body: bytes, words: str
) -> None:
    for ignore_unknown in (False, True):
        with pytest.raises(RequestError, match=words) as refused:
            decode_forward_backward(body, content_type, ignore_unknown=ignore_unknown)
        assert refused.value.status == 400
    header = Header("forward_backward", "t", "m", 1, "m:1", content_type=content_type)
    assert isinstance(await decode_entry(JournalEntry(header, body, 0)), ForwardBackwardRequest)


async def test_a_sample_with_a_chunk_without_tokens_runs_only_if_an_earlier_version_accepted_it() -> None:
    body = {"prompt": {"chunks": [{"type": "encoded_text"}, {"type": "encoded_text", "tokens": [1]}]}}
    with pytest.raises(RequestError, match=r"prompt.chunks.0.tokens is missing"):
        decode_model(SampleRequest, json.dumps(body).encode())
    decoded = await decode_entry(JournalEntry(Header("sample", "t", "s", 1, "s:1"), json.dumps(body).encode(), 0))
    assert isinstance(decoded, SampleRequest) and decoded.prompt.to_ints() == [1]


def test_both_forms_of_the_options_of_a_loss_are_accepted_as_sdks_send_them() -> None:
    options = {"a": wire_option(number=1), "b": wire_option(text="x"), "c": wire_option(number=math.nan)}
    body = protobuf_with({"a": 1, "c": math.nan}, options)
    assert {**decode_forward_backward(body, PROTOBUF).loss_fn_config, "c": 0} == {"a": 1.0, "b": "x", "c": 0}


def test_huge_and_odd_names_make_short_messages() -> None:
    body = json.dumps({"\n\r\x1b" + "x" * 100_000: 1, **{f"k{index}": 1 for index in range(100_000)}}).encode()
    with pytest.raises(RequestError) as refused:
        decode_model(MODELS["GetInfoRequest"], body[:-1] + b', "model_id": "m"}')
    assert len(refused.value.message) < 500 and "\n" not in refused.value.message
