"""Gives a model with longrope or dynamic scaling one set of rotations for all lengths, as vLLM does.

transformers takes other frequencies for a sequence beyond the original length than for a shorter one. Then keys in a
cache, tokens of a prefix, and those of shorter sequences in the same pass would rotate otherwise than in a longer one.
"""

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def rotate_alike(trunk: nn.Module, longest: int | None) -> None:
    """Makes our layers and transformers' modules rotate all sequences by the same frequencies: with longrope those for
    the longest context, with dynamic those for the original length times the factor.

    Contexts up to the original length have the module's own. Ding et al., LongRoPE (2024),
    https://arxiv.org/abs/2402.13753.

    Args:
        longest: in tokens; None if it is not known.
    """
    rotary: Any = getattr(trunk, "rotary_emb", None)
    if longest is None:
        return
    match getattr(rotary, "rope_type", None):
        case "longrope":
            if longest > rotary.config.rope_parameters["original_max_position_embeddings"]:
                _rotate_as(rotary, longest)
        case "dynamic":
            original = rotary.config.max_position_embeddings
            if longest > original:
                reach = int(original * rotary.config.rope_parameters["factor"])
                _rotate_as(rotary, reach)
                rotary.max_seq_len_cached = rotary.original_max_seq_len = reach


def _rotate_as(rotary: Any, num_tokens: int) -> None:
    """Sets the frequencies for sequences of this length."""
    frequencies, _ = ROPE_INIT_FUNCTIONS[rotary.rope_type](rotary.config, rotary.inv_freq.device, seq_len=num_tokens)
    for each in (rotary.inv_freq, rotary.original_inv_freq):
        each.copy_(frequencies)
