"""A run trains on one node of a Ray cluster, and continues after the head on another node is lost and replaced."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pytest
import trainhouse
from trainhouse.client.training import TrainingClient
from trainhouse.tests.live import live_server
from trainhouse.tests.workers.ray_nodes import RayNodes, ray_nodes

from .crashing import TOLERANCE, until
from .training_script import MODEL, batch, loss_of

MAX_SECONDS = 120


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with tempfile.TemporaryDirectory(prefix="ray") as directory, ray_nodes(Path(directory)) as started:
        yield started


@contextmanager
def training(url: str, seed: int) -> Iterator["Training"]:
    with trainhouse.ServiceClient(url, "tml-ray") as service:
        yield Training(service.create_lora_training_client(MODEL, rank=4, seed=seed))


class Training:
    """A run that trains on the same data as any other."""

    def __init__(self, client: TrainingClient) -> None:
        self._client = client
        self._numbers = count()
        self.losses: list[float] = []

    def steps(self, number: int) -> None:
        adam = trainhouse.AdamParams(learning_rate=1e-2)
        for _ in range(number):
            data = list(batch(trainhouse, next(self._numbers)))
            step = self._client.forward_backward(data, "cross_entropy"), self._client.optim_step(adam)
            self.losses.append(loss_of(*step))


def workers(node: psutil.Process) -> list[psutil.Process]:
    return [each for each in node.children(recursive=True) if "RankActor" in each.name()]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("back", ["at once", "after the cluster has given up"])
def test_run_continues_after_the_head_is_replaced(
    back: str, nodes: RayNodes, tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "RAY_gcs_rpc_server_reconnect_timeout_s", "10"
    )  # Ray gives up after this time; the default is a minute
    head, node = nodes.start_head(num_cpus=0), nodes.start_node(num_cpus=1)
    options = {"pool": "ray", "ray_address": nodes.address, "snapshot_steps": 3}
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path, **options) as server:
        with training(server.url, seed=1) as run:
            run.steps(4)
            [worker] = workers(node)
            nodes.kill(head)
            run.steps(4)
            assert workers(node) == [worker]
            if back == "at once":
                nodes.start_head(num_cpus=0)
            node.wait(MAX_SECONDS)  # Ray's nodes end soon after their head
            if back != "at once":
                until(lambda: "cannot be reached" in server.log.read_text(), MAX_SECONDS)
                nodes.start_head(num_cpus=0)
            node = nodes.start_node(num_cpus=1)
            run.steps(4)
            assert len(workers(node)) == 1
        with training(server.url, seed=1) as same, training(server.url, seed=2) as other:
            same.steps(12)
            other.steps(12)
    np.testing.assert_allclose(run.losses, same.losses, rtol=TOLERANCE)
    assert not np.allclose(run.losses, other.losses, rtol=TOLERANCE)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ranks_on_two_nodes_continue_after_one_node_is_lost(
    nodes: RayNodes, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    nodes.start_head(num_cpus=0)
    pair = []
    for _ in range(2):
        pair.append(nodes.start_node(num_cpus=1))
        nodes.wait_until_joined()
    options = {"pool": "ray", "ray_address": nodes.address, "snapshot_steps": 3, "parallel": "fsdp=2"}
    models = {MODEL: tiny_models["qwen3"]}
    with live_server(models, tmp_path / "ray", **options) as server, training(server.url, seed=1) as run:
        run.steps(4)
        assert [len(workers(node)) for node in pair] == [1, 1]
        nodes.kill(pair[0])
        third = nodes.start_node(num_cpus=1)
        run.steps(4)
        assert [len(workers(node)) for node in (pair[1], third)] == [1, 1]
    with (
        live_server(models, tmp_path / "one") as server,
        training(server.url, seed=1) as same,
        training(server.url, seed=2) as other,
    ):
        same.steps(8)
        other.steps(8)
    np.testing.assert_allclose(run.losses, same.losses, rtol=TOLERANCE)
    assert not np.allclose(run.losses, other.losses, rtol=TOLERANCE)
