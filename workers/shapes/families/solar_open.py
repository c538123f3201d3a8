"""Solar Open, with the experts of DeepSeek-V3 in each layer: https://huggingface.co/upstage/Solar-Open-100B."""

from collections.abc import Sequence

from ..parts import Layer
from .config_reader import ConfigReader
from .deepseek import ALIASES, experts_of
from .family import Family, attention


def _layers(config: ConfigReader) -> Sequence[Layer]:
    mixer = attention(config, qkv_bias=config.is_set("attention_bias"))
    return [Layer(config.hidden, mixer, experts_of(config))] * config.num_layers


SOLAR_OPEN = Family(
    "SolarOpen",
    "solar_open",
    _layers,
    {
        "vocab_size": 196608,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "moe_intermediate_size": 1280,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
    },
    ALIASES,
)
