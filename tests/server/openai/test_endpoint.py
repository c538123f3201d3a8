"""The OpenAI endpoint in this process: clients that leave cancel their jobs, and errors have OpenAI's format."""

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message
from trainhouse.schemas.errors import OperationError, RequestError
from trainhouse.server.http import event_stream
from trainhouse.server.openai import sample_batch as draws
from trainhouse.workers.dispatch import WorkerDispatch

from ...letters import save_letter_tokenizer
from ..real import ALICE, BOB, MODEL, Server, running_server, server_config

pytestmark = pytest.mark.anyio

LONG = {"model": MODEL, "prompt": "the", "n": 500, "max_tokens": 1000, "ignore_eos": True}
"""A request that takes many times LEAVE_SECONDS."""

LEAVE_SECONDS = 15.0
STOPPING = "the server is stopping: try again when it is back"


@pytest.fixture(scope="module")
def model(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adds a tokenizer to a copy of the tiny model."""
    model = tmp_path_factory.mktemp("letters") / "model"
    shutil.copytree(tiny_models["qwen3"], model)
    save_letter_tokenizer(model)
    return model


@pytest.fixture(scope="module")
async def server(
    dispatch: WorkerDispatch, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    async with running_server(server_config(model, tmp_path_factory.mktemp("state")), dispatch) as running:
        await running.services.tokenizers.get(MODEL)
        yield running


@dataclass
class Connection:
    """A request whose client leaves when `left` is set, and reads while `takes` is set."""

    body: dict[str, Any]
    left: asyncio.Event = field(default_factory=asyncio.Event)
    takes: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list[Message] = field(default_factory=list)
    was_read: bool = False

    async def receive(self) -> Message:
        if not self.was_read:
            self.was_read = True
            return {"type": "http.request", "body": json.dumps(self.body).encode(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    def __post_init__(self) -> None:
        self.takes.set()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            await self.takes.wait()
        self.sent.append(message)

    @property
    def num_events(self) -> int:
        return sum(message.get("body", b"").count(b"data: ") for message in self.sent)

    @property
    def choices(self) -> list[Any]:
        """Returns the choices of all chunks received so far."""
        body = b"".join(message.get("body", b"") for message in self.sent).decode()
        events = [event.removeprefix("data: ") for event in body.split("\n\n") if event.startswith("data: {")]
        return [choice for event in events for choice in json.loads(event)["choices"]]


def send_request(server: Server, connection: Connection, path: str = "/v1/completions") -> asyncio.Task[None]:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {ALICE}".encode()), (b"content-type", b"application/json")],
        "server": ("test", 80),
    }
    return asyncio.create_task(server.app(scope, connection.receive, connection.send))


async def wait_until(holds: Any, seconds: float = 60.0) -> float:
    started = time.monotonic()
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return time.monotonic() - started


@pytest.mark.slow
async def test_a_client_that_leaves_a_stream_cancels_its_job(server: Server) -> None:
    connection = Connection(LONG | {"stream": True})
    asked = send_request(server, connection)
    await wait_until(lambda: connection.num_events > 5)
    connection.left.set()
    assert await wait_until(lambda: server.services.dispatch.status(MODEL) is None) < LEAVE_SECONDS
    await asked
    await assert_nothing_is_held(server)


async def test_a_client_that_leaves_before_the_answer_cancels_its_jobs(server: Server) -> None:
    connection = Connection(LONG | {"prompt": ["the", "and"]})
    asked = send_request(server, connection)
    await wait_until(lambda: server.services.dispatch.status(MODEL) is not None)
    await asyncio.sleep(0.1)
    connection.left.set()
    assert await wait_until(lambda: server.services.dispatch.status(MODEL) is None) < LEAVE_SECONDS
    await asked
    await assert_nothing_is_held(server)


@pytest.mark.slow
async def test_a_disconnected_client_is_charged_for_what_it_read(
    dispatch: WorkerDispatch, model: Path, tmp_path: Path
) -> None:
    config = server_config(model, tmp_path / "metered", tenant_tokens_per_minute=6000)
    async with running_server(config, dispatch) as metered:
        await metered.services.tokenizers.get(MODEL)
        connection = Connection(LONG | {"stream": True, "return_token_ids": True})
        started = time.monotonic()
        asked = send_request(metered, connection)
        await wait_until(lambda: connection.num_events > 500)
        connection.left.set()
        await asked
        num_read = sum(len(choice["token_ids"]) for choice in connection.choices)
        limits = (await metered.clients[ALICE].get("limits")).json()
        given_back = 6000 / 60 * (time.monotonic() - started)
        assert limits["tokens_per_minute"]["used"] >= num_read - given_back - 1


@pytest.mark.slow
async def test_a_slow_reader_gets_a_whole_stream_with_little_buffered(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "MAX_QUEUED_BYTES", 20_000)
    asked = {"model": MODEL, "prompt": "the", "n": 8, "seed": 3, "max_tokens": 300, "ignore_eos": True}
    whole = await complete(server, **asked)
    connection = Connection(asked | {"stream": True})
    connection.takes.clear()
    task = send_request(server, connection)
    await wait_until(lambda: server.services.dispatch.status(MODEL) is not None)
    await wait_until(lambda: server.services.dispatch.status(MODEL) is None)
    connection.takes.set()
    await task
    for choice in whole["choices"]:
        parts = [part for part in connection.choices if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]


async def test_a_stalled_reader_is_dropped(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "STALLED_SECONDS", 0.3)
    connection = Connection(LONG | {"stream": True})
    connection.takes.clear()
    await send_request(server, connection)
    await wait_until(lambda: server.services.dispatch.status(MODEL) is None)
    await assert_nothing_is_held(server)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["the model is " * 500] * 300}),
        ("/v1/completions", {"prompt": [*[[5]] * 2000, [99_999]], "logit_bias": {str(i): 1 for i in range(500)}}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": ""}], "tools": [{"the model is " * 50_000: 1}]},
        ),
        ("/v1/completions", {"prompt": [5] * 1000, "n": 64, "max_tokens": 1, "echo": True, "logprobs": 20}),
        ("/v1/completions", {"prompt": [1.5] * 500_000}),
    ],
    ids=["texts", "biases", "keys", "echo", "wrong"],
)
async def test_large_requests_do_not_block_the_event_loop(
    dispatch: WorkerDispatch, model: Path, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    config = server_config(model, tmp_path / "large", max_body_bytes=4_000_000, max_decompressed_bytes=4_000_000)
    async with running_server(config, dispatch) as large:
        await large.services.tokenizers.get(MODEL)
        content = json.dumps({"model": MODEL} | body)
        for _ in range(10):  # other processes can block it, too
            watch = asyncio.create_task(longest_wait())
            started = time.monotonic()
            await large.clients[ALICE].post(f"http://test{path}", content=content)
            seconds = time.monotonic() - started
            watch.cancel()
            if await watch < max(0.1, seconds / 3):
                return
    pytest.fail("in every try, other tasks were blocked for a third of the request's time")


async def longest_wait() -> float:
    """Returns the longest time between two turns of the event loop, in seconds, when it is cancelled."""
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
    except asyncio.CancelledError:
        return max(longest, time.monotonic() - last)


@pytest.mark.slow
async def test_each_prompt_counts_as_an_operation(dispatch: WorkerDispatch, model: Path, tmp_path: Path) -> None:
    config = server_config(model, tmp_path / "limited", tenant_queued_operations=3)
    async with running_server(config, dispatch) as limited:
        await limited.services.tokenizers.get(MODEL)
        assert "3 prompts" in (await complete(limited, 400, prompt=["the"] * 4))["error"]["message"]
        connection = Connection(LONG | {"prompt": ["the"] * 3, "stream": True})
        asked = send_request(limited, connection)
        await wait_until(lambda: connection.num_events > 5)
        assert (await limited.clients[ALICE].get("limits")).json()["queued_operations"]["used"] == 3
        await complete(limited, 429, prompt="the")
        connection.left.set()
        await asked
        await assert_nothing_is_held(limited)


@pytest.mark.slow
async def test_a_request_reserves_room_for_its_samples(dispatch: WorkerDispatch, model: Path, tmp_path: Path) -> None:
    config = server_config(model, tmp_path / "limited", tenant_queued_bytes=100_000)
    async with running_server(config, dispatch) as limited:
        await limited.services.tokenizers.get(MODEL)
        answer = await complete(limited, 400, prompt="the", n=10, max_tokens=1000, logprobs=1)
        assert "lower n, logprobs or max_tokens" in answer["error"]["message"]
        await complete(limited, prompt="the", n=10, max_tokens=100, logprobs=1)


async def assert_nothing_is_held(server: Server) -> None:
    """Checks that no room in the queue or KV cache is held, and that the next request is answered."""
    limits = (await server.clients[ALICE].get("limits")).json()
    assert limits["queued_operations"]["used"] == limits["queued_bytes"]["used"] == 0
    answer = await asyncio.wait_for(complete(server, prompt="the", max_tokens=2), LEAVE_SECONDS)
    assert answer["choices"]


async def complete(server: Server, status: int = 200, **fields: Any) -> Any:
    response = await server.clients[ALICE].post("http://test/v1/completions", json={"model": MODEL} | fields)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.slow
async def test_a_job_longer_than_the_session_expiry_finishes(
    dispatch: WorkerDispatch, model: Path, tmp_path: Path
) -> None:
    config = server_config(model, tmp_path, session_expiry_seconds=1.0)
    async with running_server(config, dispatch) as impatient:
        await impatient.services.tokenizers.get(MODEL)
        started = time.monotonic()
        answer = await complete(impatient, **LONG | {"n": 64})
        assert time.monotonic() - started > config.sessions.session_expiry_seconds, "otherwise this test shows nothing"
        assert len(answer["choices"]) == 64


async def test_worker_errors_have_a_status_also_for_streams(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for category, status, kind in (("user", 400, "invalid_request_error"), ("server", 503, "server_error")):

        async def fail(*_: object, category: Any = category) -> None:
            raise OperationError("the cache is too small: enlarge it", category)

        monkeypatch.setattr(server.services.dispatch, "sample", fail)
        for stream in (False, True):
            answer = await complete(server, status, prompt="the", stream=stream)
            assert answer == {
                "error": {"message": "the cache is too small: enlarge it", "type": kind, "param": None, "code": None}
            }
    monkeypatch.undo()
    await assert_nothing_is_held(server)


@pytest.mark.slow
async def test_a_stopping_server_ends_open_requests_with_an_error(
    dispatch: WorkerDispatch, model: Path, tmp_path: Path
) -> None:
    async with running_server(server_config(model, tmp_path), dispatch) as server:
        await server.services.tokenizers.get(MODEL)
        some = LONG | {"n": 200}  # few enough to be sampled all at once
        whole, stream = Connection(some | {"prompt": ["the", "and"]}), Connection(some | {"stream": True})
        asked = [send_request(server, whole), send_request(server, stream)]
        await wait_until(lambda: stream.num_events > 5)
        server.services.sampling.stop_sample_now()
        assert await wait_until(lambda: all(one.done() for one in asked)) < LEAVE_SECONDS
        assert whole.sent[0]["status"] == 503
        for body in (whole.sent[1]["body"], stream.sent[-2]["body"].removeprefix(b"data: ")):
            error = json.loads(body)["error"]
            assert (error["message"], error["type"]) == (STOPPING, "server_error")
        assert await wait_until(lambda: server.services.dispatch.status(MODEL) is None) < LEAVE_SECONDS
        late = await complete(server, 503, prompt="the", max_tokens=2)
        assert late["error"]["message"] == STOPPING


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "completions"), ("POST", "chat/completions"), ("GET", "models"), ("GET", "models/x")]
)
async def test_a_base_url_without_v1_is_explained(server: Server, method: str, path: str) -> None:
    answer = await server.clients[ALICE].request(method, f"http://test/{path}", json={})
    assert answer.status_code == 404
    assert "http://test/v1 here: end the client's base URL with /v1" in answer.json()["error"]["message"]


async def test_worker_errors_about_constraints_name_response_format(server: Server) -> None:
    for stream in (False, True):
        error = (await complete(server, 400, prompt="the", stream=stream, response_format={"type": "json_object"}))[
            "error"
        ]
        assert error["param"] == "response_format"
        assert error["message"].startswith("response_format: stop strings and constraints need the model's tokenizer")


async def test_one_invalid_prompt_fails_the_whole_request(server: Server) -> None:
    answer = await complete(server, 400, prompt=[[5, 6], [5, 99_999]], max_tokens=900)
    assert "99999" in answer["error"]["message"]
    assert server.services.dispatch.status(MODEL) is None
    await assert_nothing_is_held(server)


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"prompt": "the", "max_tokens": 9_999_999}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
    ],
)
async def test_the_error_of_a_sampling_job_names_its_field(server: Server, sent: dict[str, Any], param: str) -> None:
    assert (await complete(server, 400, **sent))["error"]["param"] == param


@pytest.mark.slow
async def test_a_model_without_a_tokenizer_is_refused_by_name(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    async with running_server(server_config(tiny_models["qwen3"], tmp_path), dispatch) as bare:
        answer = await complete(bare, 400, prompt=[5, 6])
    assert f"text needs the tokenizer of {MODEL}" in answer["error"]["message"]


async def test_samplers_are_shared_by_model_within_a_tenant(server: Server) -> None:
    alice, bob = [await server.services.auth.authenticate(key) for key in (ALICE, BOB)]
    of_base = await server.services.samplers.find_by_name(alice, MODEL)
    assert await server.services.samplers.find_by_name(alice, of_base.record.sampler_id) is of_base
    assert await server.services.samplers.find_by_name(alice, MODEL) is of_base
    of_bob = await asyncio.gather(*(server.services.samplers.find_by_name(bob, MODEL) for _ in range(3)))
    assert len(set(map(id, of_bob))) == 1, "the first requests share a sampler, too"
    with pytest.raises(RequestError, match="no sampler"):
        await server.services.samplers.find_by_name(bob, of_base.record.sampler_id)


async def test_errors_of_every_kind_have_openais_format(server: Server) -> None:
    client = server.clients[ALICE]
    too_large = await client.post("http://test/v1/completions", content=b"x" * 300_000)
    nowhere = await client.get("http://test/v1/files")
    no_method = await client.get("http://test/v1/completions")
    keyless = await client.get("http://test/v1/models", headers={"X-API-Key": ""})
    for answer, status in ((too_large, 413), (nowhere, 404), (no_method, 405), (keyless, 401)):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert no_method.json()["error"]["message"] == "/v1/completions accepts POST, not GET"
    native = await client.get("http://test/api/v1/nowhere")
    assert set(native.json()) == {"detail"}, "the native API keeps its own format"
