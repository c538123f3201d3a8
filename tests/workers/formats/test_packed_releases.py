"""Ranks read the same parts of a release in fewer bits as of one that holds its numbers unpacked."""

from pathlib import Path

import pytest
from trainhouse.workers.protocol.parallel_spec import ParallelSpec

from ...tiny import tiny_model
from ..parallel import rank_weights
from ..parallel.training import layout
from .releases import RELEASES

pytestmark = pytest.mark.slow

# Ranks' parts begin and end within blocks.
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 32}
EXPERTS = SHAPE | {"moe_intermediate_size": 160}


def digests(model: Path, spec: str, scratch: Path) -> list[dict[str, str]]:
    with layout(model, ParallelSpec.parse(spec), scratch) as ranks:
        return ranks.probe(rank_weights.digests)


OF_FLOATS = ("DeepSeek's FP8", "Kimi's INT4", "NVFP4 of ModelOpt")
# Parts begin within integers that hold several codes, and in rows that share scales with others.
OF_INTEGERS = (
    "GPTQ in the order of activations",
    "GPTQ in 3 bits",
    "AWQ",
    "bitsandbytes NF4",
    "bitsandbytes INT8",
    "MXFP6",
)
LAYOUTS = [("fsdp=2", "qwen3_moe"), ("tp=2", "qwen3_moe"), ("ep=2", "qwen3_moe"), ("tp=2", "phi3")]
PRODUCTS = [("fsdp=2,tp=2", "qwen3_moe"), ("fsdp=2,ep=2", "qwen3_moe")]
CASES = [
    *((*each, release) for each in LAYOUTS for release in OF_FLOATS),
    *(("tp=2", "qwen3_moe", release) for release in ("GPTQ in the order of activations", "bitsandbytes NF4")),
]
MORE_CASES = [
    *((*each, release) for each in PRODUCTS for release in OF_FLOATS),
    *((*each, release) for each in LAYOUTS for release in OF_INTEGERS),
]


@pytest.mark.parametrize(
    ("spec", "kind", "release"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE_CASES if each not in CASES)],
)
def test_ranks_read_their_parts(spec: str, kind: str, release: str, tmp_path: Path) -> None:
    model = tiny_model(kind, tmp_path / "model", **(EXPERTS if kind == "qwen3_moe" else SHAPE))
    RELEASES[release].write(model, tmp_path / "packed", tmp_path / "plain")
    ours, theirs = (digests(tmp_path / name, spec, tmp_path) for name in ("packed", "plain"))
    assert ours == theirs and ours[0] != ours[1]
    RELEASES[release].write(model, tmp_path / "other", tmp_path / "other_plain", seed=1)
    assert digests(tmp_path / "other", spec, tmp_path) != theirs
