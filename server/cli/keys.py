"""`trainhouse keys`: creates, lists and revokes API keys, without a server."""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Coroutine

from ..config.knob_values import ConfigError
from ..config.load import store_config_of
from ..replication.state_lock import STATE_PATTERNS, check_database_exists, check_database_kind, keep_private
from ..store import Store, open_store
from ..tenants.auth import create_key, list_keys, revoke_key
from ..tenants.scopes import SCOPES, TENANT_SCOPES, parse_scopes
from .knob_flags import Commands, add_state_flags, given


def add_keys(commands: Commands) -> None:
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
        add_state_flags(verb, _with_store(command, makes=verb is create))


def _with_store(
    command: Callable[[Store, argparse.Namespace], Coroutine[object, object, None]], makes: bool
) -> Callable[[argparse.Namespace], int]:
    """Returns a command that runs `command` on the opened store.

    Args:
        makes: the command creates the database if there is none.
    """

    def run(options: argparse.Namespace) -> int:
        config = store_config_of(*given(options))
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
        where = "database" if store_config_of(*given(options)).database_url else "state directory"
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
