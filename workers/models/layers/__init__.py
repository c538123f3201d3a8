"""Runs the parts of decoder layers (see ../../shapes/parts) on transformers' modules, one file for each kind."""

from .decoder_layer import DecoderLayer, is_recognised
from .experts import RoutedExperts, is_plain_swiglu
from .merge import Merge
from .norms import add_norm, norm_of

__all__ = ["DecoderLayer", "Merge", "RoutedExperts", "add_norm", "is_plain_swiglu", "is_recognised", "norm_of"]
