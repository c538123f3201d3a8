"""Errors of requests name the value and the remedy, and do not affect later operations.

Every refusal is followed by an optim_step with the next seq_id, as the SDK would send it, which must answer.
"""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import zstandard
from tinker import types
from trainhouse.schemas.codec import encode_forward_backward_request
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.server.operations import registry
from trainhouse.server.routes.gate import DRAIN_BYTES

from ..real import ALICE, MODEL, VOCAB, Run, Server, batch, datum

pytestmark = pytest.mark.anyio

JSON = {"Content-Type": "application/json"}


async def assert_run_continues(run: Run, first: int = 2, tainted: bool = True) -> None:
    """Asserts that the next optim_step answers (with the reason, after a failed forward_backward) and the one after it
    works."""
    async with asyncio.timeout(30):
        step = await run.submit("optim_step", seq_id=first, adam_params={})
        answer = await run.server.result(step["request_id"], run.key)
        if tainted:
            assert f"seq_id {first - 1}" in answer["error"] and answer["category"] == "user"
        assert (await run.send(run.encode(batch(), first + 1))).status_code == 200
        step = await run.submit("optim_step", seq_id=first + 2, adam_params={})
        assert "metrics" in await run.server.result(step["request_id"], run.key)


GOOD = [datum([5, 6, 7, 8])]
IMAGE = types.Datum(
    model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=3)]),
    loss_fn_inputs={},
)


def too_big(run: Run) -> bytes:
    return run.encode([datum(list(range(3, 500)) * 4) for _ in range(20)], 1)


