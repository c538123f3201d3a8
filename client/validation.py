"""Says what is wrong with an argument: pydantic's validation errors as readable ValueErrors, names that other libraries
use."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from reprlib import repr as shortened
from typing import Any, ParamSpec, TypeVar

from pydantic import ValidationError

P = ParamSpec("P")
T = TypeVar("T")

_MAX_REPORTED = 5

# pydantic appends the name of the type to the location of a field that accepts several types.
_BRANCHES = ("bool", "dict", "float", "int", "list", "str")


@contextmanager
def readable_validation_errors() -> Iterator[None]:
    """Converts a ValidationError of the block to a ValueError that names the first wrong fields, their values and the
    allowed ones."""
    try:
        yield
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # A field that accepts several types yields an error per type; those from inside the value are more helpful.
        places = [_place(each) for each in errors if _is_specific(each)]
        looked_into = {place[:end] for place in places for end in range(len(place) + 1)}
        telling = [each for each in errors if _is_specific(each) or _place(each) not in looked_into]
        words = list(dict.fromkeys(map(_words, telling)))
        more = [f"and {len(words) - _MAX_REPORTED} more"] if len(words) > _MAX_REPORTED else []
        raise ValueError("; ".join([*words[:_MAX_REPORTED], *more])) from None


def _is_specific(error: Mapping[str, Any]) -> bool:
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
    """Returns the location of an error as field names and list indices, without pydantic's type names."""
    return tuple(part for part in error["loc"] if isinstance(part, int) or _is_field(part))


def _is_field(part: str) -> bool:
    return part.isidentifier() and part.islower() and part not in _BRANCHES


def suggests(**remedies: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function refuse these keyword arguments with a TypeError that says what to write instead.

    Args:
        remedies: what other libraries name an argument -> what to write here.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name in remedies:
                    raise TypeError(f"{function.__name__} has no argument {name}: write {remedies[name]}")
            return function(*args, **kwargs)

        return call

    return decorate
