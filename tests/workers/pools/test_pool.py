"""Both pools: calls reach every rank, errors keep their type, and deaths are noticed at once."""

import asyncio
import multiprocessing.util
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.tests.workers.echo_worker import ECHO, EchoConfig
from trainhouse.workers.pools.base import PerRank, Pool, PoolSpec, WorkerDied, WorkerError
from trainhouse.workers.pools.children import Child
from trainhouse.workers.pools.local import LocalPool
from trainhouse.workers.pools.ray.cluster import RayCluster, _hold_cluster
from trainhouse.workers.pools.ray.pool import RayPool, _DriverJob, _run_driver
from trainhouse.workers.protocol.messages import encode

NewPool = Callable[[PoolSpec], Pool]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    cluster = RayCluster(object_store_bytes=100 << 20)
    asyncio.run(cluster.connect(num_cpus=2))
    yield cluster
    asyncio.run(cluster.disconnect())


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def new_pool(request: pytest.FixtureRequest) -> NewPool:
    if request.param == "local":
        return LocalPool
    return partial(RayPool, cluster=request.getfixturevalue("ray_cluster"))


ray_in_full = pytest.mark.parametrize("new_pool", ["local", pytest.param("ray", marks=pytest.mark.full)], indirect=True)
"""Tests Ray only in the full suite, because a cluster would slow down a short run."""


@asynccontextmanager
async def started(new_pool: NewPool, num_ranks: int = 1, threads: int = 1) -> AsyncIterator[Pool]:
    pool = new_pool(PoolSpec(ECHO, tuple(EchoConfig(rank) for rank in range(num_ranks)), threads))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 200))


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tests glibc's allocator")
@ray_in_full
def test_idle_rank_returns_freed_memory(new_pool: NewPool) -> None:
    """Queries of its memory do not keep the rank from being idle."""

    async def check() -> None:
        async with started(new_pool) as pool:
            (before,) = await pool.broadcast("resident_bytes")
            (busy,) = await pool.broadcast("take_and_free", 4096, 100_000)
            assert busy - before > 350_000_000
            while (await pool.broadcast("resident_bytes"))[0] - before > 60_000_000:  # noqa: ASYNC110
                await asyncio.sleep(0.2)

    run(check())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tests glibc's allocator")
def test_all_threads_of_a_rank_share_one_heap() -> None:
    """Memory that one thread freed is then free for all. Processes that the rank starts do not inherit the setting."""

    async def check() -> None:
        async with started(LocalPool) as pool:
            assert await pool.broadcast("num_heaps") == [1]
            assert await pool.broadcast("environment", "MALLOC_ARENA_MAX") == [None]
        assert "MALLOC_ARENA_MAX" not in os.environ

    run(check())


def test_waiting_rank_frees_its_last_message(tmp_path: Path) -> None:
    """A message may hold all weights of a model."""

    async def check() -> None:
        async with started(LocalPool) as pool:
            freed = tmp_path / "freed"
            await pool.broadcast("touch_when_freed", np.zeros(1 << 20, np.float32), str(freed))
            while not freed.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(check(), 20))


LOGGING = """
import asyncio, logging
from trainhouse.tests.workers.echo_worker import ECHO, EchoConfig
from trainhouse.workers.pools.base import PoolSpec
from trainhouse.workers.pools.local import LocalPool
from trainhouse.workers.protocol.log_lines import LogSettings


async def log(level: int, message: str) -> None:
    pool = LocalPool(PoolSpec(ECHO, (EchoConfig(),), log=LogSettings(level)))
    await pool.start()
    await pool.broadcast("log", message)
    await pool.close()


asyncio.run(log(logging.INFO, "shown"))
asyncio.run(log(logging.WARNING, "hidden"))
"""


def test_ranks_log_from_the_level_of_their_pool() -> None:
    found = subprocess.run([sys.executable, "-c", LOGGING], capture_output=True, text=True, check=True, timeout=100)
    (line,) = found.stderr.splitlines()
    assert line.endswith(" INFO    rank 0, trainhouse.tests.workers.echo_worker: shown")


@ray_in_full
def test_ranks_collect_garbage_except_imported_objects(new_pool: NewPool) -> None:
    async def check() -> None:
        async with started(new_pool) as pool:
            ((collects, num_kept),) = await pool.broadcast("garbage")
            assert collects and num_kept > 10_000

    run(check())


def test_a_call_reaches_every_rank_and_answers_in_rank_order(new_pool: NewPool) -> None:
    async def check() -> None:
        async with started(new_pool, num_ranks=2) as pool:
            assert await pool.broadcast("rank") == [0, 1]
            assert await pool.broadcast("echo", "same") == ["same", "same"]
            assert await pool.broadcast("echo", PerRank(("first", "second"))) == ["first", "second"]
            assert len(set(pool.pids)) == 2

    run(check())