REFUSED: dict[str, tuple[Callable[[Run], bytes], dict[str, str], int, str]] = {
    "image": (lambda run: run.encode([IMAGE], 1), {}, 400, "image"),
    "broken protobuf": (lambda run: run.encode(GOOD, 1)[:-3], {}, 400, "not a valid protobuf"),
    "bad JSON": (lambda run: f'{{"model_id": "{run.model_id}", "seq_id": 1, "data": ['.encode(), JSON, 400, "JSON"),
    "truncated zstd": (
        lambda run: zstandard.compress(run.encode(batch(2000), 1))[:-9],
        {"Content-Encoding": "zstd"},
        400,
        "truncated",
    ),
    "zstd bomb": (
        lambda run: zstandard.compress(run.encode(GOOD, 1) + bytes(2_000_000)),
        {"Content-Encoding": "zstd"},
        413,
        "1000000",
    ),
    "other encoding": (lambda run: run.encode(GOOD, 1), {"Content-Encoding": "br"}, 415, "'br'"),
    "empty batch": (lambda run: run.encode([], 1), {}, 400, "data is empty"),
    "too large": (too_big, {}, 413, "200000"),
    "too large JSON": (
        lambda run: f'{{"model_id": "{run.model_id}", "seq_id": 1, "data": [{"1," * 200_000}1]}}'.encode(),
        JSON,
        413,
        "max-body-bytes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_bodies_that_cannot_be_decoded_are_refused_and_use_their_seq_id(server: Server, case: str) -> None:
    make, headers, status, reason = REFUSED[case]
    run = await server.create_run()
    response = await run.send(make(run), **headers)
    assert (response.status_code, reason in response.json()["detail"]) == (status, True), response.text
    assert int(response.headers["content-length"]) > 0, "an empty 400 would be retried"
    await assert_run_continues(run)


def with_inputs(**inputs: Any) -> list[types.Datum]:
    return [datum([5, 6, 7, 8], **({"target_tokens": [6, 7, 8], "weights": [1.0] * 3} | inputs))]


POLICY = {"target_tokens": [6, 7, 8], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}

FAILED: dict[str, tuple[list[types.Datum], dict[str, Any], str]] = {
    "token out of vocabulary": ([datum([5, VOCAB, 7])], {}, str(VOCAB)),
    "negative target": (with_inputs(target_tokens=[6, -7, 8]), {}, "-7"),
    "longer than the model": ([datum([5] * 1030)], {}, "1024"),
    "targets of another length": (with_inputs(target_tokens=[6, 7]), {}, "target_tokens"),
    "weights of another length": (with_inputs(weights=[1.0, 1.0]), {}, "weights"),
    "no targets": ([datum([5, 6], weights=[1.0])], {}, "target_tokens"),
    "unknown loss": (GOOD, {"loss_fn": "mse"}, "mse"),
    "unknown input": (with_inputs(mask=[1.0] * 3), {}, "mask"),
    "unknown config key": (GOOD, {"config": {"temperature": 2.0}}, "temperature"),
    "NaN weight": (with_inputs(weights=[1.0, float("nan"), 1.0]), {}, "weights"),
    "NaN advantage": (
        [datum([5, 6, 7, 8], **POLICY | {"advantages": [1.0, float("nan"), 1.0]})],
        {"loss_fn": "ppo"},
        "advantages",
    ),
    "stable_reinforce without spans": (
        [datum([5, 6, 7, 8], target_tokens=[6, 7, 8], advantages=[1.0] * 3)],
        {"loss_fn": "stable_reinforce"},
        "loss_fn_input_spans",
    ),
    "a second datum that is wrong": ([*GOOD, datum([5, VOCAB, 7])], {}, str(VOCAB)),
}


@pytest.mark.parametrize("case", FAILED)
async def test_batches_that_cannot_be_computed_fail_only_their_future(server: Server, case: str) -> None:
    data, options, reason = FAILED[case]
    run = await server.create_run()
    response = await run.send(run.encode(data, 1, **options))
    assert response.status_code == 200, response.text
    answer = await server.result(f"{run.model_id}:1")
    assert (answer.get("category"), reason in answer["error"]) == ("user", True), answer
    await assert_run_continues(run)


@pytest.mark.parametrize("verb", ["save_weights", "save_weights_for_sampler", "save_weights_external"])
async def test_invalid_checkpoint_names_are_refused(server: Server, verb: str) -> None:
    run = await server.create_run()
    names = ["../../etc/passwd", "a/b", "..", "", ".hidden", "a" * 129, "a\nb", "ä"]
    for name in names:
        answer = await run.do(verb, path=name)
        assert answer["category"] == "user" and "not allowed" in answer["error"]
    assert not list(server.services.config.store.state_dir.rglob("*passwd*"))
    await assert_run_continues(run, first=len(names) + 1, tainted=False)


BAD_JSON: dict[str, tuple[str, dict[str, Any], str]] = {
    "negative learning rate": ("optim_step", {"adam_params": {"learning_rate": -1}}, "adam_params.learning_rate is -1"),
    "NaN learning rate": ("optim_step", {"adam_params": {"learning_rate": "NaN"}}, "learning_rate"),
    "beta of one": ("optim_step", {"adam_params": {"beta1": 1.0}}, "beta1 is 1.0"),
    "TTL of a second": ("save_weights", {"path": "a", "ttl_seconds": 1}, "ttl_seconds is 1"),
    "TTL of ages": ("save_weights", {"path": "a", "ttl_seconds": 10**12}, "less than or equal to 315360000"),
    "no name": ("save_weights", {}, "path is missing"),
    "kind of sampler": ("save_weights_for_sampler", {"kind": "best"}, "kind is 'best'"),
    "no path": ("load_weights", {}, "path is missing"),
}


@pytest.mark.parametrize("case", BAD_JSON)
async def test_a_wrong_field_is_named_with_its_value(server: Server, case: str) -> None:
    verb, fields, reason = BAD_JSON[case]
    run = await server.create_run()
    answer = await run.submit(verb, status=400, **fields)
    assert reason in answer["detail"]
    await assert_run_continues(run, tainted=False)


async def test_invalid_json_uses_its_seq_id(server: Server) -> None:
    run = await server.create_run()
    broken = f'{{"model_id": "{run.model_id}", "seq_id": 1, "adam_params": {{'
    response = await server.post_bytes("optim_step", broken.encode())
    assert response.status_code == 400 and "not valid JSON" in response.json()["detail"]
    await assert_run_continues(run, tainted=False)


async def test_a_pass_that_captures_uses_its_seq_id_where_drafts_are_missing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "plugin_rows", lambda module, table: {})
    run = await server.create_run()
    data = [{"model_input": [5, 6], "loss_fn_inputs": {"target_tokens": [6, 7], "weights": [1.0, 1.0]}}]
    fields = {"data": data, "loss_fn": "cross_entropy", "capture_for": run.model_id}
    answer = await run.submit("forward_backward", status=400, **fields)
    assert "without: leave it out" in answer["detail"]
    await assert_run_continues(run)


async def test_json_is_accepted_without_a_json_content_type(server: Server) -> None:
    """`curl -d` sends the content type of a form."""
    for headers in ({"Content-Type": "application/x-www-form-urlencoded"}, {}):
        answer = await server.post_bytes("create_session", b'{"sdk_version": "x"}', **headers)
        assert answer.status_code == 200 and answer.json()["session_id"]


async def test_loading_a_missing_checkpoint_fails_only_that_operation(server: Server) -> None:
    run = await server.create_run()
    for path, reason in {
        f"tinker://{run.model_id}/weights/none": "none",
        "tinker://../../weights/x": "not a checkpoint path",
        "/etc/passwd": "not a checkpoint path",
    }.items():
        answer = await run.do("load_weights", path=path)
        assert answer["category"] == "user" and reason in answer["error"]
    await assert_run_continues(run, first=4, tainted=False)


async def test_the_dimuon_optimizer_is_refused(server: Server) -> None:
    run = await server.create_run()
    answer = await run.do("optim_step", optimizer_params={"type": "dimuon", "learning_rate": 0.1})
    assert answer["category"] == "user" and "'dimuon'" in answer["error"] and "adam_params" in answer["error"]
    body = {"session_id": run.session_id, "model_seq_id": 1, "base_model": MODEL, "lora_config": {"rank": 4}}
    refused = await server.post(
        "create_model", body | {"optimizer_config": {"type": "dimuon", "version": 1}}, status=400
    )
    assert "'dimuon'" in refused["detail"] and "adamw" in refused["detail"]
    await assert_run_continues(run, tainted=False)


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        (
            {"lora_config": {"rank": 64}},
            400,
            "rank 64 exceeds max_lora_rank 16: lower the rank or start the server with",
        ),
        ({"lora_config": {"rank": 0}}, 400, "lora_config.rank is 0"),
        ({"base_model": "meta/none"}, 400, "meta/none"),
        ({"session_id": "nobody"}, 404, "no session nobody"),
    ],
)
async def test_models_that_cannot_be_created_are_refused(
    server: Server, fields: dict, status: int, reason: str
) -> None:
    run = await server.create_run()
    body = {"session_id": run.session_id, "model_seq_id": 1, "base_model": MODEL, "lora_config": {"rank": 4}}
    refused = await server.post("create_model", body | fields, status=status)
    assert reason in refused["detail"]
    await assert_run_continues(run, first=1, tainted=False)


