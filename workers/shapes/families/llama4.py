"""Llama 4, with attention in parts of a sequence in layers that rotate, queries that grow in others, and experts whose
inputs are weighted.

https://ai.meta.com/blog/llama-4-multimodal-intelligence.
"""

from collections.abc import Sequence

from ..parts import Dense, Layer, QueryGrowth, RoutedExperts, SoftmaxAttention
from .config_reader import ConfigReader
from .family import Family, attention

_NAME = "feed_forward"


def _layers(config: ConfigReader) -> Sequence[Layer]:
    number, step = config.num_layers, config.number("no_rope_layer_interval")
    rotate = config.numbers("no_rope_layers") or [each % step for each in range(1, number + 1)]
    kinds = config.names("layer_types") or ["chunked_attention" if each else "full_attention" for each in rotate]
    mixers = [_attention(config, *each) for each in zip(kinds, map(bool, rotate), strict=True)]
    step = config.number("interleave_moe_layer_step")
    sparse = range(step - 1, number, step) if config.get("moe_layers") is None else config.numbers("moe_layers")
    experts, features = _experts(config), config.number("intermediate_size_mlp")
    dense = Dense(hidden=config.hidden, features=features, name=_NAME)
    parts = [experts if each in sparse else dense for each in range(number)]
    return [Layer(config.hidden, *each) for each in zip(mixers, parts, strict=True)]


def _attention(config: ConfigReader, kind: str, rotates: bool) -> SoftmaxAttention:
    has_bias, is_normed = config.is_set("attention_bias"), rotates and config.is_set("use_qk_norm")
    rate, length = config.fraction("attn_scale", 0.0), config.number("floor_scale")
    grows = config.is_set("attn_temperature_tuning") and not rotates
    return attention(
        config,
        rotation="" if rotates else None,
        is_interleaved=rotates,
        growth=QueryGrowth(rate, length, first=1) if grows else None,
        part_size=config.number("attention_chunk_size") if kind == "chunked_attention" else None,
        qkv_bias=has_bias,
        output_bias=has_bias,
        norms_heads="each" if is_normed else None,
        head_norms=("qk_norm", "qk_norm"),
        norm_module="L2Norm",
        norms_after_rotation=is_normed,
        learns_norms=False,
    )


def _experts(config: ConfigReader) -> RoutedExperts:
    features = config.number("intermediate_size")
    return RoutedExperts(
        hidden=config.hidden,
        num=config.number("num_local_experts"),
        per_token=1,
        features=features,
        router="router",
        scales_inputs=True,
        is_transposed=True,
        marks_transposed=False,
        are_stacked=True,
        shared=Dense(hidden=config.hidden, features=features, name=f"{_NAME}.shared_expert"),
        name=_NAME,
        module="Moe",
    )


def _unsupported(config: ConfigReader) -> str | None:
    per_token = config.number("num_experts_per_tok")
    return None if per_token == 1 else f"{per_token} experts for each token"


LLAMA4 = Family("Llama4Text", "llama4", _layers, unsupported=_unsupported)
