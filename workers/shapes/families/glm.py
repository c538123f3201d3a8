"""GLM-4 (https://arxiv.org/abs/2406.12793) and GLM-4.5 and 4.6 (https://arxiv.org/abs/2508.06471).

Heads rotate by half. GLM-4 rotates pairs of neighbours, and has one projection for gates and ups; GLM-4-0414 has norms
after each part in addition. GLM-4.5 has the experts of DeepSeek-V3. Sarvam 30B (https://huggingface.co/sarvamai/sarvam-30b)
is as GLM-4.5, but its heads rotate whole.
"""

from collections.abc import Sequence

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


GLM = Family("Glm", "glm", _layers, defaults={"partial_rotary_factor": 0.5})
GLM4 = Family("Glm4", "glm4", _layers_of_glm4, defaults={"partial_rotary_factor": 0.5})
GLM4_MOE = Family("Glm4Moe", "glm4_moe", _layers_of_glm4_moe, defaults={"partial_rotary_factor": 0.5}, aliases=ALIASES)
SARVAM_MOE = Family(
    "Glm4Moe",
    "glm4_moe",
    _layers_of_glm4_moe,
    defaults={"partial_rotary_factor": 1.0},
    aliases=SARVAM_ALIASES | {"use_qkv_bias": "attention_bias"},
)
