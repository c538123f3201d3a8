"""API keys: creating, listing and revoking them, and access without one."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from tinker.cli.auth_api import SelfApiKeyResponse
from tinker.lib._jwt_auth import jwt_claims
from tinker.types.auth_token_response import AuthTokenResponse
from trainhouse.schemas.errors import RequestError
from trainhouse.server.config.option_values import TenantWeight, parse_weights
from trainhouse.server.config.server_config import ServerConfig
from trainhouse.server.store import DATABASE_NAME, ApiKeyRecord, KeyCounts, SqliteStore, Store, TenantRecord
from trainhouse.server.store.database.database import Database
from trainhouse.server.store.tables.key_table import KeyTable
from trainhouse.server.store.tables.tenant_table import TenantTable
from trainhouse.server.tenants.auth import (
    CACHE_SECONDS,
    CONFIRM_SECONDS,
    Auth,
    create_key,
    hash_key,
    list_keys,
    require_keys,
    revoke_key,
)
from trainhouse.server.tenants.rate_limits import UnauthenticatedLimits
from trainhouse.server.tenants.tokens import LIFETIME_SECONDS, Tokens
from trainhouse.workers.protocol.worker_config import ServedModel

from ..api import ALICE, BOB, Api, Clock, running_api

pytestmark = pytest.mark.anyio


async def ask(api: Api, headers: dict[str, str]) -> httpx.Response:
    return await (await api.client(None)).post("/api/v1/client/config", headers=headers, json={})


async def test_a_missing_key_is_refused_with_the_remedy(api: Api) -> None:
    response = await ask(api, {})
    assert response.status_code == 401
    assert "TINKER_API_KEY" in response.json()["detail"]


async def test_a_key_of_another_kind_is_refused(api: Api) -> None:
    response = await ask(api, {"X-API-Key": "sk-123"})
    assert response.status_code == 401
    detail = response.json()["detail"]
    assert "sk-123" not in detail
    assert detail.index("any that does, such as tml-me") < detail.index("trainhouse keys create"), (
        "the easy remedy first"
    )


async def test_made_up_keys_are_not_suggested_where_they_do_not_work(tmp_path: Path, api: Api) -> None:
    await create_key(api.services.store, "team")
    async with running_api(tmp_path / "public", host="0.0.0.0") as public:
        for server in (api, public):
            detail = (await ask(server, {"X-API-Key": "sk-123"})).json()["detail"]
            assert "trainhouse keys create" in detail and "such as" not in detail


async def test_a_bearer_token_is_a_key_too(api: Api) -> None:
    assert (await ask(api, {"Authorization": f"Bearer {ALICE}"})).status_code == 200
    assert (await ask(api, {"Authorization": "Basic abc"})).status_code == 401


async def test_on_loopback_each_key_is_its_own_tenant(api: Api) -> None:
    alice, bob = await api.tenant(ALICE), await api.tenant(BOB)
    assert alice.id != bob.id
    assert await api.tenant(ALICE) == alice
    assert ALICE not in alice.id + alice.name


async def test_after_the_first_created_key_made_up_keys_are_refused(api: Api) -> None:
    key = await create_key(api.services.store, "team")
    (info,) = await list_keys(api.services.store)
    await revoke_key(api.services.store, info.key_id)
    refused = await ask(api, {"X-API-Key": ALICE})
    assert refused.status_code == 401
    assert "once a key has been made, made-up tml- keys no longer work" in refused.json()["detail"]
    assert (await ask(api, {"X-API-Key": key})).status_code == 401


@pytest.mark.parametrize("name", ["", " ", "a,b", "a=b", " alice", "alice ", "alice\n"])
async def test_a_name_that_tenant_weights_cannot_express_is_refused(api: Api, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(name)) + ".*without ',' and '='.*--tenant-weights"):
        await create_key(api.services.store, name)
    assert await list_keys(api.services.store) == ()
    assert parse_weights("alice b/c@d.e=2") == (TenantWeight("alice b/c@d.e", 2.0),)
    await create_key(api.services.store, "alice b/c@d.e")


async def test_keys_are_stored_as_hashes_and_listed_by_name(api: Api) -> None:
    key = await create_key(api.services.store, "team")
    other = await create_key(api.services.store, "team")
    assert key.startswith("tml-") and len(key) > 40 and key != other
    assert [info.name for info in await list_keys(api.services.store)] == ["team", "team"]
    assert await api.tenant(key) == await api.tenant(other)
    stored = b"".join(file.read_bytes() for file in api.services.config.store.state_dir.glob(f"{DATABASE_NAME}*"))
    assert key.encode() not in stored


async def test_a_key_revoked_by_another_process_is_refused_soon(tmp_path: Path) -> None:
    store, clock = SqliteStore(tmp_path / "store.db"), Clock()
    auth = Auth(store, loopback=False, clock=clock)
    key = await create_key(store, "team")
    assert (await auth.authenticate(key)).name == "team"

    other_store = SqliteStore(tmp_path / "store.db")
    await revoke_key(other_store, (await list_keys(other_store))[0].key_id)
    other_store.close()
    assert (await auth.authenticate(key)).name == "team"
    clock.now += CACHE_SECONDS
    with pytest.raises(RequestError, match="revoked"):
        await auth.authenticate(key)
    store.close()


async def test_a_key_created_by_another_process_is_accepted_soon(tmp_path: Path) -> None:
    store, clock = SqliteStore(tmp_path / "store.db"), Clock()
    auth = Auth(store, loopback=True, clock=clock)
    assert (await auth.authenticate(ALICE)).name.startswith("local-")

    other_store = SqliteStore(tmp_path / "store.db")
    key = await create_key(other_store, "team")
    other_store.close()
    clock.now += CACHE_SECONDS
    assert (await auth.authenticate(key)).name == "team"
    with pytest.raises(RequestError, match="unknown or revoked"):  # made-up keys no longer work
        await auth.authenticate(ALICE)
    store.close()


class WatchedKeys(KeyTable):
    """Counts the look-ups of each key, and stops counts of keys, once they are read, until `may_count` is set."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.num_lookups: Counter[str] = Counter()
        self.num_counts = 0
        self.has_counted, self.may_count = asyncio.Event(), asyncio.Event()
        self.may_count.set()

    async def count(self) -> KeyCounts:
        self.num_counts += 1
        counts = await super().count()
        self.has_counted.set()
        await self.may_count.wait()
        return counts

    async def find(self, key_hash: str) -> ApiKeyRecord | None:
        self.num_lookups[key_hash] += 1
        return await super().find(key_hash)


