"""The two formats of a body, protobuf and JSON, by media type, and their parsers, also into pydantic models."""

import re
from typing import Literal, TypeVar

from google.protobuf.message import DecodeError, Message
from pydantic import BaseModel, ValidationError

from ..bounds import MAX_JSON_BYTES, check_json_size, load_json
from ..errors import InvalidBody, RequestError, UnknownField, expected, place_of, telling_errors
from ..training import IGNORE_UNKNOWN, Request, drop_unknown, refuse_unknown
from .rules import Invalid, refused_with_400, shorten, show_value

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

PROMPT_SHAPE = '{"chunks": [{"type": "encoded_text", "tokens": [...]}]}'
_MAX_SHOWN = 5
_MAX_DESCRIBED = 1000
"""Limit on errors that are described: pydantic builds all of them, and a thousand block the event loop for 5 ms."""

Model = TypeVar("Model", bound=BaseModel)


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
        (drop_unknown if ignore_unknown else refuse_unknown)(decoded)
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
