"""Phi-3 and Phi-4, whose projections of one input are one matrix: https://arxiv.org/abs/2404.14219.

Adapters have the sizes of these matrices, as in peft; tp divides queries, keys and values, or gates and ups,
separately.
"""

from collections.abc import Sequence

from ..parts import Layer
from .config_reader import ConfigReader
from .family import Family, attention, dense


def _layers(config: ConfigReader) -> Sequence[Layer]:
    mixer = attention(config, is_fused=True, window=config.window)
    return [Layer(config.hidden, mixer, dense(config, is_fused=True))] * config.num_layers


PHI3 = Family("Phi3", "phi3", _layers, defaults={"partial_rotary_factor": 1.0})
