"""The command line of `trainhouse serve`, `keys`, `backup` and `verify`: parses, calls, prints errors."""

import argparse
import asyncio
import difflib
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from ...workers.scheduler.pool_factory import check_layouts
from ...workers.shapes.model_shape import refuse_missing_weights
from ..config.knob import Knob
from ..config.knob_values import ENVIRONMENT_PREFIX, ConfigError
from ..config.load import WORKERS_ARE_ON_RAY, load_config, place_config_of, store_config_of
from ..config.server_config import KNOBS, SECTION_OF, ServerConfig
from ..logs.setup import configure_logging
from ..replication.state_lock import (
    STATE_PATTERNS,
    StartError,
    check_database_exists,
    check_database_kind,
    keep_private,
    private_files,
)
from ..store import DatabaseUnreachable, Store, StoreConfig, open_store
from ..tenants.auth import create_key, list_keys, revoke_key
from ..tenants.scopes import SCOPES, TENANT_SCOPES, parse_scopes
from .backup import Backup
from .verify import lock_to_verify, verify

FAILED = 1
WRONGLY_USED = 2

_COMMANDS_FOR_USERS = ("plan", "import", "export")
"""Commands that write files for their user, so that the umask for private server files does not apply."""

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, 1 if the command failed, 2 if it was used wrongly."""
    options, unknown = _parser().parse_known_args(arguments)
    try:
        if unknown and options.run is not _workers:
            raise ConfigError(f"unknown argument {unknown[0]}{_nearest_flag(unknown[0])}")
        with nullcontext() if options.command in _COMMANDS_FOR_USERS else private_files():
            return options.run(options)
    except ConfigError as error:
        return _say_error(options.command, error, WRONGLY_USED)
    except (StartError, ValueError, DatabaseUnreachable) as error:
        return _say_error(options.command, error, FAILED)


def _say_error(command: str, error: Exception, status: int) -> int:
    print(f"trainhouse {command}: error: {error}", file=sys.stderr)
    return status


def _nearest_flag(argument: str) -> str:
    if argument.startswith("--workers"):
        return f": {WORKERS_ARE_ON_RAY}"
    near = difflib.get_close_matches(argument.partition("=")[0], [knob.flag for knob in KNOBS.values()], n=1)
    return f": did you mean {near[0]}?" if near else ": see --help"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("trainhouse", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_workers(commands)
    _add_keys(commands)
    _add_backup(commands)
    _add_verify(commands)
    return parser


# trainhouse serve

_SERVE_USAGE = "trainhouse serve --base-model NAME[=PATH_OR_HUB_ID] [FLAGS]"


def _add_serve(commands: _Commands) -> None:
    parser = commands.add_parser("serve", usage=_SERVE_USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action=_Print, text=serve_help, help=argparse.SUPPRESS)
    parser.add_argument("--help-all", action=_Print, text=serve_help_all, help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path)
    _add_knobs(parser, KNOBS.values())
    parser.set_defaults(run=_serve)


def _add_knobs(parser: argparse.ArgumentParser, knobs: Iterable[Knob]) -> None:
    for knob in knobs:
        action = "store" if knob.kind.separator is None else "append"
        parser.add_argument(knob.flag, dest=knob.name, action=action, default=argparse.SUPPRESS)


class _Print(argparse.Action):
    """A flag that prints a text and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, text: Callable[[], str], help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)
        self.text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(self.text())
        parser.exit()


def serve_help() -> str:
    """Returns the common knobs' help, which fits one screen of 24 lines and 80 columns."""
    rows = [*(_row(knob) for knob in KNOBS.values() if knob.common), _CONFIG_ROW, ("--help-all", "every knob")]
    return f"""\
usage: {_SERVE_USAGE}

{_table(rows)}

A flag overrides TRAINHOUSE_<KNOB> in the environment, which overrides --config.
Example: trainhouse serve --base-model Qwen/Qwen3-0.6B=/models/Qwen3-0.6B"""


