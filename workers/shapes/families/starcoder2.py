"""StarCoder2, with layer norms, biases everywhere, a window and no gates: https://arxiv.org/abs/2402.19173."""

from collections.abc import Sequence

from ..parts import Layer, Norms
from .config_reader import ConfigReader
from .family import Family, attention, dense

_ACTIVATION = "gelu_pytorch_tanh"


def _layers(config: ConfigReader) -> Sequence[Layer]:
    has_bias, names = config.is_set("use_bias"), ("c_fc", "c_proj")
    mixer = attention(config, bias_key="use_bias", window=config.window)
    mlp = dense(config, activation=_ACTIVATION, has_gate=False, has_bias=has_bias, names=names)
    return [Layer(config.hidden, mixer, mlp, Norms(has_bias=True))] * config.num_layers


STARCODER2 = Family("Starcoder2", "starcoder2", _layers, norm=None, centers_norms=True, activation=_ACTIVATION)
