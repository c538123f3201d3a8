"""Many LoRA adapters on one frozen base. The output head's pair is applied by `heads`."""

from .adapter import Adapter
from .adapters import Adapters
from .linear import LoraLinear, MergedLoraLinear
from .pair import LoraPair
from .plan import Plan
from .segment import Segment
from .target import Target

__all__ = [
    "Adapter",
    "Adapters",
    "LoraLinear",
    "LoraPair",
    "MergedLoraLinear",
    "Plan",
    "Segment",
    "Target",
]
