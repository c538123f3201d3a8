"""The two formats of a body, protobuf and JSON, by media type, and their parsers."""

import json
import re

from google.protobuf.message import DecodeError, Message

from .invalid import Invalid

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


def is_protobuf(content_type: str) -> bool:
    return _media_type(content_type) in (PROTOBUF, "application/protobuf")


def is_json(content_type: str) -> bool:
    media_type = _media_type(content_type)
    return media_type in ("", JSON) or media_type.endswith("+json")


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


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
        return json.loads(body.decode("utf-8-sig"))
    except RecursionError:
        raise Invalid("the body is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise Invalid(f"the body is not valid JSON: {error}") from None
