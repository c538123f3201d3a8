"""Knobs on the command line: their flags, their rows in a help text, and where their values are read from."""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from ..config.knob import Knob
from ..config.knob_values import ENVIRONMENT_PREFIX
from ..config.load import WORKERS_ARE_ON_RAY, Flags
from ..config.server_config import KNOBS, SECTION_OF

FAILED = 1
WRONGLY_USED = 2

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_knobs(parser: argparse.ArgumentParser, knobs: Iterable[Knob]) -> None:
    parser.add_argument("--config", type=Path)
    for knob in knobs:
        action = "store" if knob.kind.separator is None else "append"
        parser.add_argument(knob.flag, dest=knob.name, action=action, default=argparse.SUPPRESS)


def add_state_flags(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]) -> None:
    """Adds the flags that locate a server's state."""
    parser.add_argument("--state-dir", default=argparse.SUPPRESS, help="the server's --state-dir (.trainhouse)")
    parser.add_argument("--database-url", default=argparse.SUPPRESS, help="the server's --database-url, if it has one")
    parser.add_argument("--config", type=Path, help="the server's TOML file, if that sets them")
    parser.set_defaults(run=command)


def given(options: argparse.Namespace) -> tuple[Flags, Mapping[str, str], Path | None]:
    """Returns the flags, the environment and the file to read knobs from."""
    flags = {name: value for name, value in vars(options).items() if name in KNOBS}
    named = os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    return flags, os.environ, options.config or (Path(named) if named else None)


def nearest_flag(argument: str) -> str:
    if argument.startswith("--workers"):
        return f": {WORKERS_ARE_ON_RAY}"
    near = difflib.get_close_matches(argument.partition("=")[0], [knob.flag for knob in KNOBS.values()], n=1)
    return f": did you mean {near[0]}?" if near else ": see --help"


class PrintText(argparse.Action):
    """A flag that prints a text and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, text: Callable[[], str], help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)
        self.text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            print(self.text(), flush=True)
        except BrokenPipeError:  # the reader, such as `head`, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        parser.exit()


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
