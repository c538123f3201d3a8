"""Several nodes of a Ray cluster: on which nodes ranks are placed, and access by token."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest
from trainhouse.tests.workers.echo_worker import ECHO, EchoConfig
from trainhouse.tests.workers.ray_nodes import RayNodes, ray_nodes
from trainhouse.workers.pools.base import PlacementError, PoolSpec
from trainhouse.workers.pools.ray.cluster import RayCluster
from trainhouse.workers.pools.ray.pool import RayPool
from trainhouse.workers.protocol.parallel_spec import ParallelSpec

TOKEN = 40 * "t"


@contextmanager
def some_nodes(**environment: str) -> Iterator[RayNodes]:
    directory = Path(tempfile.mkdtemp(prefix="ray"))  # pytest's is too long for Ray
    try:
        with ray_nodes(directory, **environment) as started:
            yield started
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 250))


@asynccontextmanager
async def ranks(nodes: RayNodes, layout: str, seconds: float = 60) -> AsyncIterator[RayPool]:
    spec = ParallelSpec.parse(layout)
    configs = tuple(EchoConfig(rank) for rank in range(spec.num_ranks))
    ranks = PoolSpec(ECHO, configs, blocks=spec.neighbour_blocks)
    pool = RayPool(ranks, RayCluster(nodes.address), placement_timeout_seconds=seconds)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def node_of(pid: int, nodes: list[psutil.Process]) -> int:
    (number,) = (i for i, node in enumerate(nodes) if pid in {each.pid for each in node.children(recursive=True)})
    return number


@pytest.mark.parametrize(
    ("layout", "blocks"),
    [
        ("single", (1,)),
        ("replicas=4", (1,)),
        ("replicas=2,fsdp=2", (2, 1)),
        ("replicas=2,fsdp=2,sp=3,tp=4", (24, 12, 4, 1)),
        ("ep=2,tp=2", (4, 2, 1)),
    ],
)
def test_blocks_of_neighbouring_ranks_follow_from_the_layout(layout: str, blocks: tuple[int, ...]) -> None:
    assert ParallelSpec.parse(layout).neighbour_blocks == blocks


@pytest.mark.full
@pytest.mark.timeout(600)
def test_each_replica_is_on_one_node_if_it_fits() -> None:
    async def check() -> None:
        with some_nodes(RAY_health_check_failure_threshold="60") as started:
            started.start_head(num_cpus=0)
            nodes = []
            for num_cpus in (2, 3):
                nodes.append(started.start_node(num_cpus))
                started.wait_until_joined()
            for layout, places in (
                ("replicas=2,fsdp=2", [[0, 0], [1, 1]]),
                ("replicas=2", [[0], [1]]),
                ("fsdp=2", [[0, 0]]),  # both ranks on either node
                ("tp=3", [[1, 1, 1]]),
            ):
                async with ranks(started, layout) as pool:
                    assert await pool.broadcast("rank") == list(range(len(pool.pids)))
                    where = [node_of(pid, nodes) for pid in pool.pids]
                size = len(places[0])
                of_replicas = [where[first : first + size] for first in range(0, len(where), size)]
                if layout == "fsdp=2":
                    assert len(set(where)) == 1
                else:
                    assert sorted(of_replicas) == places
            async with ranks(started, "fsdp=2,tp=2") as pool:  # no node has room for four, but each for two
                where = [node_of(pid, nodes) for pid in pool.pids]
                assert where[0] == where[1] != where[2] == where[3]
            async with ranks(started, "tp=5") as pool:  # split, because no node has room for all
                assert sorted(node_of(pid, nodes) for pid in pool.pids) == [0, 0, 1, 1, 1]
            with pytest.raises(PlacementError, match="no room for 6 ranks"):
                async with ranks(started, "tp=6", seconds=1):
                    pass

    run(check())


@pytest.mark.full
@pytest.mark.timeout(600)
def test_cluster_with_a_token_requires_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def check() -> None:
        with some_nodes(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as started:
            started.start_head(num_cpus=1)
            file = tmp_path / "token"
            for token, message in ((TOKEN, None), ("x" * 40, "requires a token"), (None, "requires a token")):
                monkeypatch.setenv("RAY_AUTH_MODE", "token" if token else "disabled")
                file.write_text(token or "")
                monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
                if message is None:
                    async with ranks(started, "single") as pool:
                        assert await pool.broadcast("rank") == [0]
                    continue
                with pytest.raises(PlacementError, match=message) as refused:
                    async with ranks(started, "single"):
                        pass
                assert TOKEN not in str(refused.value)

    run(check())
