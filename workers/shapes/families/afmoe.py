"""Arcee's Trinity models (AFMoE), with gated attention, rotations only in layers with a window, and experts chosen by
sigmoids.

https://huggingface.co/arcee-ai/Trinity-Mini.
"""

from collections.abc import Sequence

from ..parts import Dense, Layer, Norms, OutputGate, RoutedExperts, SoftmaxAttention, Weight
from .config_reader import ConfigReader
from .family import Family, attention, dense, kinds_by_step

_NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")


def _layers(config: ConfigReader) -> Sequence[Layer]:
    step, num_dense = config.number("global_attn_every_n_layers"), config.number("num_dense_layers", 0, at_least=0)
    kinds, of_dense, experts = (
        config.names("layer_types") or kinds_by_step(config, step),
        dense(config),
        _experts(config),
    )
    parts = [of_dense if number < num_dense else experts for number in range(config.num_layers)]
    return [
        Layer(config.hidden, _attention(config, *each), part, _NORMS) for *each, part in zip(kinds, parts, strict=True)
    ]


def _attention(config: ConfigReader, kind: str) -> SoftmaxAttention:
    has_bias, is_local = config.is_set("attention_bias"), kind == "sliding_attention"
    return attention(
        config,
        rotation="" if is_local else None,
        window=config.window if is_local else None,
        qkv_bias=has_bias,
        output_bias=has_bias,
        norms_heads="each",
        gate=OutputGate("gate_proj"),
    )


def _experts(config: ConfigReader) -> RoutedExperts:
    num, features = config.number("num_experts"), config.number("moe_intermediate_size")
    shared = features * config.number("num_shared_experts")
    return RoutedExperts(
        hidden=config.hidden,
        num=num,
        per_token=config.number("num_experts_per_tok"),
        features=features,
        router="router",
        router_weight="gate.weight",
        router_biases=(Weight("mlp.expert_bias", (num,)),),
        block_correction="expert_bias",
        shared=Dense(hidden=config.hidden, features=shared, name="mlp.shared_experts"),
    )


AFMOE = Family("Afmoe", "afmoe", _layers, embedding_root_key="mup_enabled")
