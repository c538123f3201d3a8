"""The command line of `trainhouse serve`, `keys`, `backup` and `verify`: parses, calls, prints errors."""

import argparse
import sys
from collections.abc import Sequence

from ..config.knob_values import ConfigError
from ..config.load import WORKERS_ARE_ON_RAY
from ..replication.state_lock import StartError, private_files
from ..store import DatabaseUnreachable
from .backup import add_backup
from .keys import add_keys
from .knob_flags import FAILED, WRONGLY_USED, Commands, nearest_flag
from .serve import add_serve
from .verify import add_verify


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, 1 if the command failed, 2 if it was used wrongly."""
    options, unknown = _parser().parse_known_args(arguments)
    try:
        if unknown and options.run is not _workers:
            raise ConfigError(f"unknown argument {unknown[0]}{nearest_flag(unknown[0])}")
        with private_files():
            return options.run(options)
    except (StartError, ValueError, DatabaseUnreachable) as error:
        print(f"trainhouse {options.command}: error: {error}", file=sys.stderr)
        return WRONGLY_USED if isinstance(error, ConfigError) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("trainhouse", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_serve, _add_workers, add_keys, add_backup, add_verify):
        add(commands)
    return parser


def _add_workers(commands: Commands) -> None:
    """Adds a command that existed once, to name what replaces it."""
    commands.add_parser("workers", add_help=False, allow_abbrev=False).set_defaults(run=_workers)


def _workers(_: argparse.Namespace) -> int:
    raise ConfigError(WORKERS_ARE_ON_RAY)
