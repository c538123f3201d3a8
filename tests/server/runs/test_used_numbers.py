"""A number that was used belongs to the request that used it: retries of it, however they are encoded, get its answer,
and every other request is refused. The bodies, and everything in them that can differ, are generated from FIELDS.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zstandard
from pydantic import BaseModel
from trainhouse.schemas.codec import JSON, decode_forward_backward, decode_model, encode_forward_backward_request
from trainhouse.schemas.errors import RequestError
from trainhouse.schemas.sampling import SampleRequest, SamplingParams
from trainhouse.schemas.training import AdamParams
from trainhouse.schemas.verbs import CREATE_MODEL
from trainhouse.server.http.bodies import decoder_of
from trainhouse.server.http.digests import decode_with_digest
from trainhouse.server.http.verbs import VERBS
from trainhouse.workers.dispatch import WorkerDispatch

from ..api import DRAFTS
from ..real import ALICE, MODEL, PROTOBUF, Server, running_server, server_config

pytestmark = pytest.mark.anyio

DATA = [
    {"model_input": [5, 6, 7], "loss_fn_inputs": {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 0.5]}},
    {"model_input": [9, 10], "loss_fn_inputs": {"target_tokens": [10, 11], "weights": [1.0, 0.25]}},
]
PASS = {"data": DATA, "loss_fn": "cross_entropy", "loss_fn_config": {"beta": 0.5}, "loss_weight": 2.0}
PATH = "tinker://a:train:0/weights/a"
ADAM = {
    "learning_rate": 0.01,
    "beta1": 0.8,
    "beta2": 0.9,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_clip_norm": 1.0,
}
PARAMS = {
    "max_tokens": 4,
    "seed": 1,
    "stop": ["x"],
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.01,
    "min_tokens": 1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "logit_bias": {"5": 1.5, "6": -1.0},
    "constraint": {
        "json_schema": {
            "type": "object",
            "properties": {
                "a": {},
                "b": {"enum": [3.0, {"stop": "a"}]},
                **{name: {} for name in ("stop", "logit_bias", "user_metadata", "model_id", "seq_id", "type")},
            },
        }
    },
}
FIELDS: dict[str, dict[str, Any]] = {
    "forward_backward": PASS,
    "forward": PASS,
    "create_evaluation": PASS | {"evaluation": {"name": "held", "every": 10}},
    "optim_step": {"adam_params": ADAM, "gradient_scale": "mean", "optimizer_params": {"type": "dimuon", "lr": 0.1}},
    "save_weights": {"path": "a", "overwrite": True, "ttl_seconds": 3600, "user_metadata": {"a": "b", "c": "d"}},
    "save_weights_for_sampler": {
        "path": "a",
        "kind": "inflight",
        "ttl_seconds": 3600,
        "user_metadata": {"a": "b", "c": "d"},
    },
    "save_weights_external": {"path": "a", "ttl_seconds": 3600, "age_encryption_recipients": ["age1a"]},
    "load_weights": {
        "path": PATH,
        "optimizer": True,
        "base_model": MODEL,
        "user_metadata": {"a": 1, "stop": "x", "logit_bias": {}, "user_metadata": {}, "adam_params": {}},
        "optimizer_config": {"type": "sgd", "version": 2},
        "model_role": "policy",
    },
    "schedule_checkpoints": {
        "checkpoints": {
            "every": 10,
            "keep_last": 2,
            "keep_best": 1,
            "metric": "loss:mean",
            "best": "max",
            "prefix": "s",
            "ttl_seconds": 3600,
        }
    },
    "delete_evaluation": {"name": "held"},
}
if DRAFTS:
    FIELDS |= {
        "set_target": {"path": PATH},
        "build_vocab_map": {"tokens": [[5, 6], [7]], "weights": [[1.0, 0.0], [1.0]]},
        "capture": {"data": [{"model_input": [5, 6]}, {"model_input": [7]}], "ttl_seconds": 60.0, "uses": 1},
    }
SAMPLE: dict[str, Any] = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}, {"type": "encoded_text", "tokens": [7]}]},
    "sampling_params": PARAMS,
    "num_samples": 2,
    "prompt_logprobs": True,
    "prompt_logprobs_last_n": 1,
    "topk_prompt_logprobs": 2,
    "topk_sample_logprobs": 3,
    "target_prompt_logprobs": {"data": [6, 7], "dtype": "int64", "shape": [2, 1]},
    "prompt_alt_tokens_k": 1,
    "record_stability_info": True,
    "base_model": MODEL,
    "model_path": PATH,
    "draft_path": "",
    "num_draft_tokens": 2,
}
MODELS: dict[str, type[BaseModel]] = {
    verb.name: verb.request
    for verb in VERBS.values()
    if verb is not CREATE_MODEL and issubclass(verb.request, BaseModel)
}
NUMBERS = {"model_id", "seq_id", "session_id", "model_seq_id", "sampling_session_seq_id", "sampling_session_id", "type"}
NOT_COMPARED = {"weights_access_token", "counts"}  # a secret; another body than with tokens, see below

OTHERS: dict[str, Any] = {
    "loss_fn": "importance_sampling",
    "kind": "snapshot",
    "gradient_scale": 0.5,
    "model_role": "critic",
    "best": "min",
    "dtype": "float32",
    "type": None,
    "every": 11,
    "draft_path": PATH,
}
"""Values of fields that have few: all others are changed by arithmetic."""


def test_every_field_is_in_the_bodies() -> None:
    assert set(FIELDS) >= {*MODELS, "forward", "forward_backward", "create_evaluation"}
    for verb, model in MODELS.items():
        assert set(FIELDS[verb]) == set(model.model_fields) - NUMBERS - NOT_COMPARED, verb
    assert set(SAMPLE) == set(SampleRequest.model_fields) - NUMBERS
    assert set(PARAMS) == set(SamplingParams.model_fields) and set(ADAM) == set(AdamParams.model_fields)


def other_value(name: str, value: Any) -> Any:
    if name in OTHERS:
        return OTHERS[name]
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value / 2 + 0.13
        case _:
            return f"{value}z"


def changed(body: Any, name: str = "") -> Iterator[Any]:
    """Yields the body with one of its values changed, for each of them, and without one of its entries."""
    match body:
        case dict():
            for key, value in body.items():
                yield from ({**body, key: each} for each in changed(value, key))
                if len(body) > 1 and key not in ("model_input", "tokens", "dtype", "shape", "data", "type"):
                    yield {other: each for other, each in body.items() if other != key}
        case list():
            for index, value in enumerate(body):
                yield from ([*body[:index], each, *body[index + 1 :]] for each in changed(value, name))
        case _ if (other := other_value(name, body)) is not None:
            yield other


def reordered(body: Any, and_schemas: bool = False) -> Any:
    """Returns the body with the names of its objects in another order, which means something only in a schema."""
    if isinstance(body, dict):
        return {
            key: body[key] if key == "json_schema" and not and_schemas else reordered(body[key], and_schemas)
            for key in reversed(body)
        }
    return [reordered(each, and_schemas) for each in body] if isinstance(body, list) else body


def with_other_schemas(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the body with schemas of the same names and values, and another meaning."""
    yield reordered(body, and_schemas=True)
    text = json.dumps(body)
    yield json.loads(text.replace('{"stop": "a"}', '{"stop": ["a"]}'))
    yield json.loads(text.replace('"enum": [3.0,', '"enum": [3,'))


