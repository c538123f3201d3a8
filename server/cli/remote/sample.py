"""`trainhouse sample`: continues a text with a base model, a checkpoint or a live sampler, as it is drawn."""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated

import httpx
import typer

from ..options import new_app
from ..output import for_terminal, print_json
from .server import Server, check_answer, through_server

app = new_app()

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Served name, tinker:// path of a checkpoint, or id of a live sampler.")
]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens to draw.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="0 draws the most likely token (1).")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Draw from the most likely tokens of this share (1).")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same text.")]


@app.command()
@through_server
def sample(
    server: Server,
    model: Model,
    prompt: Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="Else standard input is read.")] = None,
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="How many continuations.")] = 1,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; repeatable.")] = None,
    seed: Seed = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="With --json: of each token.")] = False,
) -> None:
    """Continue a text, printed as it is drawn."""
    text = sys.stdin.read() if prompt is None else prompt
    asked = {"model": model, "prompt": text, "n": num, "max_tokens": max_tokens, "stop": stop or None, "seed": seed}
    asked |= {"temperature": temperature, "top_p": top_p, "logprobs": 0 if logprobs else None}
    body = {name: value for name, value in asked.items() if value is not None}
    with server.openai() as client:
        if server.as_json or num > 1:
            answer = client.post("completions", json=body)
            check_answer(answer)
            if server.as_json:
                print_json(answer.json())
                return
            print("\n---\n".join(for_terminal(choice["text"]) for choice in answer.json()["choices"]))
            return
        for chunk in streamed(client, "completions", body):
            print(for_terminal("".join(choice["text"] for choice in chunk["choices"])), end="", flush=True)
        print()


def streamed(client: httpx.Client, path: str, body: Mapping[str, object]) -> Iterator[dict[str, list]]:
    """Yields the chunks of an answer. Raises APIStatusError; ValueError if the server fails in the middle."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        check_answer(response)
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise ValueError(f"the answer broke off: {chunk['error'].get('message')}")
            yield chunk
