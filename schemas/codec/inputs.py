"""The dtypes that losses take."""

import numpy as np

from .invalid import Invalid
from .values import to_float32


def is_integer_input(name: str) -> bool:
    return name == "target_tokens"


def as_loss_input(name: str, array: np.ndarray) -> np.ndarray:
    """int64 for target_tokens, float32 for everything else."""
    if not is_integer_input(name):
        return to_float32(array)
    if array.dtype.kind == "f":
        raise Invalid(f"{name} must be int64, not {array.dtype.name}")
    return array.astype(np.int64, copy=False)
