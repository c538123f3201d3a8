"""A Ray cluster whose nodes and head come and go: the workers come back, and who waits hears why."""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from trainhouse.schemas.models import LoraConfig
from trainhouse.tests.workers.ray_nodes import RayNodes, ray_nodes
from trainhouse.tests.workers.recording_worker import RECORDING
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.pools.ray.cluster import RayCluster
from trainhouse.workers.protocol.config import ServedModel, WorkerConfig
from trainhouse.workers.protocol.verbs import RunSpec


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


async def until(condition: Callable[[], bool], seconds: float) -> float:
    """How long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it did not come about in time"
        await asyncio.sleep(0.02)
    return time.monotonic() - started


def rays_processes() -> list[psutil.Process]:
    """Those of the clusters that this process has started and that have a head."""
    heads = [each for each in psutil.Process().children(recursive=True) if each.name() == "gcs_server"]
    holders = [head.parent() for head in heads]
    return [each for holder in holders if holder for each in [holder, *holder.children(recursive=True)]]


def says(dispatch: WorkerDispatch, text: str) -> Callable[[], bool]:
    return lambda: text in (dispatch.status("tiny") or "")


@pytest.mark.full
def test_workers_lost_with_their_node_come_back_on_another(nodes: RayNodes) -> None:
    async def check() -> None:
        nodes.start_head(num_cpus=0)
        first = nodes.start_node(num_cpus=1)
        async with recording(nodes.address) as dispatch:
            before = dispatch.pids("tiny")
            assert set(before) <= {each.pid for each in first.children(recursive=True)}
            second = nodes.start_node(num_cpus=1)
            nodes.kill(first)
            assert await until(lambda: not dispatch.is_up("tiny"), 10) < 5
            await until(lambda: dispatch.is_up("tiny"), 60)
            await create(dispatch, "b")
            assert set(dispatch.pids("tiny")) <= {each.pid for each in second.children(recursive=True)}

    run(check())


@pytest.mark.full
def test_the_head_is_restarted_and_the_workers_start_on_it_again(nodes: RayNodes) -> None:
    async def check() -> None:
        head = nodes.start_head(num_cpus=1)
        async with recording(nodes.address) as dispatch:
            for _ in range(2):
                nodes.kill(head)
                await until(says(dispatch, f"the Ray cluster at {nodes.address} cannot be reached"), 15)
                waiting = asyncio.create_task(create(dispatch, "b"))
                head = await asyncio.to_thread(nodes.start_head, 1)
                await asyncio.wait_for(waiting, 40)
                assert dispatch.is_up("tiny") and not says(dispatch, "Ray")()
                assert set(dispatch.pids("tiny")) <= {each.pid for each in head.children(recursive=True)}

    run(check())


@pytest.mark.full
def test_a_worker_that_is_killed_comes_back_on_the_same_cluster(nodes: RayNodes) -> None:
    async def check() -> None:
        nodes.start_head(num_cpus=1)
        async with recording(nodes.address) as dispatch:
            [before] = dispatch.pids("tiny")
            os.kill(before, signal.SIGKILL)
            await until(lambda: not dispatch.is_up("tiny"), 30)
            await create(dispatch, "b")
            assert dispatch.pids("tiny") != [before]

    run(check())


@pytest.mark.full
def test_a_cluster_of_our_own_that_loses_its_head_ends_whole_and_another_one_starts() -> None:
    async def check() -> None:
        async with recording(None) as dispatch:
            first = rays_processes()
            assert len(first) > 5
            next(each for each in first if each.name() == "gcs_server").kill()
            await until(lambda: not dispatch.is_up("tiny"), 10)
            await create(dispatch, "b")
            assert psutil.wait_procs(first, timeout=10)[1] == []
            assert rays_processes() and not set(rays_processes()) & set(first)

    run(check())


def test_a_cluster_that_does_not_start_says_why_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"no Ray cluster could be started on this machine: .* the minimum allowed is"):
        run(RayCluster(object_store_bytes=1).connect(num_cpus=1))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.full
def test_a_cluster_that_is_just_started_again_can_be_left() -> None:
    async def check() -> None:
        cluster = RayCluster()
        await cluster.connect(num_cpus=1)
        first = rays_processes()
        first[0].kill()
        second: list[psutil.Process] = []
        await until(lambda: bool(second.extend(set(rays_processes()) - set(first)) or second), 30)
        await asyncio.wait_for(cluster.disconnect(), 20)
        assert psutil.wait_procs([*first, *second], timeout=10)[1] == []
        assert rays_processes() == []

    run(check())
