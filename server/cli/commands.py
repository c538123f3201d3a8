"""The command line `trainhouse`: finds the module of a command when it is used, and reports errors in one line.

It imports nothing that an install of only the client lacks. Commands that need the server's packages name the extra to
install if these are missing.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from ... import __version__
from ...workers.protocol.plugins import plugin_rows
from .errors import FAILED, INTERRUPTED, WRONGLY_USED, CommandFailed, missing_package
from .output import print_error

COMMANDS = {
    "serve": ("serve", "Run a server."),
    "demo": ("demo", "Start a server and fine-tune a small model through it."),
    "keys": ("keys", "Create, list and revoke API keys."),
    "tenants": ("tenants", "List tenants with their keys, runs and checkpoints."),
    "runs": ("remote.runs", "List training runs, and show what they do."),
    "sessions": ("remote.sessions", "List sessions, and what is in them."),
    "checkpoints": ("remote.checkpoints", "List, publish and delete checkpoints."),
    "import": ("remote.import_adapter", "Upload an adapter saved by peft."),
    "export": ("remote.export", "Download a checkpoint for peft, transformers or vLLM."),
    "sample": ("remote.sample", "Continue a text with a model or checkpoint."),
    "chat": ("remote.chat", "Talk to a model or checkpoint."),
    "view": ("remote.view", "Show what is trained on, token by token."),
    "usage": ("remote.usage", "Show the limits of an API key and their use."),
    "workers": ("remote.workers", "Show what a server's workers hold."),
    "bench": ("checkup.bench", "Measure how fast a server trains and samples."),
    **plugin_rows("server.planning.commands", "COMMANDS"),
    "doctor": ("checkup.doctor", "Check this machine, and measure how fast it is."),
    "backup": ("backup", "Copy a server's state, while it runs or not."),
    "verify": ("verify", "Check a server's state, while it runs or not."),
}
"""The commands in the order of --help: the module relative to this package, and a summary."""


class Commands(TyperGroup):
    """Loads a command's module when the command is used."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and _loaded(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print(f"trainhouse {ctx.invoked_subcommand}: interrupted", file=sys.stderr)
            return INTERRUPTED


app = typer.Typer(cls=Commands, rich_markup_mode=None, context_settings={"help_option_names": ["--help", "-h"]})


def _print_version(is_given: bool) -> None:
    if is_given:
        print(f"trainhouse {__version__}")
        raise typer.Exit


@app.callback()
def trainhouse(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train and sample language models over HTTP."""


for _name, (_module, _summary) in COMMANDS.items():
    app.command(_name, help=_summary)(lambda: None)  # stands in for the command in --help


def _loaded(name: str) -> Any:
    try:
        command = get_command(import_module(f".{COMMANDS[name][0]}", __package__).app)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trainhouse"):
            raise
        raise missing_package(str(error.name), "server") from None
    command.name = name
    return command


def _words(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


_UNFITTING = ("No such option", "Missing argument", "Got unexpected extra argument")


def _with_usage(error: typer.TyperException) -> str:
    """Returns an error in the command line, with the usage of its command if what was given does not fit that."""
    message = error.format_message().removesuffix(" (Possible options: --help)")
    context = getattr(error, "ctx", None)
    if context is not None and message.startswith("Missing command"):
        return f"no command is given: {context.command_path} --help lists them"
    if context is None or message.endswith(("?", ")")) or not message.startswith(_UNFITTING):
        return message
    usage = " ".join(context.get_usage().split()).replace("Usage: ", "usage: ")
    if usage.endswith("COMMAND [ARGS]..."):  # of commands, which alone have options other than --help
        usage = usage.replace("[OPTIONS] COMMAND [ARGS]...", "COMMAND [ARGS]... [OPTIONS]")
    return f"{message.removesuffix('.')} ({usage})"


_OF_EVERY_SERVER = {"--base-url": 2, "--api-key": 2, "--profile": 2, "--json": 1}
"""The flags of `through_server`, which may also stand before a command: how many arguments each is."""


def _commands_first(given: Sequence[str]) -> list[str]:
    """Moves flags that name a server behind the command and its subcommand, which alone read them."""
    words: list[str] = []
    flags: list[str] = []
    rest = list(given)
    while rest and len(words) < 2:
        name, has_value, _ = rest[0].partition("=")
        if name in _OF_EVERY_SERVER:
            end = 1 if has_value else _OF_EVERY_SERVER[name]
            flags, rest = flags + rest[:end], rest[end:]
        elif rest[0].startswith("-"):
            break
        else:
            words.append(rest.pop(0))
    return [*words, *flags, *rest]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status, see errors.py."""
    given = _commands_first(sys.argv[1:] if arguments is None else arguments)
    try:
        return get_command(app).main(given, prog_name="trainhouse", standalone_mode=False) or 0
    except typer.TyperException as error:
        status, message = error.exit_code, _with_usage(error)
    except CommandFailed as error:
        status, message = error.status, str(error)
    except (ValueError, OSError) as error:
        from ..config.option_values import ConfigError  # imported late, as most commands need no configuration

        status, message = WRONGLY_USED if isinstance(error, ConfigError) else FAILED, _words(error)
    name = next((each for each in given if each in COMMANDS), "")
    print_error(name, message, status, "--json" in given)
    return status
