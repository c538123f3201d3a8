"""Limits the size of a request's fields. Payload (prompts, data, messages) has no limits here: it is bounded by the
size of the body (--max-body-bytes) and by the tenant's quotas."""

import json
import math
from itertools import islice
from reprlib import repr as shortened
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

MAX_ID, MAX_PATH, MAX_TEXT = 256, 1024, 4096
MAX_METADATA_BYTES = 8192
MAX_CONSTRAINT_BYTES = 1 << 18
MAX_TOKEN_IDS = 1 << 18
"""Chosen to cover the largest vocabularies."""

MAX_JSON_BYTES = 64 << 20
"""Parsed JSON takes more than ten times this size in memory."""

_PIECE = 256


def load_json(text: str | bytes) -> Any:
    """Parses JSON. Raises ValueError also for text that is nested too deeply, where json raises RecursionError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from None


class FirstErrorOnly(FailFast):
    """Stops validation at the first invalid element of a list: an error takes 2 KB, and building many of them blocks
    other requests.

    It is hashable because pydantic needs that in a union.
    """

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]


def first_error_only(most: int) -> WrapValidator:
    """Returns the counterpart of FirstErrorOnly for objects of up to `most` entries, validated in pieces up
    to the first piece with an error."""

    def in_pieces(entries: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(entries, dict) or len(entries) > most:
            return validate(entries)
        items = iter(entries.items())
        pieces = iter(lambda: dict(islice(items, _PIECE)), {})
        return {key: value for piece in pieces for key, value in validate(piece).items()}

    return WrapValidator(in_pieces)


def one_of(words: str) -> WrapValidator:
    """Gives a field of several types one error with these words; pydantic has one for each type."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            content = {"words": words + _wrong_element(error)}
            raise PydanticCustomError("none_of", "it should be {words}", content) from None

    return WrapValidator(check)


def _wrong_element(error: ValidationError) -> str:
    """Names the element that the type which accepts most of a list does not accept."""
    errors = [
        (tuple(part for part in each["loc"] if isinstance(part, int)), each) for each in error.errors(include_url=False)
    ]
    place, wrong = max(errors, key=lambda placed: placed[0])
    if not place or any(not at and not each["type"].endswith("_type") for at, each in errors):
        return ""
    return f"; element {'.'.join(map(str, place))} is {shortened(wrong['input'])}"


Id = Annotated[str, Field(max_length=MAX_ID)]
"""Identifies a session, model, sampler, request or project, or is a short name, such as an optimizer's."""

TtlSeconds = Annotated[int, Field(ge=3600, le=10 * 365 * 86400)]
"""The time for which a checkpoint is kept."""

Path = Annotated[str, Field(max_length=MAX_PATH)]
"""Names a checkpoint or a base model, which may be a hub id."""

Text = Annotated[str, Field(max_length=MAX_TEXT)]
"""Free text for people: a session's name, how it ended."""

Tags = Annotated[tuple[Id, ...], Field(max_length=64)]


def _json_size(value: object, most: int) -> int:
    """Returns the approximate size of a parsed value as JSON, in bytes. Counting stops as soon as it exceeds `most`.

    Raises ValueError for numbers that JSON, and therefore PostgreSQL, does not have.
    """
    size, rest = 0, [value]
    while rest and size <= most:
        each = rest.pop()
        size += 2
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            rest += [part for entry in each.items() for part in entry]
        elif isinstance(each, list | tuple):
            rest += each
        elif isinstance(each, float) and not math.isfinite(each):
            raise ValueError(f"JSON has no {each}: leave it out, or send it as a string")
        else:
            size += len(repr(each))
    return size


def _at_most(num_bytes: int) -> AfterValidator:
    def check(value: Any) -> Any:
        if value is not None and _json_size(value, num_bytes) > num_bytes:
            raise ValueError(f"it is longer than {num_bytes} bytes of JSON: shorten it")
        return value

    return AfterValidator(check)


def _json_object(num_bytes: int) -> WithJsonSchema:
    return WithJsonSchema({"type": "object", "maxProperties": num_bytes, "description": f"{num_bytes} bytes at most"})


Metadata = Annotated[dict[str, Any], _at_most(MAX_METADATA_BYTES), _json_object(MAX_METADATA_BYTES)]
"""A user's metadata of a session, a model or a checkpoint, which is stored and listed."""

StringMetadata = Annotated[
    dict[str, str],
    first_error_only(MAX_METADATA_BYTES),
    _at_most(MAX_METADATA_BYTES),
    _json_object(MAX_METADATA_BYTES),
]

ConstraintSchema = Annotated[dict[str, Any], _at_most(MAX_CONSTRAINT_BYTES), _json_object(MAX_CONSTRAINT_BYTES)]

Detail = Annotated[str, AfterValidator(lambda text: text[:MAX_TEXT])]
"""A reason, possibly with a traceback. It is truncated, because refusing it would refuse the request it explains."""
