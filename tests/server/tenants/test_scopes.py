"""Scopes and rates of keys: every route needs a scope, and a key may have a limit of requests per minute."""

from pathlib import Path

import httpx
import pytest
from tinker.cli.auth_api import SelfApiKeyResponse
from trainhouse.schemas.errors import RequestError
from trainhouse.server.cli.commands import main
from trainhouse.server.store import DATABASE_NAME, SqliteStore
from trainhouse.server.tenants.auth import create_key, list_keys
from trainhouse.server.tenants.rate_limits import UNCOUNTED, RateLimits
from trainhouse.server.tenants.scopes import ROUTE_SCOPES, SCOPES, check_scopes, parse_scopes
from trainhouse.workers.dispatch import WorkerDispatch

from ..api import ALICE, Api, Clock
from ..real import batch, running_server, sample_body, server_config

pytestmark = pytest.mark.anyio


def described_routes(api: Api) -> set[str]:
    """Returns the routes of the OpenAPI document that take a key."""
    paths = api.app.openapi()["paths"]
    described = {(method, path): one for path, methods in paths.items() for method, one in methods.items()}
    return {f"{method.upper()} {path}" for (method, path), one in described.items() if one.get("security")}


async def test_every_route_has_a_scope(api: Api) -> None:
    named = {route.replace(":path}", "}") for route in ROUTE_SCOPES}
    assert not described_routes(api) - named, "add their scopes to ROUTE_SCOPES"
    undescribed = {route for route in named - described_routes(api) if "/console/" not in route}
    assert undescribed == {"GET /metrics"}, "there are no such routes"
    assert {scope for scopes in ROUTE_SCOPES.values() for scope in scopes} == set(SCOPES)
    assert set(ROUTE_SCOPES) >= UNCOUNTED


async def test_a_key_opens_the_routes_of_its_scopes_and_no_other(api: Api) -> None:
    """Every route is requested with every scope; any answer but 403 means that the key was let in."""
    for scope in SCOPES:
        client = await api.client(await create_key(api.services.store, "team", (scope,)))
        for route, needed in ROUTE_SCOPES.items():
            if route == "DELETE /api/v1/auth/apikey/me" and scope in needed:
                continue
            if route.startswith("POST /console/admin/") and scope in needed:
                continue  # needs admin, too: tests/server/console/test_operators.py
            method, path = route.replace("{name:path}", "nothing").split()
            try:
                answer = await client.request(method, path.format(session_id="s", run_id="r", sampler_id="m", **NAMES))
            except AttributeError:  # the request was let in and needs a part that this server lacks
                assert scope in needed
                continue
            assert (answer.status_code == 403) == (scope not in needed), (scope, route, answer.text)


NAMES = {"kind": "weights", "name": "n", "file": "config.json", "key_id": 1}


async def test_a_refusal_names_the_missing_scope_and_the_remedy(api: Api) -> None:
    key = await create_key(api.services.store, "team", ("sample", "read"))
    client = await api.client(key)
    for send in (client, await api.client(await token_for(client))):
        refused = await send.post("/api/v1/forward_backward", content=b"")
        assert refused.status_code == 403
        assert refused.json()["detail"] == (
            "this key has the scopes sample, read, and POST /api/v1/forward_backward needs train: use a key with that "
            "scope, made by `trainhouse keys create NAME --scopes sample,read,train`"
        )
        assert (await send.get("/api/v1/sessions")).status_code == 200
    refused = await client.delete("/api/v1/training_runs/r/checkpoints/weights/n")
    assert refused.status_code == 403 and "needs admin" in refused.json()["detail"]
    reader = await api.client(await create_key(api.services.store, "team", ("read",)))
    assert "has the scope read, and" in (await reader.post("/api/v1/asample", content=b"")).json()["detail"]
    own = (await client.get("/api/v1/auth/apikey/me")).json()
    assert (own["scopes"], own["requests_per_minute"]) == (["sample", "read"], None)
    assert SelfApiKeyResponse.model_validate(own).name == "team"


async def token_for(client: httpx.AsyncClient) -> str:
    return (await client.post("/api/v1/auth/token", json={})).json()["jwt"]