class WatchedTenants(TenantTable):
    """Stops look-ups of tenants, which follow those of their keys, until `may_proceed` is set."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.is_between = asyncio.Event()
        self.may_proceed = asyncio.Event()

    async def get(self, tenant_id: str) -> TenantRecord | None:
        self.is_between.set()
        await self.may_proceed.wait()
        return await super().get(tenant_id)


class WatchedStore(SqliteStore):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.keys = WatchedKeys(self)
        self.tenants = WatchedTenants(self)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[WatchedStore]:
    with closing(WatchedStore(tmp_path / "store.db")) as store:
        store.tenants.may_proceed.set()
        yield store


async def test_a_look_up_begun_before_a_revocation_does_not_cache_the_key(watched: WatchedStore) -> None:
    watched.tenants.may_proceed.clear()
    auth = Auth(watched, loopback=False, clock=Clock())
    key = await create_key(watched, "team")
    looking = asyncio.create_task(auth.authenticate(key))
    await watched.tenants.is_between.wait()
    record = await watched.keys.find(hash_key(key))
    assert record is not None
    await auth.revoke(record)
    watched.tenants.may_proceed.set()
    assert (await looking).name == "team", "this request was earlier"
    with pytest.raises(RequestError, match="revoked"):
        await auth.authenticate(key)


async def admitted_request(auth: Auth, key: str) -> Request:
    return Request({"type": "http", "state": {"key": await auth.identify(key, "1.2.3.4")}})


async def revoke_all(store: Store) -> None:
    for info in await list_keys(store):
        await revoke_key(store, info.key_id)


async def test_no_request_trusts_a_key_while_it_is_being_found_out_whether_keys_were_revoked(
    watched: WatchedStore,
) -> None:
    clock = Clock()
    auth = Auth(watched, loopback=False, clock=clock)
    key = await create_key(watched, "team")
    request = await admitted_request(auth, key)
    await revoke_all(watched)
    clock.now += 3600
    before = watched.keys.num_counts

    found = await asyncio.gather(
        *(auth.authenticate(key) for _ in range(3)),
        *(auth.confirm(request) for _ in range(3)),
        auth.tenant_of(key),
        return_exceptions=True,
    )

    assert found[-1] is None and all(isinstance(one, RequestError) and one.status == 401 for one in found[:-1]), found
    assert watched.keys.num_counts == before + 1, "one query serves all"


@pytest.mark.parametrize(("checked", "seconds"), [("a look-up", CACHE_SECONDS), ("a second check", CONFIRM_SECONDS)])
async def test_a_count_of_keys_that_began_too_early_is_repeated(
    watched: WatchedStore, checked: str, seconds: float
) -> None:
    clock, keys = Clock(), watched.keys
    auth = Auth(watched, loopback=False, clock=clock)
    key = await create_key(watched, "team")
    request = await admitted_request(auth, key)
    clock.now += 3600
    keys.has_counted.clear()
    keys.may_count.clear()
    early = asyncio.create_task(auth.authenticate(key))
    await keys.has_counted.wait()

    await revoke_all(watched)
    clock.now += seconds
    late = asyncio.create_task(auth.authenticate(key) if checked == "a look-up" else auth.confirm(request))
    await asyncio.sleep(0)
    keys.may_count.set()

    assert (await early).name == "team", "this request was earlier"
    with pytest.raises(RequestError, match="revoked"):
        await late


async def test_a_request_that_is_given_up_takes_no_others_count_of_keys_along(watched: WatchedStore) -> None:
    auth, keys = Auth(watched, loopback=False, clock=Clock()), watched.keys
    key = await create_key(watched, "team")
    keys.may_count.clear()
    given_up, other = (asyncio.create_task(auth.authenticate(key)) for _ in range(2))
    await keys.has_counted.wait()
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    keys.may_count.set()

    assert (await other).name == "team" and keys.num_counts == 1


async def test_keys_that_cannot_be_counted_are_counted_again_at_the_next_request(watched: WatchedStore) -> None:
    auth = Auth(watched, loopback=False, clock=Clock())
    key = await create_key(watched, "team")
    await watched.write(lambda connection: connection.execute(text("ALTER TABLE api_keys RENAME TO away")))
    failed = await asyncio.gather(*(auth.authenticate(key) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(one, OperationalError) for one in failed), failed
    await watched.write(lambda connection: connection.execute(text("ALTER TABLE away RENAME TO api_keys")))
    assert (await auth.authenticate(key)).name == "team"


async def test_made_up_keys_do_not_evict_valid_keys_from_the_cache(
    watched: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainhouse.server.tenants.auth._MAX_CACHED", 50)
    auth = Auth(watched, loopback=False, clock=Clock())
    key = await create_key(watched, "team")
    await auth.authenticate(key)
    for number in range(120):
        with pytest.raises(RequestError, match="unknown"):
            await auth.authenticate(f"tml-made-up-{number}")
    with pytest.raises(RequestError, match="unknown"):
        await auth.authenticate("tml-made-up-119")
    assert (await auth.authenticate(key)).name == "team"
    assert watched.keys.num_lookups[hash_key(key)] == 1
    assert watched.keys.num_lookups[hash_key("tml-made-up-119")] == 1, "a refusal is remembered, too"
    assert len(auth._valid_keys) + len(auth._invalid_keys) == 51


async def test_revoking_an_unknown_key_fails(api: Api) -> None:
    with pytest.raises(ValueError, match="no key 7 in force"):
        await revoke_key(api.services.store, 7)


async def test_listening_beyond_loopback_requires_keys(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.db")
    here, everywhere = (
        ServerConfig.of(base_models=(ServedModel("m", "m/m"),), host=host) for host in ("127.0.0.1", "0.0.0.0")
    )
    await require_keys(here, store)
    with pytest.raises(ValueError, match=r"0\.0\.0\.0.*trainhouse keys create"):
        await require_keys(everywhere, store)
    with pytest.raises(ValueError, match="`trainhouse keys create NAME --state-dir '/a b'`"):
        await require_keys(everywhere.with_options(state_dir=Path("/a b")), store)
    with pytest.raises(ValueError, match="`trainhouse keys create NAME --database-url URL`") as refused:
        await require_keys(everywhere.with_options(database_url="postgresql://me:geheim@h/d"), store)
    assert "geheim" not in str(refused.value)
    await create_key(store, "team")
    await require_keys(everywhere, store)
    store.close()


async def test_beyond_loopback_an_unknown_key_is_refused(tmp_path: Path) -> None:
    async with running_api(tmp_path, host="0.0.0.0") as api:
        assert (await ask(api, {"X-API-Key": ALICE})).status_code == 401


async def test_a_key_can_read_and_revoke_itself(api: Api) -> None:
    open_key = await (await api.client(ALICE)).get("/api/v1/auth/apikey/me")
    assert SelfApiKeyResponse.model_validate(open_key.json()).key_id == 0
    key = await create_key(api.services.store, "team")
    client = await api.client(key)
    own = SelfApiKeyResponse.model_validate((await client.get("/api/v1/auth/apikey/me")).json())
    assert (own.name, own.key_id) == ("team", 1)
    assert (await client.delete("/api/v1/auth/apikey/me")).status_code == 204
    assert (await client.get("/api/v1/auth/apikey/me")).status_code == 401


async def test_a_made_up_key_cannot_be_revoked(api: Api) -> None:
    assert (await (await api.client(ALICE)).delete("/api/v1/auth/apikey/me")).status_code == 404


async def token_for(api: Api, key: str) -> str:
    client = await api.client(key)
    return AuthTokenResponse.model_validate((await client.post("/api/v1/auth/token", json={})).json()).jwt


async def test_a_token_authenticates_as_its_key(api: Api) -> None:
    key = await create_key(api.services.store, "team")
    token = await token_for(api, key)
    assert await api.tenant(token) == await api.tenant(key)
    claims = jwt_claims(token)
    assert (claims["email"], claims["exp"] - claims["iat"]) == ("team", LIFETIME_SECONDS)
    again = await token_for(api, token)
    assert await api.tenant(again) == await api.tenant(key)
    await (await api.client(token)).delete("/api/v1/auth/apikey/me")
    assert (await ask(api, {"X-API-Key": token})).status_code == 401, "it is revoked with its key"


async def test_a_token_of_a_made_up_key_authenticates_as_that_key(api: Api) -> None:
    assert await api.tenant(await token_for(api, ALICE)) == await api.tenant(ALICE)


async def test_forged_tokens_and_tokens_of_other_servers_are_refused(api: Api) -> None:
    token = await token_for(api, ALICE)
    head, claims, signature = token.split(".")
    forged = Tokens().issue("0" * 64, "somebody", "somebody")
    for wrong in (f"{head}.{claims[:-2]}AA.{signature}", f"{head}.{claims}.", f"{head}.{claims}", forged, "eyJ.eyJ.x"):
        refused = await ask(api, {"X-API-Key": wrong})
        assert refused.status_code == 401 and "not a valid token" in refused.json()["detail"]
        assert 'error="invalid_token"' in refused.headers["WWW-Authenticate"], "the SDK then requests a new one"


def test_a_token_expires() -> None:
    clock = Clock()
    tokens = Tokens(clock)
    token = tokens.issue("hash", "tenant", "name")
    clock.now += LIFETIME_SECONDS - 1
    assert tokens.key_hash_of(token) == "hash"
    clock.now += 1
    assert tokens.key_hash_of(token) is None


@pytest.mark.parametrize("path", ["/api/v1/readyz", "/api/v1/limits"])
async def test_made_up_keys_are_counted_wherever_they_are_looked_up(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    await check_counted(app, monkeypatch, path)


async def check_counted(app: FastAPI, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Requests the path with made-up keys until they are refused without being looked up."""
    services, looked_up = app.state.services, []
    await create_key(services.store, "team")
    services.auth.unauthenticated_limits = UnauthenticatedLimits(3, Clock())
    find = services.store.keys.find
    monkeypatch.setattr(services.store.keys, "find", lambda key_hash: looked_up.append(key_hash) or find(key_hash))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answers = [await client.get(path, headers={"X-API-Key": f"tml-guess-{number}"}) for number in range(6)]

    assert [answer.status_code for answer in answers[3:]] == [429] * 3
    assert len(looked_up) == 3
