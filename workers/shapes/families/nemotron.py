"""Nemotron-4 (https://arxiv.org/abs/2402.16819) and Minitron (https://arxiv.org/abs/2407.14679), with layer norms whose
weights grow by 1 and heads that rotate by half, and Jais 2 (https://huggingface.co/inceptionai/Jais-2-8B-Chat), with
plain ones. Both have squared ReLU in place of gates."""

from collections.abc import Sequence

from ..parts import Layer, Norms
from .config_reader import ConfigReader
from .family import Family, attention, dense

_ACTIVATION = "relu2"


def _layers(config: ConfigReader) -> Sequence[Layer]:
    mixer = attention(config, bias_key="attention_bias")
    mlp = dense(config, activation=_ACTIVATION, has_gate=False, has_bias=config.is_set("mlp_bias"))
    return [Layer(config.hidden, mixer, mlp, Norms(has_bias=True))] * config.num_layers


NEMOTRON = Family(
    "Nemotron",
    "nemotron",
    _layers,
    defaults={"partial_rotary_factor": 0.5},
    norm="LayerNorm1P",
    centers_norms=True,
    norm_weight_plus_one=True,
    activation=_ACTIVATION,
)
JAIS2 = Family("Jais2", "jais2", _layers, norm=None, centers_norms=True, activation=_ACTIVATION)
