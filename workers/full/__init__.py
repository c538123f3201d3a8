"""Full fine-tuning: models whose weights are all their own."""

from .models import FullModels
from .weights import FullWeights

__all__ = ["FullModels", "FullWeights"]
