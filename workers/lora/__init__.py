"""Many LoRA adapters on one frozen base. The output head's pair is applied by `head`."""

from .adapter import Adapter, Target, Window
from .adapters import Adapters
from .linear import Segment, frozen_product, mkldnn_linear
from .pair import LoraPair

__all__ = ["Adapter", "Adapters", "LoraPair", "Segment", "Target", "Window", "frozen_product", "mkldnn_linear"]
