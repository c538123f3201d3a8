"""The store on real files, parametrized over STORES."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError
from trainhouse.server.store import (
    STORES,
    CheckpointRecord,
    ResultRecord,
    RunRecord,
    SamplerRecord,
    SqliteStore,
    Store,
    TenantRecord,
    string_metadata,
)
from trainhouse.server.store.base import FORMAT_VERSION

from .api import LORA, session_record

pytestmark = pytest.mark.anyio

OpenStore = Callable[[], Store]


@pytest.fixture(params=STORES)
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Opens the same database each time."""
    opened: list[Store] = []

    def open_again() -> Store:
        opened.append(STORES[request.param](tmp_path / "store.db"))
        return opened[-1]

    yield open_again
    for store in opened:
        store.close()


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
        "lora": LORA,
        "has_optimizer": True,
    }
    return CheckpointRecord(**(fields | values))


async def filled(store: Store) -> Store:
    await store.ensure_tenant(TenantRecord("t", "tenant", 1.0))
    await store.insert_session(session_record("s", "t", tags=("x", "y"), user_metadata={"k": "v"}))
    await store.insert_run(RUN)
    return store


async def test_what_was_written_is_there_after_a_restart(open_store: OpenStore) -> None:
    store = await filled(open_store())
    sampler = SamplerRecord("s:sample:0", "s", "t", "base", 2.0, "checkpoint", "tinker://s:train:0/weights/a")
    result = ResultRecord("s:train:0:1", "t", "segment 3 at 17", 5, "protobuf", 2.0)
    await store.put_checkpoint(checkpoint(), overwrite=False)
    await store.insert_sampler(sampler)
    await store.put_results([result])
    session = await store.get_session("s")
    store.close()

    again = open_store()
    assert session is not None and session.tags == ("x", "y") and session.user_metadata == {"k": "v"}
    assert await again.get_session("s") == session
    assert await again.get_run(RUN.run_id) == RUN
    assert await again.get_checkpoint(RUN.run_id, "weights", "a") == checkpoint()
    assert await again.get_sampler("s:sample:0") == sampler
    assert await again.get_result("s:train:0:1") == result


async def test_what_is_not_there_is_none(open_store: OpenStore) -> None:
    store = open_store()
    assert await store.get_session("s") is None
    assert await store.get_run("r") is None
    assert await store.get_checkpoint("r", "weights", "a") is None
    assert await store.get_sampler("s") is None
    assert await store.get_result("r") is None
    assert await store.find_key("hash") is None


async def test_one_failing_write_leaves_those_of_its_commit_alone(open_store: OpenStore) -> None:
    store = await filled(open_store())
    await store.put_results([ResultRecord("0", "t", "first", 1, "json", 1.0)])
    writes = [store.put_results([ResultRecord(str(number), "t", "again", 1, "json", 1.0)]) for number in range(50)]
    results = await asyncio.gather(*writes[:25], store.insert_run(RUN), *writes[25:], return_exceptions=True)
    assert [type(one) for one in results if one is not None] == [IntegrityError]
    assert len(await store.delete_results(created_before=2.0)) == 50


async def test_rows_of_unknown_owners_are_refused(open_store: OpenStore) -> None:
    store = await filled(open_store())
    with pytest.raises(IntegrityError):
        await store.insert_session(session_record("other", "nobody"))
    with pytest.raises(IntegrityError):
        await store.put_checkpoint(checkpoint(run_id="unknown"), overwrite=False)


async def test_a_session_ends_once(open_store: OpenStore) -> None:
    store = await filled(open_store())
    assert await store.end_session("s", 5.0, "success", None)
    assert not await store.end_session("s", 6.0, "expired", "late")
    session = await store.get_session("s")
    assert session is not None and (session.finished_at, session.end) == (5.0, "success")
    assert await store.list_open_sessions() == ()