def test_errors_keep_their_type_and_leave_the_pool_working(new_pool: NewPool, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with started(new_pool) as pool:
            with pytest.raises(OperationError, match="rank 0 is too low") as refused:
                await pool.broadcast("refuse", "rank 0 is too low")
            assert refused.value.category == "user"
            with pytest.raises(ValueError, match="no such model") as rejected:
                await pool.broadcast("reject", "no such model")
            assert str(rejected.value) == "no such model"
            with pytest.raises(WorkerError, match="KeyError: 'lost'") as failed:
                await pool.broadcast("fail", "lost")
            assert "in fail" in failed.value.remote_traceback and "fail failed" in caplog.text
            with pytest.raises(WorkerError, match="pickle"):
                await pool.broadcast("return_unpicklable")
            assert await pool.broadcast("echo", 1) == [1]

    run(check())


def test_failed_start_raises_the_workers_error(new_pool: NewPool) -> None:
    async def check() -> None:
        pool = new_pool(PoolSpec(ECHO, (EchoConfig(start_error="no weights in /nowhere"),)))
        with pytest.raises(ValueError, match="no weights in /nowhere"):
            await pool.start()
        with pytest.raises(WorkerDied):
            await pool.broadcast("rank")

    run(check())


def test_large_arrays_arrive_whole_and_writable(new_pool: NewPool) -> None:
    async def check() -> None:
        values = np.random.default_rng(0).normal(size=2 << 20).astype(np.float32)
        async with started(new_pool) as pool:
            [doubled] = await pool.broadcast("double", values)
        np.testing.assert_array_equal(doubled, values * 2)
        doubled += 1

    run(check())


def test_overlapping_calls_run_in_order(new_pool: NewPool) -> None:
    async def check() -> None:
        values = np.zeros(1 << 20)  # more than a pipe holds
        async with started(new_pool) as pool:
            calls = [asyncio.create_task(pool.broadcast("count", values)) for _ in range(5)]
            assert await asyncio.gather(*calls) == [[1], [2], [3], [4], [5]]

    run(check())


def test_batch_arrives_unchanged_and_writable(new_pool: NewPool) -> None:
    async def check() -> None:
        data = tuple(Datum(np.arange(3, dtype=np.int32), {"weights": np.ones(3, np.float32)}) for _ in range(1000))
        request = ForwardBackwardRequest("run", 1, data, "cross_entropy", {"clip": 0.5}, loss_weight=2.0)
        async with started(new_pool) as pool:
            [echoed] = await pool.broadcast("echo", request)
        assert (echoed.model_id, echoed.loss_fn_config, echoed.loss_weight) == ("run", {"clip": 0.5}, 2.0)
        for datum in echoed.data:
            np.testing.assert_array_equal(datum.tokens, [0, 1, 2])
            datum.loss_fn_inputs["weights"][:] = 2

    run(check())


def test_rank_gets_its_number_of_threads(new_pool: NewPool) -> None:
    async def check() -> None:
        async with started(new_pool, threads=3) as pool:
            assert await pool.broadcast("environment", "OMP_NUM_THREADS") == ["3"]

    run(check())


@pytest.mark.slow
def test_killed_rank_fails_running_and_later_calls(new_pool: NewPool) -> None:
    async def check() -> None:
        async with started(new_pool, num_ranks=2) as pool:
            call = asyncio.create_task(pool.broadcast("sleep", 50))
            await asyncio.sleep(0.1)
            os.kill(pool.pids[1], signal.SIGKILL)
            killed_at = time.monotonic()
            with pytest.raises(WorkerDied, match="the worker died"):
                await call
            assert time.monotonic() - killed_at < 30
            with pytest.raises(WorkerDied):
                await pool.broadcast("rank")

    run(check())


@pytest.mark.slow
def test_the_death_of_an_idle_rank_is_noticed(new_pool: NewPool) -> None:
    async def check() -> None:
        async with started(new_pool) as pool:
            assert not pool.death.done()
            os.kill(pool.pids[0], signal.SIGKILL)
            assert isinstance(await asyncio.wait_for(asyncio.shield(pool.death), 30), WorkerDied)

    run(check())


def test_death_message_names_the_exit_code_or_signal() -> None:
    async def check() -> None:
        async with started(LocalPool) as pool:
            with pytest.raises(WorkerDied, match="exit code 3"):
                await pool.broadcast("die", 3)
        async with started(LocalPool) as pool:
            os.kill(pool.pids[0], signal.SIGKILL)
            assert "SIGKILL (out of memory?)" in str(await asyncio.shield(pool.death))

    run(check())


@pytest.mark.slow
def test_close_ends_processes_and_fails_running_calls(new_pool: NewPool) -> None:
    async def check() -> None:
        async with started(new_pool, num_ranks=2) as pool:
            pids = pool.pids
            call = asyncio.create_task(pool.broadcast("sleep", 50))
            await asyncio.sleep(0.1)
        with pytest.raises(WorkerDied, match="stopped"):
            await call
        await wait_until_gone(pids)

    run(check())


@pytest.mark.slow
def test_cancelled_call_does_not_shift_later_answers(new_pool: NewPool) -> None:
    async def check() -> None:
        async with started(new_pool) as pool:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.broadcast("sleep", 0.3), 0.05)
            assert await pool.broadcast("echo", "next") == ["next"]

    run(check())


