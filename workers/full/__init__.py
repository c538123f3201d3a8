"""Full fine-tuning: models that have their own copy of all weights."""

from .full_models import FullModels
from .weights import FullWeights

__all__ = ["FullModels", "FullWeights"]
