"""The store on PostgreSQL: restarts of the database, cut connections, other servers on the same rows."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, insert, make_url, text
from trainhouse.schemas.models import LoraConfig
from trainhouse.server.store import DatabaseUnreachable, PostgresStore, ResultRecord, TenantRecord, open_store
from trainhouse.server.store import postgres as postgres_module
from trainhouse.server.store.database.schema import results, tenants
from trainhouse.server.store.store_config import StoreConfig

from ...postgres import Databases, PostgresServer
from ..api import session_record

pytestmark = pytest.mark.anyio


@pytest.fixture
def stores(postgres_url: str) -> Iterator[tuple[PostgresStore, PostgresStore]]:
    """The stores of two servers on one database."""
    opened = PostgresStore(postgres_url), PostgresStore(postgres_url)
    yield opened
    for store in opened:
        store.close()


@pytest.fixture
def server(postgres: Databases) -> Iterator[PostgresServer]:
    """A PostgreSQL server that the test may stop; it is restarted afterwards."""
    if postgres.server is None:
        pytest.skip("an external PostgreSQL is not stopped")
    yield postgres.server
    postgres.server.stop()
    postgres.server.start()


def add_tenant(name: str, before: Callable[[Connection], object] = lambda _: None) -> Callable[[Connection], None]:
    def statements(connection: Connection) -> None:
        before(connection)
        connection.execute(insert(tenants).values(tenant_id=name, name=name, created_at=1.0))

    return statements


def sleep_in_database(seconds: float) -> Callable[[Connection], object]:
    return lambda connection: connection.execute(text(f"SELECT pg_sleep({seconds})"))


async def tenant_names(store: PostgresStore) -> list[str]:
    return sorted(tenant.name for tenant in await store.tenants.list_all())


async def test_several_servers_can_start_at_once_on_an_empty_database(postgres_url: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda _: PostgresStore(postgres_url), range(4)))
    await opened[0].tenants.ensure(TenantRecord("t", "t", 1.0))
    assert [await tenant_names(store) for store in opened] == [["t"]] * 4
    for store in opened:
        store.close()


async def test_format_2_is_migrated(postgres_url: str) -> None:
    """Format 2 is the oldest that exists on PostgreSQL."""
    store = PostgresStore(postgres_url)
    for back in (
        "DROP TABLE operations",
        "DROP TABLE logged_metrics",
        "ALTER TABLE samplers ADD COLUMN directory VARCHAR",
        "ALTER TABLE samplers DROP COLUMN draft_path",
        "ALTER TABLE runs DROP COLUMN role",
        "ALTER TABLE checkpoints DROP COLUMN role",
        "ALTER TABLE runs DROP COLUMN target_path",
        "ALTER TABLE runs DROP COLUMN asked",
        "ALTER TABLE runs DROP COLUMN schedules",
        "ALTER TABLE checkpoints DROP COLUMN target_path",
        "ALTER TABLE runs RENAME COLUMN training TO lora",
        "ALTER TABLE checkpoints RENAME COLUMN training TO lora",
        "INSERT INTO tenants VALUES ('t', 't', 1)",
        "INSERT INTO sessions (session_id, tenant_id, created_at, last_heartbeat_at, tags) "
        "VALUES ('s', 't', 1, 1, '[]')",
        """INSERT INTO runs VALUES ('r', 's', 't', 'tiny', '{"rank": 3}', 1, 1)""",
        "UPDATE format SET version = 2",
    ):
        await store.write(lambda connection, back=back: connection.execute(text(back)) and None)
    store.close()
    store = PostgresStore(postgres_url)
    columns = text("SELECT column_name FROM information_schema.columns WHERE table_name = 'samplers'")
    found = await store.read(lambda connection: connection.execute(columns).scalars().all())
    assert "kind" in found
    run = await store.runs.get("r")
    assert run is not None and run.role == "policy" and run.training == LoraConfig(rank=3)
    store.close()


async def test_servers_that_insert_the_same_rows_at_once_agree(stores: tuple[PostgresStore, PostgresStore]) -> None:
    for number in range(20):
        tenant = TenantRecord(f"t{number}", f"t{number}", 1.0)
        await asyncio.gather(*(store.tenants.ensure(tenant) for store in stores))
        sessions = [session_record(f"{side}{number}", tenant.tenant_id, idempotency_key="same") for side in "ab"]
        made = await asyncio.gather(*(store.sessions.insert(one) for store, one in zip(stores, sessions, strict=True)))
        assert made[0] == made[1]
        put = [ResultRecord("r", tenant.tenant_id, f"{number}", 1, "json", 1.0)]
        await asyncio.gather(*(store.results.put(put) for store in stores))
        assert await stores[0].results.get("r") == put[0]


async def test_both_servers_in_a_deadlock_succeed(stores: tuple[PostgresStore, PostgresStore]) -> None:
    for name in ("x", "y"):
        await stores[0].tenants.ensure(TenantRecord(name, name, 1.0))

    def rename(first: str, second: str) -> Callable[[Connection], None]:
        def statements(connection: Connection) -> None:
            for name in (first, second):
                renamed = text("UPDATE tenants SET name = name || '!' WHERE tenant_id = :name")
                connection.execute(renamed, {"name": name})
                time.sleep(0.2)

        return statements

    writes = [stores[0].write(rename("x", "y")), stores[1].write(rename("y", "x"))]
    await asyncio.gather(*writes)
    assert await tenant_names(stores[0]) == ["x!!", "y!!"]


async def test_cut_connections_cause_no_error(postgres: Databases, postgres_url: str) -> None:
    store = open_store(StoreConfig(Path("unused"), postgres_url))
    assert isinstance(store, PostgresStore)
    for number in range(3):
        await store.tenants.ensure(TenantRecord(f"{number}", f"{number}", 1.0))
        postgres.cut_connections(postgres_url)
        assert len(await tenant_names(store)) == number + 1
        postgres.cut_connections(postgres_url)
    store.close()


async def test_a_transaction_that_is_cut_off_is_repeated_as_a_whole(
    postgres: Databases, postgres_url: str, stores: tuple[PostgresStore, PostgresStore]
) -> None:
    store = stores[0]
    slow = sleep_in_database(0.6)
    writes = [store.write(add_tenant("first", slow)), *(store.write(add_tenant(name)) for name in "abc")]
    read = store.read(lambda connection: slow(connection) and 7)
    await asyncio.sleep(0.3)
    postgres.cut_connections(postgres_url)
    await asyncio.gather(*writes)
    assert await read == 7
    assert await tenant_names(store) == ["a", "b", "c", "first"]


async def test_a_commit_whose_answer_was_lost_is_not_repeated(
    stores: tuple[PostgresStore, PostgresStore],
) -> None:
    """A repeated commit would conflict with its own rows."""
    store = stores[0]
    num_lost = 0

    def commit_and_hear_nothing(connection: Connection) -> None:
        nonlocal num_lost
        if num_lost == 0:
            num_lost = 1
            raw = connection.connection.dbapi_connection
            assert raw is not None
            raw.commit()
            raw.close()

    event.listen(store._writing, "commit", commit_and_hear_nothing)
    await store.write(add_tenant("once"))
    assert num_lost == 1 and await tenant_names(store) == ["once"]


_SLOW_COMMIT = (
    "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.6); RETURN NULL; END'",
    """CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON tenants DEFERRABLE INITIALLY DEFERRED
       FOR EACH ROW EXECUTE FUNCTION wait()""",
)


async def test_a_commit_that_lost_its_connection_is_repeated(
    postgres: Databases, postgres_url: str, stores: tuple[PostgresStore, PostgresStore]
) -> None:
    with stores[0]._writing.begin() as connection:
        for statement in _SLOW_COMMIT:
            connection.execute(text(statement))
    write = stores[0].write(add_tenant("late"))
    await asyncio.sleep(0.3)
    postgres.cut_connections(postgres_url)
    await write
    assert await tenant_names(stores[1]) == ["late"]


async def test_the_database_ends_idle_transactions(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their locks would block other servers; the transaction is repeated."""
    monkeypatch.setattr(postgres_module, "_IDLE_MILLISECONDS", 200)
    store = PostgresStore(postgres_url)
    naps = iter([0.6, 0.0])
    await store.write(add_tenant("slept", lambda _: time.sleep(next(naps))))
    assert await tenant_names(store) == ["slept"] and next(naps, None) is None
    store.close()


