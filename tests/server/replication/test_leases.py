"""Leases: one of several servers is the holder, and what a former holder still tries has no effect."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, text
from trainhouse.schemas.errors import RequestError
from trainhouse.server.files.segment import read_segment
from trainhouse.server.files.segment_log import SegmentLog, fence_off_writer
from trainhouse.server.files.state_lock import live_directory
from trainhouse.server.journal.futures import Futures, Result
from trainhouse.server.journal.journal import Header, Journal
from trainhouse.server.replication.leases import Lease, LeaseExpired, Tenure, boottime_seconds
from trainhouse.server.store import LIVE_STATE, LeaseLost, PostgresStore, SqliteStore, Store, TenantRecord

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

SOON = 0.5
"""Seconds of a lease that must expire during a test."""
LONG = 60.0

OpenStore = Callable[[], Store]


@pytest.fixture
def open_store(postgres_url: str) -> Iterator[OpenStore]:
    opened: list[Store] = []

    def open_one() -> Store:
        opened.append(PostgresStore(postgres_url))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    return open_store()


def lease(store: Store, name: str = "a", seconds: float = LONG, base_models: tuple[str, ...] = ("m",)) -> Lease:
    return Lease(store, base_models, f"http://{name}", seconds)


async def is_free(waiting: Lease, within: float = 1.5) -> bool:
    """True if the lease is taken in that many seconds."""
    try:
        await asyncio.wait_for(waiting.acquire(), within)
    except TimeoutError:
        return False
    return True


# Taking and renewing


async def test_one_of_two_servers_takes_the_lease_and_the_other_has_its_url(open_store: OpenStore) -> None:
    first, second = lease(open_store(), "a"), lease(open_store(), "b")
    waiting = {asyncio.create_task(one.acquire()): one for one in (first, second)}
    await asyncio.wait(waiting, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    done, pending = await asyncio.wait(waiting, timeout=0.5)
    assert len(done) == len(pending) == 1
    (holder,), (standby,) = ([waiting[task] for task in tasks] for tasks in (done, pending))
    assert done.pop().result().record.epoch == 1
    assert holder.holder_url is None
    assert standby.holder_url == ("http://a" if holder is first else "http://b")
    await holder.release()
    tenure = await asyncio.wait_for(pending.pop(), LONG / 2)  # well before it would run out
    assert tenure.record.epoch == 2 and standby.holder_url is None


async def test_servers_compete_even_without_a_common_base_model(open_store: OpenStore) -> None:
    await lease(open_store(), base_models=("m", "n")).acquire()
    for base_models in (("m",), ("n", "o"), ("o",)):
        assert not await is_free(lease(open_store(), "b", base_models=base_models), 0.3)


async def test_a_lease_is_valid_while_renewed_and_expires_otherwise(open_store: OpenStore) -> None:
    first, second = lease(open_store(), "a", 2 * SOON), lease(open_store(), "b", 2 * SOON)
    tenure = await first.acquire()
    keeping = asyncio.create_task(tenure.keep_renewing())
    assert not await is_free(second, 4 * SOON)
    assert tenure.is_valid and not keeping.done()
    keeping.cancel()
    assert (await asyncio.wait_for(second.acquire(), 30)).record.epoch == 2
    assert not tenure.is_valid


async def test_a_holder_sees_its_lease_expire_before_another_can_take_it(open_store: OpenStore) -> None:
    first, second = lease(open_store(), "a", SOON), lease(open_store(), "b", SOON)
    tenure = await first.acquire()
    while await second._try() is None:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert not tenure.is_valid
    with pytest.raises(LeaseExpired, match="epoch 1 has run out"):
        tenure.check()


async def test_a_holder_paused_for_too_long_loses_the_lease_to_another(open_store: OpenStore) -> None:
    first, second = lease(open_store(), "a", SOON), lease(open_store(), "b", LONG)
    tenure = await first.acquire()
    await asyncio.sleep(SOON)
    assert await second.acquire()
    await asyncio.wait_for(tenure.keep_renewing(), 30)
    assert not tenure.is_valid


async def test_a_paused_holder_continues_if_no_other_took_the_lease(store: Store) -> None:
    mine = lease(store, "a", SOON)
    tenure = await mine.acquire()
    await asyncio.sleep(2 * SOON)
    assert not tenure.is_valid
    keeping = asyncio.create_task(tenure.keep_renewing())
    await asyncio.sleep(0.2)
    assert tenure.is_valid and not keeping.done()
    keeping.cancel()


async def test_a_paused_holder_ends_if_another_had_the_lease_meanwhile(open_store: OpenStore) -> None:
    first, second = lease(open_store(), "a", SOON), lease(open_store(), "b")
    tenure = await first.acquire()
    await asyncio.sleep(SOON)
    await second.acquire()
    await second.release()
    await asyncio.wait_for(tenure.keep_renewing(), 30)
    assert (await first.acquire()).record.epoch == 3


def test_the_clock_runs_while_a_process_is_stopped() -> None:
    program = (
        "import sys; from trainhouse.server.replication.leases import boottime_seconds as now; before = now();"
        "print('stop', flush=True); sys.stdin.readline(); print(now() - before)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdin
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGCONT)
        said, _ = process.communicate("\n", timeout=60)
    assert float(said) > 0.45
    assert abs(boottime_seconds() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 1


# The database


async def test_a_former_holder_can_read_but_not_write_the_database(open_store: OpenStore) -> None:
    first, second = lease(open_store(), "a"), lease(open_store(), "b")
    before, after, tool = open_store(), open_store(), open_store()
    before.required_lease = (await first.acquire()).record
    await before.tenants.ensure(TenantRecord("1", "1", 1.0))
    await first.release()
    await before.tenants.ensure(TenantRecord("2", "2", 1.0))  # no other server has the lease yet
    after.required_lease = (await second.acquire()).record
    writes = [before.tenants.ensure(TenantRecord(f"x{number}", f"x{number}", 1.0)) for number in range(5)]
    refusals = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(one) for one in refusals] == [LeaseLost] * 5
    await after.tenants.ensure(TenantRecord("3", "3", 1.0))
    await tool.tenants.ensure(TenantRecord("4", "4", 1.0))  # as `trainhouse keys` does, which needs no lease
    assert sorted(tenant.name for tenant in await before.tenants.list_all()) == ["1", "2", "3", "4"]


async def test_writes_under_an_earlier_epoch_of_the_lease_are_refused(open_store: OpenStore) -> None:
    first, second = lease(open_store(), "a"), lease(open_store(), "b")
    store = open_store()
    store.required_lease = (await first.acquire()).record
    for one in (first, second):
        await one.release()
        await (second if one is first else first).acquire()
    with pytest.raises(LeaseLost, match="no longer has the lease of epoch 1"):
        await store.tenants.ensure(TenantRecord("1", "1", 1.0))


async def test_a_lease_cannot_be_taken_during_a_write_that_needs_it(open_store: OpenStore) -> None:
    """The holder can renew it meanwhile."""
    mine, other = lease(open_store(), "a", 3 * SOON), lease(open_store(), "b")
    tenure = await mine.acquire()
    store = open_store()
    store.required_lease = tenure.record
    ended_at: list[float] = []

    def slow(connection: object) -> None:
        time.sleep(4 * SOON)
        ended_at.append(time.monotonic())

    writing = store.write(slow)
    await asyncio.sleep(0.1)
    assert await mine.renew(tenure.record)
    assert not ended_at
    while await other._try() is None:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert ended_at
    await writing


async def test_a_silent_database_and_its_recovery_are_logged_once(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainhouse.server.replication.leases._SILENT_SECONDS", 0.2)
    tenure = await lease(open_store(), seconds=SOON).acquire()
    may_end, other = threading.Event(), open_store()

    def lock(connection: Connection) -> None:
        connection.execute(text("LOCK TABLE leases IN ACCESS EXCLUSIVE MODE"))
        may_end.wait(20)

    keeping, locking = asyncio.create_task(tenure.keep_renewing()), other.write(lock)
    async with asyncio.timeout(20):
        while tenure.renewal_error is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert "the server's database does not answer" in tenure.renewal_error
        may_end.set()
        await locking
        while tenure.renewal_error is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    keeping.cancel()
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "the lease cannot be renewed: the database does not answer",
        "the database answers again, and the lease is renewed",
    ]


async def test_a_standby_needs_the_live_state_recorded_in_the_database(store: Store, tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    for directory in (shared, other):
        directory.mkdir()
    first, second = lease(store), lease(store, "b")
    await first.prepare(shared)
    tenure = await first.acquire()
    for take in (lambda: None, lambda: tenure.take_live_state(shared)):
        take()
        await second.prepare(shared)
        with pytest.raises(ValueError, match="other has no live state, but the database has a record of one: give"):
            await second.prepare(other)


# Files


def header(seq_id: int) -> Header:
    return Header("optim_step", "t", "run", seq_id, f"run:{seq_id}")


async def test_journal_entries_after_expiry_of_the_lease_are_refused(store: Store, tmp_path: Path) -> None:
    tenure = await lease(store, seconds=SOON).acquire()
    journal = Journal(tmp_path, 1 << 20, guard=tenure.check)
    await journal.append(header(1))
    await asyncio.sleep(SOON)
    for body in (b"", b"x" * (1 << 17)):  # written at once, and by a thread
        with pytest.raises(RequestError, match="epoch 1 has run out") as refused:
            await journal.append(header(2), body)
        assert refused.value.status == 503
    await journal.close()
    assert [one.header["seq_id"] for one in read_segment(tmp_path / "00000000.segment")] == [1]


@pytest.mark.parametrize("num_bytes", [0, 1 << 17])
async def test_a_record_acknowledged_after_expiry_fails_but_stays(num_bytes: int, tmp_path: Path) -> None:
    """Another server may have read the record, so it is not cut off, as it would be after a disk error."""
    answers = iter([None, None, None, LeaseExpired("too late"), None, None])

    def guard() -> None:
        if (answer := next(answers)) is not None:
            raise answer

    segments = SegmentLog(tmp_path, 1 << 20, guard=guard)
    await segments.append({"n": 1})
    with pytest.raises(LeaseExpired):
        await segments.append({"n": 2}, b"x" * num_bytes)
    await segments.append({"n": 3})
    await segments.close()
    assert [one.header["n"] for one in read_segment(segments.path(0))] == [1, 2, 3]


async def test_results_after_expiry_of_the_lease_are_not_written(store: Store, tmp_path: Path) -> None:
    await store.tenants.ensure(TenantRecord("t", "t", 1.0))
    tenure = await lease(store, seconds=SOON).acquire()
    futures = Futures(tmp_path, store, 60.0, guard=tenure.check)
    await futures.open()
    futures.resolve(futures.create("early", "t"), Result(b"1"))
    await asyncio.sleep(SOON)
    futures.resolve(futures.create("late", "t"), Result(b"2"))
    await futures.close()
    assert await store.results.get("early") and not await store.results.get("late")
    assert [one.header["request_id"] for one in read_segment(tmp_path / "00000000.segment")] == ["early"]


async def test_a_former_holder_is_shut_out_of_its_open_segment(tmp_path: Path) -> None:
    former = SegmentLog(tmp_path, 64)
    for number in range(3):
        await former.append({"n": number}, b"x" * (64 if number < 2 else 0))  # each in a segment of its own
    fence_off_writer(tmp_path)
    await former.append({"n": 9})
    found = [one.header["n"] for number in range(3) for one in read_segment(former.path(number))]
    assert found == [0, 1, 2]
    assert SegmentLog(tmp_path, 64).earlier == [0, 1, 2]
    await former.close()


# The live state


async def take_and_release(store: Store, state_dir: Path) -> tuple[Tenure, Path]:
    mine = lease(store)
    await mine.prepare(state_dir)
    tenure = await mine.acquire()
    directory = tenure.take_live_state(state_dir)
    await mine.release()
    return tenure, directory


async def test_the_live_state_moves_from_holder_to_holder(open_store: OpenStore, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    former, before = await take_and_release(open_store(), tmp_path)
    assert (live_directory(tmp_path), before) == (tmp_path / "live-1", tmp_path / "live-1")
    segments = SegmentLog(before / "journal", 64)
    for number in range(2):  # each in a segment of its own
        await segments.append({"n": number}, b"x" * 64)
    with_room = SegmentLog(before / "results", 1 << 20)
    await with_room.append({"n": 0})
    _, after = await take_and_release(open_store(), tmp_path)
    assert after == tmp_path / "live-2" == live_directory(tmp_path)
    segments.delete(0)
    with pytest.raises(FileNotFoundError):
        await segments.append({"n": 2})
    assert SegmentLog(after / "journal", 64).earlier == [0, 1]
    await with_room.append({"n": 1})
    assert [one.header["n"] for one in read_segment(after / "results" / "00000000.segment")] == [0]
    SegmentLog(before / "journal", 64)  # a former holder recreates its directory before it notices
    with pytest.raises(ValueError, match="has live state of epoch 2, but the database is at 1"):
        former.take_live_state(tmp_path)
    assert live_directory(tmp_path) == after
    await take_and_release(open_store(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "live-3"]
    await segments.close()
    await with_room.close()


async def test_a_state_directory_without_live_state_is_refused(open_store: OpenStore, tmp_path: Path) -> None:
    shared, unmounted = tmp_path / "shared", tmp_path / "unmounted"
    for directory in (shared, unmounted):
        directory.mkdir()
    await take_and_release(open_store(), shared)
    with pytest.raises(ValueError, match=r"unmounted has no live state.*mount it first"):
        await take_and_release(open_store(), unmounted)
    assert os.listdir(unmounted) == []


async def test_live_state_of_another_database_is_left_alone(open_store: OpenStore, tmp_path: Path) -> None:
    """This holds even for the epoch that this database would use next."""
    shared = tmp_path / "shared"
    shared.mkdir()
    await take_and_release(open_store(), shared)
    words = "live state of epoch 1, but no server has ever used this database"
    with closing(SqliteStore(tmp_path / "new.db")) as new, pytest.raises(ValueError, match=words):
        await lease(new).prepare(shared)
    assert os.listdir(shared) == ["live-1"]


async def test_an_expired_holder_cannot_take_the_live_state(store: Store, tmp_path: Path) -> None:
    mine = lease(store, seconds=SOON)
    await mine.prepare(tmp_path)
    tenure = await mine.acquire()
    await asyncio.sleep(SOON)
    with pytest.raises(LeaseLost, match="expired before"):
        tenure.take_live_state(tmp_path)
    assert os.listdir(tmp_path) == ["live-0"]


def test_without_leases_the_live_state_is_in_the_state_directory(tmp_path: Path) -> None:
    (tmp_path / "live-x").mkdir()
    assert live_directory(tmp_path) == tmp_path
    assert LIVE_STATE == ""
