"""Values that a request does not take, in words."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from reprlib import repr as shortened
from typing import Any

from pydantic import ValidationError

_MOST_TOLD = 5

# What pydantic puts behind a field that may be of several types.
_BRANCHES = ("bool", "dict", "float", "int", "list", "str")


@contextmanager
def refused_in_words() -> Iterator[None]:
    """Raises ValueError where pydantic refuses what the block makes: the first fields, their values and what may be
    there."""
    try:
        yield
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # Where a field may be of several types, each says what is wrong: one that has looked inside says more.
        places = [_place(each) for each in errors if _is_telling(each)]
        looked_into = {place[:end] for place in places for end in range(len(place) + 1)}
        telling = [each for each in errors if _is_telling(each) or _place(each) not in looked_into]
        words = list(dict.fromkeys(map(_words, telling)))
        more = [f"and {len(words) - _MOST_TOLD} more"] if len(words) > _MOST_TOLD else []
        raise ValueError("; ".join([*words[:_MOST_TOLD], *more])) from None


def _is_telling(error: Mapping[str, Any]) -> bool:
    return not error["type"].endswith("_type")


def _words(error: Mapping[str, Any]) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "unknown_name":
        return error["msg"]
    place = ".".join(map(str, _place(error)))
    meaning = error["msg"].replace("Input should", "it should", 1)
    return f"{place} is {shortened(error['input'])}: {meaning}"


def _place(error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Fields and numbers in lists, without branches of types."""
    return tuple(part for part in error["loc"] if isinstance(part, int) or _is_field(part))


def _is_field(part: str) -> bool:
    return part.isidentifier() and part.islower() and part not in _BRANCHES
