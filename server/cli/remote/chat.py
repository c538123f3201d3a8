"""`trainhouse chat`: talks to a model or checkpoint by its own chat template; answers are printed as they are drawn."""

import sys
from collections.abc import Iterator
from typing import Annotated

import httpx
import typer

from ..options import new_app
from ..output import for_terminal, print_json
from .sample import MaxTokens, Model, Seed, Temperature, TopP, streamed
from .server import Server, check_answer, through_server

app = new_app()

_COMMANDS = "/reset forgets the conversation, /undo the last exchange; an empty line or Ctrl-D ends"


@app.command()
@through_server
def chat(
    server: Server,
    model: Model,
    message: Annotated[list[str] | None, typer.Option("--message", "-m", help="Say this and end; repeatable.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
) -> None:
    """Talk to a model, a checkpoint or a live sampler. With --json: the conversation as one object, at its end."""
    asked = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    options = {name: value for name, value in asked.items() if value is not None}
    beginning = [{"role": "system", "content": system}] if system is not None else []
    conversation = list(beginning)
    with server.openai() as client:
        check_answer(client.get(f"models/{model}"))
        for said in message or _typed():
            if said == "/reset":
                conversation = list(beginning)
            elif said == "/undo":
                del conversation[max(len(beginning), len(conversation) - 2) :]
            else:
                conversation.append({"role": "user", "content": said})
                answer = _answer(client, {**options, "messages": conversation}, not server.as_json)
                conversation.append({"role": "assistant", "content": answer})
    if server.as_json:
        print_json({"model": model, "messages": conversation})


def _typed() -> Iterator[str]:
    """Yields what a person types, line by line."""
    is_person = sys.stdin.isatty()
    if is_person:
        print(_COMMANDS, file=sys.stderr)
    while True:
        try:
            line = input("> " if is_person else "")
        except EOFError:
            return
        if not line.strip():
            return
        yield line


def _answer(client: httpx.Client, body: dict[str, object], is_printed: bool) -> str:
    """Returns the answer, which may be ended by Ctrl-C."""
    pieces: list[str] = []
    try:
        for chunk in streamed(client, "chat/completions", body):
            for choice in chunk["choices"]:
                pieces.append(choice["delta"].get("content") or "")
                if is_printed:
                    print(for_terminal(pieces[-1]), end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    if is_printed:
        print()
    return "".join(pieces)
