"""Ranks that hold their parts as released train and sample, bit for bit, as ranks that hold them unpacked."""

from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import Quantization

from ...tiny import tiny_model
from ..parallel.training import Numbers, greedy, layout, train
from .releases import RELEASES

# Ranks' parts begin and end within blocks.
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 160, "head_dim": 32}


def numbers(model: Path, spec: ParallelSpec, scratch: Path, held: Quantization) -> tuple[Numbers, SampleResponse]:
    with layout(model, spec, scratch / held, base_quantization=held) as ranks:
        found = train(ranks, 1)
        sample = ranks.sample(greedy("job", None, 7))["job"]
        assert isinstance(sample, SampleResponse), sample
    return found, sample


def same(ours: Numbers, theirs: Numbers) -> bool:
    assert ours.losses and ours.gradients
    pairs = zip(ours.gradients + ours.weights, theirs.gradients + theirs.weights, strict=True)
    are_same = (np.array_equal(one[name], other[name]) for one, other in pairs for name in one)
    return ours.losses == theirs.losses and all(are_same)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "release"),
    [
        *(("tp=2", each) for each in ("DeepSeek's FP8", "Kimi's INT4")),
        pytest.param("tp=2", "NVFP4 of ModelOpt", marks=pytest.mark.full),
        pytest.param("tp=2", "MXFP4 of compressed-tensors", marks=pytest.mark.full),
        ("ep=2", "NVFP4 of ModelOpt"),
        pytest.param("ep=2,tp=2", "DeepSeek's FP8", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_ranks_hold_their_parts_as_released(spec: str, release: str, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", tmp_path / "model", **SHAPE)
    RELEASES[release].write(model, tmp_path / "packed", tmp_path / "plain")
    layouts = ParallelSpec.parse(spec)
    (ours, sample), (theirs, expected) = (
        numbers(tmp_path / "packed", layouts, tmp_path, held) for held in ("released", "none")
    )
    assert same(ours, theirs)
    for one, other in zip(sample.sequences, expected.sequences, strict=True):
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs)
    RELEASES[release].write(model, tmp_path / "other", tmp_path / "other_plain", seed=1)
    assert not same(numbers(tmp_path / "other", layouts, tmp_path / "again", "released")[0], theirs)
