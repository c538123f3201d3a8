"""Futures over a real store: waiting, storing results, surviving restarts, and bounded memory."""

import asyncio
import errno
import gc
import json
import logging
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError
from trainhouse.schemas.errors import RequestError
from trainhouse.schemas.futures import Pending
from trainhouse.server.files.segment import MAX_BODY_BYTES
from trainhouse.server.http.digests import Fingerprint
from trainhouse.server.journal.futures import Futures, Result, check_same
from trainhouse.server.journal.journal import Header
from trainhouse.server.journal.strikes import REBUILD_STRIKE, STRIKE
from trainhouse.server.store import DATABASE_NAME, SqliteStore, TenantRecord

pytestmark = pytest.mark.anyio

TENANT = "alice"


@pytest.fixture
async def open_futures(tmp_path: Path) -> AsyncIterator[Callable]:
    """Yields a function that opens the futures; opening them again is a restart.

    unfinished: entries of the journal that no run takes up.
    """
    store = SqliteStore(tmp_path / DATABASE_NAME)
    await store.tenants.ensure(TenantRecord(TENANT, TENANT, 0.0))

    async def open_futures(unfinished=(), **options) -> Futures:
        futures = Futures(tmp_path / "results", store, options.pop("ttl_seconds", 3600.0), **options)
        await futures.open()
        await futures.fail_lost(unfinished)
        return futures

    async with AsyncExitStack() as stack:
        stack.callback(store.close)
        yield open_futures


def header(request_id: str) -> Header:
    return Header("optim_step", TENANT, request_id.rpartition(":")[0], 1, request_id)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_waiter_gets_the_result_as_soon_as_it_is_resolved(open_futures) -> None:
    futures = await open_futures()
    future = futures.create("r:1", TENANT)
    waiting = asyncio.create_task(futures.wait("r:1", TENANT, 30))
    await asyncio.sleep(0.01)
    futures.resolve(future, Result(b"{}"))
    assert await waiting == Result(b"{}")
    assert await futures.wait("r:1", TENANT, 30) == Result(b"{}")
    await futures.close()


async def test_a_wait_that_ends_without_a_result_says_what_it_waits_for(open_futures) -> None:
    futures = await open_futures()
    futures.create("r:1", TENANT, lambda: Pending(queue_state_reason="two operations are ahead"))
    assert await futures.wait("r:1", TENANT, 0.01) == Pending(queue_state_reason="two operations are ahead")
    await futures.close()


async def test_a_failure_is_a_result_with_its_category(open_futures) -> None:
    futures = await open_futures()
    futures.fail(futures.create("r:1", TENANT), "rank 0 is too small", "user")
    result = await futures.wait("r:1", TENANT, 1)
    assert json.loads(result.body) == {"error": "rank 0 is too small", "category": "user"}
    await futures.close()


async def test_unknown_and_foreign_requests_are_not_found(open_futures) -> None:
    futures = await open_futures()
    futures.create("r:1", TENANT)
    for request_id, tenant in (("r:2", TENANT), ("r:1", "bob")):
        with pytest.raises(RequestError, match="unknown") as refusal:
            await futures.wait(request_id, tenant, 1)
        assert refusal.value.status == 404
    await futures.close()


async def test_lost_operations_are_reported_but_not_strikes_and_refusals(open_futures) -> None:
    lost, refused = header("r:1"), replace(header("r:2"), refused="bad")
    strikes = [replace(lost, kind=STRIKE), replace(header("r:3"), kind=REBUILD_STRIKE)]
    futures = await open_futures(unfinished=[lost, refused, *strikes])
    assert "before optim_step r:1 was done" in (await futures.wait("r:1", TENANT, 1)).body.decode()
    for request_id in ("r:2", "r:3"):
        with pytest.raises(RequestError, match="unknown"):
            await futures.wait(request_id, TENANT, 1)
    await futures.close()


async def test_results_survive_a_restart(open_futures) -> None:
    first = await open_futures()
    stored = []
    future = first.create("r:1", TENANT, on_stored=lambda: stored.append(1))
    first.resolve(future, Result(b"\x01\x02", "forward_backward"))
    await wait_until(lambda: bool(stored))
    await first.close()
    second = await open_futures([header("r:1")])
    assert await second.wait("r:1", TENANT, 1) == Result(b"\x01\x02", "forward_backward")
    with pytest.raises(RequestError):
        await second.wait("r:1", "bob", 1)
    await second.close()


