"""Sessions over HTTP: created once, kept alive by heartbeats, ended by a request or by silence."""

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path

import httpx
import pytest
from tinker import types
from tinker.types.client_config_response import ClientConfigResponse
from tinker.types.client_dynamic_config_response import ClientDynamicConfigResponse
from trainhouse.server.store import DATABASE_NAME
from trainhouse.server.tenants.auth import create_key
from trainhouse.workers.dispatch import WorkerDispatch

from ..api import ALICE, BOB, MODEL, Api, running_api
from ..journal.test_futures import wait_until
from ..real import Server, running_server, server_config

pytestmark = pytest.mark.anyio

EXPIRY_SECONDS = 300.0


async def heartbeat(api: Api, session_id: str, key: str = ALICE) -> int:
    return (
        await (await api.client(key)).post("/api/v1/session_heartbeat", json={"session_id": session_id})
    ).status_code


async def finish(api: Api, session_id: str, how: str, key: str = ALICE) -> int:
    body = {"reason": {"type": how}, "detail": None}
    return (await (await api.client(key)).post(f"/api/v1/sessions/{session_id}/finish", json=body)).status_code


async def test_the_sdk_reads_our_flags(api: Api) -> None:
    client = await api.client()
    flags = ClientConfigResponse.model_validate(
        (await client.post("/api/v1/client/config", json={"sdk_version": "0.38.0"})).json()
    )
    assert flags.fwdbwd_max_chunk_len == 1024 and flags.parallel_fwdbwd_chunks and not flags.pjwt_auth_enabled
    dynamic = await client.post("/api/v1/client/dynamic_config", json={"sdk_version": "0.38.0"})
    assert ClientDynamicConfigResponse.model_validate(dynamic.json()).sample_cancel_enabled


async def test_health_needs_no_key(api: Api) -> None:
    response = await (await api.client(None)).get("/api/v1/healthz")
    assert types.HealthResponse.model_validate(response.json()).status == "ok"


async def test_capabilities_are_those_of_the_dispatch(api: Api) -> None:
    response = await (await api.client()).get("/api/v1/get_server_capabilities")
    (model,) = types.GetServerCapabilitiesResponse.model_validate(response.json()).supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == (MODEL, 1024, True)


async def test_a_retried_create_returns_the_same_session(api: Api) -> None:
    body = {"sdk_version": "0.38.0", "tags": ["a"], "user_metadata": {"n": 1}, "display_name": "mine"}

    async def create(key: str, idempotency_key: str) -> str:
        headers = {"X-Idempotency-Key": idempotency_key}
        response = await (await api.client(key)).post("/api/v1/create_session", json=body, headers=headers)
        return types.CreateSessionResponse.model_validate(response.json()).session_id

    first = await create(ALICE, "one")
    assert await create(ALICE, "one") == first
    assert await create(ALICE, "two") != first
    assert await create(BOB, "one") != first
    headers = {"X-Idempotency-Key": "one"}
    for other in (
        {"tags": ["b"]},
        {"user_metadata": {"n": 2}},
        {"sdk_version": "0.37.0"},
        {"display_name": None},
        {"project_id": "p"},
    ):
        refused = await (await api.client(ALICE)).post("/api/v1/create_session", json=body | other, headers=headers)
        assert refused.status_code == 400 and "was used to create session" in refused.json()["detail"]


async def test_heartbeats_keep_a_session_alive_and_silence_ends_it(api: Api) -> None:
    ended: list[str] = []

    async def on_end(session_id: str) -> None:
        ended.append(session_id)

    api.services.sessions.on_end.append(on_end)
    kept, silent = await api.session(), await api.session()
    for _ in range(3):
        api.clock.now += EXPIRY_SECONDS / 2
        assert await heartbeat(api, kept) == 200
        await api.services.sessions.expire()
    assert ended == [silent]
    assert await heartbeat(api, silent) == 410


async def test_any_request_of_a_session_keeps_it_alive(api: Api) -> None:
    session_id = await api.session()
    api.clock.now += EXPIRY_SECONDS
    api.services.sessions.touch(session_id)
    api.clock.now += EXPIRY_SECONDS
    await api.services.sessions.expire()
    assert await heartbeat(api, session_id) == 200


async def test_the_first_end_wins(api: Api) -> None:
    calls: list[str] = []

    async def failing(session_id: str) -> None:
        calls.append(session_id)
        raise RuntimeError("cannot release")

    async def second(session_id: str) -> None:
        calls.append(session_id)

    api.services.sessions.on_end += [failing, second]
    session_id = await api.session()
    assert await finish(api, session_id, "success") == 204
    assert await finish(api, session_id, "errored") == 204
    assert calls == [session_id, session_id]
    assert (await api.services.store.sessions.get(session_id)).end == "success"
    assert await heartbeat(api, session_id) == 410


async def test_a_session_belongs_to_one_tenant(api: Api) -> None:
    session_id = await api.session(ALICE)
    client = await api.client(BOB)
    assert await heartbeat(api, session_id, BOB) == 404
    assert await finish(api, session_id, "success", BOB) == 404
    assert (await client.get(f"/api/v1/sessions/{session_id}")).status_code == 404
    moved = await client.put(f"/api/v1/sessions/{session_id}/project", json={"project_id": "mine"})
    assert moved.status_code == 404
    assert (await client.get("/api/v1/sessions")).json() == {"sessions": [], "names": {}}
    assert await heartbeat(api, session_id, ALICE) == 200


