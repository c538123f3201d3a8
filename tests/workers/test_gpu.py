"""The worker on CUDA: bfloat16 base, float32 adapters."""

from pathlib import Path

import numpy as np
import pytest
import torch
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.config import ServedModel, WorkerConfig
from trainhouse.workers.verbs import Part, Pass, RunSpec, Step
from trainhouse.workers.worker import Worker


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_twenty_steps_in_bfloat16_halve_the_loss(tiny_models: dict[str, Path]) -> None:
    worker = Worker(WorkerConfig(ServedModel("tiny", str(tiny_models["qwen3"])), device="cuda"))
    assert worker.info().dtype == "bfloat16"
    worker.create_run(RunSpec("run", LoraConfig(rank=8, seed=0)))
    tokens = np.arange(5, 37, dtype=np.int32)
    inputs = {"target_tokens": tokens.astype(np.int64) + 1, "weights": np.ones(32, np.float32)}
    request = ForwardBackwardRequest("run", 1, (Datum(tokens, inputs),), "cross_entropy")
    losses = []
    for _ in range(20):
        (output,) = worker.run_pass(Pass((Part(0, request),)))
        assert isinstance(output, ForwardBackwardOutput)
        losses.append(output.metrics["loss:sum"])
        worker.apply_steps((Step("run", AdamParams(learning_rate=1e-2)),))
    assert losses[-1] < losses[0] / 2