def respelled(body: dict[str, Any]) -> bytes:
    """The body as JSON of another order, with other spaces and other forms of its numbers."""
    text = json.dumps(reordered(body), indent=3)
    for number, other in (("0.01", "1e-2"), ("0.5", "5.0E-1"), ("2.0", "2"), ("0.25", "2500e-4"), ("1.0", "1")):
        text = text.replace(f" {number},", f" {other},").replace(f" {number}\n", f" {other}\n")
    return text.encode()


def encodings(verb: str, body: dict[str, Any]) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Yields other encodings of the same body, with their headers."""
    plain = {"Content-Type": JSON}
    yield json.dumps(body).encode(), plain
    yield respelled(body), plain
    yield zstandard.compress(json.dumps(body).encode()), plain | {"Content-Encoding": "zstd"}
    if (targets := body.get("target_prompt_logprobs")) is not None:
        rows = {"data": [[each] for each in targets["data"]], "dtype": "int64", "sparse_crow_indices": None}
        yield json.dumps(body | {"target_prompt_logprobs": rows}).encode(), plain
        yield json.dumps(body | {"target_prompt_logprobs": targets | {"sparse_col_indices": None}}).encode(), plain
    token = {"weights_access_token": None} if verb == "load_weights" else {}
    yield json.dumps(body | {"type": verb.removeprefix("a")} | token).encode(), plain
    if "data" in body and "loss_fn" in body:
        is_evaluation = verb == "create_evaluation"
        request = decode_forward_backward(json.dumps(body).encode(), JSON, evaluates=is_evaluation)
        protobuf = encode_forward_backward_request(request)
        yield protobuf, {"Content-Type": PROTOBUF}
        yield zstandard.compress(protobuf), {"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
        old = {"model_id": body["model_id"], "seq_id": body["seq_id"], "loss_weight": body["loss_weight"]}
        if not is_evaluation:
            nested = {name: body[name] for name in ("data", "loss_fn", "loss_fn_config")}
            yield json.dumps(old | {"forward_backward_input": nested}).encode(), plain


class Restarting:
    """A server that can be restarted; results that are stored leave its memory at once."""

    def __init__(self, model: Path, state_dir: Path, dispatch: WorkerDispatch) -> None:
        self._config = server_config(model, state_dir, result_memory_bytes=1)
        self._dispatch, self._stack = dispatch, AsyncExitStack()

    async def start(self) -> Server:
        await self.stop()
        return await self._stack.enter_async_context(running_server(self._config, self._dispatch))

    async def stop(self) -> None:
        await self._stack.aclose()

    def written(self) -> dict[Path, int]:
        """Returns the sizes of the segments of journal and results."""
        return {path: path.stat().st_size for path in self._config.store.state_dir.rglob("*.segment")}


@pytest.fixture
async def restarting(
    tiny_models: dict[str, Path], tmp_path: Path, dispatch: WorkerDispatch
) -> AsyncIterator[Restarting]:
    restarting = Restarting(tiny_models["qwen3"], tmp_path / "state", dispatch)
    yield restarting
    await restarting.stop()


async def refusal(server: Server, verb: str, body: dict[str, Any]) -> str:
    answer = await server.clients[ALICE].post(verb, json=body)
    assert answer.status_code == 400, f"{verb} {body} {answer.text}"
    return answer.json()["detail"]


def article(verb: str) -> str:
    return f"an {verb}" if verb == "optim_step" else f"a {verb}"


async def test_a_used_number_belongs_to_its_request(restarting: Restarting) -> None:
    """Every verb against every other, and against itself with each value changed; then again after a restart."""
    server = await restarting.start()
    run = await server.create_run()
    numbers = {verb: {"model_id": run.model_id, "seq_id": seq_id} for seq_id, verb in enumerate(FIELDS, 1)}
    answers = {verb: await server.post(verb, numbers[verb] | FIELDS[verb]) for verb in FIELDS}
    results = {verb: await server.result(answer["request_id"]) for verb, answer in answers.items()}
    await server.services.futures.store_now()
    for _ in range(2):
        before = restarting.written()
        for verb, number in numbers.items():
            was = f"seq_id {number['seq_id']} of {run.model_id} was {article(verb)}, this is"
            await check_encodings(server, verb, number | FIELDS[verb], answers[verb])
            for other in FIELDS.keys() - {verb}:
                detail = await refusal(server, other, number | FIELDS[other])
                assert detail.startswith(f"{was} {article(other)}: is another process training this run?")
            others = [fields for fields in changed(FIELDS[verb]) if is_valid(verb, number | fields)]
            assert len(others) >= len(FIELDS[verb])
            for fields in others:
                detail = await refusal(server, verb, number | fields)
                assert detail.startswith(f"{was} another {verb} with different content: is another"), fields
            assert await server.result(answers[verb]["request_id"]) == results[verb]
        assert restarting.written() == before, "a refusal of a used number is written nowhere"
        server = await restarting.start()
    free = await server.post("forward", {"model_id": run.model_id} | PASS)
    assert free["seq_id"] == len(FIELDS) + 1, "refusals use up no number"


def is_valid(verb: str, body: dict[str, Any]) -> bool:
    decode = (
        partial(decode_model, {**MODELS, "sample": SampleRequest}[verb])
        if verb in (*MODELS, "sample")
        else decoder_of(VERBS[verb], JSON).decode
    )
    try:
        decode_with_digest(decode, json.dumps(body).encode())
    except RequestError:
        return False
    return True


async def check_encodings(server: Server, verb: str, body: dict[str, Any], answer: object) -> None:
    for encoded, headers in encodings(verb, body):
        again = await server.post_bytes(verb, encoded, **headers)
        assert again.status_code == 200 and again.json() == answer, (verb, headers, again.text)


async def test_defaults_may_be_left_out_or_filled_in(restarting: Restarting) -> None:
    """Different versions of the SDK do either."""
    server = await restarting.start()
    run = await server.create_run()
    same: dict[str, list[dict[str, Any]]] = {
        "optim_step": [{}, {"adam_params": {}}, {"adam_params": AdamParams().model_dump()}],
        "save_weights": [{"path": "a"}, {"path": "a", "overwrite": False, "ttl_seconds": None, "user_metadata": {}}],
        "save_weights_for_sampler": [{}, {"kind": "snapshot"}, {"sampling_session_seq_id": 1}],
        "forward_backward": [
            {"data": DATA, "loss_fn": "cross_entropy"},
            {"data": DATA, "loss_fn": "cross_entropy", "loss_fn_config": {}, "loss_weight": 1, "forward_only": False},
            {"data": DATA, "loss_fn": "cross_entropy", "loss_fn_config": None, "capture_for": None},
            {"data": [with_chunks(each) for each in DATA], "loss_fn": "cross_entropy"},
        ],
    }
    for seq_id, (verb, bodies) in enumerate(same.items(), 1):
        number = {"model_id": run.model_id, "seq_id": seq_id}
        answers = [await server.post(verb, number | body) for body in bodies]
        assert answers == answers[:1] * len(answers)
    sampler_id = await sampler_of(server, run.session_id)
    sampling = [{}, {"sampling_params": {}}, {"sampling_params": SamplingParams().model_dump()}]
    sampling += [{"topk_prompt_logprobs": 0, "prompt_logprobs": False, "num_samples": 1, "base_model": None}]
    prompts = [
        [{"type": "encoded_text", "tokens": [5, 6]}],
        [{"type": "encoded_text", "tokens": [each]} for each in (5, 6)],
    ]
    bodies = [{"prompt": {"chunks": chunks}, **fields} for chunks in prompts for fields in sampling]
    answers = [await server.post("asample", {"sampling_session_id": sampler_id, "seq_id": 0} | body) for body in bodies]
    assert answers == answers[:1] * len(answers)


def with_chunks(datum: dict[str, Any]) -> dict[str, Any]:
    tokens = datum["model_input"]
    chunks = [{"type": "encoded_text", "tokens": part} for part in (tokens[:1], tokens[1:])]
    inputs = {
        name: {"data": values, "dtype": "int64" if name == "target_tokens" else "float32", "shape": [len(values)]}
        for name, values in reversed(datum["loss_fn_inputs"].items())
    }
    return {"loss_fn_inputs": inputs, "model_input": {"chunks": chunks}}


async def sampler_of(server: Server, session_id: str) -> str:
    body = {"session_id": session_id, "sampling_session_seq_id": 9, "base_model": MODEL}
    return (await server.post("create_sampling_session", body))["sampling_session_id"]


async def test_sparse_and_dense_data_are_the_same(restarting: Restarting) -> None:
    server = await restarting.start()
    run = await server.create_run()
    shape, tokens = [2, 3], [[6, 7, 0], [0, 8, 9]]
    weights = {"data": [1.0, 0.5, 0.25, 1.0], "dtype": "float32", "shape": shape}
    sparse = weights | {"sparse_crow_indices": [0, 2, 4], "sparse_col_indices": [0, 1, 1, 2]}
    dense = weights | {"data": [1.0, 0.5, 0.0, 0.0, 0.25, 1.0]}
    targets = {"data": [*tokens[0], *tokens[1]], "dtype": "int64", "shape": shape}
    for number, given in enumerate((sparse, dense), 1):
        bodies = [
            {"model_id": run.model_id, "seq_id": number, "loss_fn": "cross_entropy"}
            | {"data": [{"model_input": [5, 6], "loss_fn_inputs": {"target_tokens": targets, "weights": each}}]}
            for each in (given, dense, sparse, dense | {"data": [1.0, 0.5, 0.0, 0.0, 0.25, 0.5]})
        ]
        answers = [await server.post("forward_backward", body) for body in bodies[:3]]
        assert answers == answers[:1] * 3
        assert "another forward_backward" in await refusal(server, "forward_backward", bodies[3])


async def test_a_used_number_of_a_sampler_belongs_to_its_request(restarting: Restarting) -> None:
    server = await restarting.start()
    sampler_id = await sampler_of(server, await server.create_session())
    bodies = [SAMPLE, {"prompt": SAMPLE["prompt"]}]
    numbered = [{"sampling_session_id": sampler_id, "seq_id": seq_id} | body for seq_id, body in enumerate(bodies)]
    answers = [await server.post("asample", body) for body in numbered]
    results = [await server.result(answer["request_id"]) for answer in answers]
    await server.services.futures.store_now()
    for _ in range(2):
        for body, answer, result in zip(numbered, answers, results, strict=True):
            await check_encodings(server, "asample", body, answer)
            number = {"sampling_session_id": sampler_id, "seq_id": body["seq_id"]}
            content = {name: value for name, value in body.items() if name not in number}
            more = [content | {name: value} for name, value in SAMPLE.items() if name not in content]
            others = list(with_other_schemas(content)) if "sampling_params" in content else []
            for fields in [*changed(content), *more, *others]:
                if is_valid("sample", number | fields):
                    detail = await refusal(server, "asample", number | fields)
                    assert detail.startswith(
                        f"seq_id {body['seq_id']} of sampler {sampler_id} was a sample, this is another"
                    )
            assert await server.result(answer["request_id"]) == result
        server = await restarting.start()
    assert (await server.post("asample", numbered[1] | {"seq_id": None}))["seq_id"] > 1
