"""`trainhouse view`: shows what is trained on, token by token, with the weights and advantages."""

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ....client.data import Datum
from ....client.tokenizer import TrainOn, load_directory
from ....schemas import training
from ....schemas.bounds import load_json
from ....schemas.errors import RequestError
from ...text.viewed_datum import ViewedDatum, data_of, view_datum
from ..options import new_app
from ..output import for_terminal, print_json, print_table
from .server import Server, through_server

app = new_app()


@app.command()
@through_server
def view(
    server: Server,
    source: Annotated[
        str, typer.Argument(metavar="FILE.jsonl|DATUM", help="File of data, chats or rows; or one as JSON; - to read.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Model or checkpoint of the server, for its tokenizer and chat template.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH_OR_HUB_ID", help="Tokenizer to load here instead, by transformers.")
    ] = None,
    first: Annotated[int, typer.Option(min=1, help="How many to show.")] = 3,
    skip: Annotated[int, typer.Option(min=0, help="How many to skip.")] = 0,
    train_on: Annotated[TrainOn, typer.Option(help="For chats: see Datum.from_chat.")] = "assistant",
    table: Annotated[bool, typer.Option("--table", help="One line for each token, also on a terminal.")] = False,
) -> None:
    """Show data as the model is trained on them: tokens that only are read are dim, others coloured by weight."""
    with _tokenizer(server, model, tokenizer) as loaded:
        data = itertools.islice(_data(source, loaded, train_on), skip, skip + first)
        viewed = [
            view_datum(datum, lambda token: f"{token} " if loaded is None else loaded.decode([token])) for datum in data
        ]
    if not viewed:
        raise ValueError(f"{source} has no datum, chat or row{f' behind the first {skip}' if skip else ''}")
    if server.as_json:
        print_json({"data": [one.as_json() for one in viewed]})
        return
    for number, one in enumerate(viewed, skip):
        print(f"{'' if number == skip else chr(10)}datum {number}: {one.summary}")
        if table or not sys.stdout.isatty():
            _print_rows(one)
        else:
            Console().print(coloured(one), highlight=False)


@contextmanager
def _tokenizer(server: Server, model: str | None, place: str | None) -> Iterator[Any]:
    """Yields a tokenizer, or None if none is named."""
    if model is not None and place is not None:
        raise typer.BadParameter("both --model and --tokenizer are given: leave one out")
    if place is not None:
        yield load_directory(place)
    elif model is not None:
        by_name = {"model_path" if model.startswith("tinker://") else "base_model": model}
        with server.client() as service:
            yield service.create_sampling_client(**by_name).get_tokenizer()
    else:
        yield None


def _data(source: str, tokenizer: Any, train_on: TrainOn) -> Iterator[training.Datum]:
    for place, text in _texts(source):
        try:
            value = load_json(text)
        except ValueError as error:
            forms = "view takes JSON, or a file of it with an object on each line"
            raise ValueError(f"{place} is not JSON: {error}; {forms}") from None
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                raise ValueError(f"{place} is {str(one)[:40]!r}: expected a datum, a chat or a row, as an object")
            try:
                yield from _of_object(one, tokenizer, train_on)
            except (ValueError, TypeError, RequestError) as error:
                raise ValueError(f"{place}: {error}") from None


def _texts(source: str) -> Iterator[tuple[str, str]]:
    """Yields pieces of JSON, each with its place."""
    if source.lstrip().startswith(("{", "[")):
        yield "the datum", source
    elif source.endswith(".json"):
        yield source, Path(source).read_text()
    else:
        with sys.stdin if source == "-" else Path(source).open() as lines:
            yield from ((f"{source}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip())


def _of_object(value: dict[str, Any], tokenizer: Any, train_on: TrainOn) -> Iterator[training.Datum]:
    """Yields the data of a request of forward_backward, a datum as REST takes it, or a chat or row of a dataset."""
    if (data := data_of(value)) is not None:
        yield from data
    elif tokenizer is None:
        raise ValueError("a chat or a row needs a tokenizer: name a served model with --model, or give --tokenizer")
    else:
        yield Datum.from_row(value, tokenizer, train_on)


def _print_rows(viewed: ViewedDatum) -> None:
    rows = [("", viewed.tokens[0], json.dumps(viewed.first, ensure_ascii=False), *[""] * len(viewed.columns))]
    for number, (token, text) in enumerate(zip(viewed.targets, viewed.texts, strict=True)):
        values = [f"{column[number]:.6g}" for column in viewed.columns.values()]
        rows.append((str(number), token, json.dumps(text, ensure_ascii=False), *values))
    print_table(("TARGET", "TOKEN", "TEXT", *viewed.columns), rows)


def coloured(viewed: ViewedDatum) -> Text:
    """Returns the text of the datum, with the colour of each token."""
    text = Text(for_terminal(viewed.first), "dim")
    for piece, value in zip(viewed.texts, viewed.significance, strict=True):
        text.append(for_terminal(piece).replace("\n", "↵\n"), _style(value))
    return text


def _style(value: float) -> str:
    """Returns a style for a share of the largest weight: green if the token is made likelier, red if less likely."""
    if value == 0:
        return "dim"
    strength = round(90 + 110 * min(abs(value), 1.0))
    return f"white on rgb(0,{strength // 2},0)" if value > 0 else f"white on rgb({strength},0,0)"
