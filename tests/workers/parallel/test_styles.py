"""What a user puts otherwise than the table of styles."""

import pytest
from trainhouse.workers.parallel.styles import PLAN, Unit, replicated_units


@pytest.mark.parametrize(
    ("overrides", "units"),
    [
        ([], ()),
        (["layers.*.self_attn.*=replicate"], ("self_attn",)),
        (["model.layers.*.self_attn.*=replicate"], ("self_attn",)),
        (["layers.*.mlp.*_proj.*=replicate"], ("mlp",)),
        (["layers.*.mlp.experts.*=replicate"], ("experts",)),
        (["layers.*.mlp.*=replicate"], ("mlp", "experts")),
        (["* = replicate"], ("self_attn", "mlp", "experts")),
        (["*=replicate", "*experts*=grouped"], ("self_attn", "mlp")),
        (["layers.*.mlp.experts.gate_up_proj=grouped"], ()),
        (["layers.*.self_attn.q_proj.weight=colwise", "layers.*.self_attn.o_proj.weight=rowwise"], ()),
    ],
    ids=str,
)
def test_the_last_pattern_that_covers_a_part_of_a_layer_says_its_style(
    overrides: list[str], units: tuple[Unit, ...]
) -> None:
    assert replicated_units(overrides) == units


@pytest.mark.parametrize("name", PLAN)
def test_a_single_weight_of_several_is_not_replicated_alone(name: str) -> None:
    with pytest.raises(ValueError, match="which is shared out together with"):
        replicated_units([f"{name}=replicate"])
