"""Mistral, with a window in every layer, Ministral, with one in some layers, Ministral 3, whose queries grow with their
positions (https://arxiv.org/abs/2601.08584), and Mixtral, with experts (https://arxiv.org/abs/2401.04088).
"""

from collections.abc import Sequence

from ..parts import Layer, RoutedExperts
from .config_reader import ConfigReader
from .family import Family, attention, dense, query_growth


def _dense_layers(config: ConfigReader) -> Sequence[Layer]:
    return [Layer(config.hidden, attention(config, window=config.window), dense(config))] * config.num_layers


def _layers_of_ministral(config: ConfigReader) -> Sequence[Layer]:
    kinds, of_all = config.names("layer_types") or ["sliding_attention"] * config.num_layers, dense(config)
    windows = [config.window if kind == "sliding_attention" else None for kind in kinds]
    return [Layer(config.hidden, attention(config, window=each), of_all) for each in windows]


def _layers_of_ministral3(config: ConfigReader) -> Sequence[Layer]:
    mixer = attention(config, window=config.window, growth=query_growth(config))
    return [Layer(config.hidden, mixer, dense(config))] * config.num_layers


def _sparse_layers(config: ConfigReader) -> Sequence[Layer]:
    num = config.number("num_local_experts", at_least=0)
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


MISTRAL = Family("Mistral", "mistral", _dense_layers)
MINISTRAL = Family(
    "Ministral",
    "ministral",
    _layers_of_ministral,
    unsupported=lambda config: None if config.is_set("sliding_window") else "no sliding_window",
)
MINISTRAL3 = Family(
    "Ministral3",
    "ministral3",
    _layers_of_ministral3,
    defaults={
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "llama_4_scaling_beta": 0.1,
        }
    },
)
MIXTRAL = Family("Mixtral", "mixtral", _sparse_layers, aliases={"num_experts": "num_local_experts"})
