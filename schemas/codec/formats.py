"""The two formats of a body, by media type, and their parsers."""

import json

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


def parse_json(body: bytes) -> object:
    try:
        return json.loads(body)
    except RecursionError:
        raise Invalid("the body is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise Invalid(f"the body is not valid JSON: {error}") from None
