"""OpenAI's endpoint in this process: who leaves is not sampled for, and what fails is told in OpenAI's words."""

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
from trainhouse.workers.dispatch import WorkerDispatch

from ..letters import save_letter_tokenizer
from .real import ALICE, BOB, MODEL, Server, running_server, server_config

pytestmark = pytest.mark.anyio

LONG = {"model": MODEL, "prompt": "the", "n": 200, "max_tokens": 1000, "ignore_eos": True}
"""Takes many times LEAVE_SECONDS."""

LEAVE_SECONDS = 2.0


@pytest.fixture
async def server(dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path) -> AsyncIterator[Server]:
    shutil.copytree(tiny_models["qwen3"], tmp_path / "model")
    save_letter_tokenizer(tmp_path / "model")
    config = server_config(tmp_path / "model", tmp_path / "state", session_expiry_seconds=1.0)
    async with running_server(config, dispatch) as running:
        await running.services.tokenizers.get(MODEL)
        yield running


@dataclass
class Connection:
    """One request by hand, whose client leaves when `left` is set."""

    body: dict[str, Any]
    left: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list[Message] = field(default_factory=list)
    was_read: bool = False

    async def receive(self) -> Message:
        if not self.was_read:
            self.was_read = True
            return {"type": "http.request", "body": json.dumps(self.body).encode(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def num_events(self) -> int:
        return sum(message.get("body", b"").count(b"data: ") for message in self.sent)


def ask(server: Server, connection: Connection, path: str = "/v1/completions") -> asyncio.Task[None]:
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


async def until(holds: Any, seconds: float = 20.0) -> float:
    started = time.monotonic()
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return time.monotonic() - started


async def test_a_client_that_leaves_a_stream_cancels_its_job(server: Server) -> None:
    connection = Connection(LONG | {"stream": True})
    asked = ask(server, connection)
    await until(lambda: connection.num_events > 5)
    connection.left.set()
    assert await until(lambda: server.services.dispatch.status(MODEL) is None) < LEAVE_SECONDS
    await asked
    await check_that_all_is_free(server)


async def test_a_client_that_leaves_before_the_answer_cancels_its_jobs(server: Server) -> None:
    connection = Connection(LONG | {"prompt": ["the", "and"]})
    asked = ask(server, connection)
    await until(lambda: server.services.dispatch.status(MODEL) is not None)
    await asyncio.sleep(0.1)
    connection.left.set()
    assert await until(lambda: server.services.dispatch.status(MODEL) is None) < LEAVE_SECONDS
    await asked
    await check_that_all_is_free(server)


async def check_that_all_is_free(server: Server) -> None:
    """Neither room in the queue nor the key/value cache is held, and the next request is answered."""
    limits = (await server.clients[ALICE].get("limits")).json()
    assert limits["queued_operations"]["used"] == limits["queued_bytes"]["used"] == 0
    started = time.monotonic()
    answer = await complete(server, prompt="the", max_tokens=2)
    assert answer["choices"] and time.monotonic() - started < LEAVE_SECONDS


async def complete(server: Server, status: int = 200, **fields: Any) -> Any:
    response = await server.clients[ALICE].post("http://test/v1/completions", json={"model": MODEL} | fields)
    assert response.status_code == status, response.text
    return response.json()


async def test_a_job_that_takes_longer_than_the_silence_that_ends_a_session_is_done(server: Server) -> None:
    slow = LONG | {"n": 64}
    started = time.monotonic()
    answer = await complete(server, **slow)
    assert time.monotonic() - started > server.services.config.session_expiry_seconds, "or this shows nothing"
    assert len(answer["choices"]) == 64


async def test_what_the_worker_refuses_has_a_status_also_when_it_was_to_be_streamed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    await check_that_all_is_free(server)


async def test_one_prompt_that_cannot_be_sampled_fails_all_of_its_request(server: Server) -> None:
    answer = await complete(server, 400, prompt=[[5, 6], [5, 99_999]], max_tokens=900)
    assert "99999" in answer["error"]["message"]
    assert server.services.dispatch.status(MODEL) is None
    await check_that_all_is_free(server)


async def test_a_model_without_a_tokenizer_is_said_to_have_none(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    async with running_server(server_config(tiny_models["qwen3"], tmp_path), dispatch) as bare:
        answer = await complete(bare, 400, prompt=[5, 6])
    assert f"text needs the tokenizer of {MODEL}" in answer["error"]["message"]


async def test_a_sampler_is_found_by_the_name_of_what_it_samples(server: Server) -> None:
    alice, bob = [await server.services.auth.authenticate(key) for key in (ALICE, BOB)]
    of_base = await server.services.samplers.named(alice, MODEL)
    assert await server.services.samplers.named(alice, of_base.record.sampler_id) is of_base
    assert await server.services.samplers.named(alice, MODEL) is of_base
    with pytest.raises(RequestError, match="no sampler"):
        await server.services.samplers.named(bob, of_base.record.sampler_id)


async def test_errors_of_every_kind_are_in_openais_words(server: Server) -> None:
    client = server.clients[ALICE]
    too_large = await client.post("http://test/v1/completions", content=b"x" * 300_000)
    nowhere = await client.get("http://test/v1/files")
    no_method = await client.get("http://test/v1/completions")
    keyless = await client.get("http://test/v1/models", headers={"X-API-Key": ""})
    for answer, status in ((too_large, 413), (nowhere, 404), (no_method, 405), (keyless, 401)):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    native = await client.get("http://test/api/v1/nowhere")
    assert set(native.json()) == {"detail"}, "the others have theirs"
