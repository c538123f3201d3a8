"""Poolside's Laguna, with gated attention whose layers differ in heads, windows and rotations, and experts chosen by
sigmoids.

https://huggingface.co/poolside/Laguna-XS.2.
"""

from collections.abc import Sequence

from ..parts import Dense, Layer, OutputGate, RoutedExperts, SoftmaxAttention, Weight
from .config_reader import ConfigReader
from .family import Family, attention, dense


def _layers(config: ConfigReader) -> Sequence[Layer]:
    number, by_kind = config.num_layers, {"dense": dense(config), "sparse": _experts(config)}
    kinds = config.names("layer_types") or ["full_attention"] * number
    of_parts = config.names("mlp_layer_types") or ["dense", *["sparse"] * (number - 1)]
    heads = config.numbers("num_attention_heads_per_layer") or [config.heads] * number
    mixers = [_attention(config, *each) for each in zip(kinds, heads, strict=True)]
    parts = [by_kind[kind] for kind in of_parts]
    return [Layer(config.hidden, *each) for each in zip(mixers, parts, strict=True)]


def _unsupported(config: ConfigReader) -> str | None:
    kv_heads = config.number("num_key_value_heads")
    uneven = [each for each in config.numbers("num_attention_heads_per_layer") or () if each % kv_heads]
    return f"{uneven[0]} num_attention_heads_per_layer and {kv_heads} num_key_value_heads" if uneven else None


def _attention(config: ConfigReader, kind: str, heads: int) -> SoftmaxAttention:
    has_bias, gating, rope = config.is_set("attention_bias"), config.get("gating"), config.get("rope_parameters")
    of_kind = rope.get(kind, {}) if isinstance(rope, dict) else {}
    return attention(
        config,
        heads=heads,
        rotary_dim=int(config.head_dim * of_kind.get("partial_rotary_factor", config.rotary_factor)),
        rotation=kind,
        window=config.window if kind == "sliding_attention" else None,
        qkv_bias=has_bias,
        output_bias=has_bias,
        norms_heads="each",
        gate=OutputGate("g_proj", "softplus", is_by_head=gating in (True, "per-head"), is_adapted=False),
    )


def _experts(config: ConfigReader) -> RoutedExperts:
    num, shared = config.number("num_experts"), config.number("shared_expert_intermediate_size")
    return RoutedExperts(
        hidden=config.hidden,
        num=num,
        per_token=config.number("num_experts_per_tok"),
        features=config.number("moe_intermediate_size"),
        router_biases=(Weight("mlp.gate.e_score_correction_bias", (num,)),),
        scale=config.fraction("moe_routed_scaling_factor", 1.0),
        shared=Dense(hidden=config.hidden, features=shared, name="mlp.shared_experts"),
    )


LAGUNA = Family(
    "Laguna",
    "laguna",
    _layers,
    defaults={
        "partial_rotary_factor": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "partial_rotary_factor": 1.0},
        },
    },
    unsupported=_unsupported,
)
