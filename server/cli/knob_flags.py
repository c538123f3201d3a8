"""Knobs on the command line: their flags, their rows in a help text, and where their values are read from."""

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import Parameter
from itertools import groupby
from pathlib import Path
from typing import Any

from ..config.knob import Knob
from ..config.knob_values import ENVIRONMENT_PREFIX
from ..config.load import WORKERS_ARE_ON_RAY, Flags
from ..config.server_config import KNOBS, SECTION_OF
from ..files.state_lock import StartError, private_files
from ..store import DatabaseUnreachable
from .errors import CommandFailed
from .options import Status, knob_option, option, with_options

Sources = tuple[Flags, Mapping[str, str], Path | None]
"""The flags, the environment and the file to read knobs from."""

STATE_FLAGS = {
    "state_dir": "The server's --state-dir (.trainhouse).",
    "database_url": "The server's --database-url, if it has one.",
}


def reads_knobs(knobs: Iterable[Knob]) -> Callable[[Callable[..., Status]], Callable[..., Status]]:
    """Gives a command a flag for each knob; the command's first argument is the Sources."""
    return _with_flags([knob_option(knob) for knob in knobs], "TOML file of knobs.")


def reads_state(**more: str) -> Callable[[Callable[..., Status]], Callable[..., Status]]:
    """Gives a command the flags that locate a server's state, and `more`; its first argument is the Sources."""
    flags = [knob_option(KNOBS[name], help) for name, help in (STATE_FLAGS | more).items()]
    return _with_flags(flags, "The server's TOML file, if that sets them.")


def _with_flags(flags: Sequence[Parameter], of_config: str) -> Callable[[Callable[..., Status]], Callable[..., Status]]:
    def add(function: Callable[..., Status]) -> Callable[..., Status]:
        file = option("config", "--config", of_config, "FILE", Path | None)
        return with_options(_private(function), [*flags, file], _sources)

    return add


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
    flags = {name: value for name, value in values.items() if value and name in KNOBS}
    named = os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    return flags, os.environ, values["config"] or (Path(named) if named else None)


def nearest_flag(argument: str) -> str:
    if argument.startswith("--workers"):
        return f": {WORKERS_ARE_ON_RAY}"
    near = difflib.get_close_matches(argument.partition("=")[0], [knob.flag for knob in KNOBS.values()], n=1)
    return f": did you mean {near[0]}?" if near else ": see --help"


CONFIG_ROW = ("--config FILE", "TOML: max_lora_rank = 64 is --max-lora-rank 64")


def row(knob: Knob) -> tuple[str, str]:
    return f"{knob.flag} {knob.metavar}", knob.described


def rows_by_section(knobs: Iterable[Knob]) -> Iterator[tuple[str, str]]:
    """Yields a row for each knob, and a heading with no flag before each section."""
    yield CONFIG_ROW
    for section, own in groupby(knobs, lambda knob: SECTION_OF[knob.name]):
        yield "", f"\n[{section}]"
        yield from map(row, own)


def table(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max(len(flag) for flag, _ in rows)
    return "\n".join(f"  {flag:<{width}}  {text}" if flag else text for flag, text in rows)
