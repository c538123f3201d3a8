"""Each field that a family reads from a config.json has the effect that it has in transformers, or is refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from trainhouse.workers.models.fused_decoder import FusedTrunk, fused_trunk
from trainhouse.workers.models.loading import class_of
from trainhouse.workers.models.packing_checks import check_numbers
from trainhouse.workers.ops.attention import ATTENTION, AttendingPacking
from trainhouse.workers.ops.linear import soft_capped
from trainhouse.workers.shapes import model_shape
from trainhouse.workers.shapes.families import FAMILIES
from trainhouse.workers.shapes.model_shape import ModelShape, describe_model
from trainhouse.workers.shapes.other_models import logit_cap_of, logit_scale_of
from transformers import AutoConfig

from .changed_fields import changed_settings
from .tiny_types import OWN, tiny_settings_of


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OWN)
def test_fields_change_declared_weights_as_they_change_those_of_transformers(model_type: str) -> None:
    compared: set[str] = set()
    for name, settings in changed_settings(model_type):
        if (shape := shape_of(model_type, settings)) is None:
            continue
        with torch.device("meta"):
            model = made_by_transformers(model_type, settings)
        if model is not None:
            assert declared(shape) == parameters(model), (name, settings[name])
            compared.add(name)
    assert len(compared) >= 9


@pytest.mark.parametrize(
    ("model_type", "changes", "settings"),
    [
        ("flex_olmo", {"aliases": {}}, {"num_local_experts": 2}),
        ("mellum", {"defaults": {"first_k_dense_replace": None}}, {"first_k_dense_replace": 1}),
    ],
)
def test_fields_with_another_meaning_are_found(
    model_type: str, changes: dict[str, Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tiny_settings_of(model_type)
    others = {name: value for name, value in others.items() if name not in ("num_experts", "mlp_layer_types")}
    family = FAMILIES[model_type]
    changed = {name: {**getattr(family, name), **each} if each else each for name, each in changes.items()}
    for each, is_right in ((family, True), (replace(family, **changed), False)):
        monkeypatch.setattr(model_shape, "FAMILIES", {model_type: each})
        shape = shape_of(model_type, others | settings)
        model = made_by_transformers(model_type, others | settings)
        assert shape is not None and model is not None
        assert (declared(shape) == parameters(model)) is is_right


@pytest.mark.full
@pytest.mark.parametrize("model_type", OWN)
@pytest.mark.filterwarnings("ignore")
def test_fields_change_numbers_as_they_change_those_of_transformers(model_type: str) -> None:
    compared: set[str] = set()
    for name, settings in changed_settings(model_type):
        if shape_of(model_type, settings) is not None and have_numbers_of_transformers(model_type, settings):
            compared.add(name)
    assert len(compared) >= 8


@pytest.mark.parametrize(
    ("model_type", "settings", "words"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, "llama models with partial_rotary_factor 0.5 are not supported"),
        ("gpt_oss", {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]}, "no sliding_wi"),
        ("iquestcoder", {"clip_qkv": 1.0}, "with clip_qkv"),
        ("granite_swa", {"layer_rope_theta": [10000.0, 500.0]}, "with layer_rope_theta 500"),
        ("falcon_h1", {"projectors_bias": True}, "with projectors_bias"),
        ("llama4_text", {"num_experts_per_tok": 2}, "with 2 experts for each token"),
        ("helium", {"head_dim": 16}, "with 4 heads of 16 features and hidden_size 32"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "with 2 num_key_value_heads and 4 num_attention_heads"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full"]}, "a first layer without an indexer of its own"),
        ("nemotron_h", {"mlp_bias": True, "moe_latent_size": 8}, "with mlp_bias and moe_latent_size"),
        ("nemotron_h", {"layers_block_type": ["mlp", "fancy"]}, "with fancy layers"),
        ("ministral", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, "with no sliding_window"),
        ("laguna", {"num_attention_heads_per_layer": [4, 3]}, "with 3 num_attention_heads_per_layer and 2 num_key_val"),
        ("gemma4_text", {"vocab_size": 256}, "with vocab_size 256 and vocab_size_per_layer_input 128"),
        ("gemma4_text", {"num_kv_shared_layers": 4}, "with 4 layers that share keys and values of 0 others"),
        ("gemma4_text", {"num_kv_shared_layers": 3}, "layers of full_attention that share keys and values of no other"),
    ],
)
def test_settings_that_a_family_does_not_run_are_refused(
    model_type: str, settings: Mapping[str, Any], words: str
) -> None:
    described = describe_model("m", {"model_type": model_type, **tiny_settings_of(model_type), **settings})
    assert words in (described.refusal or "")


def shape_of(model_type: str, settings: Mapping[str, Any]) -> ModelShape | None:
    """Returns what a config.json describes, None if it is refused."""
    try:
        described = describe_model("m", {"model_type": model_type, **settings})
    except ValueError:
        return None
    return described if isinstance(described, ModelShape) else None


def made_by_transformers(model_type: str, settings: Mapping[str, Any]) -> Any:
    """Returns a random model, None if transformers makes none with these settings."""
    try:
        config = AutoConfig.for_model(model_type, **settings)
        return class_of(config).from_config(config, attn_implementation=ATTENTION)
    except Exception:  # of any kind, by type
        return None


def declared(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    return {name: weight.shape for name, weight in shape.placed_weights().items()}


def parameters(model: Any) -> dict[str, tuple[int, ...]]:
    named = {name.removeprefix("model."): tuple(each.shape) for name, each in trunk_of(model).named_parameters()}
    return {name: each for name, each in named.items() if name.startswith("layers.")}


def trunk_of(model: Any) -> Any:
    """Returns the model without its head. Llama 4's class has another name of it than it has itself."""
    return model.model if model.base_model is model else model.base_model


def have_numbers_of_transformers(model_type: str, settings: Mapping[str, Any]) -> bool:
    """Returns False if transformers makes no such model, or its numbers cannot be compared. Fails if they differ."""
    torch.manual_seed(0)
    model = made_by_transformers(model_type, settings)
    if model is None or trunk_in(model) is None:
        return False
    for each in model.parameters():
        if each.ndim <= 1:
            each.data += 0.1 * torch.randn_like(each)
    model = model.float().eval().requires_grad_(False)

    def logits(tokens: Tensor, positions: Tensor, packing: AttendingPacking) -> Tensor:
        trunk, head = trunk_in(model), model.get_output_embeddings()
        assert trunk is not None
        hidden = trunk.hidden_states(tokens, positions, packing) * logit_scale_of(model.config)
        return soft_capped(linear(hidden, head.weight, head.bias), logit_cap_of(model.config))

    shape = describe_model("m", model.config.to_dict())
    assert isinstance(shape, ModelShape)
    check_numbers(f"{model_type} with {settings}", model, logits, None, shape.attending_layers)
    return True


def trunk_in(model: Any) -> FusedTrunk | None:
    return fused_trunk(trunk_of(model), describe_model("m", model.config.to_dict()))
