"""Sequences of 16k and 32k tokens on two ranks stay within the planned memory."""

from dataclasses import replace
from pathlib import Path

import pytest
from trainhouse.workers.planner.estimate import estimate
from trainhouse.workers.planner.workload import Workload
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel
from trainhouse.workers.shapes.model_shape import ModelShape, read_model
from trainhouse.workers.shapes.sequence_split import SequenceSplit

from ...tiny import tiny_model
from .measuring import HANG_SECONDS, LORA, measured

SPEC = ParallelSpec(sp=2)
LOAD = Workload(32768, "float32", head_chunk_tokens=64, lora_rank=LORA.rank, adapter_slots=1, samples=False)

# Numbers of query and key/value heads that divide by two ranks, and that do not.
HEADS = {"heads": (4, 2), "ring": (3, 1)}


@pytest.mark.full
@pytest.mark.parametrize("way", ["keep", "recompute"])
@pytest.mark.parametrize("split", HEADS)
def test_long_sequences_use_the_planned_memory(split: str, way: str, tmp_path: Path) -> None:
    heads, kv_heads = HEADS[split]
    assert (SequenceSplit.of(SPEC.sp, heads, kv_heads).ring > 1) == (split == "ring")
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    model = tiny_model("qwen3", tmp_path, max_position_embeddings=32768, **sizes)
    shape = read_model(ServedModel("m", str(model)))
    assert isinstance(shape, ModelShape)
    knobs = {"dtype": "float32", "head_chunk_tokens": 64, "hang_seconds": HANG_SECONDS, "activations": way}
    with measured(model, SPEC, **knobs) as where:
        for length in (16384, 32768):
            peak = where.peak(length, length)
            pass_estimate = estimate(shape, SPEC, replace(LOAD, longest=length, activations=way))
            planned = pass_estimate.work + pass_estimate.trainable.weights  # the gradients of an operation
            print(f"| {length // 1024}k | {split} | {way} | {peak / 1e6:.1f} | {planned / 1e6:.1f} |")
            assert 0.85 * peak < planned < 1.15 * peak
            # One number per pair of a rank's tokens would be far more.
            assert (length // 2) ** 2 * 4 > 2 * planned
