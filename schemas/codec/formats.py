"""The two formats of a body, protobuf and JSON, by media type, their parsers, and the rules that a body must obey.

Invalid is the error of a body that does not, a RequestError(400) to the client that sent it.
"""

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import BaseModel, ValidationError

from ..bounds import MAX_JSON_BYTES, load_json
from ..errors import InvalidBody, RequestError, UnknownField, expected, place_of, telling_errors
from ..training import IGNORE_UNKNOWN, Request, check_unknown, describe_unknown

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

PROMPT_SHAPE = '{"chunks": [{"type": "encoded_text", "tokens": [...]}]}'
_MAX_SHOWN = 5
_MAX_DESCRIBED = 1000
"""Limit on errors that are described: pydantic builds all of them, and a thousand block the event loop for 5 ms."""

Model = TypeVar("Model", bound=BaseModel)

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


def format_of(content_type: str) -> Literal["protobuf", "json"] | None:
    """Returns None for other formats."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in (PROTOBUF, "application/protobuf"):
        return "protobuf"
    return "json" if media_type in ("", JSON) or media_type.endswith("+json") else None


def parse_protobuf(message: Message, body: bytes) -> None:
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Invalid(f"the body is not a valid protobuf {type(message).__name__}: {error}") from None


# Matches one escape after the other, so that an escaped backslash begins none. A whole surrogate pair is fine.
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u0000|u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_SUSPECT = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")


def check_json_size(body: bytes, most_bytes: int = MAX_JSON_BYTES) -> None:
    """Raises RequestError 413 if the body is too large."""
    if len(body) > most_bytes:
        raise RequestError(f"the body has {len(body)} bytes of JSON; the limit is {most_bytes}: send less", 413)


def check_json_text(body: bytes) -> None:
    """Raises Invalid if a string or key of a JSON body contains NUL or half a surrogate pair.

    No database, header or response accepts these. They can only be written as escapes, or as bytes that are not UTF-8.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise Invalid(f"the body is not valid JSON: it is not UTF-8 at byte {error.start}") from None
    if _SUSPECT.search(body) is None:
        return
    for escape in _ESCAPES.finditer(body):
        if escape[1]:
            raise Invalid(
                f"the body has \\{escape[1].decode()} at byte {escape.start()}: strings must contain neither NUL nor "
                "half a surrogate pair, leave it out"
            )


def parse_json(body: bytes) -> object:
    check_json_text(body)
    try:
        return load_json(body.decode("utf-8-sig"))
    except ValueError as error:
        raise Invalid(f"the body is not valid JSON: {error}") from None


def decode_model(
    model: type[Model], body: bytes, most_bytes: int = MAX_JSON_BYTES, ignore_unknown: bool = False
) -> Model:
    """Decodes JSON.

    Args:
        ignore_unknown: drops fields that the model does not have instead of refusing them.
    Raises:
        RequestError: 400 naming each wrong field, its value and the problem, 413 for too much JSON; UnknownField for an
            unknown field.
    """
    check_json_size(body, most_bytes)
    with refused_with_400():
        check_json_text(body)
    try:
        decoded = model.model_validate_json(body, context=IGNORE_UNKNOWN if ignore_unknown else None)
    except ValidationError as error:
        if error.error_count() > _MAX_DESCRIBED:
            raise RequestError(f"bad request: {error.error_count()} fields of the body are wrong") from None
        errors = list(error.errors(include_url=False))
        if any(each["type"] == "unknown_name" for each in errors):
            raise UnknownField(describe_errors(errors), True) from None
        raise InvalidBody(describe_errors(errors)) from None
    if isinstance(decoded, Request):
        check_unknown(decoded, ignore_unknown)
    return decoded


def describe_errors(errors: list) -> str:
    """Describes pydantic's list of errors in one line."""
    described = list(dict.fromkeys(map(_describe, telling_errors(errors))))
    more = f"; and {len(described) - _MAX_SHOWN} more" if len(described) > _MAX_SHOWN else ""
    return f"bad request: {'; '.join(described[:_MAX_SHOWN])}{more}"


def _describe(error: dict) -> str:
    place = ".".join(shorten(str(part)) for part in place_of(error) if part != "body")
    if error["type"] in ("json_invalid", "json_type"):
        return f"the body is not valid JSON: {error.get('ctx', {}).get('error', error['msg'])}"
    if error["type"] == "missing":
        return f"{place or 'the body'} is missing"
    if error["type"] == "unknown_name":
        return error["msg"]
    if error["type"] == "extra_forbidden":
        return f"unknown field {place}: see /docs for the fields that exist"
    if error["type"].startswith("model_") and error["loc"][-1:] == ("prompt",):
        return f"prompt is {show_value(error['input'])}: send tokens, {PROMPT_SHAPE}"
    return f"{place or 'the body'} is {show_value(error['input'])}: {expected(error)}"