def serve_help_all() -> str:
    return f"""\
usage: {_SERVE_USAGE}

{_table(_rows_by_section(KNOBS.values()))}

Every knob is a flag, a key of the file with _ for - (base_models: a list), and an environment variable
TRAINHOUSE_<KEY> (base models separated by commas). A flag overrides the environment, which overrides the file.
The file may group its keys in tables named like the sections. Sizes in bytes may be written as 256MiB."""


_CONFIG_ROW = ("--config FILE", "TOML: max_lora_rank = 64 is --max-lora-rank 64")


def _row(knob: Knob) -> tuple[str, str]:
    return f"{knob.flag} {knob.metavar}", knob.described


def _rows_by_section(knobs: Iterable[Knob]) -> Iterator[tuple[str, str]]:
    """Yields a row for each knob, and a heading with no flag before each section."""
    yield _CONFIG_ROW
    for section, own in groupby(knobs, lambda knob: SECTION_OF[knob.name]):
        yield "", f"\n[{section}]"
        yield from map(_row, own)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = max(len(flag) for flag, _ in rows)
    return "\n".join(f"  {flag:<{width}}  {text}" if flag else text for flag, text in rows)


def _serve(options: argparse.Namespace) -> int:
    config = load_config(_knob_flags(options), os.environ, _config_file(options))
    _refuse_impossible_models(config)
    from ..serving.server_process import serve  # imports the whole application, which takes seconds

    configure_logging(config.process.log_level)
    check_database_kind(config.store_config())
    serve(config)
    return 0


def _refuse_impossible_models(config: ServerConfig) -> None:
    """Raises ValueError for what is known to fail before anything is loaded."""
    ranks = config.dispatch_config()
    if config.ranks.parallel is None:  # chosen later, and drafts depend on it
        ranks = replace(ranks, models=tuple(replace(model, draft_parallel=None) for model in ranks.models))
    check_layouts(ranks)
    for model in config.models.base_models:
        refuse_missing_weights(model.source)


# trainhouse workers


def _add_workers(commands: _Commands) -> None:
    """Adds a command that existed once, to name what replaces it."""
    commands.add_parser("workers", add_help=False, allow_abbrev=False).set_defaults(run=_workers)


def _workers(_: argparse.Namespace) -> int:
    raise ConfigError(WORKERS_ARE_ON_RAY)


def _knob_flags(options: argparse.Namespace) -> Mapping[str, str | Sequence[str]]:
    given = vars(options)
    return {name: given[name] for name in KNOBS if name in given}


def _config_file(options: argparse.Namespace) -> Path | None:
    named = os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    return options.config or (Path(named) if named else None)


# trainhouse keys


