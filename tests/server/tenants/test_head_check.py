"""A server without keys answers only under names that lead to this machine."""

from pathlib import Path

import httpx
import pytest
from fastapi import Request
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.routes.gate import is_local_request
from trainhouse.server.serving.app import create_app
from trainhouse.server.tenants.auth import create_key
from trainhouse.server.tenants.rate_limits import UnauthenticatedLimits
from trainhouse.server.tenants.scopes import ROUTE_SCOPES
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.worker_config import ServedModel

from ..api import ALICE, Api, Clock
from ..real import MODEL, Server
from .test_gate import target_of

pytestmark = pytest.mark.anyio

OWN = (
    *("localhost", "localhost:8000", "LOCALHOST", "localhost.", "127.0.0.1", "127.0.0.1:8000", "127.9.9.9", "[::1]"),
    *("[::1]:8000", "trainhouse", "trainhouse-server:8000", "a.localhost", "", "test:x"),
)
FOREIGN = (
    *("evil.example", "evil.example:8000", "evil.example.", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("10.0.0.1", "0.0.0.0", "0.0.0.0:8000", "[::2]", "192.168.0.1:8000", "localhost:80@evil.example", "a.b", "[a.b]"),
    *("localhost:evil.example", "evil.example:localhost", "é.example"),
)


async def get(api: Api, host: str, path: str = "/api/v1/limits", method: str = "GET") -> httpx.Response:
    client = await api.client(ALICE)
    return await client.request(method, path, headers={b"Host": host.encode("latin-1")}, content=b"{}")


@pytest.mark.parametrize("host", FOREIGN)
async def test_an_open_server_refuses_names_of_other_sites(api: Api, host: str) -> None:
    answer = await get(api, host, "/api/v1/get_server_capabilities")
    assert answer.status_code == 403 and "--allowed-host" in answer.text


@pytest.mark.parametrize("host", OWN)
async def test_an_open_server_answers_under_loopback_names(api: Api, host: str) -> None:
    assert (await get(api, host, "/api/v1/get_server_capabilities")).status_code == 200


async def test_every_route_of_an_open_server_refuses_them(api: Api) -> None:
    open_paths = ["/", "/docs", "/openapi.json", "/console", "/console/sign-in", "/api/v1/healthz", "/nothing"]
    targets = [target_of(route) for route in ROUTE_SCOPES] + [("GET", path) for path in open_paths]
    for method, path in [*targets, ("POST", "/console/sign-in"), ("POST", "/console/sign-out")]:
        assert (await get(api, "evil.example", path, method)).status_code == 403, path


async def test_with_keys_any_name_is_answered(api: Api) -> None:
    key = await create_key(api.services.store, "team")
    client = await api.client(key)
    answer = await client.get("/api/v1/get_server_capabilities", headers={"Host": "train.example"})
    assert answer.status_code == 200


async def test_names_are_allowed_by_an_option(tmp_path: Path) -> None:
    config = ServerConfig.of(
        base_models=(ServedModel("tiny/qwen3", str(tmp_path)),), state_dir=tmp_path, allowed_hosts=("Train.Example",)
    )
    app = create_app(config, WorkerDispatch(config.dispatch_config()))
    async with app.router.lifespan_context(app):
        for host, status in (("train.example:80", 200), ("other.example", 403)):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
                assert (await client.get("/api/v1/healthz")).status_code == status


async def test_foreign_names_count_as_failures(api: Api) -> None:
    api.services.auth.unauthenticated_limits = UnauthenticatedLimits(3, Clock())
    statuses = [(await get(api, "evil.example")).status_code for _ in range(5)]
    assert statuses == [403] * 3 + [429] * 2


async def test_only_clients_on_this_machine_are_told_the_models_directory(
    server: Server, tiny_models: dict[str, Path]
) -> None:
    run, directory = await server.create_run(), str(tiny_models["qwen3"])

    async def told(address: str = "127.0.0.1", **headers: str) -> str:
        transport = httpx.ASGITransport(server.app, client=(address, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1/") as client:
            key = {"X-API-Key": ALICE}
            answer = await client.post("get_info", json={"model_id": run.model_id}, headers=key | headers)
            missing = await client.get(f"models/{MODEL}/tokenizer", headers=key | headers)
        assert (directory in missing.text) == (directory in answer.text)
        return answer.json()["model_data"]["tokenizer_id"]

    assert await told() == await told("::1") == directory
    assert await told("192.0.2.1") == MODEL
    for name in ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "Via", "X-Real-IP"):
        assert await told(**{name: "127.0.0.1"}) == MODEL, name
    for host, is_told in (("train.example", False), ("127.0.0.1:8000", True), ("[::1]", True)):
        request = Request({"type": "http", "headers": [(b"host", host.encode())], "client": ("127.0.0.1", 1)})
        assert is_local_request(request) == is_told, host
