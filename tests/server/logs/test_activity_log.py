"""The lines that a server logs about requests, operations, samples and passes, and those that it must not log."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from trainhouse.server.logs.activity_log import ActivityLog
from trainhouse.server.tenants.auth import create_key
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.pools.base import RankTime
from trainhouse.workers.protocol.log_lines import LineFormatter
from trainhouse.workers.scheduler.calls import EndedCall, StepsCall
from trainhouse.workers.scheduler.work import CallSize

from ...live import live_server
from ..real import ALICE, BOB, MODEL, Server, batch, running_server, sample_body, server_config

pytestmark = pytest.mark.anyio

Line = dict[str, Any]


class Log(logging.Handler):
    """Keeps the lines of JSON that a handler of the server writes."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineFormatter("json"))
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record) + "\n"

    def lines(self, message: str, **fields: object) -> list[Line]:
        found = [json.loads(line) for line in self.text.splitlines()]
        wanted = {"message": message} | fields
        return [line for line in found if {name: line.get(name) for name in wanted} == wanted]


@pytest.fixture
def log() -> Iterator[Log]:
    handler, ours = Log(), logging.getLogger("trainhouse")
    before = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    yield handler
    ours.removeHandler(handler)
    ours.setLevel(before)


@pytest.mark.slow
async def test_an_operation_and_its_request_have_a_line_with_the_same_ids(server: Server, log: Log) -> None:
    run = await server.create_run()
    [created] = log.lines("operation", verb="create_model")
    assert created["level"] == "info"
    data = batch()
    await run.forward_backward(data)
    await run.optim_step()
    [request] = log.lines("request", route="/api/v1/forward_backward", status=200)
    [operation] = log.lines("operation", verb="forward_backward")
    assert request["level"] == operation["level"] == "debug"
    for name in ("request", "tenant", "run"):
        assert request[name] == operation[name], name
    assert operation["run"] == run.model_id and operation["seq"] == 1
    num_tokens = sum(len(each.model_input.to_ints()) for each in data)
    assert operation["tokens"] == operation["call_tokens"] == num_tokens and operation["call_operations"] == 1
    assert operation["ms"] > 0 and operation["queued_ms"] >= 0
    [step] = log.lines("operation", verb="optim_step")
    assert step["seq"] == 2 and step["step"] == 1 and step["request"] != operation["request"]
    [made] = log.lines("call of the ranks", activity="pass")
    assert made["tokens"] == num_tokens and made["group"] == MODEL
    polls = log.lines("request", route="/api/v1/retrieve_future")
    assert polls and all(line["level"] == "debug" and "path" not in line for line in polls)


@pytest.mark.slow
async def test_what_is_wrong_is_visible_with_its_reason_and_without_a_traceback(server: Server, log: Log) -> None:
    run = await server.create_run()
    client = server.clients[ALICE]
    await server.post(
        "create_model", {"session_id": run.session_id, "base_model": "gpt\n5", "model_seq_id": 9}, status=400
    )
    [wrong_model] = log.lines("request", status=400)
    assert wrong_model["level"] == "info" and "gpt" in wrong_model["reason"] and wrong_model["tenant"]
    assert (await client.get("weights", headers={"X-API-Key": "sk-secret"})).status_code == 404
    assert (await client.get("checkpoints", headers={"X-API-Key": "sk-secret"})).status_code == 401
    [wrong_key] = log.lines("request", status=401)
    assert wrong_key["level"] == "warning" and "the API key" in wrong_key["reason"] and "tenant" not in wrong_key
    assert log.lines("request", status=404, path="/api/v1/weights")[0]["level"] == "info"
    assert "error" in await run.optim_step()
    [refused] = log.lines("operation failed", verb="optim_step")
    assert refused["level"] == "info" and refused["category"] == "user" and "no gradients" in refused["reason"]
    assert "traceback" not in log.text and "sk-secret" not in log.text


@pytest.mark.slow
async def test_a_key_without_the_scope_is_a_warning(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path, log: Log
) -> None:
    async with running_server(server_config(tiny_models["qwen3"], tmp_path), dispatch) as server:
        key = await create_key(server.services.store, "reader", ("read",))
        await server.clients[BOB].post("create_session", json={}, headers={"X-API-Key": key})
    [line] = log.lines("request", status=403)
    assert line["level"] == "warning" and "needs train or sample" in line["reason"]
    assert key not in log.text


