"""Full fine-tuning: models that have their own copy of all weights."""

from .weights import FullWeights

__all__ = ["FullWeights"]
