"""Mellum 2, which is Qwen3-MoE with windows and rotations of their own in some layers.

https://huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base.
"""

from collections.abc import Sequence

from ..parts import Layer, RoutedExperts
from .config_reader import ConfigReader
from .deepseek import feed_forwards
from .family import Family, attention


def _layers(config: ConfigReader) -> Sequence[Layer]:
    experts = RoutedExperts(
        hidden=config.hidden,
        num=config.number("num_local_experts"),
        per_token=config.number("num_experts_per_tok"),
        features=config.number("moe_intermediate_size"),
    )
    has_bias, windows = config.is_set("attention_bias"), {"sliding_attention": config.window}
    kinds = config.names("layer_types") or ["full_attention"] * config.num_layers
    mixers = [
        attention(
            config,
            rotation=kind,
            window=windows.get(kind),
            qkv_bias=has_bias,
            output_bias=has_bias,
            norms_heads="each",
        )
        for kind in kinds
    ]
    parts = zip(mixers, feed_forwards(config, experts, num_dense=0), strict=True)
    return [Layer(config.hidden, *each) for each in parts]


MELLUM = Family("Mellum", "mellum", _layers, aliases={"num_experts": "num_local_experts"})