async def test_an_adapter_that_trains_nothing_fails_at_creation(server: Server) -> None:
    session_id = await server.create_session()
    nothing = {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": nothing}
    answer = await server.result((await server.post("create_model", body))["request_id"])
    assert answer["category"] == "user"
    assert (
        "could not be created"
        in (await server.post("optim_step", {"model_id": f"{session_id}:train:0"}, status=410))["detail"]
    )


async def test_an_unknown_model_is_not_found(server: Server) -> None:
    unknown = await server.post("optim_step", {"model_id": "nobody:train:0", "seq_id": 1}, status=404)
    assert "nobody:train:0" in unknown["detail"] and "create_model" in unknown["detail"]
    datums = (Datum(np.array([5], np.int32), {"target_tokens": np.array([6])}),)
    body = encode_forward_backward_request(ForwardBackwardRequest("nobody:train:0", 1, datums, "cross_entropy"))
    response = await server.post_bytes("forward_backward", body, **{"Content-Type": "application/x-protobuf"})
    assert response.status_code == 404


async def test_an_unknown_path_is_answered_with_json(server: Server) -> None:
    response = await server.clients[ALICE].post("unload_models", json={})
    assert response.status_code == 404 and "POST /api/v1/unload_models" in response.json()["detail"]


async def test_the_body_of_create_session_is_limited(server: Server) -> None:
    response = await server.post_bytes("create_session", b'{"tags": ["' + b"a" * 300_000 + b'"]}', **JSON)
    assert response.status_code == 413 and "200000" in response.json()["detail"]


async def test_a_huge_body_is_not_kept_in_memory(server: Server) -> None:
    """At most four times the limit is read of an endless body, and what is dropped after an answer; it is not held."""
    run = await server.create_run()
    num_taken = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_taken
        yield run.encode(GOOD, 1)
        while num_taken < 1000:
            num_taken += 1
            yield bytes(1 << 14)

    tracemalloc.start()
    headers = {"Content-Type": "application/x-protobuf"}
    response = await server.clients[ALICE].post("forward_backward", content=pieces(), headers=headers)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert response.status_code == 413
    assert num_taken < (4 * 200_000 + DRAIN_BYTES) / (1 << 14) + 2
    assert most_bytes < 4 * 200_000
    await assert_run_continues(run)


async def test_a_client_that_disconnects_uses_no_seq_id(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    run = await server.create_run()
    body = run.encode(GOOD, 1)
    messages = iter(({"type": "http.request", "body": body[:-3], "more_body": True}, {"type": "http.disconnect"}))

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: dict[str, Any]) -> None:
        """Drops the message: the client is gone."""

    headers = [(b"x-api-key", ALICE.encode()), (b"content-type", b"application/x-protobuf")]
    address = {"type": "http", "method": "POST", "path": "/api/v1/forward_backward", "query_string": b""}
    await server.app(address | {"headers": headers}, receive, send)  # pyright: ignore[reportArgumentType]
    assert not [record for record in caplog.records if record.exc_info], "a disconnect logs no traceback"
    assert (await run.send(body)).status_code == 200
    assert "metrics" in await server.result(f"{run.model_id}:1")


async def test_failures_of_one_run_do_not_affect_another(server: Server) -> None:
    good, bad = await server.create_run(), await server.create_run()
    expected = await (await server.create_run()).train(batch(), 3)

    async def misbehave() -> None:
        for seq_id in range(1, 10, 3):
            await bad.send(bad.encode([datum([5, VOCAB, 7])], seq_id))
            await bad.send(b"\x0a" + bytes([len(bad.model_id)]) + bad.model_id.encode() + b"\x10" + bytes([seq_id + 1]))
            await bad.submit("optim_step", seq_id=seq_id + 2)

    losses, _ = await asyncio.gather(good.train(batch(), 3), misbehave())
    assert losses == pytest.approx(expected, rel=1e-5)
