"""Typed access to parsed JSON, and JSON numbers <-> arrays."""

import math
import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from .invalid import Invalid, shown

JsonObject: TypeAlias = dict[str, object]
"""An object as `json` reads and writes it."""


def json_object(value: object, what: str) -> JsonObject:
    if not isinstance(value, dict):
        raise Invalid(f"{what} must be an object, not {shown(value)}")
    return value


def json_list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise Invalid(f"{what} must be a list, not {shown(value)}")
    return value


def json_text(value: object, what: str) -> str:
    # JSON can spell half a surrogate pair, which no database or header takes.
    if not isinstance(value, str) or (not value.isascii() and re.search("[\ud800-\udfff]", value)):
        raise Invalid(f"{what} must be a string, not {shown(value)}")
    return value


def json_integer(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise Invalid(f"{what} must be an integer, not {shown(value)}")
    return value


def json_number(value: object, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e308:
        raise Invalid(f"{what} must be a number, not {shown(value)}")
    return float(value)


def json_boolean(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise Invalid(f"{what} must be true or false, not {shown(value)}")
    return value


def numeric_array(values: Sequence[object], integer: bool) -> np.ndarray:
    """A list, nested or not, as int64 or float32; never rounds a fraction to an integer."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise Invalid("nested lists must be rectangular") from None
    if array.size == 0:
        return array.astype(np.int64 if integer else np.float32)
    if integer and array.dtype.kind != "i":
        raise Invalid(f"expected 64-bit integers, not {shown(values[0])} ...")
    if array.dtype.kind not in "biuf":
        raise Invalid(f"expected numbers, not {shown(values[0])} ...")
    return array.astype(np.int64) if integer else to_float32(array)


def json_numbers(array: np.ndarray) -> list[float | None]:
    """Flat; what JSON cannot say is None."""
    values = array.ravel().tolist()
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return values
    return [value if math.isfinite(value) else None for value in values]


def to_float32(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)
