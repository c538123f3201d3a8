"""Hunyuan 3, with norms of each head, and experts chosen by sigmoids: https://huggingface.co/tencent/Hy3-preview."""

from collections.abc import Sequence

from ..parts import Dense, Layer, RoutedExperts
from .config_reader import ConfigReader
from .deepseek import feed_forwards
from .family import Family, attention


def _layers(config: ConfigReader) -> Sequence[Layer]:
    of_mlp = config.is_set("mlp_bias")
    features = config.number("moe_intermediate_size")
    mixer = attention(config, bias_key="attention_bias", norms_heads="each")
    shared = features * config.number("num_shared_experts")
    experts = RoutedExperts(
        hidden=config.hidden,
        num=config.number("num_experts"),
        per_token=config.number("num_experts_per_tok"),
        features=features,
        block_correction="e_score_correction_bias",
        shared=Dense(hidden=config.hidden, features=shared, name="mlp.shared_experts", has_bias=of_mlp),
        module="MoE",
    )
    return [Layer(config.hidden, mixer, each) for each in feed_forwards(config, experts, has_bias=of_mlp)]


HY_V3 = Family("HYV3", "hy_v3", _layers, aliases={"num_local_experts": "num_experts"})
