"""Many LoRA adapters on one frozen base. The output head's pair is applied by `heads`."""

from .adapter import Adapter
from .adapter_registry import AdapterRegistry
from .batch_plan import BatchPlan
from .lora_linear import LoraLinear, MergedLoraLinear
from .pair import LoraPair
from .segment import Segment
from .target import Target

__all__ = [
    "Adapter",
    "AdapterRegistry",
    "BatchPlan",
    "LoraLinear",
    "LoraPair",
    "MergedLoraLinear",
    "Segment",
    "Target",
]
