"""Style overrides: patterns that replicate parts of a layer."""

from pathlib import Path

import pytest
from trainhouse.workers.protocol.parallel_spec import ParallelSpec, ShardedUnit
from trainhouse.workers.protocol.worker_config import ServedModel
from trainhouse.workers.shapes.layouts.checks import check_layout
from trainhouse.workers.shapes.model_shape import read_model
from trainhouse.workers.shapes.styles import PLAN, replicated_units


@pytest.mark.parametrize(
    ("overrides", "units"),
    [
        ([], ()),
        (["layers.*.self_attn.*=replicate"], ("self_attn",)),
        (["model.layers.*.self_attn.*=replicate"], ("self_attn",)),
        (["layers.*.mlp.*_proj.*=replicate"], ("mlp",)),
        (["layers.*.mlp.experts.*=replicate"], ("experts",)),
        *(([f"layers.*.{block}.experts.*=replicate"], ("experts",)) for block in ("mixer", "block_sparse_moe")),
        (["layers.*.mlp.*=replicate"], ("mlp", "experts")),
        (["* = replicate"], ("self_attn", "linear_attn", "mamba", "mlp", "experts")),
        (["*=replicate", "*experts*=grouped"], ("self_attn", "linear_attn", "mamba", "mlp")),
        (["layers.*.mlp.experts.gate_up_proj=grouped"], ()),
        (["layers.*.self_attn.[qkvo]*=replicate"], ("self_attn",)),
        (["layers.*.self_attn.*_proj=replicate"], ("self_attn",)),
        (["layers.*.self_attn.q_proj.weight=colwise", "layers.*.self_attn.o_proj.weight=rowwise"], ()),
    ],
    ids=str,
)
def test_last_matching_pattern_sets_the_style(overrides: list[str], units: tuple[ShardedUnit, ...]) -> None:
    assert replicated_units(overrides) == units


@pytest.mark.parametrize("pattern", ["layers.*.mlp.*=replicate", "*=replicate"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_moe_mixed"])
def test_patterns_may_match_parts_the_model_lacks(kind: str, pattern: str, tiny_models: dict[str, Path]) -> None:
    shape = read_model(ServedModel("M", str(tiny_models[kind])))
    check_layout(ParallelSpec(tp=2, replicated=replicated_units([pattern])), shape)


@pytest.mark.parametrize("name", PLAN)
def test_one_weight_of_a_unit_cannot_be_replicated_alone(name: str) -> None:
    with pytest.raises(ValueError, match="which must have the same style as"):
        replicated_units([f"{name}=replicate"])
