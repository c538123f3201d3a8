"""Tests that a worker which does not answer is found, killed and replaced, and that a slow one is left alone."""

import asyncio
import inspect
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import numpy as np
import psutil
import pytest
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.tests.workers.echo_worker import ECHO, EchoConfig
from trainhouse.tests.workers.pools.test_pool import (
    OPENS_A_POOL,
    NewPool,
    new_pool,
    ray_cluster,
    ray_in_full,
    wait_until_gone,
)
from trainhouse.tests.workers.recording_worker import RECORDING
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.pools.base import PoolSpec, WorkerDied
from trainhouse.workers.pools.local import LocalPool
from trainhouse.workers.protocol import methods
from trainhouse.workers.protocol.calls import RunSpec, SampleJob, WorkerLost
from trainhouse.workers.protocol.methods import MEMORY, SAVE_RUN, Method
from trainhouse.workers.protocol.plugins import plugin_rows
from trainhouse.workers.protocol.timeouts import CallTimeouts, ObservedDurations, cost_of
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker

__all__ = ["new_pool", "ray_cluster"]


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 200))


# --- pools ---


@ray_in_full
def test_a_stopped_rank_is_killed_in_time(new_pool: NewPool) -> None:
    async def check() -> None:
        pool = new_pool(PoolSpec(ECHO, (EchoConfig(), EchoConfig(1))))
        await pool.start()
        try:
            os.kill(pool.pids[1], signal.SIGSTOP)
            pids, stopped_at = pool.pids, time.monotonic()
            with pytest.raises(WorkerDied, match="it hung: rank had no answer after 1 s"):
                await pool.broadcast("rank", hang_seconds=1)
            assert time.monotonic() - stopped_at > 0.9
            assert "it hung" in str(pool.death.result())
            await wait_until_gone(pids)
        finally:
            await pool.close()

    run(check())


@ray_in_full
def test_a_call_answered_in_time_is_not_a_hang(new_pool: NewPool) -> None:
    async def check() -> None:
        pool = new_pool(PoolSpec(ECHO, (EchoConfig(),)))
        await pool.start(hang_seconds=50)
        try:
            await pool.broadcast("sleep", 0.2, hang_seconds=1.5)
            await asyncio.sleep(1.5)
            await pool.broadcast("rank")
            assert not pool.death.done()
        finally:
            await pool.close()

    run(check())


def test_a_worker_that_does_not_start_is_killed_in_time() -> None:
    async def check() -> None:
        pool = LocalPool(PoolSpec(ECHO, (EchoConfig(start_seconds=50),)))
        with pytest.raises(WorkerDied, match="start had no answer"):
            await pool.start(hang_seconds=0.5)
        await wait_until_gone([child.process.pid for child in pool._children])

    run(check())


@pytest.mark.skipif(sys.platform != "linux", reason="the lifeline alone cannot end a stopped process")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_ends_with_its_server_even_when_it_is_stopped(tmp_path, stopped: bool) -> None:
    script = tmp_path / "opens_a_pool.py"
    script.write_text(OPENS_A_POOL)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        assert psutil.pid_exists(pid)
        server.kill()
    asyncio.run(wait_until_gone([pid]))


# --- the dispatch ---


@asynccontextmanager
async def recording_dispatch(hang_seconds: float) -> AsyncIterator[WorkerDispatch]:
    model = WorkerConfig(ServedModel("tiny", "tiny"), device="cpu", hang_seconds=hang_seconds)
    dispatch = WorkerDispatch(DispatchConfig((model,), worker=RECORDING, slice_milliseconds=5))
    await dispatch.start(lambda _: None)
    try:
        await create(dispatch)
        yield dispatch
    finally:
        await dispatch.close()


async def create(dispatch: WorkerDispatch) -> None:
    await dispatch.create_run("tiny", RunSpec("run", LoraConfig(rank=4, seed=0)), "tenant")


def operation(seconds: float = 0.0) -> ForwardBackwardRequest:
    data = (Datum(np.zeros(1, np.int32)),)
    return ForwardBackwardRequest("run", 1, data, "sleep", {"seconds": seconds}, forward_only=True)


def sample_job(num_slices: int) -> SampleJob:
    return SampleJob("job", None, np.zeros(3, np.int32), SamplingParams(max_tokens=num_slices, seed=0), (), ())


def test_a_worker_stopped_in_a_pass_is_replaced() -> None:
    async def check() -> None:
        async with recording_dispatch(hang_seconds=3) as dispatch:
            await dispatch.forward_backward(operation())  # records how long passes take
            [pid] = dispatch.pids("tiny")
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(WorkerLost, match="it hung: run_pass had no answer after 3 s, so it was killed") as lost:
                await asyncio.wait_for(dispatch.forward_backward(operation()), 30)
            assert lost.value.alone
            await wait_until_gone([pid])
            await create(dispatch)
            await dispatch.forward_backward(operation())
            assert dispatch.pids("tiny") != [pid]

    run(check())


