"""A 4-bit base under layouts trains as on one rank: quantization blocks end at the boundaries of the ranks' parts."""

from pathlib import Path

import pytest
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec

from ...tiny import tiny_model
from .training import close, largest_error, layout, train

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}


@pytest.mark.full
@pytest.mark.parametrize(
    ("spec", "kind"), [("tp=2", "qwen3"), ("sp=2", "qwen3"), ("replicas=2", "qwen3"), ("ep=2,tp=2", "qwen3_moe")]
)
def test_4_bit_base_trains_as_on_one_rank(spec: str, kind: str, tmp_path: Path) -> None:
    shape = {name: size for name, size in SHAPE.items() if kind == "qwen3_moe" or not name.startswith("moe")}
    model = tiny_model(kind, tmp_path / "model", **shape)
    with (
        layout(model, SINGLE, tmp_path, base_quantization="nf4") as alone,
        layout(model, ParallelSpec.parse(spec), tmp_path, base_quantization="nf4") as many,
        layout(model, SINGLE, tmp_path / "whole") as whole,
    ):
        theirs, ours, unquantized = (train(each, 2) for each in (alone, many, whole))
    assert close(ours.losses, theirs.losses) and not close(ours.losses, unquantized.losses)
    assert largest_error(ours.gradients, theirs.gradients) <= 1e-4
