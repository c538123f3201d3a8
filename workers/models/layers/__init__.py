"""Runs the parts of decoder layers (see ../../shapes/parts) on transformers' modules, a file for each kind of mixer."""

from .decoder_layer import DecoderLayer, is_recognised
from .expert_weights import activation_of
from .experts import GroupedExperts
from .norms import norm_of
from .token_inputs import TokenInputs

__all__ = [
    "DecoderLayer",
    "GroupedExperts",
    "TokenInputs",
    "activation_of",
    "is_recognised",
    "norm_of",
]
