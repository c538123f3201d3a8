"""Arcee's AFM, which is Llama with squared ReLU in place of gates: https://huggingface.co/arcee-ai/AFM-4.5B."""

from collections.abc import Sequence

from ..parts import Layer
from .config_reader import ConfigReader
from .family import Family, attention, dense

_ACTIVATION = "relu2"


def _layers(config: ConfigReader) -> Sequence[Layer]:
    mixer = attention(config, bias_key="attention_bias")
    mlp = dense(config, activation=_ACTIVATION, has_gate=False, has_bias=config.is_set("mlp_bias"))
    return [Layer(config.hidden, mixer, mlp)] * config.num_layers


ARCEE = Family("Arcee", "arcee", _layers, activation=_ACTIVATION)
