"""Invalid, the error that decoders raise, and its conversion to RequestError(400)."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import InvalidBody


class Invalid(ValueError):
    """Bytes or JSON that violate the protocol; a RequestError(400) if a client sent them."""


@contextmanager
def refused_with_400() -> Iterator[None]:
    try:
        yield
    except Invalid as error:
        raise InvalidBody(str(error), 400) from None


@contextmanager
def at_place(place: str) -> Iterator[None]:
    """Prefixes the message of an Invalid with its place in the request."""
    try:
        yield
    except Invalid as error:
        raise Invalid(f"{place}: {error}") from None


def show_value(value: object) -> str:
    return shorten(_BEGINNINGS.repr(value))


def shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


_BEGINNINGS = reprlib.Repr()
"""Formats only about 80 characters of a value: the whole text of a value of megabytes takes seconds."""
for _name, _most in {"list": 40, "tuple": 40, "dict": 40, "string": 200, "long": 200, "other": 200}.items():
    setattr(_BEGINNINGS, f"max{_name}", _most)
