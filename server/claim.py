"""The claim on a state directory: made if need be, and held by one process alone. Imports nothing of the server."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


@contextlib.contextmanager
def made(state_dir: Path) -> Iterator[None]:
    """Makes the state directory if need be. Raises StartError."""
    _make(state_dir)
    yield


@contextlib.contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Holds the state directory, made if need be, for this process alone. Raises StartError."""
    _make(state_dir)
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


def _make(state_dir: Path) -> None:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"state directory {state_dir} cannot be used: {error.strerror}") from None
