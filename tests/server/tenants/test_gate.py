"""Requests without access are answered before a byte of their body is read, and every route limits the bytes that it
reads."""

import asyncio
import contextlib
import gc
import json
import weakref
from pathlib import Path

import httpx
import pytest
import uvicorn
import zstandard
from fastapi import FastAPI, Request
from trainhouse.schemas.errors import RequestError
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.http.bodies import CONTROL_BODY_BYTES, Body, BodyLimits
from trainhouse.server.routes import gate
from trainhouse.server.routes.gate import find_route
from trainhouse.server.serving.app import create_app
from trainhouse.server.store import SqliteStore
from trainhouse.server.tenants import rate_limits
from trainhouse.server.tenants.auth import Auth, create_key, hash_key
from trainhouse.server.tenants.rate_limits import UnauthenticatedLimits, network_of
from trainhouse.server.tenants.scopes import LARGE_BODIES, ROUTE_SCOPES
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.worker_config import ServedModel

from ..api import ALICE, Api, Clock
from ..serving.test_connections import connection_to, read_all, serving

pytestmark = pytest.mark.anyio

PLACES = {
    "{session_id}": "s",
    "{run_id}": "s:train:0",
    "{sampler_id}": "s:sample:0",
    "{kind}": "weights",
    "{name}": "n",
    "{name:path}": "tiny/qwen3",
    "{file}": "config.json",
}


def target_of(route: str) -> tuple[str, str]:
    method, path = route.split(" ")
    for place, value in PLACES.items():
        path = path.replace(place, value)
    return method, path


def head(route: str, *headers: str, body_bytes: int | None = 1000) -> bytes:
    method, path = target_of(route)
    length = ["transfer-encoding: chunked"] if body_bytes is None else [f"content-length: {body_bytes}"]
    lines = [f"{method} {path} HTTP/1.1", "host: here", "content-type: application/json", *length, *headers, "", ""]
    return "\r\n".join(lines).encode()


async def answer_to(server: uvicorn.Server, request: bytes) -> bytes:
    """Returns all that arrives until the server closes the connection, without sending a byte of the body."""
    async with connection_to(server) as (reader, writer):
        writer.write(request)
        return await asyncio.wait_for(read_all(reader), 20)