@pytest.mark.slow
def test_call_does_not_block_the_event_loop(new_pool: NewPool) -> None:
    async def check() -> None:
        async with started(new_pool) as pool:
            call = asyncio.create_task(pool.broadcast("sleep", 0.5))
            num_ticks = 0
            while not call.done():
                await asyncio.sleep(0.01)
                num_ticks += 1
            assert num_ticks > 10

    run(check())


def test_ranks_ignore_ctrl_c_and_do_not_run_the_main_script() -> None:
    async def check() -> None:
        async with started(LocalPool) as pool:
            assert await pool.broadcast("interrupt_self") == ["still here"]
            assert await pool.broadcast("main_file") == [None]

    run(check())


# No guard around its last line: a child that ran this script again would start children without end.
OPENS_A_POOL = """
import asyncio
from trainhouse.tests.workers.echo_worker import ECHO, EchoConfig
from trainhouse.workers.pools.base import PoolSpec
from trainhouse.workers.pools.local import LocalPool

async def main():
    pool = LocalPool(PoolSpec(ECHO, (EchoConfig(),)))
    await pool.start()
    print(pool.pids[0], flush=True)
    await pool.broadcast("sleep", 50)

asyncio.run(main())
"""


def test_ranks_ignore_sigterm() -> None:
    """systemd sends it to all processes of a service."""

    async def check() -> None:
        async with started(LocalPool) as pool:
            os.kill(pool.pids[0], signal.SIGTERM)
            os.kill(psutil.Process(pool.pids[0]).ppid(), signal.SIGTERM)
            await asyncio.sleep(0.2)
            assert await pool.broadcast("echo", "alive") == ["alive"]

    run(check())


def test_program_exits_without_closing_its_pool() -> None:
    program = """
import asyncio
from trainhouse.tests.workers.echo_worker import ECHO, EchoConfig
from trainhouse.workers.pools.base import PoolSpec
from trainhouse.workers.pools.local import LocalPool

async def main():
    pool = LocalPool(PoolSpec(ECHO, (EchoConfig(),)))
    await pool.start()
    print(pool.pids[0], flush=True)
    return pool

kept = asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0
    assert not psutil.pid_exists(int(ended.stdout))


def test_a_rank_ends_when_its_server_is_killed(tmp_path) -> None:
    script = tmp_path / "opens_a_pool.py"
    script.write_text(OPENS_A_POOL)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert psutil.pid_exists(pid)
        server.kill()
    asyncio.run(wait_until_gone([pid]))


async def wait_until_gone(pids: list[int]) -> None:
    for _ in range(200):
        if not any(map(is_running, pids)):
            return
        await asyncio.sleep(0.025)
    pytest.fail(f"some of the processes {pids} still run after 5 s")


def is_running(pid: int) -> bool:
    """Returns False for a zombie, too: it has ended, and only its parent has not reaped it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_children_of_ray_end_with_their_server_while_they_start(capfd: pytest.CaptureFixture[str]) -> None:
    """A driver that waits for a cluster, and the holder of a cluster, read no pipe yet."""
    spec, environment = PoolSpec(ECHO, (EchoConfig(),)), {"RAY_USAGE_STATS_ENABLED": "0"}
    drive = _DriverJob(spec, "127.0.0.1:1", environment, None, 60.0)
    holder = (_hold_cluster, environment, 1, 100 << 20, multiprocessing.util.get_temp_dir())
    for serve, *arguments in ((_run_driver, drive), holder):
        child = Child((), serve, *arguments)
        child.disconnect()
        child.process.join(5)
        assert child.process.exitcode in (0, -signal.SIGKILL)
    assert "Traceback" not in capfd.readouterr().err


def test_a_driver_without_a_cluster_ends_silently(capfd: pytest.CaptureFixture[str]) -> None:
    """The driver answers each call with the reason, until its pipe closes."""
    spec = PoolSpec(ECHO, (EchoConfig(),))
    child = Child((), _run_driver, _DriverJob(spec, "127.0.0.1:1", {"RAY_USAGE_STATS_ENABLED": "0"}, None, 60.0))
    child._pipe.sendall(b"".join(encode(("rank", ()))))
    assert child.read_first_message()
    child._pipe.close()
    child.process.join(30)
    assert child.process.exitcode == 0 and "Traceback" not in capfd.readouterr().err


def test_children_that_were_being_started_end_with_the_server_without_a_traceback(tmp_path: Path) -> None:
    begin = "import trainhouse.workers.pools.forkserver, io, pickle; "
    variables = {**os.environ, "TRAINHOUSE_FORKSERVER_DIRECTORY": str(tmp_path / "forkserver")}
    errors = []
    for fails in ("pickle.load(io.BytesIO())", "pickle.loads(b'no pickle')"):
        ended = subprocess.run([sys.executable, "-c", begin + fails], env=variables, capture_output=True, text=True)
        errors.append((ended.returncode, ended.stderr.rpartition(":")[0].rpartition("\n")[2]))
    assert errors == [(1, ""), (1, "_pickle.UnpicklingError")]
