"""Decodes JSON bodies into pydantic models, and describes validation errors."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ..bounds import MAX_JSON_BYTES, check_json_size
from ..errors import RequestError
from .formats import check_json_text
from .invalid import refused_with_400, shorten, show_value

PROMPT_SHAPE = '{"chunks": [{"type": "encoded_text", "tokens": [...]}]}'
_MOST_SHOWN = 5
_MOST_DESCRIBED = 1000
"""Limit on errors that are described: pydantic builds all of them, and a thousand block the event loop for 5 ms."""

Model = TypeVar("Model", bound=BaseModel)


def decode_model(model: type[Model], body: bytes, most_bytes: int = MAX_JSON_BYTES) -> Model:
    """Raises RequestError: 400 naming each wrong field, its value and the problem, 413 for too much JSON."""
    check_json_size(body, most_bytes)
    with refused_with_400():
        check_json_text(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > _MOST_DESCRIBED:
            raise RequestError(f"bad request: {error.error_count()} fields of the body are wrong") from None
        raise RequestError(describe_errors(list(error.errors(include_url=False)))) from None


def describe_errors(errors: list) -> str:
    """Describes pydantic's list of errors in one line."""
    shown = "; ".join(_describe(error) for error in errors[:_MOST_SHOWN])
    more = f"; and {len(errors) - _MOST_SHOWN} more" if len(errors) > _MOST_SHOWN else ""
    return f"bad request: {shown}{more}"


def _describe(error: dict) -> str:
    place = ".".join(shorten(str(part)) for part in error["loc"] if part != "body")
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
    return f"{place or 'the body'} is {show_value(error['input'])}: {error['msg']}"
