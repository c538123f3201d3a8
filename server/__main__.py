"""Command-line entry point (`trainhouse`, `python -m trainhouse.server`): dispatches each command to its program.

It imports nothing that an install of only the client lacks: `export`, `import` and `plan` need no more. Commands that
need the server's packages name the extra to install if these are missing.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from ..schemas.version import VERSION
from .cli.plan import main as plan

FAILED = 1
INTERRUPTED = 130

COMMANDS = {
    "serve": "run a server",
    "workers": None,  # removed; names what replaces it
    "keys": "create, list and revoke API keys",
    "backup": "copy the state of a server, running or not, so that a server can start from the copy",
    "verify": "check the state of a server, running or not, for damage",
    "plan": "estimate the memory per rank of a layout without loading anything",
    "import": "upload an adapter saved by peft to a running server",
    "export": "download a checkpoint from a running server, in the format of peft, transformers or vLLM",
    "demo": "start a server and fine-tune a small model through it",
}
_CLIENT_MODULES = {"import": "client.import_adapter", "export": "client.export_checkpoint"}

Program = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0; 1 if it failed; 2 for wrong usage; 130 if Ctrl-C ended it."""
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
        commands.add_parser(name, add_help=False, **({} if summary is None else {"help": summary}))
    return parser


def _program(command: str) -> Program:
    if command == "plan":
        return plan
    if command in _CLIENT_MODULES:
        return partial(_exec_client_program, _CLIENT_MODULES[command])
    return partial(_run_server_program, command)


def _exec_client_program(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process with the client's program."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"trainhouse.{module}", *arguments])


def _run_server_program(command: str, arguments: Sequence[str]) -> int:
    try:
        run = _load_program(command)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trainhouse"):
            raise
        extra = "server,demo" if command == "demo" else "server"
        hint = f"pip install 'trainhouse[{extra}]', in a checkout pip install -c deploy/constraints.txt '.[{extra}]'"
        print(f"trainhouse {command}: error: the package {error.name} is not installed: {hint}", file=sys.stderr)
        return FAILED
    return run(arguments)


def _load_program(command: str) -> Program:
    """Raises ModuleNotFoundError if a package is missing."""
    if command == "demo":
        from .cli.demo import run_demo

        return run_demo
    from .cli.commands import main as run

    return lambda arguments: run([command, *arguments])


if __name__ == "__main__":
    raise SystemExit(main())
