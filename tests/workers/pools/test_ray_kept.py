"""Ranks on Ray that outlive their servers: one server at a time has them, and they end when no one needs them."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from trainhouse.tests.workers.echo_worker import ECHO, EchoConfig
from trainhouse.tests.workers.pools.test_pool import wait_until_gone
from trainhouse.tests.workers.ray_nodes import RayNodes, ray_head
from trainhouse.workers.pools.base import PlacementError, Pool, PoolSpec, WorkerDied
from trainhouse.workers.pools.ray.actors import KeptGroup
from trainhouse.workers.pools.ray.cluster import RayCluster
from trainhouse.workers.pools.ray.pool import RayPool
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import KeptWorkers
from trainhouse.workers.scheduler.supervision.ranks import Ranks

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

NUM_RANKS = 2


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_head(num_cpus=NUM_RANKS) as started:
        yield started


@dataclass
class StateDirectory:
    """The workers of a state directory on a cluster, as servers use them one after the other."""

    nodes: RayNodes
    id_file: Path
    seconds: float = 600.0
    takeover_seconds: float = 30.0

    def pool(
        self,
        server: str,
        epoch: int | None = None,
        contents: str = "same",
        replaces: bool = False,
        reset_error: str | None = None,
    ) -> RayPool:
        workers = KeptWorkers(str(self.id_file), self.id_file.read_text(), self.seconds, server, epoch)
        group = KeptGroup(workers, "echo", contents, self.takeover_seconds, replaces)
        spec = PoolSpec(ECHO, tuple(EchoConfig(rank, reset_error=reset_error) for rank in range(NUM_RANKS)))
        return RayPool(spec, RayCluster(self.nodes.address), group)

    @asynccontextmanager
    async def attached(self, pool: RayPool) -> AsyncIterator[RayPool]:
        """Attaches like a server's group."""
        ranks = Ranks(pool, ParallelSpec(replicas=NUM_RANKS))
        await ranks.start(60, 20)
        try:
            yield pool
        finally:
            await ranks.close()

    def end(self) -> None:
        self.id_file.unlink(missing_ok=True)


@pytest.fixture
def state(nodes: RayNodes, tmp_path: Path) -> Iterator[StateDirectory]:
    file = tmp_path / "workers.id"
    file.write_text("a state directory")
    state = StateDirectory(nodes, file)
    yield state
    state.end()
    deadline = time.monotonic() + 60
    while nodes.actors():
        assert time.monotonic() < deadline, "workers of a state directory that is gone did not end"
        time.sleep(0.1)


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 200))


async def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not become true in {seconds} s"
        await asyncio.sleep(0.05)


async def death_of(pool: Pool) -> str:
    return str(await asyncio.wait_for(asyncio.shield(pool.death), 30))


def test_next_server_gets_the_same_ranks_with_fresh_state(state: StateDirectory) -> None:
    async def check() -> None:
        async with state.attached(state.pool("first")) as pool:
            assert not pool.is_kept
            pids = pool.pids
            assert await pool.broadcast("count", None) == [1, 1]
            values = np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)
            for doubled in await pool.broadcast("double", values):
                np.testing.assert_array_equal(doubled, values * 2)
            slow = asyncio.create_task(pool.broadcast("sleep", 2))
            counted = asyncio.create_task(pool.broadcast("count", None))
            await asyncio.sleep(0.5)
        for call in (slow, counted):
            with pytest.raises(WorkerDied, match="stopped"):
                await call
        async with state.attached(state.pool("second")) as pool:  # what the first one began is finished before
            assert pool.is_kept and pool.pids == pids
            assert await pool.broadcast("count", None) == [1, 1]

    run(check())


