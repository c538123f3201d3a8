"""Llama 2 and 3, and models of the same shape: https://arxiv.org/abs/2407.21783."""

from collections.abc import Sequence

from ..parts import Layer
from .config_reader import ConfigReader
from .family import Family, attention, dense


def _layers(config: ConfigReader) -> Sequence[Layer]:
    has_bias = config.is_set("attention_bias")
    mixer = attention(config, qkv_bias=has_bias, output_bias=has_bias)
    return [Layer(config.hidden, mixer, dense(config, has_bias=config.is_set("mlp_bias")))] * config.num_layers


LLAMA = Family("Llama", "llama", _layers, {"max_position_embeddings": 2048})
