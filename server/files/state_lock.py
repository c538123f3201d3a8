"""Creates the state directory, keeps it private to its user, and locks it for one process."""

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ..store import DATABASE_NAME, LeaseRecord, StoreConfig
from .directories import make_directory
from .segment_log import Guard

logger = logging.getLogger(__name__)

_LOCK_NAME = "server.lock"
KEPT_WORKERS_NAME = "workers.id"
"""A file with the id of the workers that outlive the server; deleting it ends them."""
_OTHERS = 0o077
"""The permission bits of group and others."""
STATE_PATTERNS = (
    *(f"{DATABASE_NAME}*", _LOCK_NAME, KEPT_WORKERS_NAME, "url_secret", "*.json", "*.log", "live-*", "checkpoints"),
    *("staging", "cache", "journal", "results", "recordings", "snapshots", "loaded", "features", "ephemeral"),
    *("evaluations", "pages"),
)
"""Patterns of everything that servers store in their state directory."""
CHECKPOINT_PATTERNS = ("*/weights", "*/sampler_weights", "*/external_weights")


def live_directory(state_dir: Path) -> Path:
    """Returns where live runs and results are: in live-EPOCH if servers share a database, else in the directory."""
    newest = max(live_epochs(state_dir), default=None)
    return state_dir if newest is None else epoch_directory(state_dir, newest)


def live_epochs(state_dir: Path) -> list[int]:
    return [int(name[1]) for path in os.listdir(state_dir) if (name := re.fullmatch(r"live-(\d+)", path))]


def epoch_directory(state_dir: Path, epoch: int) -> Path:
    return state_dir / f"live-{epoch}"


@dataclass(frozen=True)
class LiveState:
    """The live runs and results of a server."""

    directory: Path
    """The state directory, or below it if servers share a database."""
    guard: Guard = lambda: None
    """Raises an OSError when another server may have them."""
    lease: LeaseRecord | None = None
    """Held by a server on a shared database."""
    outage: Callable[[], str | None] = lambda: None
    """Says why the lease cannot be renewed now, or returns None."""


class StartError(Exception):
    """Raised if the server cannot start. The message gives the reason and the remedy."""


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Makes files that this process and its children create inaccessible to other users while the block runs."""
    before = os.umask(_OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def keep_private(directory: Path, ours: Sequence[str]) -> None:
    """Revokes other users' access to an existing directory, which holds tenants' data and weights, and to entries of
    these patterns, which an earlier version may have left readable. Raises StartError."""
    try:
        mode = directory.stat().st_mode
    except FileNotFoundError:  # this process will create it, as private
        return
    if not mode & _OTHERS:
        return
    if mode & stat.S_ISVTX:  # a shared directory like /tmp, which root could but must not close
        raise StartError(
            f"{directory} is shared by all users of this machine (mode {mode & 0o7777:o}): give a directory in it, "
            "which is then created for this user only"
        )
    with contextlib.suppress(OSError):
        directory.chmod(mode & 0o7777 & ~_OTHERS)
    if directory.stat().st_mode & _OTHERS:
        raise StartError(
            f"{directory} can be read by other users of this machine (mode {mode & 0o777:o}), and this process may not "
            f"change that: `chmod 700 {directory}` as its owner, or give a directory in it, which is then created for "
            "this user only"
        )
    logger.warning("%s could be read by other users (mode %o): now only its owner can", directory, mode & 0o777)
    for path in (path for pattern in ours for path in directory.glob(pattern)):
        _close_to_others(path)


def _close_to_others(path: Path) -> None:
    """Revokes other users' access to `path`, everything below it, and its parent directory."""
    below = [Path(root, name) for root, names, files in os.walk(path) for name in (*names, *files)]
    for entry in (path.parent, path, *below):
        with contextlib.suppress(OSError):  # of another user, or deleted meanwhile: the directory around it protects it
            if not entry.is_symlink():
                entry.chmod(entry.stat().st_mode & 0o7777 & ~_OTHERS)