def test_newer_lease_epoch_takes_over_and_an_older_one_is_refused(state: StateDirectory) -> None:
    async def check() -> None:
        async with state.attached(state.pool("older", 1)) as first:
            assert await first.broadcast("count", None) == [1, 1]
            async with state.attached(state.pool("newer", 2)) as second:
                assert second.pids == first.pids
                assert "a server with lease epoch 2 has taken over the workers" in await death_of(first)
                with pytest.raises(WorkerDied):
                    await first.broadcast("count", None)
                with pytest.raises(PlacementError, match="a server with lease epoch 2 has used the workers"):
                    await state.pool("older", 1).start()
                with pytest.raises(PlacementError, match="a server with lease epoch 2 has used the workers"):
                    await state.pool("older", 1, replaces=True).start()
                assert await second.broadcast("count", None) == [1, 1]
        with pytest.raises(PlacementError, match=f"lease has epoch 1: .* delete {state.id_file}"):
            await state.pool("older", 1).start()  # even after the newer server left

    run(check())


@pytest.mark.parametrize("change", ["other contents", "replaced", "a dead rank", "a stopped rank", "a hung call"])
def test_ranks_that_cannot_be_used_are_replaced(change: str, state: StateDirectory) -> None:
    async def check() -> None:
        state.takeover_seconds = 3.0 if change in ("a stopped rank", "a hung call") else 30.0
        async with state.attached(state.pool("first")) as pool:
            pids = pool.pids
            calls = [asyncio.create_task(pool.broadcast("sleep", 100))] if change == "a hung call" else []
            await asyncio.sleep(0.5)
        await asyncio.gather(*calls, return_exceptions=True)
        if change == "a dead rank":
            os.kill(pids[1], signal.SIGKILL)
        if change == "a stopped rank":
            os.kill(pids[1], signal.SIGSTOP)
        contents = "others" if change == "other contents" else "same"
        async with state.attached(state.pool("next", contents=contents, replaces=change == "replaced")) as pool:
            assert not pool.is_kept and not set(pool.pids) & set(pids)
            assert await pool.broadcast("rank") == [0, 1]
        await wait_until_gone(pids)

    run(check())


def test_ranks_that_cannot_be_reset_are_killed(state: StateDirectory) -> None:
    """A server that ended while it loaded them may have left such."""

    async def check() -> None:
        async with state.attached(state.pool("first", reset_error="not loaded")):
            pass
        with pytest.raises(WorkerDied, match=r"it could not be reset .*not loaded.* so it was killed"):
            async with state.attached(state.pool("second", reset_error="not loaded")):
                pass
        async with state.attached(state.pool("second", reset_error="not loaded", replaces=True)) as pool:
            assert not pool.is_kept

    run(check())


def test_a_dead_rank_ends_its_group_for_the_server_too(state: StateDirectory) -> None:
    async def check() -> None:
        async with state.attached(state.pool("first")) as pool:
            call = asyncio.create_task(pool.broadcast("sleep", 100))
            await asyncio.sleep(0.5)
            os.kill(pool.pids[1], signal.SIGKILL)
            with pytest.raises(WorkerDied, match="its Ray actor is gone"):
                await call
            await wait_until_gone(pool.pids)

    run(check())


def test_ranks_without_a_server_end_after_their_time(state: StateDirectory) -> None:
    async def check() -> None:
        state.seconds = 8.0
        async with state.attached(state.pool("first")) as pool:
            pids = pool.pids
            await asyncio.sleep(10)
            assert await pool.broadcast("rank") == [0, 1]
        await asyncio.sleep(3)
        assert all(psutil.pid_exists(pid) for pid in pids)
        await wait_until(lambda: not state.nodes.actors(), 20)

    run(check())


@pytest.mark.parametrize("change", ["nothing", "deleted", "another"])
def test_ranks_end_with_their_state_directory(change: str, state: StateDirectory) -> None:
    async def check() -> None:
        async with state.attached(state.pool("first")) as pool:
            pids = pool.pids
        if change == "deleted":
            state.id_file.unlink()
        if change == "another":
            state.id_file.write_text("a new directory at the same path")
        if change == "nothing":
            await asyncio.sleep(8)
            assert all(psutil.pid_exists(pid) for pid in pids)
        else:
            await wait_until(lambda: not state.nodes.actors(), 20)

    run(check())
