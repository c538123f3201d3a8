"""The weights that families declare are the parameters of transformers' models, so that plans count all of them."""

import pytest
import torch
from trainhouse.workers.shapes.model_shape import ModelShape, describe_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ..models.tiny_types import NEEDED_SETTINGS, OWN, tiny_config_of


@pytest.mark.parametrize("model_type", OWN)
def test_declared_weights_are_the_parameters_of_transformers(model_type: str) -> None:
    of_defaults = AutoConfig.for_model(model_type, num_hidden_layers=5, **NEEDED_SETTINGS.get(model_type, {}))
    for config in (tiny_config_of(model_type), of_defaults):
        declared, whole = declared_weights(config), parameters(config)
        assert declared == whole
        del whole[next(iter(declared))]
        assert declared != whole


def declared_weights(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    shape = describe_model("m", config.to_dict())
    assert isinstance(shape, ModelShape)
    return {name: weight.shape for name, weight in shape.placed_weights().items()}


def parameters(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the layers' parameters."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).base_model
    # Llama 4's class has another name of its trunk than it has itself.
    named = ((name.removeprefix("model."), tuple(each.shape)) for name, each in model.named_parameters())
    return {name: shape for name, shape in named if name.startswith("layers.")}
