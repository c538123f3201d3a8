"""Tenants over their limits, with the unmodified official SDK: they are slowed, never failed, and others are
unaffected.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from ..live import LiveServer, live_server
from ..official import official_service

# The SDK leaves connections to its interpreter's end.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

MODEL = "tiny/qwen3"
ADAM = types.AdamParams(learning_rate=1e-3)


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    options = {"sdk_max_chunk_datums": 2, "tenant_queued_operations": 3}
    with live_server({MODEL: tiny_models["qwen3"]}, tmp_path_factory.mktemp("state"), **options) as running:
        yield running


def batch(num_datums: int = 8, num_tokens: int = 50) -> list[types.Datum]:
    random = np.random.default_rng(0)
    rows = random.integers(3, 512, (num_datums, num_tokens + 1))
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(row[1:].astype(np.int64))},
        )
        for row in rows
    ]


def train(client: tinker.TrainingClient, num_steps: int) -> float:
    """Pipelines four chunks and a step each time, and returns the loss afterwards."""
    futures = []
    for _ in range(num_steps):
        futures += [client.forward_backward(batch(), "cross_entropy"), client.optim_step(ADAM)]
    for future in futures:
        future.result(120)
    return client.forward(batch(), "cross_entropy").result(120).metrics["loss:sum"]


def throttled(server: LiveServer) -> list[tuple[str, str]]:
    """Returns (tenant, limit) of the log lines about throttling, one each time that it begins."""
    return re.findall(r"requests of tenant (\S+) are throttled: .*--(tenant-[a-z-]+)", server.log.read_text())


@pytest.mark.slow
def test_only_the_tenant_over_its_limits_is_slowed(server: LiveServer) -> None:
    with (
        official_service(server.url, "tml-greedy") as greedy,
        official_service(server.url, "tml-modest") as modest,
    ):
        pipelined = greedy.create_lora_training_client(MODEL, rank=4, seed=1).result(60)
        one_by_one = modest.create_lora_training_client(MODEL, rank=4, seed=1).result(60)
        sampler = pipelined.save_weights_and_get_sampling_client().result(60)
        params = types.SamplingParams(max_tokens=4, stop=[])
        samples = [sampler.sample(types.ModelInput.from_ints([5, 6]), 1, params) for _ in range(8)]
        loss = train(pipelined, 4)
        assert all(len(sample.result(60).sequences) == 1 for sample in samples)
        for _ in range(4):
            one_by_one.forward_backward(batch(2), "cross_entropy").result(60)
        assert {limit for _, limit in throttled(server)} == {"tenant-queued-operations"}
        assert len({tenant for tenant, _ in throttled(server)}) == 1, "the modest tenant was throttled"
        same = modest.create_lora_training_client(MODEL, rank=4, seed=1).result(60)
        for _ in range(4):
            for start in range(0, 8, 2):
                same.forward_backward(batch()[start : start + 2], "cross_entropy").result(60)
            same.optim_step(ADAM).result(60)
        logprobs = [same.forward(batch()[start : start + 2], "cross_entropy").result(60) for start in range(0, 8, 2)]
        assert sum(output.metrics["loss:sum"] for output in logprobs) == pytest.approx(loss, rel=1e-4)
