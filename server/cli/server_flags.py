"""The server's options on the command line: their flags, their rows in a help text, and where values are read from."""

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from inspect import Parameter
from itertools import groupby
from pathlib import Path
from typing import Any

from ..config.load import WORKERS_ARE_ON_RAY
from ..config.option import Flags, Option
from ..config.option_values import ENVIRONMENT_PREFIX
from ..config.server_config import OPTIONS, SECTION_OF
from ..files.state_lock import StartError, private_files
from ..store import DatabaseUnreachable
from .errors import CommandFailed
from .options import Status, flag, server_flag, with_options

Sources = tuple[Flags, Mapping[str, str], Path | None]
"""The flags, the environment and the file to read options from."""

STATE_FLAGS = {
    "state_dir": "The server's --state-dir (.trainhouse).",
    "database_url": "The server's --database-url, if it has one.",
}


def reads_options(
    flags: Iterable[Parameter], of_config: str = "TOML file of options."
) -> Callable[[Callable[..., Status]], Callable[..., Status]]:
    """Gives a command these flags, and --config with these words; the command's first argument is the Sources."""
    file = flag("config", "--config", of_config, "FILE", Path | None)
    return lambda function: with_options(_private(function), [*flags, file], _sources)


def reads_state(**more: str) -> Callable[[Callable[..., Status]], Callable[..., Status]]:
    """Gives a command the flags that locate a server's state, and `more`; its first argument is the Sources."""
    flags = [server_flag(OPTIONS[name], help) for name, help in (STATE_FLAGS | more).items()]
    return reads_options(flags, "The server's TOML file, if that sets them.")


def _private(function: Callable[..., Status]) -> Callable[..., Status]:
    """Returns the command with files that only this user can read, and with the server's errors as CommandFailed."""

    @wraps(function)
    def command(*sources: Sources, **options: Any) -> Status:
        try:
            with private_files():
                return function(*sources, **options)
        except (StartError, DatabaseUnreachable) as error:
            raise CommandFailed(str(error)) from None

    return command


def _sources(values: Mapping[str, Any]) -> Sources:
    flags = {name: value for name, value in values.items() if value and name in OPTIONS}
    named = os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    return flags, os.environ, values["config"] or (Path(named) if named else None)


def nearest_flag(argument: str) -> str:
    if argument.startswith("--workers"):
        return f": {WORKERS_ARE_ON_RAY}"
    near = difflib.get_close_matches(argument.partition("=")[0], [each.flag for each in OPTIONS.values()], n=1)
    return f": did you mean {near[0]}?" if near else ": see --help"


CONFIG_ROW = ("--config FILE", "TOML: max_lora_rank = 64 is --max-lora-rank 64")


def row(option: Option) -> tuple[str, str]:
    return f"{option.flag} {option.metavar}", option.described


def rows_by_section() -> Iterator[tuple[str, str]]:
    """Yields a row for each option, and a heading with no flag before each section."""
    yield CONFIG_ROW
    for section, own in groupby(OPTIONS.values(), lambda each: SECTION_OF[each.name]):
        yield "", f"\n[{section}]"
        yield from map(row, own)


def table(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max(len(flag) for flag, _ in rows)
    return "\n".join(f"  {flag:<{width}}  {text}" if flag else text for flag, text in rows)