async def test_a_request_sent_twice_makes_one_session(open_store: OpenStore) -> None:
    store = await filled(open_store())
    sent = [session_record(f"s{number}", "t", idempotency_key="same") for number in range(5)]
    made = await asyncio.gather(*(store.insert_session(one) for one in sent))
    assert len({one.session_id for one in made}) == 1
    without = [session_record(f"n{number}", "t") for number in range(2)]
    assert [await store.insert_session(one) for one in without] == without


async def test_a_checkpoint_is_replaced_only_where_that_is_asked_for(open_store: OpenStore) -> None:
    store = await filled(open_store())
    await store.put_checkpoint(checkpoint(directory="/old"), overwrite=False)
    with pytest.raises(IntegrityError):
        await store.put_checkpoint(checkpoint(directory="/new"), overwrite=False)
    replaced = await store.put_checkpoint(checkpoint(directory="/new"), overwrite=True)
    assert replaced is not None and replaced.directory == "/old"
    await store.delete_checkpoint(replaced)  # a late delete of the old one
    assert await store.list_checkpoint_directories() == {"/new"}


async def test_listings_are_pages_with_a_total(open_store: OpenStore) -> None:
    store = await filled(open_store())
    for number in range(5):
        await store.put_checkpoint(checkpoint(f"c{number}", f"/{number}", created_at=float(number)), overwrite=False)
    await store.put_checkpoint(checkpoint("expired", "/e", expires_at=10.0), overwrite=False)
    records, page = await store.list_checkpoints("t", unexpired_at=10.0, offset=1, limit=2)
    assert [record.name for record in records] == ["c3", "c2"]
    assert (page.offset, page.limit, page.total_count) == (1, 2, 5)
    assert [record.name for record in await store.list_expired_checkpoints(10.0)] == ["expired"]
    assert await store.list_expired_checkpoints(9.9) == ()


async def test_runs_are_listed_by_last_use(open_store: OpenStore) -> None:
    store = await filled(open_store())
    await store.insert_run(RunRecord("s:train:1", "s", "t", "base", LORA, 2.0, 2.0))
    assert [run.run_id for run in (await store.list_runs("t", 0, 10))[0]] == ["s:train:1", "s:train:0"]
    await store.touch_runs({"s:train:0": 3.0})
    assert [run.run_id for run in (await store.list_runs("t", 0, 10))[0]] == ["s:train:0", "s:train:1"]
    await store.set_session_project("s", "project")
    assert (await store.list_runs("t", 0, 10, project_id="project"))[1].total_count == 2
    assert (await store.list_runs("t", 0, 10, project_id="another"))[1].total_count == 0


async def test_results_go_by_age(open_store: OpenStore) -> None:
    store = await filled(open_store())
    assert await store.newest_result() is None
    await store.put_results([ResultRecord(str(age), "t", f"place {age}", 1, "json", float(age)) for age in range(4)])
    assert (await store.newest_result()) == await store.get_result("3")
    assert [one.request_id for one in await store.delete_results(2.0)] == ["0", "1"]
    assert [await store.get_result(str(age)) is not None for age in range(4)] == [False, False, True, True]


async def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    SqliteStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE format SET version = ?", (FORMAT_VERSION + 1,))
    connection.close()
    with pytest.raises(ValueError, match=rf"has format {FORMAT_VERSION + 1}.*upgrade trainhouse"):
        SqliteStore(path)


async def test_two_processes_may_write_one_file(tmp_path: Path) -> None:
    """As `trainhouse keys` does beside a server: neither sees a locked database."""
    stores = [SqliteStore(tmp_path / "store.db") for _ in range(2)]
    await filled(stores[0])
    puts = [
        stores[number % 2].put_results([ResultRecord(str(number), "t", "p", 1, "json", 1.0)]) for number in range(60)
    ]
    await asyncio.gather(*puts)
    assert len(await stores[1].delete_results(created_before=2.0)) == 60
    for store in stores:
        store.close()


def test_metadata_values_become_strings() -> None:
    assert string_metadata({"a": "b", "n": 1, "l": [1, None], "z": None}) == {
        "a": "b",
        "n": "1",
        "l": "[1, null]",
        "z": "null",
    }
    assert string_metadata(None) is None