def _add_keys(commands: _Commands) -> None:
    parser = commands.add_parser("keys", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    create = verbs.add_parser("create", help="make a key and print it; it cannot be printed again")
    create.add_argument("name", help="tenant of the key; keys with the same name share runs and checkpoints")
    create.add_argument("--scopes", metavar="A,B", help=f"what it may do: {','.join(SCOPES)} (all but operator)")
    create.add_argument("--requests-per-minute", metavar="N", help="limit, beyond which requests get 429 (unlimited)")
    revoke = verbs.add_parser("revoke", help="revoke a key")
    revoke.add_argument("key_id", help="its number in `trainhouse keys list`")
    for verb, command in (
        (create, _create_key),
        (verbs.add_parser("list", help="list all keys"), _list_keys),
        (revoke, _revoke_key),
    ):
        _add_place(verb, _with_store(command, makes=verb is create))


def _with_store(
    command: Callable[[Store, argparse.Namespace], Coroutine[object, object, None]], makes: bool
) -> Callable[[argparse.Namespace], int]:
    """Returns a command that runs `command` on the opened store.

    Args:
        makes: the command creates the database if there is none.
    """

    def run(options: argparse.Namespace) -> int:
        config = _store_config(options)
        if config.database_url is None:  # else no directory matters
            check_database_kind(config)
            if makes:
                keep_private(config.state_dir, STATE_PATTERNS)
        if not makes:
            check_database_exists(config)
        store = open_store(config)
        try:
            asyncio.run(command(store, options))
        finally:
            store.close()
        return 0

    return run


async def _create_key(store: Store, options: argparse.Namespace) -> None:
    scopes = None if options.scopes is None else _scopes(options.scopes)
    per_minute = None if options.requests_per_minute is None else _per_minute(options.requests_per_minute)
    is_first = (await store.keys.count()).created == 0
    print(await create_key(store, options.name, scopes, per_minute))
    print("keep it: only its hash is stored, so it cannot be shown again", file=sys.stderr)
    if is_first:
        where = "database" if _store_config(options).database_url else "state directory"
        print(f"it is the first key: on this {where} made-up tml- keys no longer work", file=sys.stderr)


def _scopes(text: str) -> tuple[str, ...]:
    try:
        return parse_scopes(text)
    except ValueError as error:
        raise ConfigError(f"--scopes: {error}") from None


def _per_minute(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ConfigError(f"--requests-per-minute is {text!r}: expected an integer from 1 to {2**31 - 1}")
    return int(text)


async def _list_keys(store: Store, _: argparse.Namespace) -> None:
    keys = await list_keys(store)
    print(f"{'KEY':>4}  {'CREATED':<16}  {'REVOKED':<16}  {'SCOPES':<23}  {'A MINUTE':>8}  NAME")
    for key in keys:
        scopes = ",".join(key.scopes or TENANT_SCOPES)
        times = f"{_day(key.created_at):<16}  {_day(key.revoked_at):<16}"
        print(f"{key.key_id:>4}  {times}  {scopes:<23}  {key.requests_per_minute or 'any':>8}  {key.name}")


def _day(timestamp: float | None) -> str:
    return "-" if timestamp is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(timestamp))


async def _revoke_key(store: Store, options: argparse.Namespace) -> None:
    key_id = _key_id(options.key_id)
    await revoke_key(store, key_id)
    print(f"key {key_id} is revoked")


def _key_id(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{text!r} is not the number of a key: give the one that `trainhouse keys list` shows")
    return int(text)


# trainhouse backup, trainhouse verify


def _add_backup(commands: _Commands) -> None:
    parser = commands.add_parser("backup", allow_abbrev=False)
    parser.add_argument(
        "target", metavar="DIR", type=Path, help="directory of the copy; fast on the same file system, by hard links"
    )
    _add_place(parser, _backup)


def _add_verify(commands: _Commands) -> None:
    parser = commands.add_parser("verify", allow_abbrev=False)
    parser.add_argument("--repair", action="store_true", help="repair what is safe to; needs the server stopped")
    parser.add_argument("--checkpoints", default=argparse.SUPPRESS, help="the server's --checkpoints, if it has one")
    _add_place(parser, _verify)


def _add_place(parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]) -> None:
    """Adds the flags that locate a server's state."""
    parser.add_argument("--state-dir", default=argparse.SUPPRESS, help="the server's --state-dir (.trainhouse)")
    parser.add_argument("--database-url", default=argparse.SUPPRESS, help="the server's --database-url, if it has one")
    parser.add_argument("--config", type=Path, help="the server's TOML file, if that sets them")
    parser.set_defaults(run=command)


def _store_config(options: argparse.Namespace) -> StoreConfig:
    return store_config_of(_knob_flags(options), os.environ, _config_file(options))


def _backup(options: argparse.Namespace) -> int:
    store_config = _store_config(options)
    check_database_kind(store_config)
    Backup(store_config.state_dir, options.target, store_config.database_url is None).run(print)
    return 0


def _verify(options: argparse.Namespace) -> int:
    given = (_knob_flags(options), os.environ, _config_file(options))
    store_config, place_config = store_config_of(*given), place_config_of(*given)
    check_database_kind(store_config)
    check_database_exists(store_config)
    logging.disable()  # verify itself reports what it finds
    try:
        with lock_to_verify(store_config.state_dir, options.repair) as is_running:
            store = open_store(store_config)
            try:
                work = verify(store, store_config.state_dir, place_config, is_running, options.repair, print)
                return FAILED if asyncio.run(work) else 0
            finally:
                store.close()
    finally:
        logging.disable(logging.NOTSET)
