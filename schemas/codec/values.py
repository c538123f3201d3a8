"""Typed access to parsed JSON, and JSON text of arrays in pieces."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .formats import Invalid, show_value

JsonObject: TypeAlias = dict[str, object]
"""A JSON object as the `json` module reads and writes it."""


_PIECE_CELLS = 1 << 14
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class JsonRows:
    """A JSON list that is built in pieces.

    entries: returns the entries from start to stop. width: how many numbers each entry has.
    """

    num: int
    entries: Callable[[int, int], Sequence[object]]
    width: int = 1


def rows_of(array: np.ndarray) -> JsonRows:
    """Returns the array's numbers, flattened; those that JSON cannot represent become None."""
    flat = array.ravel()

    def entries(start: int, stop: int) -> list[float | None]:
        values = flat[start:stop].tolist()
        if flat.dtype.kind != "f" or np.isfinite(flat[start:stop]).all():
            return values
        return [value if math.isfinite(value) else None for value in values]

    return JsonRows(flat.size, entries)


def without_rows(value: object) -> object:
    """Replaces each JsonRows in the value by a list."""
    match value:
        case JsonRows():
            return list(value.entries(0, value.num))
        case dict():
            return {key: without_rows(entry) for key, entry in value.items()}
        case list():
            return [without_rows(entry) for entry in value]
        case _:
            return value


def json_pieces(value: object) -> Iterator[bytes]:
    """Yields the JSON text of a value with JsonRows; each piece is quick to build, so the event loop is not blocked
    for long.
    """
    waiting, num_bytes = [], 0
    for piece in _texts(value):
        waiting.append(piece)
        num_bytes += len(piece)
        if num_bytes >= _PIECE_BYTES:
            yield "".join(waiting).encode()
            waiting, num_bytes = [], 0
    if waiting:
        yield "".join(waiting).encode()


def _texts(value: object) -> Iterator[str]:
    match value:
        case JsonRows():
            yield "["
            step = max(1, _PIECE_CELLS // max(1, value.width))
            for start in range(0, value.num, step):
                text = _text(value.entries(start, min(start + step, value.num)))
                yield f"{',' if start else ''}{text[1:-1]}"
            yield "]"
        case dict():
            yield "{"
            for number, (key, entry) in enumerate(value.items()):
                yield f"{',' if number else ''}{_text(key)}:"
                yield from _texts(entry)
            yield "}"
        case list():
            yield "["
            for number, entry in enumerate(value):
                yield "," if number else ""
                yield from _texts(entry)
            yield "]"
        case _:
            yield _text(value)


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def json_object(value: object, what: str) -> JsonObject:
    if not isinstance(value, dict):
        raise Invalid(f"{what} must be an object, not {show_value(value)}")
    return value


def json_list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise Invalid(f"{what} must be a list, not {show_value(value)}")
    return value


def json_text(value: object, what: str) -> str:
    # JSON can spell half a surrogate pair, which no database or header takes.
    if not isinstance(value, str) or (not value.isascii() and re.search("[\ud800-\udfff]", value)):
        raise Invalid(f"{what} must be a string, not {show_value(value)}")
    return value


def json_integer(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise Invalid(f"{what} must be an integer, not {show_value(value)}")
    return value


def json_number(value: object, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e308:
        raise Invalid(f"{what} must be a number, not {show_value(value)}")
    return float(value)


def json_boolean(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise Invalid(f"{what} must be true or false, not {show_value(value)}")
    return value