def test_a_worker_stopped_in_a_slice_is_replaced() -> None:
    async def check() -> None:
        async with recording_dispatch(hang_seconds=3) as dispatch:
            await dispatch.sample("tiny", sample_job(3))
            sampling = asyncio.create_task(dispatch.sample("tiny", sample_job(10_000)))
            await asyncio.sleep(0.1)
            os.kill(dispatch.pids("tiny")[0], signal.SIGSTOP)
            with pytest.raises(WorkerLost, match="sample_slice had no answer"):
                await asyncio.wait_for(sampling, 30)
            await dispatch.sample("tiny", sample_job(1))

    run(check())


def test_only_unexpectedly_slow_passes_are_hangs() -> None:
    async def check() -> None:
        async with recording_dispatch(hang_seconds=1) as dispatch:
            for _ in range(2):
                await dispatch.forward_backward(operation(seconds=1.2))
            assert dispatch.groups[0].supervisor.num_deaths == 0
            with pytest.raises(WorkerLost, match="it hung"):
                await dispatch.forward_backward(operation(seconds=60))

    run(check())


# --- timeouts ---


def test_timeouts_grow_with_the_work_and_with_observed_durations() -> None:
    timeouts = CallTimeouts(WorkerConfig(ServedModel("tiny", "tiny"), hang_seconds=60))

    def of_pass(cost: float) -> float:
        return timeouts.for_runs(1) + timeouts.passes.limit(cost)

    before = of_pass(10_000)
    assert before > 60 + 10_000 * 0.1
    timeouts.passes.record(10_000, 2.0)
    known = of_pass(10_000)
    assert 60 + 2 * 2.0 < known < 70 + 10 * 2.0 < before
    assert of_pass(100_000) > 60 + 4 * 20.0
    assert of_pass(10) >= 60 + 2.0
    assert timeouts.for_slice(50) > 60 and timeouts.for_method(SAVE_RUN) > timeouts.for_method(MEMORY) == 60
    assert timeouts.for_runs(64) > 5 * timeouts.for_runs(1) > 5 * 60
    assert timeouts.for_start(is_restart=False) == math.inf > timeouts.for_start(is_restart=True) > 3600


def test_limits_allow_for_unseen_sizes_and_remember_slow_passes_for_a_while() -> None:
    seen = ObservedDurations(unseen_seconds=1.0)
    seen.record(1, 0.1)
    assert seen.limit(1000) >= 100
    seen.record(1000, 0.5)
    assert 0.5 <= seen.limit(1000) <= 5
    seen.record(1000, 50.0)
    assert seen.limit(1000) >= 50
    for _ in range(1000):
        seen.record(1000, 0.5)
    assert seen.limit(1000) <= 5


@pytest.mark.parametrize("seconds_per_token", [1e-5, 1e-1])
def test_limits_hold_for_passes_of_any_size_in_any_order(seconds_per_token: float) -> None:
    """Passes of random sizes, with a fixed cost and a cost per token, never take half of the limit."""
    random = np.random.default_rng(0)
    seen = ObservedDurations(unseen_seconds=1.0)
    for size in 2 ** random.uniform(0, 20, 2000):
        seconds = 0.01 + seconds_per_token * size
        assert not seen._slowest or seconds <= seen.limit(size) / 2
        seen.record(size, seconds)
    assert seen.limit(2**20) < 20 * (0.01 + seconds_per_token * 2**20)


def test_long_sequences_and_backward_passes_cost_more() -> None:
    assert cost_of([100] * 10, forward_only=True) < cost_of([1000], forward_only=True) < 1500
    assert cost_of([32_000], forward_only=True) > 5 * 32_000
    assert cost_of([100], forward_only=False) > 2 * cost_of([100], forward_only=True)
    assert cost_of([], forward_only=True) > 0


def test_the_table_names_methods_of_the_worker_and_whatever_reads_a_directory_has_time_for_it() -> None:
    verbs = {name: function for name, function in vars(Worker).items() if callable(function)}
    for plugin in plugin_rows("workers.drafts.rows", "VERBS").values():
        verbs |= {name: getattr(plugin, name) for name in plugin.verbs}
    table = {method.name: method for method in vars(methods).values() if isinstance(method, Method)}
    assert verbs.keys() >= table.keys()
    reading = {name for name, function in verbs.items() if "directory" in inspect.signature(function).parameters}
    assert "load_draft" in reading and all(table[name].moves_data for name in reading)
