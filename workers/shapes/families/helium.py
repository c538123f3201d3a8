"""Helium 1, which is Llama with rotations of pairs of neighbours: https://huggingface.co/kyutai/helium-1-2b."""

from collections.abc import Sequence

from ..parts import Layer
from .config_reader import ConfigReader
from .family import Family, attention, dense, heads_unlike_hidden


def _layers(config: ConfigReader) -> Sequence[Layer]:
    mixer = attention(config, qkv_bias=config.is_set("attention_bias"), is_interleaved=True)
    return [Layer(config.hidden, mixer, dense(config, has_bias=config.is_set("mlp_bias")))] * config.num_layers


HELIUM = Family("Helium", "helium", _layers, unsupported=heads_unlike_hidden)
