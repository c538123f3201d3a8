"""`trainhouse view`: shows what is trained on, token by token, with the weights and advantages."""

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from ....client.chats import TrainOn
from ....client.data import Datum
from ....client.tokenizer import load_directory
from ....schemas import training
from ....schemas.codec import JSON, decode_forward_backward
from ....schemas.errors import RequestError
from ..options import new_app
from ..output import for_terminal, print_json, print_table
from .server import Server, through_server

app = new_app()

_SIGNIFICANT = ("advantages", "weights", "returns")
"""The input that colours the tokens: the first of these that a datum has."""


@dataclass(frozen=True)
class ViewedDatum:
    """A datum with the texts of its tokens.

    first: text of the first token, which is only read. texts: of the targets, [T]. columns: loss inputs, each [T].
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    first: str
    texts: Sequence[str]
    columns: Mapping[str, Sequence[float]]

    @property
    def significance(self) -> Sequence[float]:
        """Returns how much each target counts: 0 if it is not trained on; relative to the largest."""
        values = next((self.columns[name] for name in _SIGNIFICANT if name in self.columns), [1.0] * len(self.targets))
        most = max((abs(value) for value in values), default=0.0) or 1.0
        return [value / most for value in values]

    def as_json(self) -> dict[str, object]:
        rows = [
            {"token": token, "text": text, **{name: column[number] for name, column in self.columns.items()}}
            for number, (token, text) in enumerate(zip(self.targets, self.texts, strict=True))
        ]
        return {"first_token": self.tokens[0], "first_text": self.first, "targets": rows}


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
        viewed = [_viewed(datum, loaded) for datum in data]
    if server.as_json:
        print_json({"data": [one.as_json() for one in viewed]})
        return
    for number, one in enumerate(viewed, skip):
        print(f"{'' if number == skip else chr(10)}datum {number}: {_summary(one)}")
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
            value = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{place} is not JSON: {error}") from None
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
    data = value.get("forward_backward_input", value).get("data")
    if "model_input" in value or data:
        body = {"model_id": "view", "seq_id": 1, "loss_fn": "cross_entropy", "data": data or [value]}
        yield from decode_forward_backward(json.dumps(body).encode(), JSON).data
    elif tokenizer is None:
        raise ValueError("a chat or a row needs a tokenizer: name a served model with --model, or give --tokenizer")
    else:
        yield Datum.from_row(value, tokenizer, train_on)


def _viewed(datum: training.Datum, tokenizer: Any) -> ViewedDatum:
    targets = datum.loss_fn_inputs.get("target_tokens", datum.tokens[1:])
    flat = targets if targets.ndim == 1 else targets[:, 0]  # the likeliest target stands for several
    columns = {
        name: values.tolist()
        for name, values in datum.loss_fn_inputs.items()
        if name != "target_tokens" and values.shape == flat.shape
    }
    tokens, shown = datum.tokens.tolist(), np.asarray(flat).tolist()
    texts = [_text(token, tokenizer) for token in (tokens[0], *shown)]
    return ViewedDatum(tokens, shown, texts[0], texts[1:], columns)


def _text(token: int, tokenizer: Any) -> str:
    return f"{token} " if tokenizer is None else tokenizer.decode([token])


def _summary(viewed: ViewedDatum) -> str:
    trained = sum(value != 0 for value in viewed.significance)
    sums = [f"sum of {name} {sum(values):.6g}" for name, values in viewed.columns.items() if name in _SIGNIFICANT]
    return ", ".join((f"{len(viewed.tokens)} tokens", f"{trained} trained on", *sums))


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
