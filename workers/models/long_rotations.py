"""Gives a model with longrope one set of rotations for all lengths, as vLLM does.

transformers takes other frequencies for a sequence beyond the original length than for a shorter one. Then keys in a
cache, and tokens of a prefix, would rotate otherwise than in a longer pass.
"""

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_KIND = "longrope"


def rotate_alike(trunk: nn.Module, longest: int | None) -> None:
    """Makes our layers and transformers' modules rotate by the frequencies for sequences of the longest context.

    Those for contexts up to the original length are the module's own. Ding et al., LongRoPE (2024),
    https://arxiv.org/abs/2402.13753.

    Args:
        longest: in tokens; None if it is not known.
    """
    rotary: Any = getattr(trunk, "rotary_emb", None)
    if longest is None or getattr(rotary, "rope_type", None) != _KIND:
        return
    if longest > rotary.config.rope_parameters["original_max_position_embeddings"]:
        frequencies, _ = ROPE_INIT_FUNCTIONS[_KIND](rotary.config, rotary.inv_freq.device, seq_len=longest)
        for each in (rotary.inv_freq, rotary.original_inv_freq):
            each.copy_(frequencies)
