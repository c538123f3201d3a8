"""Many LoRA adapters on one frozen base. The output head's pair is applied by `head`."""

from .adapter import Adapter, Target, Window
from .adapters import Adapters
from .linear import LoraLinear, MergedLoraLinear, Segment, frozen_product, mkldnn_linear
from .pair import LoraPair
from .residency import Residency

__all__ = [
    "Adapter",
    "Adapters",
    "LoraLinear",
    "LoraPair",
    "MergedLoraLinear",
    "Residency",
    "Segment",
    "Target",
    "Window",
    "frozen_product",
    "mkldnn_linear",
]
