"""Invalid, the error that decoders raise, and its conversion to RequestError(400)."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from ..errors import InvalidBody, UnknownField


class Invalid(ValueError):
    """Bytes or JSON that violate the protocol; a RequestError(400) if a client sent them."""

    def at(self, place: str) -> Self:
        """Prefixes the message with its place in the request."""
        self.args = (f"{place}: {self}",)
        return self


class UnknownName(Invalid):
    """Invalid because of an unknown field; see UnknownField for `changes_results`."""

    def __init__(self, message: str, changes_results: bool = True) -> None:
        super().__init__(message)
        self.changes_results = changes_results


@contextmanager
def refused_with_400() -> Iterator[None]:
    try:
        yield
    except UnknownName as error:
        raise UnknownField(str(error), error.changes_results) from None
    except Invalid as error:
        raise InvalidBody(str(error), 400) from None


@contextmanager
def at_place(place: str) -> Iterator[None]:
    try:
        yield
    except Invalid as error:
        raise error.at(place) from None


def show_value(value: object) -> str:
    return shorten(_BEGINNINGS.repr(value))


def shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


_BEGINNINGS = reprlib.Repr()
"""Formats only about 80 characters of a value: the whole text of a value of megabytes takes seconds."""
for _name, _most in {"list": 40, "tuple": 40, "dict": 40, "string": 200, "long": 200, "other": 200}.items():
    setattr(_BEGINNINGS, f"max{_name}", _most)
