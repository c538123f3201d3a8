"""Converts arrays to the dtypes that losses take."""

import numpy as np

from .invalid import Invalid
from .values import to_float32


def is_integer_input(name: str) -> bool:
    return name == "target_tokens"


def as_loss_input(name: str, array: np.ndarray) -> np.ndarray:
    """Returns target_tokens as int64, and any other input as float32."""
    if not is_integer_input(name):
        return to_float32(array)
    if array.dtype.kind == "f":
        raise Invalid(f"{name} must be int64, not {array.dtype.name}")
    return array.astype(np.int64, copy=False)