async def test_every_route_refuses_a_request_without_a_key_before_its_body(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size may be known or unknown, and the client may wait for 100 Continue."""
    monkeypatch.setattr(gate, "DRAIN_SECONDS", 0.1)
    async with serving(api.app) as server:
        for route in ROUTE_SCOPES:
            requests = [head(route), head(route, body_bytes=None), head(route, "expect: 100-continue")]
            answers = await asyncio.gather(*(answer_to(server, request) for request in requests))
            for answer in answers:
                assert answer.startswith(b"HTTP/1.1 401 "), (route, answer)
                assert b"connection: close" in answer.lower() and answer.count(b"HTTP/1.1") == 1, (route, answer)


@pytest.mark.slow
async def test_every_route_refuses_a_key_without_the_scope_before_its_body(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "DRAIN_SECONDS", 0.1)
    keys = {scope: await create_key(api.services.store, "team", (scope,)) for scope in ("read", "train")}
    async with serving(api.app) as server:
        for route, needed in ROUTE_SCOPES.items():
            for scope, key in keys.items():
                if scope not in needed:
                    answer = await answer_to(server, head(route, f"x-api-key: {key}"))
                    assert answer.startswith(b"HTTP/1.1 403 "), (route, answer)


async def test_find_route_finds_every_route_that_takes_a_key(api: Api) -> None:
    for route in ROUTE_SCOPES:
        found = find_route(*target_of(route))
        assert found is not None and ROUTE_SCOPES[found] == ROUTE_SCOPES[route], route
    for path in ("/api/v1/healthz", "/openapi.json", "/api/v1/downloads/r/weights/n/f", "/api/v1/nothing"):
        assert find_route("GET", path) is None
    assert find_route("GET", "/api/v1/create_session") is None


@pytest.mark.parametrize("suffix", ["%0A", "/", "//", "%00", "%0A%0A", "?", ";", "%20"])
async def test_no_spelling_of_a_path_opens_a_route_to_strangers(api: Api, suffix: str) -> None:
    stranger = await api.client(key=None)

    for route in ROUTE_SCOPES:
        method, path = target_of(route)
        answer = await stranger.request(method, f"{path}{suffix}", content=b"{}")

        assert answer.status_code in (401, 404, 405, 307), (route, answer.text)


async def test_a_refused_client_may_finish_sending_a_small_body(api: Api) -> None:
    """The connection is not reset before the client has read the answer."""
    body = bytes(gate.DRAIN_BYTES // 2)
    async with serving(api.app) as server, connection_to(server) as (reader, writer):
        writer.write(head("POST /api/v1/create_session", body_bytes=len(body)) + body)
        await writer.drain()
        assert (await read_all(reader)).startswith(b"HTTP/1.1 401 ")


async def test_a_refused_client_that_sends_endlessly_is_disconnected(api: Api) -> None:
    async with serving(api.app) as server, connection_to(server) as (_, writer):
        writer.write(head("POST /api/v1/create_session", body_bytes=1 << 40))
        num_sent, piece = 0, bytes(1 << 16)
        with contextlib.suppress(ConnectionError):
            while num_sent < 64 * gate.DRAIN_BYTES:
                writer.write(piece)
                await writer.drain()
                num_sent += len(piece)
        assert num_sent < 64 * gate.DRAIN_BYTES


@pytest.mark.parametrize("path", ["/api/v1/nothing", "/api/v1/healthz"])
async def test_endless_bodies_to_unknown_and_open_routes_are_cut_off(api: Api, path: str) -> None:
    async with serving(api.app) as server, connection_to(server) as (_, writer):
        writer.write(f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-length: {1 << 40}\r\n\r\n".encode())
        num_sent, piece = 0, bytes(1 << 16)
        with contextlib.suppress(ConnectionError):
            while num_sent < 64 * gate.DRAIN_BYTES:
                writer.write(piece)
                await writer.drain()
                num_sent += len(piece)
        assert num_sent < 64 * gate.DRAIN_BYTES


@pytest.mark.slow
async def test_routes_without_data_limit_bodies_to_one_mebibyte(app: FastAPI) -> None:
    """The body is spaces: at the limit it is refused for its content, beyond the limit for its size."""
    headers = {"Content-Type": "application/json", "X-API-Key": ALICE}
    for route in ROUTE_SCOPES:
        method, path = target_of(route)
        if method not in ("POST", "PUT") or route in LARGE_BODIES or path.endswith(NO_BODY):
            continue
        for num_bytes, is_too_large in ((CONTROL_BODY_BYTES, False), (CONTROL_BODY_BYTES + 1, True)):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                answer = await client.request(method, path, content=b" " * num_bytes, headers=headers)
            assert (answer.status_code == 413) == is_too_large, (route, answer.text)


NO_BODY = ("/token", "/publish", "/config", "/dynamic_config", "/ttl", "/revoke")
"""Path endings of the routes that read no body, or that look up a checkpoint first."""


async def test_routes_without_data_limit_the_decompressed_size_too(api: Api) -> None:
    client = await api.client()
    body = zstandard.compress(json.dumps({"model_id": "m", "seq_id": 1, "x": " " * CONTROL_BODY_BYTES}).encode())
    assert len(body) < 10_000
    answer = await client.post("/api/v1/retrieve_future", content=body, headers={"Content-Encoding": "zstd"})
    assert answer.status_code == 413 and str(CONTROL_BODY_BYTES) in answer.text


# Requests without a valid key


def test_each_address_has_a_budget_per_minute_that_refills() -> None:
    clock = Clock()
    strangers = UnauthenticatedLimits(60, clock)
    for _ in range(60):
        strangers.take("10.0.0.1")
    with pytest.raises(RequestError, match=r"60 a minute.*X-API-Key") as refused:
        strangers.take("10.0.0.1")
    assert (refused.value.status, refused.value.retry_after_seconds) == (429, pytest.approx(1))
    strangers.take("10.0.0.2")
    clock.now += 1
    strangers.take("10.0.0.1")
    with pytest.raises(RequestError):
        strangers.take("10.0.0.1")


def test_all_addresses_together_are_limited_too() -> None:
    clock = Clock()
    strangers = UnauthenticatedLimits(6, clock)
    for index in range(60):
        strangers.take(f"10.0.0.{index}")
    with pytest.raises(RequestError):
        strangers.take("10.0.1.1")
    clock.now += 1
    strangers.take("10.0.1.1")


def test_the_number_of_tracked_addresses_is_bounded() -> None:
    clock = Clock()
    strangers = UnauthenticatedLimits(10**9, clock)
    for index in range(3 * rate_limits._MAX_ADDRESSES):
        strangers.take(f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}")
    assert len(strangers._of_address) == rate_limits._MAX_ADDRESSES


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("somewhere", "somewhere"),
        ("", ""),
    ],
)
def test_an_ipv6_network_counts_as_one_address(address: str, network: str) -> None:
    assert network_of(address) == network


async def test_over_the_limit_unknown_keys_are_not_looked_up_and_known_ones_work(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    clock = Clock()
    auth = Auth(store, loopback=False, clock=clock, unauthenticated_per_minute=5)
    key = await create_key(store, "team")

    async def status(key: str | None) -> int:
        headers = [(b"x-api-key", key.encode())] if key else []
        try:
            await auth.admit(
                Request({"type": "http", "headers": headers, "client": ("10.0.0.1", 1)}), "GET /api/v1/sessions"
            )
        except RequestError as error:
            return error.status
        return 200

    assert await status(key) == 200
    assert [await status(one) for one in (None, "tml-a", "tml-b", None, "tml-a", None, "tml-c")] == [401] * 5 + [
        429
    ] * 2
    assert hash_key("tml-c") not in auth._invalid_keys, "the store was not asked"
    assert await status(key) == 200
    # A new key clears the cache, so that unknown keys are looked up again, within the limit.
    await create_key(store, "another team")
    clock.now += 1.5
    assert [await status(None), await status("tml-d"), await status("tml-e")][-1] == 429
    assert await status(key) == 200
    clock.now += 60
    assert [await status(None), await status("tml-c")] == [401, 401]
    store.close()


async def test_requests_without_a_key_over_the_limit_get_retry_after(tmp_path: Path) -> None:
    config = ServerConfig.of(
        base_models=(ServedModel("tiny/qwen3", str(tmp_path)),), state_dir=tmp_path, unauthenticated_per_minute=2
    )
    app = create_app(config, WorkerDispatch(config.dispatch_config()))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test/api/v1/") as client,
    ):
        answers = [await client.get("sessions") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [401, 401, 429]
        assert 0 < int(answers[-1].headers["Retry-After"]) <= 30
        assert (await client.get("sessions", headers={"X-API-Key": ALICE})).status_code == 429, "not known yet"
        for _ in range(5):
            assert (await client.get("healthz")).status_code == 200


async def test_a_body_is_freed_while_its_connection_idles(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[weakref.ref[Body]] = []
    announced = Body.announced

    def recorded(request: Request, limits: BodyLimits) -> Body:
        bodies.append(weakref.ref(body := announced(request, limits)))
        return body

    monkeypatch.setattr(Body, "announced", recorded)
    async with serving(api.app) as server:
        host, port = server.servers[0].sockets[0].getsockname()
        async with httpx.AsyncClient(headers={"X-API-Key": ALICE}) as client:
            for _ in range(2):
                response = await client.post(f"http://{host}:{port}/api/v1/session_heartbeat", json={"session_id": "s"})
                assert response.status_code == 404 and "connection" not in response.headers
            await asyncio.sleep(0.1)  # until the server has done all that follows the answer
            gc.collect()
            assert len(bodies) == 2 and not any(body() for body in bodies)
