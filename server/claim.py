"""The claim on a state directory: made if need be, and held by one process alone. Imports hardly anything."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from .manifest import make_directory


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


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
