"""`trainhouse`, and `python -m trainhouse.server`: finds the program that a command is, and runs it.

Nothing is imported here that an install of the client alone does not have: `export` and `import` need no more, `plan`
does not either, and what needs the server's packages says which extra has them.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from ..schemas.version import VERSION
from .cli.plan import main as plan
from .cli.preflight import refused

FAILED = 1
INTERRUPTED = 130

COMMANDS = {
    "serve": "run a server",
    "workers": "keep workers, for servers that come and go",
    "keys": "create, list and revoke API keys",
    "backup": "copy the state of a server, running or not, so that one can start on it",
    "verify": "look through the state of a server, running or not, for what is damaged",
    "plan": "the memory of each rank of a layout, before anything is loaded",
    "import": "bring an adapter that peft has saved to a running server",
    "export": "fetch a checkpoint from a running server, as peft, transformers or vLLM loads it",
    "demo": "fine-tune a small model through a server of its own",
}
_OF_THE_CLIENT = {"import": "client.import_adapter", "export": "client.export_checkpoint"}

Program = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 when the command failed, 2 when it was wrongly used, 130 when Ctrl-C ended it."""
    given = sys.argv[1:] if arguments is None else arguments
    command = _parser().parse_args(given[:1]).command
    try:
        return _program(command)(given[1:])
    except KeyboardInterrupt:
        print(f"trainhouse {command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "trainhouse", description="Train and sample language models over HTTP.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"trainhouse {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def _program(command: str) -> Program:
    if command == "plan":
        return plan
    if command in _OF_THE_CLIENT:
        return partial(_become, _OF_THE_CLIENT[command])
    return partial(_of_the_server, command)


def _become(module: str, arguments: Sequence[str]) -> NoReturn:
    """No part of the server: a program of its own, in this process."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"trainhouse.{module}", *arguments])


def _of_the_server(command: str, arguments: Sequence[str]) -> int:
    # Before the server's packages are loaded, which takes seconds.
    if command == "serve" and (status := refused(arguments)):
        return status
    try:
        run = _loaded(command)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trainhouse"):
            raise
        extra = "server,demo" if command == "demo" else "server"
        hint = f"pip install 'trainhouse[{extra}]', in a checkout pip install -c deploy/constraints.txt '.[{extra}]'"
        print(f"trainhouse {command}: error: the package {error.name} is not installed: {hint}", file=sys.stderr)
        return FAILED
    return run(arguments)


def _loaded(command: str) -> Program:
    """Raises ModuleNotFoundError where a package is missing."""
    if command == "demo":
        from .cli.demo import run_demo

        return run_demo
    from .cli.commands import main as run

    return lambda arguments: run([command, *arguments])


if __name__ == "__main__":
    raise SystemExit(main())
