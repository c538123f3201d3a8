"""The page that shows data as a model is trained on them, token by token."""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from ...schemas.bounds import MAX_PATH
from ...schemas.errors import RequestError
from ...schemas.training import Datum
from ..http.bodies import Decoder, decode_body, receive_body
from ..routes.services import ServicesDependency
from ..text.tokenizer import Tokenizer
from ..text.viewed_datum import ViewedDatum, data_of, view_datum
from .templates import CONSOLE, render
from .visitor import VisitorDependency, page

router = APIRouter(prefix=CONSOLE, include_in_schema=False)

_MAX_SHOWN = 20
_MAX_TOKENS = 20_000
"""Tokens of all data on a page, or numbers of their largest inputs: a browser shows a page of this size in a second."""
_MAX_DENSE_BYTES = 16 << 20


@router.get("/data")
async def show_data(services: ServicesDependency, visitor: VisitorDependency) -> HTMLResponse:
    return page(visitor, "data.html", models=list(services.dispatch.models))


@router.post("/data")
async def view_data(
    request: Request, services: ServicesDependency, model: Annotated[str, Query(max_length=MAX_PATH)] = ""
) -> HTMLResponse:
    """Shows the data of the request's body: JSON, or a line of JSON for each datum."""
    # As a whole: what reads it needs the tokenizer, which another process does not have.
    body = await decode_body(await receive_body(request), Decoder(bytes, math.inf))
    if model not in services.dispatch.models:
        served = ", ".join(services.dispatch.models)
        raise RequestError(f"the base model {model!r} is not served: choose one of {served}", 404)
    tokenizer = await services.tokenizers.get(model)
    return HTMLResponse(await services.tokenizers.run_in_thread(lambda: _rendered(body, tokenizer)))


def _rendered(body: bytes, tokenizer: Tokenizer) -> str:
    """Raises RequestError."""
    return render("viewed_data.html", shown=_viewed(body, tokenizer))


def _viewed(body: bytes, tokenizer: Tokenizer) -> list[ViewedDatum]:
    """Returns the first data of the body. Raises RequestError."""
    shown, num_tokens = [], 0
    for datum in islice(_data(body), _MAX_SHOWN):
        num_tokens += max([len(datum.tokens), *(values.size for values in datum.loss_fn_inputs.values())])
        if num_tokens > _MAX_TOKENS:
            most = f"the first {len(shown) + 1} data have {num_tokens} tokens, and a page shows at most {_MAX_TOKENS}"
            raise RequestError(f"{most}: show fewer, or use trainhouse view", 413)
        try:
            shown.append(view_datum(datum, tokenizer.name_of))
        except ValueError as error:
            raise RequestError(f"datum {len(shown)}: {error}") from None
    return shown


def _data(body: bytes) -> Iterator[Datum]:
    for place, text in _pieces(body):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{place} is not JSON: {error}") from None
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                raise RequestError(f"{place} is {str(one)[:40]!r}: expected a datum, as an object")
            if (data := data_of(one, _MAX_DENSE_BYTES)) is None:
                command = "trainhouse view FILE.jsonl --model MODEL"
                raise RequestError(
                    f"{place} is no datum, since it has no model_input. A chat or a row becomes one in the client: "
                    f"Datum.from_chat, Datum.from_row; or show the file by {command}"
                )
            yield from data


def _pieces(body: bytes) -> Sequence[tuple[str, str]]:
    """Returns pieces of JSON, each with its place: lines, if the first is an object of its own."""
    text = body.decode(errors="replace").strip()
    lines = [(f"line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    is_by_line = bool(lines) and lines[0][1].startswith("{") and lines[0][1].rstrip().endswith("}")
    return lines if is_by_line else [("the text", text)]