@pytest.mark.slow
async def test_keys_prompts_and_data_are_in_no_line(server: Server, log: Log) -> None:
    run = await server.create_run()
    await run.forward_backward(batch())
    sampler = await server.post(
        "create_sampling_session", {"session_id": run.session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
    )
    secret = "the launch code"
    submitted = await server.post("asample", sample_body(sampler["sampling_session_id"]))
    await server.result(submitted["request_id"])
    body = sample_body(sampler["sampling_session_id"], prompt=secret)
    wrong = await server.clients[ALICE].post("asample", json=body)
    assert wrong.status_code == 400 and secret in wrong.text, "the client sees what it sent"
    given = {"data": [{"model_input": secret, "loss_fn_inputs": {}}], "loss_fn": "ppo"}
    wrong = await run.submit("forward_backward", forward_backward_input=given, status=400)
    assert secret in str(wrong)
    refused = await run.optim_step()
    assert secret in refused["error"], "it quotes the refusal"
    chat = {"model": MODEL, "messages": [{"role": "user", "content": secret}], "max_tokens": 2}
    await server.clients[ALICE].post("http://test/v1/chat/completions", json=chat)
    await server.clients[ALICE].get("checkpoints", params={"limit": secret})
    assert len(log.lines("request", status=400)) >= 3 and log.lines("operation", verb="sample")
    assert secret not in log.text and ALICE not in log.text
    assert not re.search(r"5, ?6, ?7", log.text)


def test_refused_requests_are_limited_by_status_and_counted(log: Log) -> None:
    now = 0.0
    activity = ActivityLog(60.0, clock=lambda: now)

    def request(status: int) -> None:
        activity.request("GET", "/metrics", "/metrics", status, 0.001, "no API key")

    for _ in range(1000):
        request(401)
    assert len(log.lines("request", status=401)) == 20
    request(429)
    assert len(log.lines("request", status=429)) == 1, "another status has its own lines"
    now = 0.5
    request(401)
    assert log.lines("request", status=401)[-1]["suppressed"] == 980
    for _ in range(100):
        request(200)
    assert len(log.lines("request", status=200)) == 100


@pytest.mark.parametrize("seconds", [0.9, 1.1])
def test_a_slow_pass_is_a_warning_that_names_the_slowest_rank(log: Log, seconds: float) -> None:
    call = StepsCall((), ())
    ended = EndedCall(MODEL, call, 0.0, seconds, [RankTime(0.0, 0.1), RankTime(0.0, seconds)], 0, None)
    ActivityLog(slow_pass_seconds=1.0).call(ended)
    ActivityLog(slow_pass_seconds=1.0).call(replace(ended, call=_Slice()))
    warned = log.lines("slow step", level="warning")
    assert len(warned) == (seconds > 1.0) and len(log.lines("call of the ranks")) == 2 - len(warned)
    assert all(line["slowest_rank"] == 1 for line in warned)


class _Slice(StepsCall):
    kind, activity = "sampling", "sampling"

    def __init__(self) -> None:
        self.works, self.size = (), CallSize(0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["auto", "text"])
def test_a_server_process_and_its_workers_log_in_one_form(
    tiny_models: dict[str, Path], tmp_path: Path, form: str
) -> None:
    """A file is no terminal, so `auto` is JSON."""
    state = tmp_path / "state"
    with live_server({MODEL: tiny_models["qwen3"]}, state, log_format=form, log_level="debug") as server:
        assert httpx.get(f"{server.url}/api/v1/checkpoints", headers={"X-API-Key": "sk-x"}).status_code == 401
    lines = [line for line in server.log.read_text().splitlines() if "status" in line and "401" in line]
    assert len(lines) == 1
    if form == "auto":
        assert json.loads(lines[0])["message"] == "request"
    else:
        assert re.match(r"[-0-9]{10} [:0-9]{8} WARNING trainhouse\S*: request method=GET route=/api/v1/check", lines[0])
