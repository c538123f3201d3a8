"""A draft's pass that recomputes activations gives the same numbers in less memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from trainhouse.schemas.models import Algorithm
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.workers.worker.worker import Worker

from ..model_state import pending_gradients
from ..parallel.live_bytes import LiveBytes
from ..requests import repeatable
from .test_worker import ALGORITHMS, create_draft, new_worker, request, run_pass, some_data


def train_once(directory: Path, algorithm: Algorithm, **options: Any) -> tuple[Worker, Mapping[str, float]]:
    """Makes one pass, and returns the worker and the metrics."""
    worker = new_worker(directory, **options)
    create_draft(worker, algorithm=algorithm)
    (output,) = run_pass(worker, request(some_data(1), loss_fn=algorithm))
    return worker, repeatable(output.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activations", ["recompute", "offload"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_recomputed_gradients_are_bit_identical(
    algorithm: Algorithm, activations: str, dtype: str, tiny_models: dict[str, Path]
) -> None:
    directory = tiny_models["qwen3"]
    kept, metrics = train_once(directory, algorithm, dtype=dtype)
    other, other_metrics = train_once(directory, algorithm, dtype=dtype, activations=activations)
    wanted = pending_gradients(kept, "draft")
    assert torch.equal(pending_gradients(other, "draft"), wanted)
    assert other_metrics == metrics
    cut, _ = train_once(directory, algorithm, dtype=dtype, activations=activations, micro_batch_tokens=12)
    assert not torch.equal(pending_gradients(cut, "draft"), wanted), "sums in another order would show"


@pytest.mark.slow
def test_recompute_keeps_less_per_draft_token(tiny_models: dict[str, Path]) -> None:
    keep, recompute = (bytes_of_a_draft_token(tiny_models["qwen3"], each) for each in ("keep", "recompute"))
    assert recompute < 0.6 * keep
    assert recompute > 0.2 * keep, "the state, queries, keys and values are still kept"


def bytes_of_a_draft_token(directory: Path, activations: Literal["keep", "recompute"], length: int = 256) -> float:
    """Returns the memory of a pass per token and additional draft token."""
    worker = new_worker(directory, activations=activations, head_chunk_tokens=128)
    create_draft(worker)
    peaks = []
    for ttt_length in (2, 6):
        data = (Datum(np.random.default_rng(0).integers(3, 512, length).astype(np.int32), {}),)
        with LiveBytes() as live:
            run_pass(worker, ForwardBackwardRequest("draft", 1, data, "eagle3", {"ttt_length": ttt_length}))
        peaks.append(live.peak)
    return (peaks[1] - peaks[0]) / 4 / length
