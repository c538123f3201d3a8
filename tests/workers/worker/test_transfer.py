"""Tests copying adapters from one worker to another of the same base model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.workers.protocol.calls import AdapterWeights, RunSpec, SampleJob, SamplingSlice
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker


@pytest.fixture
def workers(tiny_models: dict[str, Path]) -> tuple[Worker, Worker]:
    config = WorkerConfig(ServedModel("tiny", str(tiny_models["qwen3"])), device="cpu", threads=1, max_lora_rank=8)
    return Worker(config), Worker(config)


def random_adapter(worker: Worker) -> AdapterWeights:
    """Returns an adapter with random weights in both matrices, so that it changes what is sampled."""
    worker.create_run(RunSpec("run", LoraConfig(rank=4, seed=3)))
    exported = worker.export_adapter("run")
    noise = np.random.default_rng(0).normal(0, 0.1, exported.weights.shape).astype(np.float32)
    return replace(exported, weights=noise)


def logprobs(worker: Worker, adapter_id: str) -> np.ndarray:
    prompt = np.array([1, 5, 9], np.int32)
    job = SampleJob(adapter_id, adapter_id, prompt, SamplingParams(max_tokens=8, seed=1), (), ())
    return worker.sample_slice(SamplingSlice((job,), (), 1e6)).finished[adapter_id].sequences[0].logprobs


def test_an_imported_adapter_samples_like_the_original(workers: tuple[Worker, Worker], tmp_path: Path) -> None:
    training, sampling = workers
    training.import_adapter("original", random_adapter(training))
    exported = training.export_adapter("original")
    sampling.import_adapter("copy", exported)
    np.testing.assert_array_equal(logprobs(sampling, "copy"), logprobs(training, "original"))
    training.save_run("original", str(tmp_path), optimizer=False)
    read = training.read_adapter(str(tmp_path))
    assert read.training == exported.training
    np.testing.assert_array_equal(read.weights, exported.weights)


def test_a_reimported_adapter_is_overwritten_in_place(workers: tuple[Worker, Worker]) -> None:
    training, sampling = workers
    exported = random_adapter(training)
    sampling.import_adapter("copy", exported)
    before = logprobs(sampling, "copy")
    sampling.import_adapter("copy", replace(exported, weights=exported.weights / 2))
    assert not np.allclose(logprobs(sampling, "copy"), before, atol=1e-3)
    assert sampling.memory()["num_adapters_on_device"] == 1
    sampling.import_adapter("copy", replace(exported, training=exported.training.model_copy(update={"alpha": 16.0})))
    assert sampling.memory()["num_adapters_on_device"] == 1


def test_missing_runs_and_checkpoints_are_named(workers: tuple[Worker, Worker], tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="run unknown is not on this worker"):
        workers[0].export_adapter("unknown")
    with pytest.raises(OperationError, match="is not a checkpoint"):
        workers[0].read_adapter(str(tmp_path))
