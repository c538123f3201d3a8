"""Mistral, with a window in every layer, and Mixtral, with experts: https://arxiv.org/abs/2401.04088."""

from collections.abc import Sequence

from ..parts import Layer, RoutedExperts
from .config_reader import ConfigReader
from .family import Family, attention, dense


def _dense_layers(config: ConfigReader) -> Sequence[Layer]:
    return [Layer(config.hidden, attention(config, window=config.window), dense(config))] * config.num_layers


def _sparse_layers(config: ConfigReader) -> Sequence[Layer]:
    num = config.number("num_local_experts", config.number("num_experts", at_least=0), at_least=0)
    if not num:
        return _dense_layers(config)
    experts = RoutedExperts(
        hidden=config.hidden,
        num=num,
        per_token=config.number("num_experts_per_tok"),
        features=config.number("intermediate_size"),
        saved_block="block_sparse_moe",
        linears=("w1", "w3", "w2"),
    )
    return [Layer(config.hidden, attention(config, window=config.window), experts)] * config.num_layers


_DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8}

MISTRAL = Family("Mistral", "mistral", _dense_layers, {**_DEFAULTS, "sliding_window": 4096})
MIXTRAL = Family("Mixtral", "mixtral", _sparse_layers, {**_DEFAULTS, "num_experts": 8, "num_experts_per_tok": 2})
