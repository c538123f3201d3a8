"""A pass over the model: the operations of many runs, forward and backward together."""

from .progress import Answer
from .runner import PassRunner

__all__ = ["Answer", "PassRunner"]
