"""Tests each family of models on a GPU: it trains as on the CPU, and samples have the trainer's log-probabilities."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainhouse.schemas.training import AdamParams
from trainhouse.workers.protocol.calls import OptimizerStep
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.sampler.decode_steps import StepGraph
from trainhouse.workers.worker.worker import Worker

from ...tiny import FAMILY_KINDS, KINDS, MORE_KINDS, OTHER_KINDS, PLAIN_KINDS
from ..jobs import answers, job
from .test_gpu import logprobs, new_run, request, rows, run_pass, train

pytestmark = [
    *(pytest.mark.slow, pytest.mark.gpu),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU"),
]

ALL_KINDS = [*KINDS, *MORE_KINDS, *FAMILY_KINDS, *PLAIN_KINDS, *OTHER_KINDS]
# Their decode steps depend on how long the sequences are: by attention within parts, or an indexer beyond its choice.
UNCAPTURED = {"llama4", "deepseek_v32", "glm_moe_dsa"}


@pytest.fixture(autouse=True)
def own_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def new_worker(tiny_models: dict[str, Path], kind: str, device: str, dtype: str, **options: Any) -> Worker:
    model, options = ServedModel("tiny", str(tiny_models[kind])), {"kv_cache_bytes": 64 << 20} | options
    return Worker(WorkerConfig(model, device=device, dtype=dtype, **options))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_family_trains_on_a_gpu_as_on_the_cpu(tiny_models: dict[str, Path], kind: str) -> None:
    """Computes in float32. Training moves the log-probabilities by far more than devices differ."""
    data, found = rows(40, 9, 23, seed=5), {}
    for device in ("cpu", "cuda"):
        worker = new_worker(tiny_models, kind, device, "float32")
        new_run(worker, "run")
        before = np.concatenate(logprobs(worker, "run", data))
        train(worker, "run", learning_rate=3e-3, num_steps=2)
        run_pass(worker, request("run", data))
        (stepped,) = worker.apply_steps((OptimizerStep("run", AdamParams(learning_rate=0.0)),))
        assert isinstance(stepped, dict), stepped
        found[device] = before, np.concatenate(logprobs(worker, "run", data)), stepped["unclipped_grad_l2:mean"]
    (before, after, norm), (before_on_gpu, after_on_gpu, norm_on_gpu) = found["cpu"], found["cuda"]
    moved = np.abs(after - before).max()
    assert np.abs(before_on_gpu - before).max() < 1e-3
    assert np.abs(after_on_gpu - after).max() < min(5e-3, 0.1 * moved), moved
    assert norm_on_gpu == pytest.approx(norm, rel=5e-3)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_samples_of_a_family_have_the_trainers_logprobs(
    tiny_models: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples in bfloat16, by CUDA graphs. Medians are compared: rounding may choose another expert."""
    repeated = []
    repeat = StepGraph.repeat
    monkeypatch.setattr(StepGraph, "repeat", lambda self: (repeated.append(1), repeat(self))[1])
    worker = new_worker(tiny_models, kind, "cuda", "bfloat16", prefill_chunk_tokens=16)
    for run_id in ("run", "other"):
        new_run(worker, run_id)
    train(worker, "run", "other", num_steps=8)
    for run_id in ("run", "other"):
        worker.copy_adapter(run_id, f"sampler-{run_id}")
    (prompt,) = rows(40)
    jobs = [job("long", prompt, "sampler-run", max_tokens=40), job("short", prompt[:5], "sampler-other", max_tokens=40)]
    sampled = answers(worker.sample_slice, *jobs)
    errors, differences = [], []
    for each, run_id, other in zip(jobs, ("run", "other"), ("other", "run"), strict=True):
        (sequence,) = sampled[each.job_id].sequences
        whole, found = np.concatenate([each.prompt, np.asarray(sequence.tokens, np.int32)]), sequence.logprobs
        for run, into in ((run_id, errors), (other, differences)):
            (scored,) = logprobs(worker, run, [whole])
            into.append(np.abs(np.asarray(found) - scored[-len(found) :]))
    assert np.median(np.concatenate(errors)) < 0.03
    assert np.median(np.concatenate(differences)) > 5 * np.median(np.concatenate(errors))
    assert len(repeated) > 10 or kind in UNCAPTURED
