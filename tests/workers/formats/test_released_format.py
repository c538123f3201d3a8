"""The weights that a release holds packed, by its quantization_config."""

from typing import Any

import pytest
from trainhouse.workers.shapes.packed_format import ReleasedFormat
from trainhouse.workers.shapes.packed_weights import ReleasedWeights

GPT_OSS: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
DEEPSEEK: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
KIMI: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}}
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}
NVIDIA: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["language_model.model.layers.0*", "lm_head"],
}


def weights(given: dict[str, Any]) -> ReleasedWeights:
    return ReleasedWeights.of({"quantization_config": given})


@pytest.mark.parametrize(
    ("given", "format", "bits"),
    [
        (GPT_OSS, ReleasedFormat("float4", "power of two", (1, 32)), 4.25),
        (DEEPSEEK, ReleasedFormat("float8", "float32", (128, 128)), 8 + 32 / 128**2),
        (KIMI, ReleasedFormat("integer", "bfloat16", (1, 32)), 4.5),
        (NVIDIA, ReleasedFormat("float4", "float8", (1, 16)), 4.5 + 64 / 2048),
        ({"quant_method": "mxfp8"}, ReleasedFormat("float8", "power of two", (1, 32)), 8.25),
    ],
)
def test_formats_and_bytes_of_published_releases(given: dict[str, Any], format: ReleasedFormat, bits: float) -> None:
    assert weights(given).formats == (format,)
    for part in ("text_config", "llm_config"):
        assert ReleasedWeights.of({part: {"quantization_config": given}}).formats == (format,)
    assert weights(given).bytes_of((8, 4096, 2048)) == 8 * 4096 * 2048 * bits / 8


@pytest.mark.parametrize("groups", [5, ["a"], {"a": 5}, {"a": None}, {"a": {"weights": "x"}}])
def test_groups_without_settings_of_weights_have_no_format(groups: object) -> None:
    assert not weights({"quant_method": "compressed-tensors", "config_groups": groups}).formats


@pytest.mark.parametrize("wrong", [-1, True, "lm_head", {"lm_head": 1}])
def test_layers_that_are_not_packed_must_be_in_a_list(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"quantization_config has ignore .*, which must be a list of names"):
        weights({"quant_method": "compressed-tensors", "ignore": wrong})


def test_ignored_layers_are_not_packed() -> None:
    expected = {
        "gpt-oss": (GPT_OSS, ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
        "DeepSeek": (DEEPSEEK, ("self_attn.q_proj.weight", "mlp.gate_proj.weight", "mlp.experts.down_proj")),
        "Kimi": (KIMI, ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    }
    names = ("self_attn.q_proj.weight", "mlp.shared_experts.up_proj.weight", "mlp.gate_proj.weight")
    names = (*names, "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    for given, packed in expected.values():
        found = [name for name in names if not weights(given).ignores(f"model.layers.3.{name}")]
        assert set(packed) <= set(found)
        assert "self_attn.q_proj.weight" not in found or given is DEEPSEEK
    assert weights(KIMI).ignores("model.layers.3.mlp.shared_experts.up_proj.weight")
    assert weights(KIMI).ignores("model.layers.3.mlp.gate_proj.weight")
    assert weights(NVIDIA).ignores("model.layers.0.mlp.up_proj") and not weights(NVIDIA).ignores("model.layers.1.mlp")
    for head in ("backbone.", "model.language_model.", "language_model.model.", "model."):
        given = weights({**NVIDIA, "ignore": [f"{head}layers.5.mixer*"]})
        assert given.ignores("model.layers.5.mixer.in_proj.weight") and not given.ignores(
            "model.layers.50.mixer.in_proj"
        )


def test_blocks_divide_the_parts_of_ranks() -> None:
    format = ReleasedFormat("float8", "float32", (128, 128))
    assert list(format.blocks(256, 384)) == [(128, 128), (64, 64), (32, 32), (16, 16), (8, 8), (4, 4)]
    assert next(format.blocks(192, 320)) == (64, 64)
    rows = ReleasedFormat("integer", "bfloat16", (1, 32))
    assert list(rows.blocks(7, 96)) == [(1, 32), (1, 16), (1, 8)] and next(rows.blocks(7, 80)) == (1, 16)
    assert rows.bytes_of((7, 3)) is None and weights({"quant_method": "gptq"}).bytes_of((64, 64)) is None


def test_groups_in_the_order_of_activations_are_not_kept() -> None:
    in_order = {"num_bits": 4, "type": "int", "group_size": 32}
    for weights_of_group, is_kept in ((in_order, True), (in_order | {"actorder": "group"}, False)):
        given = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights_of_group}}}
        assert bool(weights(given).formats) == is_kept
