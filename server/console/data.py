"""The page that shows data as a model is trained on them, token by token."""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic_core import from_json

from ...schemas.bounds import MAX_PATH
from ...schemas.chats.weighted import TrainOn, weighted_row
from ...schemas.errors import InvalidBody, RequestError
from ...schemas.training import Datum
from ..http.bodies import Decoder, decode_body, receive_body
from ..routes.services import ServicesDependency
from ..text.tokenizer import Tokenizer
from ..text.viewed_datum import ViewedDatum, data_of, view_datum
from .paths import CONSOLE
from .templates import render
from .visitor import VisitorDependency, page

router = APIRouter(prefix=CONSOLE, include_in_schema=False)

_MAX_SHOWN = 20
_MAX_TOKENS = 20_000
"""Tokens of all data on a page, or numbers of their largest inputs: a browser shows a page of this size in a second."""
_MAX_DENSE_BYTES = 16 << 20
_MAX_WRITTEN = 4 << 20
"""Characters of a page's chats, each times its messages: a template writes the chat again for each answer."""


@router.get("/data")
async def show_data(services: ServicesDependency, visitor: VisitorDependency) -> HTMLResponse:
    return page(visitor, "data.html", models=list(services.dispatch.models))


@router.post("/data")
async def view_data(
    request: Request,
    services: ServicesDependency,
    visitor: VisitorDependency,
    model: Annotated[str, Query(max_length=MAX_PATH)] = "",
    train_on: TrainOn = "assistant",
) -> HTMLResponse:
    """Shows the data, chats and rows of the request's body: JSON, or a line of JSON for each."""
    # As a whole: what reads it needs the tokenizer, which another process does not have.
    body = await decode_body(await receive_body(request), Decoder(bytes, math.inf))
    if model not in services.dispatch.models:
        served = ", ".join(services.dispatch.models)
        raise RequestError(f"the base model {model!r} is not served: choose one of {served}", 404)
    tokenizer = await services.tokenizers.get(model)
    shown = await services.tokenizers.run_in_thread(
        visitor.tenant.id, lambda: render("viewed_data.html", shown=_viewed(body, tokenizer, train_on))
    )
    return HTMLResponse(shown)


def _viewed(body: bytes, tokenizer: Tokenizer, train_on: TrainOn) -> list[ViewedDatum]:
    """Returns the first data of the body. Raises RequestError."""
    shown, num_tokens = [], 0
    for datum in islice(_data(body, tokenizer, train_on), _MAX_SHOWN):
        num_tokens += max([len(datum.tokens), *(values.size for values in datum.loss_fn_inputs.values())])
        if num_tokens > _MAX_TOKENS:
            most = f"the first {len(shown) + 1} data have {num_tokens} tokens, and a page shows at most {_MAX_TOKENS}"
            raise RequestError(f"{most}: show fewer, or use trainhouse view", 413)
        try:
            shown.append(view_datum(datum, tokenizer.name_of))
        except ValueError as error:
            raise RequestError(f"datum {len(shown)}: {error}") from None
    return shown


def _data(body: bytes, tokenizer: Tokenizer, train_on: TrainOn) -> Iterator[Datum]:
    num_written = 0
    for place, text in _pieces(body):
        try:
            value = from_json(text)
        except ValueError as error:
            raise RequestError(f"{place} is not JSON: {error}") from None
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                raise RequestError(f"{place} is {str(one)[:40]!r}: expected a datum, a chat or a row, as an object")
            if (data := data_of(one, _MAX_DENSE_BYTES)) is not None:
                yield from data
                continue
            num_messages = sum(len(each) for each in one.values() if isinstance(each, list))
            num_written += len(json.dumps(one)) * (1 + num_messages)
            if num_written > _MAX_WRITTEN:
                raise RequestError(f"{place}: the chats are too long for a page: use trainhouse view", 413)
            try:
                yield weighted_row(one, tokenizer.chats, train_on).datum
            except (ValueError, TypeError) as error:
                raise InvalidBody(f"{place}: {error}") from None


def _pieces(body: bytes) -> Sequence[tuple[str, str]]:
    """Returns pieces of JSON, each with its place: lines, if the first is an object of its own."""
    text = body.decode(errors="replace").strip()
    lines = [(f"line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    is_by_line = bool(lines) and lines[0][1].startswith("{") and lines[0][1].rstrip().endswith("}")
    return lines if is_by_line else [("the text", text)]
