"""The claim on a state directory: whose it is, made if need be, and held by one process alone."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from .directories import make_directory
from .leases import live_directory
from .store import DATABASE_NAME, StoreConfig


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


def check_kind(config: StoreConfig) -> None:
    """That the state directory, if there is one, is of servers on this kind of database. Raises StartError.

    Of what another database does not know nothing is worth keeping: a sweep or a repair would remove it.
    """
    state_dir = config.state_dir
    if not state_dir.is_dir():
        return
    try:
        live = live_directory(state_dir)
    except OSError as error:
        raise StartError(f"state directory {state_dir} cannot be used: {error.strerror}") from None
    if config.database_url is None and live != state_dir:
        raise StartError(
            f"state directory {state_dir} belongs to servers on a PostgreSQL (it has {live.name}): give --database-url"
        )
    if config.database_url is not None and live == state_dir and (state_dir / DATABASE_NAME).exists():
        raise StartError(
            f"state directory {state_dir} belongs to a server on SQLite (it has {DATABASE_NAME}): leave "
            "--database-url away, or name another directory with --state-dir"
        )


def check_database(config: StoreConfig) -> None:
    """That it is there, where it is SQLite: for what is to make none. Raises StartError."""
    path = config.state_dir / DATABASE_NAME
    if config.database_url is None and not path.is_file():
        raise StartError(
            f"there is no database {path}: name the server's directory with --state-dir, or its database with "
            "--database-url"
        )


@contextlib.contextmanager
def made(state_dir: Path, sync: bool = False) -> Iterator[None]:
    """Makes the state directory if need be. sync: it is to survive the death of the machine. Raises StartError."""
    _make(state_dir, sync)
    yield


@contextlib.contextmanager
def locked(state_dir: Path, sync: bool = False) -> Iterator[None]:
    """Holds the state directory, made if need be, for this process alone. sync: as above. Raises StartError."""
    _make(state_dir, sync)
    try:
        lock = (state_dir / "server.lock").open("a+")
    except OSError as error:
        raise StartError(f"state directory {state_dir} cannot be used: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise StartError(
                f"state directory {state_dir} is in use by the server with process id {lock.read().strip()}: "
                "stop that one, or choose another directory with --state-dir"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def _make(state_dir: Path, sync: bool) -> None:
    try:
        make_directory(state_dir, sync, mode=0o700)
    except OSError as error:
        raise StartError(f"state directory {state_dir} cannot be used: {error.strerror}") from None
