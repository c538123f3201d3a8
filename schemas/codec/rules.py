"""Rules that a body must obey: known fields, and sparse tensors of a bounded size.

Invalid is the error of a body that does not, a RequestError(400) to the client that sent it.
"""

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ..errors import InvalidBody, UnknownField
from ..training import describe_unknown

MAX_DENSE_BYTES = 1 << 30
"""Maximum bytes that the sparse tensors of one request may take when made dense."""


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


@dataclass
class Rules:
    """The rules for one body. Each level is checked where it is decoded, so that the first error ends the decoding."""

    dense_bytes: int = MAX_DENSE_BYTES
    """Memory that sparse tensors may still take when made dense."""
    ignore_unknown: bool = False
    """Fields that this version does not know are dropped, which a newer SDK may have sent: they are refused else, since
    the model would be trained on something else."""
    was_accepted: bool = False
    """An earlier version accepted the body: what only later ones refuse is not refused."""

    def take_dense(self, num_bytes: int) -> None:
        self.dense_bytes -= num_bytes
        if self.dense_bytes < 0:
            raise Invalid(
                f"sparse tensors of one request exceed the limit of dense bytes by {-self.dense_bytes}: "
                "send fewer datums in one call, or narrower tensors"
            )

    def check_names(
        self, value: Mapping[str, object], kind: str, known: Iterable[str], changes_results: bool = True
    ) -> None:
        """Raises UnknownName for an unknown key of a JSON object. kind: what the object is."""
        if (unknown := value.keys() - known) and not self.ignore_unknown:
            raise UnknownName(describe_unknown(kind, min(unknown), known), changes_results)

    def check_fields(self, *messages: Message) -> None:
        """Raises UnknownName if a protobuf message has an unknown field. Nested messages are not checked."""
        for message in messages:
            if len(unknown := UnknownFieldSet(message)) and not self.ignore_unknown:
                known = ", ".join(f"{field.number} {field.name}" for field in message.DESCRIPTOR.fields)
                raise UnknownName(
                    f"{message.DESCRIPTOR.name} has no field {unknown[0].field_number}: it has {known}; a newer client "
                    "may have sent it"
                )
