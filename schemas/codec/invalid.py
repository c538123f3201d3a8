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
vars(_BEGINNINGS).update(
    dict.fromkeys(("maxlist", "maxtuple", "maxdict"), 40) | dict.fromkeys(("maxstring", "maxlong", "maxother"), 200)
)
