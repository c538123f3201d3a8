"""What a decoder raises, and how a client comes to hear of it."""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import RequestError


class Invalid(ValueError):
    """Bytes or JSON that are not what the protocol says; RequestError(400) where a client sent them."""


@contextmanager
def refused_with_400() -> Iterator[None]:
    try:
        yield
    except Invalid as error:
        raise RequestError(str(error), 400) from None


@contextmanager
def at_place(place: str) -> Iterator[None]:
    """Says where in the request an Invalid arose."""
    try:
        yield
    except Invalid as error:
        raise Invalid(f"{place}: {error}") from None


def shown(value: object) -> str:
    return shorten(_BEGINNINGS.repr(value))


def shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


_BEGINNINGS = reprlib.Repr()
"""Looks no further than 80 characters reach: the whole text of a value of megabytes takes seconds."""
for _name, _most in {"list": 40, "tuple": 40, "dict": 40, "string": 200, "long": 200, "other": 200}.items():
    setattr(_BEGINNINGS, f"max{_name}", _most)
