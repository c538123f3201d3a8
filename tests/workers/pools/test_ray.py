"""A Ray cluster that loses nodes or its head: the workers restart, and waiting callers get the reason."""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
from trainhouse.schemas.models import LoraConfig
from trainhouse.tests.workers.ray_nodes import RayNodes, ray_nodes
from trainhouse.tests.workers.recording_worker import RECORDING
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.pools.ray.cluster import RayCluster
from trainhouse.workers.protocol.calls import RunSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    directory = Path(tempfile.mkdtemp(prefix="ray"))  # pytest's is too long for Ray
    try:
        with ray_nodes(directory) as started:
            yield started
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 200))


@asynccontextmanager
async def recording(address: str | None) -> AsyncIterator[WorkerDispatch]:
    model = WorkerConfig(ServedModel("tiny", "tiny"), device="cpu")
    dispatch = WorkerDispatch(DispatchConfig((model,), pool="ray", ray_address=address, worker=RECORDING))
    await dispatch.start(lambda _: None)
    try:
        await create(dispatch, "a")
        yield dispatch
    finally:
        await dispatch.close()


async def create(dispatch: WorkerDispatch, run_id: str) -> None:
    await dispatch.create_run("tiny", RunSpec(run_id, LoraConfig(rank=4, seed=0)), "tenant")


async def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    """Returns after how many seconds the condition became true."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "the condition did not become true in time"
        await asyncio.sleep(0.02)
    return time.monotonic() - started


def ray_processes() -> list[psutil.Process]:
    """Returns the processes of the clusters with a head that this process started."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it may end meanwhile
            if child.name() == "gcs_server" and (holder := child.parent()):
                found += [holder, *holder.children(recursive=True)]
    return found


def status_contains(dispatch: WorkerDispatch, text: str) -> Callable[[], bool]:
    return lambda: text in (dispatch.status("tiny") or "")


@pytest.mark.full
def test_workers_of_a_dead_node_restart_on_another(nodes: RayNodes) -> None:
    async def check() -> None:
        nodes.start_head(num_cpus=0)
        first = nodes.start_node(num_cpus=1)
        async with recording(nodes.address) as dispatch:
            before = dispatch.pids("tiny")
            assert set(before) <= {each.pid for each in first.children(recursive=True)}
            second = nodes.start_node(num_cpus=1)
            nodes.kill(first)
            assert await wait_until(lambda: not dispatch.is_up("tiny"), 10) < 5
            await wait_until(lambda: dispatch.is_up("tiny"), 60)
            await create(dispatch, "b")
            assert set(dispatch.pids("tiny")) <= {each.pid for each in second.children(recursive=True)}

    run(check())


@pytest.mark.full
def test_workers_restart_after_the_head_restarts(nodes: RayNodes) -> None:
    async def check() -> None:
        head = nodes.start_head(num_cpus=1)
        async with recording(nodes.address) as dispatch:
            for _ in range(2):
                nodes.kill(head)
                await wait_until(status_contains(dispatch, f"the Ray cluster at {nodes.address} cannot be reached"), 15)
                waiting = asyncio.create_task(create(dispatch, "b"))
                head = await asyncio.to_thread(nodes.start_head, 1)
                await asyncio.wait_for(waiting, 40)
                assert dispatch.is_up("tiny") and not status_contains(dispatch, "Ray")()
                assert set(dispatch.pids("tiny")) <= {each.pid for each in head.children(recursive=True)}

    run(check())


@pytest.mark.full
def test_killed_worker_restarts_on_the_same_cluster(nodes: RayNodes) -> None:
    async def check() -> None:
        nodes.start_head(num_cpus=1)
        async with recording(nodes.address) as dispatch:
            [before] = dispatch.pids("tiny")
            os.kill(before, signal.SIGKILL)
            await wait_until(lambda: not dispatch.is_up("tiny"), 30)
            await create(dispatch, "b")
            assert dispatch.pids("tiny") != [before]

    run(check())


@pytest.mark.full
def test_own_cluster_that_loses_its_head_is_replaced() -> None:
    async def check() -> None:
        async with recording(None) as dispatch:
            first = ray_processes()
            assert len(first) > 5
            next(each for each in first if each.name() == "gcs_server").kill()
            await wait_until(lambda: not dispatch.is_up("tiny"), 10)
            await create(dispatch, "b")
            assert psutil.wait_procs(first, timeout=10)[1] == []
            assert ray_processes() and not set(ray_processes()) & set(first)

    run(check())


def test_failed_cluster_start_is_explained_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"no Ray cluster could be started on this machine: .* the minimum allowed is"):
        run(RayCluster(object_store_bytes=1).connect(num_cpus=1))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.full
def test_cluster_can_be_disconnected_while_it_restarts() -> None:
    async def check() -> None:
        cluster = RayCluster()
        await cluster.connect(num_cpus=1)
        first = ray_processes()
        first[0].kill()
        second: list[psutil.Process] = []
        await wait_until(lambda: bool(second.extend(set(ray_processes()) - set(first)) or second), 30)
        await asyncio.wait_for(cluster.disconnect(), 20)
        assert psutil.wait_procs([*first, *second], timeout=10)[1] == []
        assert ray_processes() == []

    run(check())