def test_a_result_that_was_read_survives_kill_9(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, signal
from pathlib import Path
from trainhouse.server.journal.futures import Futures, Result
from trainhouse.server.store import SqliteStore, TenantRecord
async def main():
    store = SqliteStore(Path({str(tmp_path / DATABASE_NAME)!r}))
    await store.tenants.ensure(TenantRecord("alice", "alice", 0.0))
    futures = Futures(Path({str(tmp_path / "results")!r}), store, 3600.0)
    await futures.open()
    for number in range(3):
        future = futures.create(f"r:{{number}}", "alice")
        asyncio.get_running_loop().call_soon(futures.resolve, future, Result(bytes([number]), "sample"))
        await futures.wait(f"r:{{number}}", "alice", 5)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == -signal.SIGKILL
    asyncio.run(assert_all_stored(tmp_path))


async def assert_all_stored(directory: Path) -> None:
    store = SqliteStore(directory / DATABASE_NAME)
    futures = Futures(directory / "results", store, 3600.0)
    await futures.open()
    await futures.fail_lost([header(f"r:{number}") for number in range(4)])
    for number in range(3):
        assert await futures.wait(f"r:{number}", TENANT, 1) == Result(bytes([number]), "sample")
    lost = await futures.wait("r:3", TENANT, 1)
    assert isinstance(lost, Result) and b"server restarted" in lost.body
    await futures.close()
    store.close()


async def test_a_result_whose_file_cannot_be_written_is_answered_and_written_later(
    open_futures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainhouse.server.journal.futures._RETRY_SECONDS", 0.05)
    futures = await open_futures()
    (tmp_path / "results").rmdir()
    stored = asyncio.Event()
    futures.resolve(futures.create("r:1", TENANT, on_stored=stored.set), Result(b"{}"))
    assert await futures.wait("r:1", TENANT, 1) == Result(b"{}")
    (tmp_path / "results").mkdir()
    await stored.wait()
    await futures.close()


async def test_closing_writes_what_was_not_written_yet(open_futures) -> None:
    first = await open_futures()
    for number in range(3):
        first.resolve(first.create(f"r:{number}", TENANT), Result(bytes([number])))
    await first.close()
    second = await open_futures()
    assert [(await second.wait(f"r:{number}", TENANT, 1)).body for number in range(3)] == [b"\x00", b"\x01", b"\x02"]
    await second.close()


async def test_unfinished_operations_are_answered_as_lost(open_futures) -> None:
    futures = await open_futures([header("r:1"), header("r:1")])
    answer = json.loads((await futures.wait("r:1", TENANT, 1)).body)
    assert answer["category"] == "server"
    assert "server restarted" in answer["error"] and "checkpoint" in answer["error"]
    await futures.close()


async def test_failed_writes_of_results_are_retried_and_logged_once(
    open_futures, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def full() -> None:
        tries.append(1)
        if len(tries) < 9:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainhouse.server.journal.futures._RETRY_SECONDS", 0.01)
    caplog.set_level(logging.WARNING)
    futures = await open_futures(guard=full)
    for name in ("r:1", "r:2"):
        futures.resolve(futures.create(name, TENANT), Result(name.encode()))
        assert await futures.wait(name, TENANT, 30) == Result(name.encode()), (
            "waiting for a result is not waiting for the disk"
        )
    await wait_until(lambda: len(tries) > 9)
    await futures.close()
    failed, passed = caplog.messages
    assert failed.startswith("writing results to ") and failed.endswith(
        "failed, will retry: [Errno 28] No space left on device"
    )
    assert passed.endswith("works again")
    futures = await open_futures()
    assert [await futures.wait(name, TENANT, 0) for name in ("r:1", "r:2")] == [Result(b"r:1"), Result(b"r:2")]
    await futures.close()


async def test_a_reader_of_the_store_waits_for_results_but_not_for_a_store_that_fails(
    open_futures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainhouse.server.journal.futures._LINGER_SECONDS", 30.0)
    monkeypatch.setattr("trainhouse.server.journal.futures._RETRY_SECONDS", 0.1)
    futures = await open_futures()
    await asyncio.sleep(0.01)  # until the writer waits for results
    for name in ("r:1", "r:2"):
        futures.resolve(futures.create(name, TENANT), Result(b"{}"))
        assert not await futures.has_result(name)
        async with asyncio.timeout(10):
            await futures.store_now()
        assert await futures.has_result(name)

    async def fail(*records: object) -> None:
        raise OperationalError("", None, OSError("no database"))

    with monkeypatch.context() as broken:
        broken.setattr(futures._store.results, "put", fail)
        futures.resolve(futures.create("r:3", TENANT), Result(b"{}"))
        async with asyncio.timeout(10):
            await futures.store_now()
        assert not await futures.has_result("r:3")
    await futures.close()


async def test_a_result_too_large_to_store_becomes_an_error(open_futures) -> None:
    futures = await open_futures()
    async with asyncio.timeout(60):
        futures.resolve(futures.create("r:1", TENANT), Result(bytes(MAX_BODY_BYTES + 1), "sample"))
        answer = await futures.wait("r:1", TENANT, 30)
        assert isinstance(answer, Result) and answer.is_error and b"at most 4294967295 can be stored" in answer.body
        stored = asyncio.Event()
        futures.resolve(futures.create("r:2", TENANT, on_stored=stored.set), Result(b"{}"))
        assert await futures.wait("r:2", TENANT, 30) == Result(b"{}")
        await stored.wait()
        await futures.close()


async def test_stored_results_leave_memory_and_are_read_from_disk(open_futures, tmp_path: Path) -> None:
    futures, stored = await open_futures(memory_bytes=10_000), []
    for number in range(10):
        future = futures.create(f"r:{number}", TENANT, on_stored=lambda: stored.append(1))
        futures.resolve(future, Result(bytes([number]) * 1000))
    await wait_until(lambda: len(stored) == 10)
    for number in range(10):
        assert (await futures.wait(f"r:{number}", TENANT, 1)).body == bytes([number]) * 1000
    shutil.rmtree(tmp_path / "results")
    for number in range(7):
        with pytest.raises(RequestError, match="no longer kept"):
            await futures.wait(f"r:{number}", TENANT, 1)
    for number in range(7, 10):
        assert (await futures.wait(f"r:{number}", TENANT, 1)).body == bytes([number]) * 1000
    await futures.close()


@pytest.mark.slow
async def test_the_memory_of_many_small_results_is_bounded(open_futures) -> None:
    """The bound covers more than the bodies. With a very large bound, the results take more memory."""
    taken: list[int] = []
    for memory_bytes in (2 << 20, 1 << 30):
        futures = await open_futures(memory_bytes=memory_bytes)
        tracemalloc.start()
        for number in range(4000):
            waiting = PendingRequest(bytes(1000))  # stands for the request
            name = f"{memory_bytes}:{number}"
            futures.resolve(futures.create(name, TENANT, waiting.pending, waiting.stored), Result(b"{}"))
        await wait_until(lambda: len(futures._unstored) == 0 == len(futures._appending))  # noqa: B023
        gc.collect()
        taken.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        await futures.close()
    bounded, unbounded = taken
    assert bounded < 1.5 * (2 << 20) < unbounded


@dataclass
class PendingRequest:
    body: bytes

    def pending(self) -> Pending:
        return Pending()

    def stored(self) -> None:
        pass


async def test_results_expire(open_futures) -> None:
    futures, stored = await open_futures(ttl_seconds=0.0), asyncio.Event()
    futures.resolve(futures.create("r:1", TENANT, on_stored=stored.set), Result(b"{}"))
    await stored.wait()
    await futures.expire()
    with pytest.raises(RequestError, match="no longer kept"):
        await futures.wait("r:1", TENANT, 1)
    remedy = "is another process training this run?"
    with pytest.raises(RequestError, match="poll earlier, or continue with the next number") as refused:
        await check_same(futures, "r:1", "seq_id 1", Fingerprint("forward", "a"), remedy)
    assert refused.value.status == 400 and remedy not in refused.value.message
    await futures.close()


async def test_two_thousand_waiting_futures_take_no_cpu_time(open_futures) -> None:
    futures = await open_futures()
    created = [futures.create(f"r:{number}", TENANT) for number in range(2000)]
    waiting = [asyncio.create_task(futures.wait(f"r:{number}", TENANT, 30)) for number in range(2000)]
    await asyncio.sleep(0.1)
    cpu_started = time.thread_time()
    await asyncio.sleep(0.5)
    assert time.thread_time() - cpu_started < 0.1
    for future in created:
        futures.resolve(future, Result(b"{}"))
    assert await asyncio.gather(*waiting) == [Result(b"{}")] * 2000
    await futures.close()
