"""A tiny twin of each family's default config has the numbers of transformers, and wrong arithmetic is found."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from trainhouse.workers.models import model as model_module
from trainhouse.workers.models import twin
from trainhouse.workers.models.layers import latent_attention, softmax_attention
from trainhouse.workers.shapes.model_shape import ModelShape, describe_model
from transformers import AutoConfig, PreTrainedConfig

from ..lineup import LINEUP
from .tiny_types import NEEDED_SETTINGS, OWN


def of_type(model_type: str, **settings: Any) -> tuple[str, PreTrainedConfig, ModelShape]:
    """Returns a model of a type, of the size of its releases."""
    config = AutoConfig.for_model(model_type, **(NEEDED_SETTINGS.get(model_type, {}) | settings))
    shape = describe_model("m", config.to_dict())
    assert isinstance(shape, ModelShape)
    return "source", config, shape


# Attention behind many layers of another kind, keys shared by half of the layers, heads of one size, experts, and fewer
# heads than a twin has.
MORE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bamba", {"num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]}),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp"] * 7 + ["full_attention", "mlp"]}),
    ("gemma4_text", {"num_hidden_layers": 35, "num_kv_shared_layers": 20, "hidden_size_per_layer_input": 256}),
    ("gemma4_text", {"global_head_dim": 256, "num_kv_shared_layers": 15}),
    ("gemma4_text", LINEUP["gemma-4-26B-A4B"]["text_config"]),
    ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 1}),
)


@pytest.mark.parametrize(("model_type", "settings"), [*((each, {}) for each in OWN), *MORE])
def test_every_family_has_a_twin_that_passes(
    model_type: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    source, config, shape = of_type(**(settings | {"model_type": model_type}))
    with caplog.at_level(logging.WARNING, logger=twin.__name__):
        twin.check_twin(source, config, shape)
    assert twin.__name__ not in {record.name for record in caplog.records}
    small = describe_model("m", twin.twin_of(config, shape).to_dict())
    assert isinstance(small, ModelShape) and small.num_layers <= shape.num_layers
    kinds = [{type(part) for layer in each.layers for part in layer.parts} for each in (small, shape)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("model_type", ["llama", "exaone4", "gpt_oss"])
def test_wrong_scales_of_attention_are_found(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = softmax_attention.attend

    def scaled(query: Tensor, *others: Any) -> Tensor:
        return attend(1.1 * query, *others)

    monkeypatch.setattr(softmax_attention, "attend", scaled)
    with pytest.raises(ValueError, match=r"source: a small random model of its config: .* of their spread away"):
        twin.check_twin(*of_type(model_type))


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_a_wrong_choice_of_an_indexer_is_found(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = latent_attention.choose
    monkeypatch.setattr(latent_attention, "choose", lambda queries, key, *rest: choose(queries, -key, *rest))
    source, config, shape = of_type(model_type)
    assert twin.needs_twin(shape, torch.bfloat16, is_shared=False)
    assert not twin.needs_twin(shape, torch.float32, is_shared=False)  # the model itself is compared
    with pytest.raises(ValueError, match=r"source: a small random model of its config: .* of their spread away"):
        twin.check_twin(source, config, shape)


def test_a_wrong_scale_of_logits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "logit_scale_of", lambda config: 2.0)
    with pytest.raises(ValueError, match=r"source: a small random model of its config: .* of their spread away"):
        twin.check_twin(*of_type("llama"))


def test_a_config_without_a_small_model_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    source, config, shape = of_type("llama")
    config.rope_parameters = {"rope_type": "unknown", "rope_theta": 1.0}
    with caplog.at_level(logging.WARNING, logger=twin.__name__):
        twin.check_twin(source, config, shape)
    (record,) = (record for record in caplog.records if record.name == twin.__name__)
    assert "source is not compared with transformers: no small model of its config" in record.getMessage()
