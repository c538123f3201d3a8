"""Many LoRA adapters on one frozen base. The output head's pair is applied by `head`."""

from .adapter import Adapter, Window
from .adapters import Adapters
from .layout import Target
from .linear import LoraLinear, MergedLoraLinear
from .pair import LoraPair
from .plan import Plan
from .residency import Residency
from .segment import Segment

__all__ = [
    "Adapter",
    "Adapters",
    "LoraLinear",
    "LoraPair",
    "MergedLoraLinear",
    "Plan",
    "Residency",
    "Segment",
    "Target",
    "Window",
]
