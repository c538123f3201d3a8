"""GLM-4 (https://arxiv.org/abs/2406.12793) and GLM-4.5 and 4.6 (https://arxiv.org/abs/2508.06471).

Heads rotate by half. GLM-4 rotates pairs of neighbours, and has one projection for gates and ups; GLM-4-0414 has norms
after each part in addition. GLM-4.5 has the experts of DeepSeek-V3. Sarvam 30B (https://huggingface.co/sarvamai/sarvam-30b)
is as GLM-4.5, but its heads rotate whole.
"""

from collections.abc import Mapping, Sequence

from ..parts import Layer, Norms
from .config_reader import ConfigReader
from .deepseek import ALIASES, SARVAM_ALIASES, experts_of, feed_forwards
from .family import Family, attention, dense

_NORMS = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _layers(config: ConfigReader) -> Sequence[Layer]:
    return [_layer(config, Norms())] * config.num_layers


def _layers_of_glm4(config: ConfigReader) -> Sequence[Layer]:
    return [_layer(config, _NORMS)] * config.num_layers


def _layer(config: ConfigReader, norms: Norms) -> Layer:
    mixer = attention(config, qkv_bias=config.is_set("attention_bias"), is_interleaved=True)
    return Layer(config.hidden, mixer, dense(config, is_fused=True), norms)


def _layers_of_glm4_moe(config: ConfigReader) -> Sequence[Layer]:
    norms = "each" if config.is_set("use_qk_norm") else None
    mixer = attention(config, qkv_bias=config.is_set("attention_bias"), norms_heads=norms)
    return [Layer(config.hidden, mixer, each) for each in feed_forwards(config, experts_of(config))]


_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}

GLM = Family("Glm", "glm", _layers, _DEFAULTS)
GLM4 = Family("Glm4", "glm4", _layers_of_glm4, _DEFAULTS)
GLM4_MOE = Family(
    "Glm4Moe",
    "glm4_moe",
    _layers_of_glm4_moe,
    {
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
    },
    ALIASES,
)
SARVAM_MOE = Family(
    "Glm4Moe",
    "glm4_moe",
    _layers_of_glm4_moe,
    {
        **GLM4_MOE.defaults,
        "vocab_size": 262144,
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_hidden_layers": 19,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "partial_rotary_factor": 1.0,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "use_qk_norm": True,
    },
    SARVAM_ALIASES | {"use_qkv_bias": "attention_bias"},
)
