"""The store on real files, parametrized over STORES."""

import asyncio
import dataclasses
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from sqlalchemy import Connection, delete, event, insert, text, update
from sqlalchemy.exc import IntegrityError, OperationalError
from trainhouse.schemas.models import DraftConfig, FullConfig, LoraConfig
from trainhouse.server.store import (
    STORES,
    ApiKeyRecord,
    CheckpointCopyRecord,
    CheckpointRecord,
    ResultRecord,
    RunRecord,
    SamplerRecord,
    SqliteStore,
    Store,
    StoreConfig,
    TenantRecord,
    string_metadata,
)
from trainhouse.server.store import open_store as open_configured
from trainhouse.server.store.database.database import PendingWrite
from trainhouse.server.store.database.schema import format_table, tenants
from trainhouse.server.store.database.schema import runs as runs_table
from trainhouse.server.store.migrations import FORMAT_VERSION, MIGRATIONS, for_dialect

from ..api import LORA, session_record

pytestmark = pytest.mark.anyio

OpenStore = Callable[[], Store]


@pytest.fixture(params=STORES)
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Returns a function that opens the same database each time."""
    opened: list[Store] = []
    url = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None

    def open_again() -> Store:
        opened.append(open_configured(StoreConfig(tmp_path, url)))
        return opened[-1]

    yield open_again
    for store in opened:
        store.close()


FORMAT_1 = """
CREATE TABLE format (
    version INTEGER NOT NULL
);
CREATE TABLE tenants (
    tenant_id VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    created_at FLOAT NOT NULL,
    PRIMARY KEY (tenant_id),
    UNIQUE (name)
);
CREATE TABLE api_keys (
    key_id INTEGER NOT NULL,
    tenant_id VARCHAR NOT NULL,
    key_hash VARCHAR NOT NULL,
    created_at FLOAT NOT NULL,
    revoked_at FLOAT,
    PRIMARY KEY (key_id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (tenant_id),
    UNIQUE (key_hash)
);
CREATE TABLE results (
    request_id VARCHAR NOT NULL,
    tenant_id VARCHAR NOT NULL,
    place VARCHAR NOT NULL,
    size_bytes BIGINT NOT NULL,
    encoding VARCHAR NOT NULL,
    created_at FLOAT NOT NULL,
    PRIMARY KEY (request_id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (tenant_id)
);
CREATE INDEX ix_results_created_at ON results (created_at);
CREATE TABLE sessions (
    session_id VARCHAR NOT NULL,
    tenant_id VARCHAR NOT NULL,
    created_at FLOAT NOT NULL,
    last_heartbeat_at FLOAT NOT NULL,
    finished_at FLOAT,
    "end" VARCHAR,
    end_detail VARCHAR,
    tags JSON NOT NULL,
    user_metadata JSON,
    sdk_version VARCHAR,
    project_id VARCHAR,
    display_name VARCHAR,
    idempotency_key VARCHAR,
    PRIMARY KEY (session_id),
    UNIQUE (tenant_id, idempotency_key),
    FOREIGN KEY(tenant_id) REFERENCES tenants (tenant_id)
);
CREATE INDEX ix_sessions_finished_at ON sessions (finished_at);
CREATE INDEX sessions_by_tenant ON sessions (tenant_id, created_at);
CREATE TABLE runs (
    run_id VARCHAR NOT NULL,
    session_id VARCHAR NOT NULL,
    tenant_id VARCHAR NOT NULL,
    base_model VARCHAR NOT NULL,
    lora JSON NOT NULL,
    created_at FLOAT NOT NULL,
    last_request_at FLOAT NOT NULL,
    user_metadata JSON,
    PRIMARY KEY (run_id),
    FOREIGN KEY(session_id) REFERENCES sessions (session_id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (tenant_id)
);
CREATE INDEX ix_runs_session_id ON runs (session_id);
CREATE INDEX runs_by_tenant ON runs (tenant_id, last_request_at);
CREATE TABLE samplers (
    sampler_id VARCHAR NOT NULL,
    session_id VARCHAR NOT NULL,
    tenant_id VARCHAR NOT NULL,
    base_model VARCHAR NOT NULL,
    created_at FLOAT NOT NULL,
    kind VARCHAR NOT NULL,
    model_path VARCHAR,
    run_id VARCHAR,
    directory VARCHAR,
    PRIMARY KEY (sampler_id),
    FOREIGN KEY(session_id) REFERENCES sessions (session_id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (tenant_id)
);
CREATE INDEX ix_samplers_session_id ON samplers (session_id);
CREATE TABLE checkpoints (
    run_id VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    tenant_id VARCHAR NOT NULL,
    directory VARCHAR NOT NULL,
    size_bytes BIGINT NOT NULL,
    created_at FLOAT NOT NULL,
    expires_at FLOAT,
    public BOOLEAN NOT NULL,
    user_metadata JSON,
    base_model VARCHAR NOT NULL,
    lora JSON NOT NULL,
    has_optimizer BOOLEAN NOT NULL,
    PRIMARY KEY (run_id, kind, name),
    FOREIGN KEY(run_id) REFERENCES runs (run_id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (tenant_id)
);
CREATE INDEX checkpoints_by_tenant ON checkpoints (tenant_id, created_at);
CREATE INDEX ix_checkpoints_expires_at ON checkpoints (expires_at);
"""

RUN = RunRecord("s:train:0", "s", "t", "base", LORA, 1.0, 1.0, {"a": "b"})


def checkpoint(name: str = "a", directory: str = "/x", **values) -> CheckpointRecord:
    fields = {
        "run_id": RUN.run_id,
        "tenant_id": "t",
        "kind": "weights",
        "name": name,
        "directory": directory,
        "size_bytes": 1 << 40,
        "created_at": 1.0,
        "expires_at": None,
        "public": False,
        "user_metadata": None,
        "base_model": "base",
        "training": LORA,
        "has_optimizer": True,
    }
    return CheckpointRecord(**(fields | values))


async def filled(store: Store) -> Store:
    await store.tenants.ensure(TenantRecord("t", "tenant", 1.0))
    await store.sessions.insert(session_record("s", "t", tags=("x", "y"), user_metadata={"k": "v"}))
    await store.runs.insert(RUN)
    return store


async def test_rows_survive_a_restart(open_store: OpenStore) -> None:
    store = await filled(open_store())
    path = "tinker://s:train:0/weights/a"
    sampler = SamplerRecord("s:sample:0", "s", "t", "base", 2.0, "checkpoint", path, draft_path="tinker://s:train:1/b")
    result = ResultRecord("s:train:0:1", "t", "segment 3 at 17", 5, "protobuf", 2.0)
    await store.checkpoints.put(checkpoint(), overwrite=False)
    await store.samplers.insert(sampler)
    await store.results.put([result])
    session = await store.sessions.get("s")
    store.close()

    again = open_store()
    assert session is not None and session.tags == ("x", "y") and session.user_metadata == {"k": "v"}
    assert await again.sessions.get("s") == session
    assert await again.runs.get(RUN.run_id) == RUN
    assert await again.checkpoints.get(RUN.run_id, "weights", "a") == checkpoint()
    assert await again.samplers.get("s:sample:0") == sampler
    assert await again.results.get("s:train:0:1") == result


async def test_missing_rows_are_none(open_store: OpenStore) -> None:
    store = open_store()
    assert await store.sessions.get("s") is None
    assert await store.runs.get("r") is None
    assert await store.checkpoints.get("r", "weights", "a") is None
    assert await store.samplers.get("s") is None
    assert await store.results.get("r") is None
    assert await store.keys.find("hash") is None


async def test_a_failing_write_does_not_affect_the_others_of_its_commit(open_store: OpenStore) -> None:
    store = await filled(open_store())
    await store.results.put([ResultRecord("0", "t", "first", 1, "json", 1.0)])
    writes = [store.results.put([ResultRecord(str(number), "t", "again", 1, "json", 1.0)]) for number in range(50)]
    results = await asyncio.gather(*writes[:25], store.runs.insert(RUN), *writes[25:], return_exceptions=True)
    assert [type(one) for one in results if one is not None] == [IntegrityError]
    assert len(await store.results.get_many([str(number) for number in range(50)])) == 50


async def test_rows_of_unknown_owners_are_refused(open_store: OpenStore) -> None:
    store = await filled(open_store())
    with pytest.raises(IntegrityError):
        await store.sessions.insert(session_record("other", "nobody"))
    with pytest.raises(IntegrityError):
        await store.checkpoints.put(checkpoint(run_id="unknown"), overwrite=False)


async def test_a_session_ends_once(open_store: OpenStore) -> None:
    store = await filled(open_store())
    assert await store.sessions.end("s", 5.0, "success", None)
    assert not await store.sessions.end("s", 6.0, "expired", "late")
    session = await store.sessions.get("s")
    assert session is not None and (session.finished_at, session.end) == (5.0, "success")
    assert await store.sessions.list_open() == ()


async def test_a_request_sent_twice_creates_one_session(open_store: OpenStore) -> None:
    store = await filled(open_store())
    sent = [session_record(f"s{number}", "t", idempotency_key="same") for number in range(5)]
    made = await asyncio.gather(*(store.sessions.insert(one) for one in sent))
    assert len({one.session_id for one in made}) == 1
    without = [session_record(f"n{number}", "t") for number in range(2)]
    assert [await store.sessions.insert(one) for one in without] == without


async def test_a_checkpoint_is_replaced_only_with_overwrite(open_store: OpenStore) -> None:
    store = await filled(open_store())
    await store.checkpoints.put(checkpoint(directory="/old"), overwrite=False)
    with pytest.raises(IntegrityError):
        await store.checkpoints.put(checkpoint(directory="/new"), overwrite=False)
    replaced = await store.checkpoints.put(checkpoint(directory="/new"), overwrite=True)
    assert replaced is not None and replaced.directory == "/old"
    await store.checkpoints.delete(replaced)  # a late delete of the old one
    assert await store.checkpoints.list_directories() == {"/new"}


async def test_listings_are_pages_with_a_total(open_store: OpenStore) -> None:
    store = await filled(open_store())
    for number in range(5):
        await store.checkpoints.put(checkpoint(f"c{number}", f"/{number}", created_at=float(number)), overwrite=False)
    await store.checkpoints.put(checkpoint("expired", "/e", expires_at=10.0), overwrite=False)
    records, page = await store.checkpoints.list_of_tenant("t", unexpired_at=10.0, offset=1, limit=2)
    assert [record.name for record in records] == ["c3", "c2"]
    assert (page.offset, page.limit, page.total_count) == (1, 2, 5)
    for number in range(5, 30):
        await store.checkpoints.put(checkpoint(f"c{number}", f"/{number}", created_at=7.0), overwrite=False)
    seen: list[CheckpointRecord] = []
    for offset in range(0, 30, 7):
        seen += (await store.checkpoints.list_of_tenant("t", unexpired_at=10.0, offset=offset, limit=7))[0]
    assert len(seen) == len({record.name for record in seen}) == 30
    assert [record.name for record in await store.checkpoints.list_expired(10.0)] == ["expired"]
    assert await store.checkpoints.list_expired(9.9) == ()


async def test_runs_are_listed_by_last_use(open_store: OpenStore) -> None:
    store = await filled(open_store())
    await store.runs.insert(RunRecord("s:train:1", "s", "t", "base", LORA, 2.0, 2.0))
    assert [run.run_id for run in (await store.runs.list_of_tenant("t", 0, 10))[0]] == ["s:train:1", "s:train:0"]
    await store.runs.touch({"s:train:0": 3.0})
    assert [run.run_id for run in (await store.runs.list_of_tenant("t", 0, 10))[0]] == ["s:train:0", "s:train:1"]
    await store.sessions.set_project("s", "project")
    assert (await store.runs.list_of_tenant("t", 0, 10, project_id="project"))[1].total_count == 2
    assert (await store.runs.list_of_tenant("t", 0, 10, project_id="another"))[1].total_count == 0


async def test_runs_and_sessions_are_found_by_what_is_written_about_them(open_store: OpenStore) -> None:
    store = await filled(open_store())
    texts = {"display_name": "100% Ünique_name", "user_metadata": {"quote": 'a "b" é'}, "tags": ("Red-Team",)}
    named = session_record("named", "t", 2.0, **texts)
    await store.sessions.insert(named)
    await store.runs.insert(RunRecord("named:train:0", "named", "t", "Other/Model", LORA, 2.0, 2.0, {"c": 'd "e" é'}))
    await store.tenants.ensure(TenantRecord("u", "another", 1.0))
    await store.sessions.insert(session_record("hidden", "u", display_name="100%"))
    await store.runs.insert(RunRecord("hidden:train:0", "hidden", "u", "Other/Model", LORA, 3.0, 3.0))
    for search, expected in {
        "": ["named:train:0", "s:train:0"],
        "NAMED:": ["named:train:0"],
        "other/m": ["named:train:0"],
        "100%": ["named:train:0"],
        "unique_name": [],
        "nique_name": ["named:train:0"],
        "niquexname": [],
        '"e" é': ["named:train:0"],
        "_": ["named:train:0"],
        "\\": [],
    }.items():
        runs, page = await store.runs.list_of_tenant("t", 0, 10, search=search)
        assert ([run.run_id for run in runs], page.total_count) == (expected, len(expected)), search
    await store.sessions.set_project("s", "project")
    for search, number in {"s:train": 1, "100%": 0}.items():
        assert (await store.runs.list_of_tenant("t", 0, 10, "project", search=search))[1].total_count == number
    await store.sessions.end("s", 5.0, "success", None)
    for search, is_open, expected in (
        ("", None, ["named", "s"]),
        ("", True, ["named"]),
        ("", False, ["s"]),
        ('A "B" é', None, ["named"]),
        ("100%", False, []),
        ("red-TEAM", None, ["named"]),
    ):
        sessions, page = await store.sessions.page_of_tenant("t", 0, 10, search, is_open)
        assert ([one.session_id for one in sessions], page.total_count) == (expected, len(expected)), (search, is_open)


async def test_a_run_that_is_deleted_while_it_is_searched_for_is_left_out(open_store: OpenStore) -> None:
    store = await filled(open_store())
    await store.runs.insert(RunRecord("s:train:1", "s", "t", "base", LORA, 2.0, 2.0))
    selects: list[str] = []

    def delete_between(connection: Connection, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("SELECT runs."):
            selects.append(statement)
        if selects and len(selects) == 1 and statement == selects[0]:
            with store._writing.begin() as other:
                other.execute(delete(runs_table).where(runs_table.c.run_id == "s:train:1"))

    event.listen(store._reading, "after_cursor_execute", delete_between)
    try:
        found, page = await store.runs.list_of_tenant("t", 0, 10, search="train")
    finally:
        event.remove(store._reading, "after_cursor_execute", delete_between)

    assert len(selects) == 2, "the ids are found first"
    reads_one_state = isinstance(store, SqliteStore)
    expected = ["s:train:1", "s:train:0"] if reads_one_state else ["s:train:0"]
    assert ([run.run_id for run in found], page.total_count) == (expected, 2)


async def test_keys_have_scopes_and_limits(open_store: OpenStore) -> None:
    store = await filled(open_store())
    plain = await store.keys.insert("t", "1", 1.0)
    narrow = await store.keys.insert("t", "2", 2.0, scopes=("sample", "read"), requests_per_minute=60)
    assert (plain.scopes, plain.requests_per_minute) == (None, None)
    assert (narrow.scopes, narrow.requests_per_minute) == (("sample", "read"), 60)
    assert await store.keys.list_all() == (plain, narrow)
    assert await store.keys.find("2") == narrow


async def test_copies_of_checkpoints_have_a_state(open_store: OpenStore) -> None:
    store = open_store()
    waiting = CheckpointCopyRecord("/a", "s3://m", "s3://m/a", "waiting", None, 0, 2.0)
    failed = CheckpointCopyRecord("/b", "s3://m", "s3://m/b", "failed", "refused", 3, 1.0)
    elsewhere = CheckpointCopyRecord("/a", "hf://m", "hf://m/a", "copied", None, 1, 3.0)
    for copy in (waiting, failed, elsewhere):
        await store.copies.put(copy)
    assert await store.copies.list_unfinished() == (failed, waiting)
    assert [one.num_tries for one in await store.copies.list_unfinished()] == [3, 0]
    assert await store.copies.list_in(["/a", "/c"]) == (elsewhere, waiting)
    copied = dataclasses.replace(waiting, state="copied", num_tries=1, updated_at=4.0)
    await store.copies.put(copied)
    assert await store.copies.list_unfinished() == (failed,)
    await store.copies.delete_in(["/b"])
    assert await store.copies.list_in(["/a", "/b"]) == (elsewhere, copied)


async def test_leases_are_taken_all_or_none(open_store: OpenStore) -> None:
    store, now = open_store(), time.time()
    mine = await store.leases.acquire(["b", "a"], "me", "http://me", now, 60)
    assert mine is not None
    assert [(one.base_model, one.holder, one.url, one.epoch) for one in mine] == [
        ("b", "me", "http://me", 1),
        ("a", "me", "http://me", 1),
    ]
    assert all(now <= one.expires_at - 60 <= time.time() for one in mine)
    assert await store.leases.acquire(["b", "c"], "you", "http://you", now, 60) is None
    assert await store.leases.list_all() == mine[::-1]
    again = await store.leases.acquire(["b"], "me", "http://me", now + 1, 60)
    assert again is not None and again[0].epoch == 1 and again[0].expires_at >= mine[0].expires_at


async def test_a_lease_that_changes_hands_has_a_new_epoch(open_store: OpenStore) -> None:
    store, now = open_store(), time.time()
    assert await store.leases.acquire(["a"], "me", "http://me", now, 60)
    assert not await store.leases.renew("you", now, 60)
    await store.leases.release("me")
    assert [(one.epoch, one.expires_at) for one in await store.leases.list_all()] == [(1, 0.0)]
    yours = await store.leases.acquire(["a"], "you", "http://you", now, 60)
    assert yours is not None and yours[0].epoch == 2
    assert await store.leases.acquire(["a"], "me", "http://me", now, 60) is None
    assert await store.leases.renew("you", now, 120)
    assert (await store.leases.list_all())[0].expires_at > yours[0].expires_at + 59
    assert not await store.leases.renew("me", now, 60)


async def test_an_expired_lease_is_free_and_is_not_renewed(open_store: OpenStore) -> None:
    store = open_store()
    assert await store.leases.acquire(["a"], "me", "http://me", time.time(), 0.2)
    await asyncio.sleep(0.3)
    assert not await store.leases.renew("me", time.time(), 60)
    yours = await store.leases.acquire(["a"], "you", "http://you", time.time(), 60)
    assert yours is not None and yours[0].epoch == 2


async def test_only_one_of_several_servers_gets_a_lease(open_store: OpenStore) -> None:
    stores = [open_store() for _ in range(3)]
    wanted = [
        store.leases.acquire(["b", "a"] if number % 2 else ["a", "b"], f"server {number}", "http://x", time.time(), 60)
        for number, store in enumerate(stores)
    ]
    taken = [one for one in await asyncio.gather(*wanted) if one is not None]
    assert len(taken) == 1 and {lease.epoch for lease in taken[0]} == {1}


async def test_results_are_found_and_deleted_by_age(open_store: OpenStore) -> None:
    store = await filled(open_store())
    assert await store.results.newest() is None
    await store.results.put([ResultRecord(str(age), "t", f"place {age}", 1, "json", float(age)) for age in range(4)])
    assert (await store.results.newest()) == await store.results.get("3")
    await store.results.delete(2.0)
    assert [await store.results.get(str(age)) is not None for age in range(4)] == [False, False, True, True]


async def test_training_configs_are_stored(open_store: OpenStore) -> None:
    store = await filled(open_store())
    full = dataclasses.replace(RUN, run_id="s:train:1", training=FullConfig(seed=7))
    config = DraftConfig(algorithm="eagle3", capture_layers=(0, 2), seed=7)
    draft = dataclasses.replace(RUN, run_id="s:train:2", training=config, role="draft", target_path="tinker://a")
    for run in (full, draft):
        await store.runs.insert(run)
    for run in (RUN, full, draft):
        own = {"training": run.training, "role": run.role, "target_path": run.target_path}
        await store.checkpoints.put(checkpoint(run_id=run.run_id, **own), overwrite=False)
    store.close()
    again = open_store()
    for run in (RUN, full, draft):
        saved = await again.checkpoints.get(run.run_id, "weights", "a")
        assert saved is not None and (saved.training, saved.target_path) == (run.training, run.target_path)
        assert await again.runs.get(run.run_id) == run
    for path in ("tinker://b", None):
        await again.runs.set_target(draft.run_id, path)
        assert await again.runs.get(draft.run_id) == dataclasses.replace(draft, target_path=path)
    assert await again.runs.get(full.run_id) == full


async def test_a_newer_format_is_refused(open_store: OpenStore) -> None:
    store = open_store()
    newer = update(format_table).values(version=FORMAT_VERSION + 1)
    await store.write(lambda connection: connection.execute(newer) and None)
    with pytest.raises(ValueError, match=rf"has format {FORMAT_VERSION + 1}.*upgrade trainhouse"):
        open_store()


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION))
async def test_older_formats_are_migrated_with_their_rows(version: int, tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(FORMAT_1)
        connection.execute("INSERT INTO tenants VALUES ('t', 'tenant', 1.5)")
        connection.execute("INSERT INTO api_keys VALUES (7, 't', 'old', 2.5, 3.5)")
        connection.execute(
            "INSERT INTO sessions VALUES ('s', 't', 1, 1, NULL, NULL, NULL, '[]', NULL, NULL, NULL, NULL, NULL)"
        )
        connection.execute("INSERT INTO samplers VALUES ('s:0', 's', 't', 'tiny', 1.0, 'base', NULL, NULL, NULL)")
        lora = '{"rank": 3, "seed": 5}'
        connection.execute("INSERT INTO runs VALUES ('s:train:0', 's', 't', 'tiny', ?, 1, 1, NULL)", [lora])
        saved = "'s:train:0', 'weights', 'a', 't', '/x', 1, 1, NULL, 0, NULL, 'tiny', ?, 1"
        connection.execute(f"INSERT INTO checkpoints VALUES ({saved})", [lora])
        for newer in range(2, version + 1):
            connection.executescript(for_dialect(";".join(MIGRATIONS[newer]), "sqlite"))
        connection.execute("INSERT INTO format VALUES (?)", [version])
    connection.close()
    store = SqliteStore(path)
    assert await store.samplers.list_open() == (SamplerRecord("s:0", "s", "t", "tiny", 1.0),)
    assert await store.tenants.get("t") == TenantRecord("t", "tenant", 1.5)
    run = await store.runs.get("s:train:0")
    assert run is not None and (run.role, run.target_path) == ("policy", None)
    saved = await store.checkpoints.get("s:train:0", "weights", "a")
    assert saved is not None and saved.training == run.training == LoraConfig(rank=3, seed=5)
    assert await store.keys.find("old") == ApiKeyRecord(7, "t", "old", 2.5, 3.5, None, None)
    assert (await store.keys.insert("t", "new", 4.5, ("read",), 60)).key_id == 8
    assert await store.leases.acquire(["a"], "me", "http://me", 1.0, 1.0)
    await store.copies.put(CheckpointCopyRecord("/x", "s3://m", "s3://m/x", "waiting", None, 0, 1.0))
    store.close()
    SqliteStore(tmp_path / "fresh.db").close()
    migrated = schema(path)
    migrated["samplers"].remove(("directory", "VARCHAR", 0, 0))  # old SQLite cannot drop columns
    assert migrated == schema(tmp_path / "fresh.db")
    SqliteStore(path).close()  # nothing is migrated twice


def schema(path: Path) -> dict[str, list[tuple]]:
    """Returns the columns and indexes of each table, in order."""
    with sqlite3.connect(path) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        described = {
            name: [
                *connection.execute(
                    f"SELECT name, type, \"notnull\", pk FROM pragma_table_info('{name}') ORDER BY cid"
                ),
                *sorted(connection.execute(f"SELECT name, \"unique\" FROM pragma_index_list('{name}')")),
            ]
            for name in tables
        }
    connection.close()
    return described


async def test_a_failed_migration_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(FORMAT_1)
        connection.execute("INSERT INTO format VALUES (1)")
        connection.execute("CREATE TABLE leases (odd INTEGER)")  # conflicts with a later statement
    connection.close()
    before = schema(path)
    with pytest.raises(OperationalError, match="leases already exists"):
        SqliteStore(path)
    assert schema(path) == before


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
@pytest.mark.parametrize("replace", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
def test_a_database_beside_what_is_no_file_says_so(
    tmp_path: Path, suffix: str, replace: Callable[[Path], object]
) -> None:
    path = tmp_path / "store.db"
    SqliteStore(path).close()
    beside = path.with_name(f"{path.name}{suffix}")
    beside.unlink(missing_ok=True)
    replace(beside)
    try:
        SqliteStore(path).close()
    except ValueError as error:
        assert "store.db cannot be used (" in str(error)
        assert "must be files that this user may write" in str(error)
    else:
        assert (suffix, replace) == ("-wal", os.mkfifo), "SQLite replaces only this"


@pytest.mark.parametrize(("durability", "synchronous"), [("process", 1), ("power", 2)])
async def test_durability_sets_the_synchronous_mode_of_sqlite(
    tmp_path: Path, durability: Literal["process", "power"], synchronous: int
) -> None:
    store = open_configured(StoreConfig(tmp_path, durability=durability))
    for ask in (store.write, store.read):
        asked = ask(lambda connection: connection.execute(text("PRAGMA synchronous")).scalar_one())
        assert await asked == synchronous  # NORMAL, FULL
    store.close()


async def test_text_that_databases_cannot_store_is_replaced(open_store: OpenStore) -> None:
    store = await filled(open_store())
    for number, odd in enumerate(("a\0b", "a\ud800b")):
        names = {"display_name": odd, "idempotency_key": odd + str(number)}
        record = session_record(f"odd{number}", "t", tags=(odd,), user_metadata={odd: odd}, **names)
        assert await store.sessions.insert(record) == record
        stored = await store.sessions.get(record.session_id)
        assert stored is not None and stored.display_name == "a\ufffdb"
        assert (stored.tags, stored.user_metadata) == (("a\ufffdb",), {"a\ufffdb": "a\ufffdb"})
        again = await store.sessions.insert(dataclasses.replace(record, session_id="again"))
        assert again.session_id == record.session_id
        assert await store.runs.get(odd) is None


async def test_two_processes_can_write_one_database(open_store: OpenStore) -> None:
    """`trainhouse keys` does so while a server runs: neither sees a locked database."""
    stores = [open_store() for _ in range(2)]
    await filled(stores[0])
    puts = [
        stores[number % 2].results.put([ResultRecord(str(number), "t", "p", 1, "json", 1.0)]) for number in range(60)
    ]
    await asyncio.gather(*puts)
    assert len(await stores[1].results.get_many([str(number) for number in range(60)])) == 60


def test_metadata_values_become_strings() -> None:
    assert string_metadata({"a": "b", "n": 1, "l": [1, None], "z": None}) == {
        "a": "b",
        "n": "1",
        "l": "[1, null]",
        "z": "null",
    }
    assert string_metadata(None) is None


async def test_a_commit_on_a_full_disk_fails_all_of_its_writes(tmp_path: Path) -> None:
    """SQLite then rolls back the whole transaction, not only the statement that failed."""
    store = SqliteStore(tmp_path / "a.db")

    def fill(connection: Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")
        for number in range(200):
            names = [f"{number}-{one}" for one in range(50)]
            rows = [{"tenant_id": name * 20, "name": name, "created_at": 0.0} for name in names]
            connection.execute(insert(tenants), rows)

    def insert_tenant(name: str) -> PendingWrite:
        values = {"tenant_id": name, "name": name, "created_at": 0.0}
        return PendingWrite(lambda connection: connection.execute(insert(tenants).values(values)) and None)

    group = [insert_tenant("before"), PendingWrite(fill), insert_tenant("behind")]
    store._commit_and_resolve(group)
    assert [str(write.done.exception().orig) for write in group] == 3 * ["database or disk is full"]
    assert await store.tenants.list_all() == ()
    store.close()


async def test_sessions_without_checkpoints_are_deleted_with_their_runs_and_samplers(open_store: OpenStore) -> None:
    store = open_store()
    for tenant in ("t", "u"):
        await store.tenants.ensure(TenantRecord(tenant, tenant, 1.0))
    ended = [f"ended-{number}" for number in range(4)]
    for number, session_id in enumerate(ended):
        await store.sessions.insert(session_record(session_id, "t", finished_at=100.0 + number))
    await store.sessions.insert(session_record("saved", "t", finished_at=100.0))
    await store.sessions.insert(session_record("open", "t"))
    await store.sessions.insert(session_record("of-u", "u", finished_at=104.0))
    for session_id in (*ended, "saved", "open"):
        await store.runs.insert(RunRecord(f"{session_id}:train:0", session_id, "t", "m", LORA, 1.0, 1.0))
        await store.samplers.insert(SamplerRecord(f"{session_id}:sample:0", session_id, "t", "m", 1.0))
    checkpoint = CheckpointRecord(
        "saved:train:0", "weights", "a", "t", "d", 1, 1.0, None, False, None, "m", LORA, has_optimizer=False
    )
    await store.checkpoints.put(checkpoint, overwrite=False)

    assert await store.sessions.list_deletable(100.5, 0.0, most=10) == ["ended-0"]
    assert await store.sessions.list_deletable(0.0, 1000.0, most=4) == []
    assert await store.sessions.list_deletable(0.0, 1000.0, most=2) == ["ended-0", "ended-1"]
    assert await store.sessions.list_deletable(0.0, 100.5, most=2) == ["ended-0"], (
        "sessions that ended recently are kept"
    )
    await store.sessions.delete(["ended-0", "saved", "open"])
    kept = {session.session_id for session in await store.sessions.list_of_tenant("t", 0, 100)}
    assert kept == {"saved", "open", *ended[1:]}
    assert await store.runs.list_ids() == {f"{session_id}:train:0" for session_id in kept}
    assert await store.samplers.get("ended-0:sample:0") is None and await store.samplers.get("saved:sample:0")
    await store.checkpoints.delete(checkpoint)
    await store.sessions.delete(["saved"])
    assert await store.sessions.get("saved") is None and await store.runs.get("saved:train:0") is None


async def test_long_fields_stored_by_older_versions_are_shortened(open_store: OpenStore) -> None:
    store = open_store()
    await store.tenants.ensure(TenantRecord("t", "t", 1.0))
    long = {"display_name": "x" * 9000, "user_metadata": {"a": "\u00fc" * 9000}, "tags": ("y" * 70_000,)}
    await store.sessions.insert(session_record("long", "t", **long))
    await store.sessions.insert(session_record("short", "t", display_name="x", user_metadata={"a": "b"}, tags=("c",)))
    await store.runs.insert(RunRecord("long:train:0", "long", "t", "m", LORA, 1.0, 1.0, {"a": "z" * 70_000}))
    await store.runs.insert(RunRecord("short:train:0", "short", "t", "m", LORA, 1.0, 1.0, {"a": "z"}))
    await store.sessions.truncate_texts(4096, 60_000)
    session = await store.sessions.get("long")
    assert session is not None and session.display_name == "x" * 4096
    assert session.tags == () and session.user_metadata == {"a": "\u00fc" * 9000}, "within the limit of JSON"
    await store.sessions.truncate_texts(4096, 50_000)
    session, short = await store.sessions.get("long"), await store.sessions.get("short")
    assert session is not None and session.user_metadata is None
    assert short is not None and (short.display_name, short.user_metadata, short.tags) == ("x", {"a": "b"}, ("c",))
    run, other = await store.runs.get("long:train:0"), await store.runs.get("short:train:0")
    assert run is not None and run.user_metadata is None
    assert other is not None and other.user_metadata == {"a": "z"}