@pytest.mark.parametrize("end", [PostgresServer.stop, PostgresServer.crash])
async def test_a_restart_of_the_database_is_waited_for(
    server: PostgresServer, stores: tuple[PostgresStore, PostgresStore], end: Callable[[PostgresServer], None]
) -> None:
    store = stores[0]
    await store.tenants.ensure(TenantRecord("before", "before", 1.0))
    end(server)
    meanwhile = [store.write(add_tenant(name)) for name in "ab"]
    seen = store.read(lambda connection: connection.execute(tenants.select()).all())
    await asyncio.sleep(0.5)
    assert not any(one.done() for one in (*meanwhile, seen))
    server.start()
    await asyncio.gather(*meanwhile)
    assert len(await seen) >= 1
    assert await tenant_names(store) == ["a", "b", "before"]


async def test_an_unreachable_database_is_reported_and_used_again_when_it_returns(
    server: PostgresServer,
    stores: tuple[PostgresStore, PostgresStore],
    postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(postgres_module, "_OUTAGE_SECONDS", 0.5)
    secret = make_url(postgres_url).password
    assert secret
    store = stores[0]
    server.stop()
    with caplog.at_level(logging.DEBUG):
        for attempt in (
            store.tenants.list_all(),
            store.tenants.ensure(TenantRecord("t", "t", 1.0)),
            store.leases.list_all(),
        ):
            with pytest.raises(DatabaseUnreachable, match="is out of reach: connection") as unreachable:
                await asyncio.wait_for(attempt, 30)
            assert secret not in f"{unreachable.value!r} {unreachable.value.__cause__!r}"
    assert secret not in caplog.text
    server.start()
    await store.tenants.ensure(TenantRecord("t", "t", 1.0))
    assert await tenant_names(store) == ["t"]


@pytest.mark.parametrize(
    "change",
    [
        {"password": "geheim"},
        {"database": "nowhere"},
        {"query": {"host": "/nowhere"}},
        {"query": {"connect_timeout": "x"}},
    ],
)
async def test_a_database_that_cannot_be_used_is_named_without_its_password(postgres_url: str, change: dict) -> None:
    url = make_url(postgres_url).set(**change)
    with pytest.raises(
        (ValueError, DatabaseUnreachable), match=r"postgresql\+psycopg://.* cannot be used: "
    ) as refused:
        PostgresStore(url.render_as_string(hide_password=False))
    assert url.password and url.password not in str(refused.value)


async def test_a_malformed_url_is_not_shown_in_the_error() -> None:
    with pytest.raises(ValueError, match="database_url cannot be parsed") as refused:
        PostgresStore("postgresql://me:geheim@host:port/d")
    assert "geheim" not in repr(refused.value)


async def test_times_keep_their_full_precision(stores: tuple[PostgresStore, PostgresStore]) -> None:
    exact = 1_700_000_000.1234567
    await stores[0].tenants.ensure(TenantRecord("t", "t", exact))
    await stores[0].results.put([ResultRecord("r", "t", "p", 1 << 40, "json", exact)])
    assert await stores[1].tenants.get("t") == TenantRecord("t", "t", exact)
    assert results.c.created_at.type.python_type is float
    assert (await stores[1].results.newest()) == ResultRecord("r", "t", "p", 1 << 40, "json", exact)


async def test_text_columns_use_the_c_collation(
    stores: tuple[PostgresStore, PostgresStore],
) -> None:
    """Most locales sort `run:2` after `run1`, so that ids with the prefix `run:` are not contiguous."""
    columns = text(
        "SELECT table_name || '.' || column_name, collation_name FROM information_schema.columns "
        "WHERE table_schema = 'public' AND data_type = 'character varying'"
    )
    found = await stores[0].read(lambda connection: connection.execute(columns).all())
    assert len(found) > 30 and {collation for _, collation in found} == {"C"}


async def test_leases_use_the_clock_of_the_database(stores: tuple[PostgresStore, PostgresStore]) -> None:
    """One server's clock is a day ahead, the other's a day behind."""
    day = 86400.0
    ahead, behind = time.time() + day, time.time() - day
    taken = await stores[0].leases.acquire(["a"], "ahead", "http://a", ahead, 60)
    assert taken is not None and abs(taken[0].expires_at - time.time() - 60) < 30
    assert await stores[1].leases.acquire(["a"], "behind", "http://b", behind, 60) is None
    assert await stores[0].leases.renew("ahead", ahead, 60)
