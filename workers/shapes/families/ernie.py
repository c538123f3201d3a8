"""ERNIE 4.5, dense and sparse, which rotates pairs of neighbours.

https://yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf.
"""

from collections.abc import Sequence

from ..parts import Dense, Layer, RoutedExperts, SoftmaxAttention, Weight
from .config_reader import ConfigReader
from .family import Family, attention, dense


def _dense_layers(config: ConfigReader) -> Sequence[Layer]:
    return [Layer(config.hidden, _attention(config), _dense(config))] * config.num_layers


def _sparse_layers(config: ConfigReader) -> Sequence[Layer]:
    mixer, of_dense, experts = _attention(config), _dense(config), _experts(config)
    first, last = config.number("moe_layer_start_index", at_least=0), config.number("moe_layer_end_index", at_least=-1)
    last, step = config.num_layers - 1 if last == -1 else last, config.number("moe_layer_interval")
    are_sparse = [(number + 1) % step == 0 and first <= number <= last for number in range(config.num_layers)]
    return [Layer(config.hidden, mixer, experts if each else of_dense) for each in are_sparse]


def _attention(config: ConfigReader) -> SoftmaxAttention:
    return attention(config, bias_key="use_bias", is_interleaved=True)


def _dense(config: ConfigReader) -> Dense:
    return dense(config, has_bias=config.is_set("use_bias"))


def _experts(config: ConfigReader) -> RoutedExperts:
    features, num = config.number("moe_intermediate_size"), config.number("moe_num_experts")
    shared = features * config.number("moe_num_shared_experts", at_least=0)
    of_shared = Dense(
        hidden=config.hidden, features=shared, name="mlp.shared_experts", has_bias=config.is_set("use_bias")
    )
    return RoutedExperts(
        hidden=config.hidden,
        num=num,
        per_token=config.number("moe_k"),
        features=features,
        router_biases=(Weight("mlp.gate.moe_statics.e_score_correction_bias", (1, num)),),
        shared=of_shared if shared else None,
    )


ERNIE4_5 = Family("Ernie4_5", "ernie4_5", _dense_layers)
ERNIE4_5_MOE = Family(
    "Ernie4_5_Moe",
    "ernie4_5_moe",
    _sparse_layers,
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
)
