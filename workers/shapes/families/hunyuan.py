"""Hunyuan, dense and sparse, whose heads have norms after their rotation: https://arxiv.org/abs/2411.02265."""

from collections.abc import Sequence

from ..parts import Dense, Layer, RoutedExperts, SoftmaxAttention
from .config_reader import ConfigReader
from .family import Family, attention, dense


def _dense_layers(config: ConfigReader) -> Sequence[Layer]:
    return [Layer(config.hidden, _attention(config), dense(config))] * config.num_layers


def _sparse_layers(config: ConfigReader) -> Sequence[Layer]:
    chosen = config.numbers("moe_topk") or [config.number("moe_topk")] * config.num_layers
    if len(chosen) != config.num_layers:
        raise ValueError(f"moe_topk has {len(chosen)} numbers for {config.num_layers} layers: expected one for each")
    return [_sparse_layer(config.changed({"moe_topk": each})) for each in chosen]


def _sparse_layer(config: ConfigReader) -> Layer:
    features = config.number("intermediate_size")
    experts = RoutedExperts(
        hidden=config.hidden,
        num=config.number("num_experts"),
        per_token=config.number("moe_topk"),
        features=features,
        shared=Dense(hidden=config.hidden, features=features, name="mlp.shared_mlp"),
        router_weight="wg.weight",
        module="Moe",
    )
    return Layer(config.hidden, _attention(config), experts)


def _attention(config: ConfigReader) -> SoftmaxAttention:
    has_bias, names = config.is_set("attention_bias"), ("query_layernorm", "key_layernorm")
    return attention(
        config,
        qkv_bias=has_bias,
        output_bias=has_bias,
        norms_heads="each",
        head_norms=names,
        norms_after_rotation=True,
    )


HUNYUAN_V1_DENSE = Family("HunYuanDenseV1", "hunyuan_v1_dense", _dense_layers)
HUNYUAN_V1_MOE = Family(
    "HunYuanMoEV1",
    "hunyuan_v1_moe",
    _sparse_layers,
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
)
