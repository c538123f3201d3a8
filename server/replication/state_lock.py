"""The claim on a state directory: whose it is, made if need be, and held by one process alone."""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from ..files.directories import make_directory
from ..store import DATABASE_NAME, StoreConfig
from .leases import live_directory

logger = logging.getLogger(__name__)

_LOCK_NAME = "server.lock"
_OTHERS = 0o077
"""The rights of all users but a file's owner."""
OF_STATE = (
    *(f"{DATABASE_NAME}*", _LOCK_NAME, "url_secret", "*.json", "*.log", "live-*", "checkpoints", "staging", "cache"),
    *("journal", "results", "recordings", "snapshots", "loaded", "features", "ephemeral", "pages"),
)
"""What servers keep in their state directory."""
OF_CHECKPOINTS = ("*/weights", "*/sampler_weights", "*/external_weights")


class StartError(Exception):
    """The server cannot start; the message says why and what to do."""


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """What this process and those that it starts write is for their user alone, for as long as the block lasts."""
    before = os.umask(_OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def keep_private(directory: Path, ours: Sequence[str]) -> None:
    """Takes the rights of other users on a directory that is there, which holds tenants' data and weights.

    ours: patterns of what an earlier version may have left readable in it. Raises StartError where they stay.
    """
    try:
        mode = directory.stat().st_mode
    except FileNotFoundError:  # it will be made, by this process
        return
    if not mode & _OTHERS:
        return
    if mode & stat.S_ISVTX:  # as /tmp, which root could close
        raise StartError(
            f"{directory} is there for all users of this machine (mode {mode & 0o7777:o}): name a directory in it, "
            "which is then made for this user alone"
        )
    with contextlib.suppress(OSError):
        directory.chmod(mode & 0o7777 & ~_OTHERS)
    if directory.stat().st_mode & _OTHERS:
        raise StartError(
            f"{directory} can be read by other users of this machine (mode {mode & 0o777:o}), and this process may not "
            f"change that: `chmod 700 {directory}` as its owner, or name a directory in it, which is then made for "
            "this user alone"
        )
    logger.warning("%s could be read by other users (mode %o): now its owner alone can", directory, mode & 0o777)
    for path in (path for pattern in ours for path in directory.glob(pattern)):
        _close_to_others(path)


def _close_to_others(path: Path) -> None:
    """With all that is below, and what it is in. What is another user's own, or goes meanwhile, is shut off by the
    directory that all is in."""
    below = [Path(root, name) for root, names, files in os.walk(path) for name in (*names, *files)]
    for each in (path.parent, path, *below):
        with contextlib.suppress(OSError):
            if not each.is_symlink():
                each.chmod(each.stat().st_mode & 0o7777 & ~_OTHERS)


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
def made(state_dir: Path, sync: bool = False) -> "Iterator[Claim | None]":
    """Makes the state directory if need be. sync: it is to survive the death of the machine. Raises StartError."""
    _make(state_dir, sync)
    yield None


@contextlib.contextmanager
def locked(state_dir: Path, sync: bool = False) -> "Iterator[Claim]":
    """Holds the state directory, made if need be, for this process alone. sync: as above. Raises StartError."""
    _make(state_dir, sync)
    try:
        claim = Claim(state_dir)
    except BlockingIOError as error:
        raise StartError(
            f"state directory {state_dir} is in use by {error.strerror}: stop that one, or choose another directory "
            "with --state-dir"
        ) from None
    except OSError as error:
        raise StartError(f"state directory {state_dir} cannot be used: {error.strerror}") from None
    try:
        yield claim
    finally:
        claim.close()


class ClaimLost(OSError):
    """Nothing may be written any more: the state directory is another server's now, or another directory."""


class Claim:
    """A state directory that is held by two locks: of the file server.lock, which says by whom, and of the directory
    itself, which nobody can remove. Not all file systems lock directories (NFS does not): there a removed file is made
    again by the next `check`, unless another server was faster.
    """

    def __init__(self, state_dir: Path) -> None:
        """Raises BlockingIOError, whose strerror says who has it, and OSError."""
        self._state_dir = state_dir
        self._retaking = threading.Lock()
        with contextlib.ExitStack() as opened:
            self._directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, self._directory)
            self._file = opened.enter_context(_locked_file(state_dir))
            self._lock_directory()
            self._opened = opened.pop_all()

    def check(self) -> None:
        """As a guard of segments. Raises ClaimLost."""
        if not _is(self._state_dir, self._directory):
            raise ClaimLost(f"{self._state_dir} is not the directory any more that this server has: start it again")
        if _is(self._state_dir / _LOCK_NAME, self._file.fileno()):
            return
        with self._retaking:
            if not _is(self._state_dir / _LOCK_NAME, self._file.fileno()):
                self._retake()

    def close(self) -> None:
        self._file.close()
        self._opened.close()

    def _lock_directory(self) -> None:
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(errno.EWOULDBLOCK, f"a server whose {_LOCK_NAME} somebody has removed") from None
        except OSError as error:
            logger.info("%s is locked by %s alone: %s", self._state_dir, _LOCK_NAME, error.strerror)

    def _retake(self) -> None:
        try:
            new = _locked_file(self._state_dir)
        except OSError as error:
            raise ClaimLost(f"{self._state_dir} was taken from this server, by {error.strerror}") from None
        logger.warning("%s was removed from %s, and is made again", _LOCK_NAME, self._state_dir)
        self._file.close()
        self._file = new


def _locked_file(state_dir: Path) -> TextIO:
    """With this process's id in it. Raises OSError, whose strerror says who has it."""
    lock = (state_dir / _LOCK_NAME).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = f"the server with process id {lock.read().strip()}"
        lock.close()
        raise BlockingIOError(errno.EWOULDBLOCK, holder) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _is(path: Path, handle: int) -> bool:
    """True if the path still leads to what was opened there."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _make(state_dir: Path, sync: bool) -> None:
    try:
        make_directory(state_dir, sync, mode=0o700)
    except OSError as error:
        raise StartError(f"state directory {state_dir} cannot be used: {error.strerror}") from None