async def test_the_expiry_clock_stops_while_the_server_is_down(tmp_path: Path) -> None:
    async with running_api(tmp_path) as api:
        session_id = await api.session()
        finished = await api.session()
        await finish(api, finished, "success")
    async with running_api(tmp_path) as api:
        api.clock.now += EXPIRY_SECONDS
        await api.services.sessions.expire()
        assert await heartbeat(api, session_id) == 200
        assert await heartbeat(api, finished) == 410
        api.clock.now += EXPIRY_SECONDS + 1
        await api.services.sessions.expire()
        assert await heartbeat(api, session_id) == 410


async def test_telemetry_is_accepted_and_dropped(api: Api) -> None:
    body = {"events": [{"secret": "traceback"}], "platform": "x", "sdk_version": "0.38.0", "session_id": "s"}
    response = await (await api.client()).post("/api/v1/telemetry", json=body)
    assert types.TelemetryResponse.model_validate(response.json()).status == "accepted"


async def test_a_session_can_be_moved_into_a_project(api: Api) -> None:
    run = await api.run()
    client = await api.client()
    moved = await client.put(f"/api/v1/sessions/{run.session_id}/project", json={"project_id": "p"})
    assert moved.status_code == 204
    listed = await client.get("/api/v1/training_runs", params={"project_id": "p"})
    assert [one["training_run_id"] for one in listed.json()["training_runs"]] == [run.run_id]


async def create(server: Server, key: str = ALICE, **headers: str) -> httpx.Response:
    return await server.clients[key].post("create_session", json={"sdk_version": "1"}, headers=headers)


async def test_open_sessions_are_limited_and_more_are_throttled(
    tiny_models: dict[str, Path], tmp_path: Path, dispatch: WorkerDispatch
) -> None:
    config = server_config(tiny_models["qwen3"], tmp_path, tenant_sessions=2)
    async with running_server(config, dispatch) as server:
        answers = await asyncio.gather(*(create(server) for _ in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429], "also at the same time"
        refused = await create(server)
        assert "you have 2 open sessions" in refused.json()["detail"]
        assert "--tenant-sessions" in refused.json()["detail"] and float(refused.headers["Retry-After"]) > 0
        assert (await create(server, BOB, **{"X-Idempotency-Key": "one"})).status_code == 200
        assert (await create(server, BOB)).status_code == 200
        again = await create(server, BOB, **{"X-Idempotency-Key": "one"})
        assert again.status_code == 200, "a session that already exists"
        limits = (await server.clients[ALICE].get("limits")).json()
        assert limits["sessions"] == {"limit": 2, "used": 2}
        session_id = next(answer.json()["session_id"] for answer in answers if answer.status_code == 200)
        await server.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}}, status=204)
        assert (await create(server)).status_code == 200
    async with running_server(config, dispatch) as server:
        assert (await create(server)).status_code == 429, "sessions from before the restart count"


async def test_ended_sessions_are_deleted_unless_they_have_checkpoints(
    tiny_models: dict[str, Path], tmp_path: Path, dispatch: WorkerDispatch
) -> None:
    async with running_server(server_config(tiny_models["qwen3"], tmp_path), dispatch) as server:
        saved, unsaved, live = [await server.create_run() for _ in range(3)]
        path = (await saved.do("save_weights", path="a"))["path"]
        for run in (saved, unsaved):
            await server.post(f"sessions/{run.session_id}/finish", {"reason": {"type": "success"}}, status=204)
        await wait_until(lambda: not server.services.runs.ending_session_ids)
        forget = server.services.sessions.delete_ended
        await forget(3600.0, 100, ())
        await forget(0.0, 100, (unsaved.session_id,))
        client = server.clients[ALICE]
        assert (await client.get(f"sessions/{unsaved.session_id}")).status_code == 200
        await forget(0.0, 100, ())
        assert (await client.get(f"sessions/{unsaved.session_id}")).status_code == 404
        assert (await client.get(f"training_runs/{unsaved.model_id}")).status_code == 404
        assert await server_heartbeat(server, unsaved.session_id) == 404
        runs = (await client.get("training_runs")).json()["training_runs"]
        assert {run["training_run_id"] for run in runs} == {saved.model_id, live.model_id}
        assert (await client.get(f"sessions/{saved.session_id}")).json()["training_run_ids"] == [saved.model_id]
        assert (await client.get("checkpoints")).json()["checkpoints"][0]["tinker_path"] == path
        body = {"session_id": live.session_id, "model_seq_id": 1, "path": path, "optimizer": True}
        loaded = await server.result((await server.post("load_weights", body))["request_id"])
        assert loaded["model_id"] == f"{live.session_id}:train:1"
        assert "error" not in (await live.do("save_weights", path="b"))


async def server_heartbeat(server: Server, session_id: str) -> int:
    return (await server.clients[ALICE].post("session_heartbeat", json={"session_id": session_id})).status_code


async def test_creating_a_session_needs_the_train_or_sample_scope(api: Api) -> None:
    for scopes, status in (("read", 403), ("admin", 403), ("sample", 200), ("train", 200)):
        client = await api.client(await create_key(api.services.store, "team", (scopes,)))
        response = await client.post("/api/v1/create_session", json={"sdk_version": "1"})
        assert response.status_code == status, (scopes, response.text)


async def test_an_old_database_with_large_sessions_opens_and_is_cleaned(tmp_path: Path) -> None:
    async with running_api(tmp_path) as api:
        session_id = await api.session()
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as database, database:
        database.execute("UPDATE sessions SET user_metadata = ?", [json.dumps({"a": "x" * 20_000_000})])
    async with running_api(tmp_path) as api:
        assert await heartbeat(api, session_id) == 200
        info = (await (await api.client()).get(f"/api/v1/sessions/{session_id}")).json()
        assert info["user_metadata"] is None
