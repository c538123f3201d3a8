"""SqliteStore: one file in WAL mode. One thread writes and commits in groups; readers go on beside it."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError

from .base import Store
from .format import open_format

T = TypeVar("T")

DATABASE_NAME = "trainhouse.db"  # inside the state directory
_BUSY_MILLISECONDS = 10_000
_NUM_READERS = 4
_MOST_PER_COMMIT = 256


class SqliteStore(Store):
    """Other processes may have the same file open (`trainhouse keys` beside a server)."""

    def __init__(self, path: Path) -> None:
        """Makes the file when it is not there. Raises ValueError when a newer trainhouse wrote it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._engine = _engine(path)
        try:
            with _writing(self._engine).begin() as connection:
                open_format(connection, str(path))
        except BaseException:
            self._engine.dispose()
            raise
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_until_closed, name="store-writer", daemon=True)
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="store-reader")
        self._writer.start()

    def write(self, statements: Callable[[Connection], T]) -> "Future[T]":
        write = _Write(statements)
        self._writes.put(write)
        return write.done

    def read(self, statements: Callable[[Connection], T]) -> "Future[T]":
        return self._readers.submit(self._read_now, statements)

    def close(self) -> None:
        self._writes.put(None)
        self._writer.join()
        self._readers.shutdown()
        self._engine.dispose()

    def _read_now(self, statements: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            return statements(connection)

    def _write_until_closed(self) -> None:
        while group := self._next_group():
            self._commit(group)

    def _next_group(self) -> "list[_Write]":
        """Waits for a write and takes with it those that came meanwhile; empty once the store is closed."""
        group: list[_Write] = []
        while len(group) < _MOST_PER_COMMIT and not (group and self._writes.empty()):
            write = self._writes.get()
            if write is None:
                self._writes.put(None)
                break
            group.append(write)
        return group

    def _commit(self, group: "list[_Write]") -> None:
        try:
            with _writing(self._engine).begin() as connection:
                for write in group:
                    write.run(connection)
        except SQLAlchemyError as error:  # the transaction itself failed: a full disk, a lock held for too long
            for write in group:
                write.fail(error)
        else:
            for write in group:
                write.succeed()


class _Write:
    """One caller's statements; the caller hears of them only after the commit."""

    def __init__(self, statements: Callable[[Connection], object]) -> None:
        self.done: Future = Future()
        self._statements = statements
        self._result: object = None
        self._error: Exception | None = None

    def run(self, connection: Connection) -> None:
        """In a savepoint, so that one caller's error undoes nobody else's statements."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            with connection.begin_nested():
                self._result = self._statements(connection)
        except Exception as error:
            self._error = error

    def succeed(self) -> None:
        if self.done.cancelled():
            return
        if self._error is not None:
            self.done.set_exception(self._error)
        else:
            self.done.set_result(self._result)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def _engine(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}")
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: DBAPIConnection, _: object) -> None:
    connection.isolation_level = None  # the driver begins no transactions of its own, so that savepoints work
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))


def _writing(engine: Engine) -> Engine:
    """Its transactions take the write lock first: one that took it midway could fail at once instead of waiting."""
    return engine.execution_options(begin="BEGIN IMMEDIATE")
