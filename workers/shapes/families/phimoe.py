"""Phi-3.5-MoE, whose layer norms have biases and whose router draws nothing: of two experts each has a weight from a
softmax of its own (SparseMixer, https://arxiv.org/abs/2409.12136), as in evaluation.
"""

from collections.abc import Sequence

from ..parts import Layer, Norms, RoutedExperts
from .config_reader import ConfigReader
from .family import Family, attention


def _layers(config: ConfigReader) -> Sequence[Layer]:
    scale = _rotary_scale(config)
    mixer = attention(config, bias_key="attention_bias", rotary_scale=scale, window=config.window)
    experts = RoutedExperts(
        hidden=config.hidden,
        num=config.number("num_local_experts"),
        per_token=2,
        features=config.number("intermediate_size"),
        saved_block="block_sparse_moe",
        saved_router="gate",
        linears=("w1", "w3", "w2"),
        router="router",
    )
    return [Layer(config.hidden, mixer, experts, Norms(has_bias=True))] * config.num_layers


def _rotary_scale(config: ConfigReader) -> float | None:
    """Returns the scale of rotations up to the original length."""
    return config.fraction("short_mscale", 1.0) if _kind_of_rotations(config) == "longrope" else None


def _unsupported(config: ConfigReader) -> str | None:
    kind = _kind_of_rotations(config)
    return None if kind in ("default", "longrope") else f"RoPE scaling {kind} instead of longrope"


def _kind_of_rotations(config: ConfigReader) -> object:
    return config.rope.get("rope_type", config.rope.get("type", "default"))


PHIMOE = Family(
    "Phimoe",
    "phimoe",
    _layers,
    unsupported=_unsupported,
    has_long_rotations=False,
    norm=None,
    centers_norms=True,
    head_bias_key="lm_head_bias",
)
