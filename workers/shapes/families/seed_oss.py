"""Seed-OSS, which is Llama with a bias of queries, keys and values: https://huggingface.co/ByteDance-Seed."""

from collections.abc import Sequence

from ..parts import Layer
from .config_reader import ConfigReader
from .family import Family, attention, dense


def _layers(config: ConfigReader) -> Sequence[Layer]:
    mixer = attention(config, bias_key="attention_bias", output_bias=config.is_set("attention_out_bias"))
    return [Layer(config.hidden, mixer, dense(config, has_bias=config.is_set("mlp_bias")))] * config.num_layers


SEED_OSS = Family("SeedOss", "seed_oss", _layers)
