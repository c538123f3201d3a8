"""OLMo 2, with norms after each part and over all heads together: https://arxiv.org/abs/2501.00656."""

from collections.abc import Sequence

from ..parts import Layer, Norms
from .config_reader import ConfigReader
from .family import Family, attention, dense

_NORMS = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _layers(config: ConfigReader) -> Sequence[Layer]:
    has_bias = config.is_set("attention_bias")
    mixer = attention(config, qkv_bias=has_bias, output_bias=has_bias, norms_heads="together")
    return [Layer(config.hidden, mixer, dense(config), _NORMS)] * config.num_layers


OLMO2 = Family("Olmo2", "olmo2", _layers, {"max_position_embeddings": 2048})
