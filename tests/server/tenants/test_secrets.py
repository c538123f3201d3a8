"""Keys, tokens and URL signatures appear in no log line, at any level, and in no file of the server."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from trainhouse.server.tenants.auth import create_key
from trainhouse.workers.dispatch import WorkerDispatch

from ..real import ALICE, BOB, Server, batch, running_server, sample, sample_body, server_config

pytestmark = pytest.mark.anyio


class Lines(logging.Handler):
    """Collects everything that is logged, with tracebacks and arguments."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(name)s %(message)s %(args)s"))
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{self.format(record)}\n"


@pytest.fixture
def lines() -> Iterator[Lines]:
    kept, root = Lines(), logging.getLogger()
    # An earlier test may have given our logger a level of its own.
    levels = {each: each.level for each in (root, logging.getLogger("trainhouse"))}
    for each in levels:
        each.setLevel(logging.DEBUG)
    root.addHandler(kept)
    yield kept
    root.removeHandler(kept)
    for each, level in levels.items():
        each.setLevel(level)


async def test_no_secret_is_logged_or_stored(
    dispatch: WorkerDispatch,
    tiny_models: dict[str, Path],
    tmp_path: Path,
    lines: Lines,
    capfd: pytest.CaptureFixture[str],
) -> None:
    state_dir = tmp_path / "state"
    async with running_server(server_config(tiny_models["qwen3"], state_dir), dispatch) as server:
        secrets = await use(server)
        await send_wrong_keys(server, secrets)
        await disconnect(server, secrets[0])
        assert "a client disconnected during POST /api/v1/optim_step" in lines.text, "the handler sees what is logged"
        printed = "".join(capfd.readouterr())
        stored = b"".join(path.read_bytes() for path in state_dir.rglob("*") if path.is_file())
    for secret in secrets:
        assert len(secret) > 8
        assert secret not in lines.text and secret not in printed, "in the log"
        assert secret.encode() not in stored, "in a file"


async def use(server: Server) -> list[str]:
    """Does what an ordinary client does, and returns the secrets that it sent."""
    key, other = [await create_key(server.services.store, name) for name in ("alice", "bob")]
    for name, made in ((ALICE, key), (BOB, other)):
        server.clients[name].headers["X-API-Key"] = made
    token = (await server.post("auth/token", {}))["jwt"]
    server.clients[ALICE].headers["X-API-Key"] = token
    run = await server.create_run()
    await run.train(batch(), 1)
    path = (await run.do("save_weights", path="saved"))["path"]
    sampler_id = (await run.do("save_weights_for_sampler"))["sampling_session_id"]
    await sample(server, sample_body(sampler_id))
    session_id = await server.create_session(BOB)
    body = {"session_id": session_id, "model_seq_id": 0, "path": path, "weights_access_token": key}
    loaded = await server.post("load_weights", body, BOB)
    assert "model_id" in await server.result(loaded["request_id"], BOB)
    copied = {"source_path": path, "weights_access_token": token}
    assert "tinker_path" in await server.post("copy_weights", copied, BOB)
    urls = await server.clients[ALICE].get(
        f"training_runs/{run.model_id}/checkpoints/weights/saved/external_weights_urls"
    )
    signed = next(iter(urls.json()["urls"].values()))
    assert (await httpx.AsyncClient(transport=httpx.ASGITransport(server.app)).get(signed)).status_code == 200
    return [key, other, token, parse_qs(urlsplit(signed).query)["signature"][0]]


async def disconnect(server: Server, key: str) -> None:
    """Sends a request whose client disconnects before its end, which is logged."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        """Drops the message: the client is gone."""

    address = {"type": "http", "method": "POST", "path": "/api/v1/optim_step", "query_string": b""}
    await server.app(address | {"headers": [(b"x-api-key", key.encode())]}, receive, send)  # pyright: ignore


async def send_wrong_keys(server: Server, secrets: list[str]) -> None:
    """Sends invalid keys, and valid ones in wrong places, and adds them to the secrets."""
    wrong = ["tml-" + "w" * 40, "sk-" + "x" * 40, secrets[2][:-4] + "AAAA", "a.b." + "c" * 40]
    client = server.clients[ALICE]
    for key in wrong:
        for headers in ({"X-API-Key": key}, {"X-API-Key": "", "Authorization": f"Bearer {key}"}):
            refused = await client.get("sessions", headers=headers)
            assert refused.status_code == 401 and key not in refused.text
        body = {"source_path": "tinker://none/weights/none", "weights_access_token": key}
        refused = await client.post("copy_weights", json=body)
        assert refused.status_code == 404 and key not in refused.text
        refused = await client.post("load_weights", json={"model_id": "none", "path": 1, "weights_access_token": key})
        assert refused.status_code == 400 and key not in refused.text
        refused = await client.get(f"downloads/a/weights/b/c?expires=1&signature={key}")
        assert refused.status_code == 403 and key not in refused.text
    secrets += wrong
