"""Many LoRA adapters on one frozen base. The output head's pair is applied by `heads`."""

from .adapter import Adapter, LoraPair
from .batch_plan import BatchPlan
from .lora_layers import LoraLayers
from .lora_linear import LoraLinear, MergedLoraLinear
from .segment import Segment
from .target import Target

__all__ = [
    "Adapter",
    "BatchPlan",
    "LoraLayers",
    "LoraLinear",
    "LoraPair",
    "MergedLoraLinear",
    "Segment",
    "Target",
]
