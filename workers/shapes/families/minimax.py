"""MiniMax-M2, with norms over all heads together, a partial rotation and experts chosen by sigmoids.

https://huggingface.co/MiniMaxAI/MiniMax-M2.
"""

from collections.abc import Sequence

from ..parts import Layer, RoutedExperts
from .config_reader import ConfigReader
from .family import Family, attention


def _layers(config: ConfigReader) -> Sequence[Layer]:
    mixer = attention(config, rotary_dim=_rotary_dim(config), norms_heads="together")
    experts = RoutedExperts(
        hidden=config.hidden,
        num=config.number("num_local_experts"),
        per_token=config.number("num_experts_per_tok"),
        features=config.number("intermediate_size"),
        block_correction="e_score_correction_bias",
        saved_block="block_sparse_moe",
        linears=("w1", "w3", "w2"),
    )
    return [Layer(config.hidden, mixer, experts)] * config.num_layers


def _rotary_dim(config: ConfigReader) -> int:
    """Returns the rotated features of a head, as releases or as transformers write them."""
    rotated = int(config.head_dim * config.rotary_factor)
    return config.number("rotary_dim", rotated) if config.rotary_factor == 1 else rotated


MINIMAX_M2 = Family(
    "MiniMaxM2",
    "minimax_m2",
    _layers,
    defaults={"partial_rotary_factor": None},
    aliases={"num_experts": "num_local_experts"},
)
