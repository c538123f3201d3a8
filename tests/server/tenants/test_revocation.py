"""A key that is revoked while a request is under way does nothing more, and gets nothing more."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import uvicorn
from fastapi import FastAPI, Request
from sqlalchemy import func, select
from starlette.routing import Route
from trainhouse.server.http.event_stream import EventStream
from trainhouse.server.routes.services import Services
from trainhouse.server.store import RunRecord
from trainhouse.server.store.database.schema import metadata
from trainhouse.server.tenants.auth import CACHE_SECONDS, Tenant, create_key, hash_key, list_keys, revoke_key
from trainhouse.server.tenants.scopes import ROUTE_SCOPES, SCOPES

from ..api import LORA, MODEL, session_record
from ..serving.test_connections import connection_to, read_all, serving

pytestmark = pytest.mark.anyio

Revoke = Callable[[Services, str], Awaitable[None]]
NO_BODY = {
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "POST /api/v1/auth/token",
    "DELETE /api/v1/auth/apikey/me",
    "DELETE /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}",
    "POST /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/publish",
    "DELETE /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/publish",
    "POST /console/admin/keys/{key_id}/revoke",
}
"""Changing routes that read no body, so that they act when the head has arrived."""
BODIES: dict[str, object] = {
    "POST /console/admin/keys": {"name": "team", "scopes": ["admin", "operator"]},
    "POST /console/data": {"model_input": [1, 2]},
    "POST /api/v1/telemetry": {"events": []},
    "POST /api/v1/import_weights": {"peft_type": "LORA"},
}
"""The bodies of routes without an example in the OpenAPI document."""


async def revoke_here(services: Services, key: str) -> None:
    record = (await services.auth.identify(key)).key
    assert record is not None
    await services.auth.revoke(record)


async def revoke_elsewhere(services: Services, key: str) -> None:
    """Revokes it as another process does."""
    record = await services.store.keys.find(hash_key(key))
    assert record is not None
    await revoke_key(services.store, record.key_id)
    await asyncio.sleep(0.1)


async def new_run(services: Services, tenant: Tenant) -> RunRecord:
    session = session_record(f"s{secrets.token_hex(4)}", tenant.id)
    await services.store.sessions.insert(session)
    run = RunRecord(f"{session.session_id}:train:0", session.session_id, tenant.id, MODEL, LORA, 1.0, 1.0)
    await services.store.runs.insert(run)
    async with services.checkpoints.writing(run, "weights", "n", False) as place:
        (place / "adapter_config.json").write_bytes(b"{}")
    return run


async def num_rows(services: Services) -> dict[str, int]:
    """Counts the rows of all tables, and the keys in force."""

    def statements(connection) -> dict[str, int]:
        return {
            name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for name, table in metadata.tables.items()
        }

    counted = await services.store.read(statements)
    return counted | {"keys in force": sum(key.revoked_at is None for key in await list_keys(services.store))}


def body_of(app: FastAPI, route: str) -> bytes:
    method, path = route.split(" ")
    described = app.openapi()["paths"].get(path.replace(":path", ""), {}).get(method.lower(), {})
    content = described.get("requestBody", {}).get("content", {}).get("application/json", {})
    return json.dumps(content.get("example", BODIES.get(route))).encode()


def head_of(route: str, run: RunRecord, num_bytes: int, headers: dict[str, str]) -> bytes:
    method, path = route.split(" ")
    places = {"session_id": run.session_id, "run_id": run.run_id, "kind": "weights", "name": "n", "key_id": "1"}
    path = path.format(**places) + ("?config_bytes=2" if path.endswith("import_weights") else "")
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {num_bytes}", "connection: close"]
    lines += ["content-type: application/json", "expect: 100-continue", *(f"{a}: {b}" for a, b in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


async def answer_after(
    server: uvicorn.Server, head: bytes, body: bytes, between: Callable[[], Awaitable[object]]
) -> tuple[bool, bytes]:
    """Returns whether the route waited for the body, and the answer; calls `between` when half of the body has
    arrived."""
    async with connection_to(server) as (reader, writer):
        writer.write(head)
        first = await asyncio.wait_for(reader.readuntil(b"\r\n"), 30)
        if not first.startswith(b"HTTP/1.1 100"):
            return False, first
        writer.write(body[: len(body) // 2])
        await writer.drain()
        await asyncio.sleep(0.02)
        await between()
        writer.write(body[len(body) // 2 :])
        return True, (await read_all(reader)).lstrip(b"\r\n")


@pytest.mark.parametrize("revoke", [revoke_here, revoke_elsewhere])
async def test_a_key_revoked_while_its_body_arrives_does_nothing(app: FastAPI, revoke: Revoke) -> None:
    services = app.state.services
    await create_key(services.store, "operator", SCOPES)
    tenant = await services.auth.authenticate(await create_key(services.store, "team", SCOPES))
    run = await new_run(services, tenant)
    async with serving(app) as server:
        for route in (one for one in ROUTE_SCOPES if not one.startswith("GET ")):
            if await services.checkpoints.find(f"tinker://{run.run_id}/weights/n") is None:
                run = await new_run(services, tenant)
            key, body = await create_key(services.store, "team", SCOPES), body_of(app, route)
            before, head = await num_rows(services), head_of(route, run, len(body), {"x-api-key": key})

            waited, answer = await answer_after(server, head, body, partial(revoke, services, key))

            assert waited == (route not in NO_BODY), (route, answer)
            if waited:
                assert answer.startswith(b"HTTP/1.1 401 ") and b"unknown or revoked" in answer, (route, answer)
                assert await num_rows(services) == before | {"keys in force": before["keys in force"] - 1}, route
                assert services.journal.num_held == 0, route


async def test_a_key_revoked_elsewhere_opens_no_session_however_many_requests_come_at_once(app: FastAPI) -> None:
    services = app.state.services
    key = await create_key(services.store, "team", SCOPES)
    run, route = await new_run(services, await services.auth.authenticate(key)), "POST /api/v1/create_session"
    body = body_of(app, route)
    head = head_of(route, run, len(body), {"x-api-key": key}).replace(b"expect: 100-continue\r\n", b"")

    async def create(server: uvicorn.Server) -> bytes:
        async with connection_to(server) as (reader, writer):
            writer.write(head + body)
            return await read_all(reader)

    async with serving(app) as server:
        before = await num_rows(services)
        assert (await create(server)).startswith(b"HTTP/1.1 200 ")
        await revoke_elsewhere(services, key)
        await asyncio.sleep(CACHE_SECONDS)
        answers = await asyncio.gather(*(create(server) for _ in range(6)))

    assert all(answer.startswith(b"HTTP/1.1 401 ") for answer in answers), answers
    assert (await num_rows(services))["sessions"] == before["sessions"] + 1


async def test_a_key_that_stays_valid_is_served_however_slowly_its_body_arrives(app: FastAPI) -> None:
    services = app.state.services
    key = await create_key(services.store, "team", SCOPES)
    run, route = await new_run(services, await services.auth.authenticate(key)), "POST /api/v1/create_session"
    body = body_of(app, route)

    head = head_of(route, run, len(body), {"x-api-key": key})
    before = await num_rows(services)
    async with serving(app) as server:
        waited, answer = await answer_after(server, head, body, lambda: asyncio.sleep(0.1))

    assert waited and answer.startswith(b"HTTP/1.1 200 "), answer
    assert await num_rows(services) == before | {"sessions": before["sessions"] + 1}


async def test_a_made_up_key_ends_with_the_first_key_though_its_body_is_on_its_way(app: FastAPI) -> None:
    services = app.state.services
    run = await new_run(services, await services.auth.authenticate("tml-me"))
    route = "POST /api/v1/create_session"
    body = body_of(app, route)

    async def create() -> None:
        await create_key(services.store, "team")
        await asyncio.sleep(0.1)

    async with serving(app) as server:
        head = head_of(route, run, len(body), {"x-api-key": "tml-me"})
        _, answer = await answer_after(server, head, body, create)

    assert answer.startswith(b"HTTP/1.1 401 "), answer


@pytest.mark.parametrize("revoke", [revoke_here, revoke_elsewhere])
async def test_a_poll_of_a_revoked_key_is_answered_401(app: FastAPI, revoke: Revoke) -> None:
    services = app.state.services
    key = await create_key(services.store, "team", SCOPES)
    tenant = await services.auth.authenticate(key)
    run = await new_run(services, tenant)
    future = services.futures.create("s:sample:0:1", tenant.id, lambda: None)  # pyright: ignore
    body = json.dumps({"request_id": "s:sample:0:1"}).encode()

    async with serving(app) as server, connection_to(server) as (reader, writer):
        head = head_of("POST /api/v1/retrieve_future", run, len(body), {"x-api-key": key})
        writer.write(head.replace(b"expect: 100-continue\r\n", b"") + body)
        await asyncio.sleep(0.1)
        await revoke(services, key)
        services.futures.fail(future, "secret of the tenant", "server")
        answer = await read_all(reader)

    assert answer.startswith(b"HTTP/1.1 401 ") and b"secret" not in answer, answer


async def test_a_stream_of_a_revoked_key_is_cut_off(app: FastAPI) -> None:
    services, ended = app.state.services, asyncio.Event()
    key = await create_key(services.store, "team", SCOPES)
    run = await new_run(services, await services.auth.authenticate(key))

    async def pieces():
        while True:
            yield b"data: piece\n\n"
            await asyncio.sleep(0.01)

    async def endless(request: Request) -> EventStream:
        return EventStream(pieces(), ended.set)

    app.router.routes.insert(0, Route("/api/v1/sessions", endless))
    async with serving(app) as server, connection_to(server) as (reader, writer):
        writer.write(
            head_of("GET /api/v1/sessions", run, 0, {"x-api-key": key}).replace(b"expect: 100-continue", b"a: b")
        )
        assert b"piece" in await asyncio.wait_for(reader.readuntil(b"piece"), 30)
        await asyncio.sleep(0.1)
        assert not ended.is_set(), "it continues while the key is valid"
        await revoke_here(services, key)
        rest = await asyncio.wait_for(read_all(reader), 30)

    assert ended.is_set() and not rest.endswith(b"0\r\n\r\n")
