"""`trainhouse keys`: creates, lists and revokes API keys, without a server."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from datetime import datetime
from typing import Annotated, TypeVar

import typer
from sqlalchemy import Connection, func, select

from ..config.load import load_section
from ..config.option_values import ConfigError
from ..files.state_lock import STATE_PATTERNS, check_database_exists, check_database_kind, keep_private
from ..store import Store, StoreConfig, open_store
from ..store.database.schema import runs, tenants
from ..tenants.auth import MADE_UP_PREFIX, create_key, list_keys, revoke_key
from ..tenants.scopes import SCOPES, TENANT_SCOPES, parse_scopes
from .options import AsJson, new_app
from .output import print_json, print_table
from .server_flags import Sources, reads_state

T = TypeVar("T")

app = new_app("Create, list and revoke API keys, without a server.")


@app.command()
@reads_state()
def create(
    sources: Sources,
    name: Annotated[str, typer.Argument(help="Tenant of the key; keys with the same name share runs and checkpoints.")],
    scopes: Annotated[
        str | None, typer.Option(metavar="A,B", help=f"What it may do: {','.join(SCOPES)} (all but operator).")
    ] = None,
    requests_per_minute: Annotated[
        str | None, typer.Option(metavar="N", help="Limit, beyond which requests get 429 (unlimited).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it; it cannot be printed again."""
    allowed = None if scopes is None else _scopes(scopes)
    per_minute = None if requests_per_minute is None else _per_minute(requests_per_minute)

    async def make(store: Store) -> tuple[str, Mapping[str, int] | None]:
        left = None if (await store.keys.count()).created else await store.read(_runs_of_made_up_keys)
        return await create_key(store, name, allowed, per_minute), left

    key, left = with_store(sources, make, makes=True)
    if as_json:
        print_json({"key": key, "name": name, "is_first": left is not None})
        return
    print(key)
    config = load_section(StoreConfig, *sources)
    where = "database" if config.database_url else "state directory"
    place = "" if config.database_url else f" of servers with --state-dir {config.state_dir.resolve()}"
    print(f"keep this key{place}: only its hash is stored, so it cannot be shown again", file=sys.stderr)
    if left is not None:
        print(f"it is the first key: on this {where} made-up tml- keys no longer work", file=sys.stderr)
    if left:
        owners = ", ".join(f"{tenant} ({num})" for tenant, num in left.items())
        remedy = f"`trainhouse keys create {next(iter(left))}` makes a key that reaches its runs and checkpoints"
        print(f"made-up keys have runs here, by tenant: {owners}; {remedy}", file=sys.stderr)


def _runs_of_made_up_keys(connection: Connection) -> Mapping[str, int]:
    """Returns the number of runs by tenant."""
    query = select(tenants.c.name, func.count()).join(runs, runs.c.tenant_id == tenants.c.tenant_id)
    query = query.where(tenants.c.name.startswith(MADE_UP_PREFIX)).group_by(tenants.c.name).order_by(tenants.c.name)
    return {row[0]: row[1] for row in connection.execute(query)}


@app.command("list")
@reads_state()
def list_all(sources: Sources, as_json: AsJson = False) -> None:
    """List all keys."""
    keys = with_store(sources, list_keys)
    if as_json:
        names = ("key_id", "name", "created_at", "revoked_at", "scopes", "requests_per_minute")
        found = [{name: getattr(key, name) for name in names} for key in keys]
        print_json({"keys": [key | {"scopes": key["scopes"] or TENANT_SCOPES} for key in found]})
        return
    rows = [
        (key.key_id, _day(key.created_at), _day(key.revoked_at), ",".join(key.scopes or TENANT_SCOPES),
         key.requests_per_minute or "any", key.name)
        for key in keys
    ]  # fmt: skip
    print_table(("KEY", "CREATED", "REVOKED", "SCOPES", "A MINUTE", "NAME"), rows)


def _day(timestamp: float | None) -> datetime | None:
    return None if timestamp is None else datetime.fromtimestamp(timestamp)


@app.command()
@reads_state()
def revoke(
    sources: Sources,
    key_id: Annotated[str, typer.Argument(help="Its number in `trainhouse keys list`.")],
    as_json: AsJson = False,
) -> None:
    """Revoke a key."""
    if not key_id.isdecimal():
        raise ConfigError(f"{key_id!r} is not the number of a key: give the one that `trainhouse keys list` shows")
    number = int(key_id)
    with_store(sources, lambda store: revoke_key(store, number))
    if as_json:
        print_json({"key_id": number, "revoked": True})
    else:
        print(f"key {number} is revoked")


def with_store(sources: Sources, work: Callable[[Store], Awaitable[T]], makes: bool = False) -> T:
    """Returns what `work` returns on the opened store, which `makes` creates if there is none."""
    config = load_section(StoreConfig, *sources)
    if config.database_url is None:  # else no directory matters
        check_database_kind(config)
        if makes:
            keep_private(config.state_dir, STATE_PATTERNS)
    if not makes:
        check_database_exists(config)

    async def run() -> T:
        return await work(store)

    with closing(open_store(config)) as store:
        return asyncio.run(run())


def _scopes(text: str) -> tuple[str, ...]:
    try:
        return parse_scopes(text)
    except ValueError as error:
        raise ConfigError(f"--scopes: {error}") from None


def _per_minute(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise ConfigError(f"--requests-per-minute is {text!r}: expected an integer from 1 to {2**31 - 1}")
    return int(text)