async def test_a_key_without_scopes_is_not_restricted(api: Api) -> None:
    await create_key(api.services.store, "team")
    (info,) = await list_keys(api.services.store)
    assert (info.scopes, info.requests_per_minute) == (None, None)
    for route, needed in ROUTE_SCOPES.items():
        with pytest.raises(RequestError, match="needs"):
            check_scopes(set(SCOPES) - set(needed) or {"none"}, route)


async def test_an_access_token_for_weights_needs_the_read_scope(api: Api) -> None:
    store = api.services.store
    owner = await create_key(store, "owner")
    checkpoint = await api.save(await api.run(owner))
    other = await api.client(await create_key(store, "other"))
    for scopes, status in ((("sample", "train"), 404), (("read",), 200)):
        headers = {"X-Tinker-Weights-Access-Token": await create_key(store, "owner", scopes)}
        body = {"source_path": checkpoint.tinker_path}
        assert (await other.post("/api/v1/copy_weights", json=body, headers=headers)).status_code == status


@pytest.mark.parametrize("text", ["train", "admin,read", " sample , train "])
def test_parsed_scopes_have_a_fixed_order(text: str) -> None:
    names = parse_scopes(text)
    assert set(names) == {name.strip() for name in text.split(",")}
    assert list(names) == sorted(names, key=SCOPES.index)


def test_keys_are_created_and_listed_with_scopes_and_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--state-dir", str(tmp_path)]
    assert main(["keys", "create", "alice", "--scopes", "read,sample", "--requests-per-minute", "90", *place]) == 0
    assert main(["keys", "create", "bob", *place]) == 0
    capsys.readouterr()
    assert main(["keys", "list", *place]) == 0
    _, alice, bob = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (alice[-3:], bob[-3:]) == (["sample,read", "90", "alice"], ["train,sample,read,admin", "any", "bob"])
    for wrong, reason in (
        (["--scopes", "write"], "'write' is not a scope: give one or more of train,sample,read,admin,operator"),
        (["--scopes", ""], "'' is not a scope"),
        (["--requests-per-minute", "0"], "'0': expected an integer from 1"),
    ):
        assert main(["keys", "create", "carol", *wrong, *place]) == 2
        assert reason in capsys.readouterr().err
    store = SqliteStore(tmp_path / DATABASE_NAME)
    store.close()


# Rates


def test_a_rate_allows_one_minute_at_once_and_then_refills() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    for _ in range(120):
        limits.take(1, 120)
    with pytest.raises(RequestError, match="120 requests a minute") as refused:
        limits.take(1, 120)
    assert (refused.value.status, refused.value.retry_after_seconds) == (429, pytest.approx(0.5))
    limits.take(2, 1)
    clock.now += 0.5
    limits.take(1, 120)
    clock.now += 3600
    for _ in range(120):
        limits.take(1, 120)
    with pytest.raises(RequestError):
        limits.take(1, 120)


async def test_a_key_over_its_rate_gets_retry_after(api: Api) -> None:
    client = await api.client(await create_key(api.services.store, "team", requests_per_minute=3))
    other = await api.client(await create_key(api.services.store, "team"))
    statuses = [(await client.get("/api/v1/sessions")).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    refused = await client.get("/api/v1/sessions")
    assert refused.headers["Retry-After"] == "20" and 19_000 < int(refused.headers["Retry-After-Ms"]) <= 20_000
    assert "--requests-per-minute 6" in refused.json()["detail"]
    assert (await other.get("/api/v1/sessions")).status_code == 200, "another key of the tenant"
    session = {"session_id": "nothing"}
    assert (await client.post("/api/v1/session_heartbeat", json=session)).status_code == 404, "not counted"


async def test_polls_do_not_count_against_the_rate(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Polls bypass FastAPI, as submits do."""
    config = server_config(tiny_models["qwen3"], tmp_path)
    async with running_server(config, dispatch) as server:
        key = await create_key(server.services.store, "team", ("train", "sample"), requests_per_minute=8)
        server.clients[key] = server.clients.pop(ALICE)
        server.clients[key].headers["X-API-Key"] = key
        run = await server.create_run(key)
        await run.train(batch(), 1)
        for _ in range(20):
            assert "metrics" in await server.result(f"{run.model_id}:2", key)
        sampler_id = (await run.do("save_weights_for_sampler"))["sampling_session_id"]
        for expected in (200, 200, 200, 429):
            answer = await server.clients[key].post("asample", json=sample_body(sampler_id, None))
            assert answer.status_code == expected