def check_database_kind(config: StoreConfig) -> None:
    """Raises StartError if an existing state directory belongs to servers on the other kind of database: a sweep or a
    repair would remove everything that this database has no record of."""
    state_dir = config.state_dir
    if not state_dir.is_dir():
        return
    try:
        live = live_directory(state_dir)
    except OSError as error:
        raise StartError(f"state directory {state_dir} cannot be used: {error.strerror or error}") from None
    if config.database_url is None and live != state_dir:
        raise StartError(
            f"state directory {state_dir} belongs to servers on PostgreSQL (it has {live.name}): give --database-url"
        )
    if config.database_url is not None and live == state_dir and (state_dir / DATABASE_NAME).exists():
        raise StartError(
            f"state directory {state_dir} belongs to a server on SQLite (it has {DATABASE_NAME}): omit "
            "--database-url, or give another directory with --state-dir"
        )


def check_database_exists(config: StoreConfig) -> None:
    """Raises StartError if the SQLite database does not exist. For commands that must not create one."""
    path = config.state_dir / DATABASE_NAME
    if config.database_url is None and not path.is_file():
        remedy = "give the server's directory with --state-dir, or its database with --database-url"
        raise StartError(f"database {path} does not exist: {remedy}")


@contextlib.contextmanager
def created_state_directory(state_dir: Path, sync: bool = False) -> "Iterator[StateLock | None]":
    """Creates the state directory if needed, with `sync` to survive a crash of the machine. Raises StartError."""
    _make(state_dir, sync)
    yield None


@contextlib.contextmanager
def locked_state_directory(state_dir: Path, sync: bool = False) -> "Iterator[StateLock]":
    """Creates the state directory if needed and locks it for this process while the block runs. Raises StartError if
    another server has it, or it cannot be used."""
    _make(state_dir, sync)
    try:
        lock = StateLock(state_dir)
    except BlockingIOError as error:
        raise StartError(
            f"state directory {state_dir} is in use by {error.strerror}: stop that one, or choose another directory "
            "with --state-dir"
        ) from None
    except OSError as error:
        raise StartError(f"state directory {state_dir} cannot be used: {error.strerror or error}") from None
    try:
        yield lock
    finally:
        lock.close()


class StateLockLost(OSError):
    """This server must no longer write: another has taken the state directory, or its path leads elsewhere."""


class StateLock:
    """Holds a state directory by two locks: on the file server.lock, which names the holder, and on the directory.

    The directory lock survives the removal of the file. Some file systems cannot lock directories (NFS): there the next
    `check` restores a removed file, unless another server was faster.
    """

    def __init__(self, state_dir: Path) -> None:
        """Raises BlockingIOError if another server has the directory (strerror names it), or another OSError."""
        self._state_dir = state_dir
        self._retaking = threading.Lock()
        with contextlib.ExitStack() as opened:
            self._directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, self._directory)
            self._file = opened.enter_context(_locked_file(state_dir))
            self._lock_directory()
            self._opened = opened.pop_all()

    def check(self) -> None:
        """Serves as the guard of segments. Raises StateLockLost."""
        if not _is(self._state_dir, self._directory):
            raise StateLockLost(
                f"{self._state_dir} is no longer the directory that this server locked: restart the server"
            )
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
            raise BlockingIOError(errno.EWOULDBLOCK, f"a server whose {_LOCK_NAME} was removed") from None
        except OSError as error:
            logger.info("%s is locked only by its %s: %s", self._state_dir, _LOCK_NAME, error.strerror)

    def _retake(self) -> None:
        try:
            new = _locked_file(self._state_dir)
        except OSError as error:
            raise StateLockLost(f"{self._state_dir} was taken from this server, by {error.strerror}") from None
        logger.warning("%s was removed from %s and has been recreated", _LOCK_NAME, self._state_dir)
        self._file.close()
        self._file = new


def _locked_file(state_dir: Path) -> TextIO:
    """Locks the lock file and writes this process's id. Raises OSError; if it is locked, strerror names the holder."""
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
    """True if the path still leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _make(state_dir: Path, sync: bool) -> None:
    try:
        make_directory(state_dir, sync, mode=0o700)
    except OSError as error:
        raise StartError(f"state directory {state_dir} cannot be used: {error.strerror or error}") from None
