"""A store on SQLAlchemy engines. One thread writes and commits in groups; reads run concurrently in other threads."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from .base import Store

T = TypeVar("T")

NUM_READERS = 4
_MOST_PER_COMMIT = 256


class EngineStore(Store):
    """Runs the statements of Store on a writer thread and NUM_READERS reader threads.

    `writing` and `reading` may share a connection pool, which needs NUM_READERS + 1 connections.
    """

    def __init__(self, writing: Engine, reading: Engine) -> None:
        self._writing, self._reading = writing, reading
        self._writes: queue.SimpleQueue[PendingWrite | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_until_closed, name="store-writer", daemon=True)
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="store-reader")
        self._writer.start()

    def write(self, statements: Callable[[Connection], T]) -> "Future[T]":
        write = PendingWrite(statements)
        self._writes.put(write)
        return write.done

    def read(self, statements: Callable[[Connection], T]) -> "Future[T]":
        return self._readers.submit(self._read_now, statements)

    def close(self) -> None:
        self._writes.put(None)
        self._writer.join()
        self._readers.shutdown()
        self._writing.dispose()

    def _read_now(self, statements: Callable[[Connection], T]) -> T:
        with self._reading.connect() as connection:
            return statements(connection)

    def _commit(self, group: "Sequence[PendingWrite]") -> None:
        """Runs the statements of all writes in one transaction."""
        with self._writing.begin() as connection:
            self._require_lease(connection)
            for write in group:
                write.run(connection)
                if isinstance(write.error, OperationalError):
                    # The database may have rolled back the whole transaction, with earlier writes and the savepoint:
                    # later errors only follow from that, so raise the first.
                    raise _first(write.error)

    def _write_until_closed(self) -> None:
        while group := self._next_group():
            self._commit_and_resolve([write for write in group if write.done.set_running_or_notify_cancel()])

    def _next_group(self) -> "list[PendingWrite]":
        """Waits for a write and returns it with those already queued; empty after the store is closed."""
        group: list[PendingWrite] = []
        while len(group) < _MOST_PER_COMMIT and not (group and self._writes.empty()):
            write = self._writes.get()
            if write is None:
                self._writes.put(None)
                break
            group.append(write)
        return group

    def _commit_and_resolve(self, group: "Sequence[PendingWrite]") -> None:
        try:
            self._commit(group)
        except Exception as error:  # the transaction itself failed (disk full, out of memory); the thread must survive
            for write in group:
                write.done.set_exception(error)
        else:
            for write in group:
                write.resolve()


def _first(error: OperationalError) -> OperationalError:
    """Returns the first OperationalError of a chain of contexts."""
    first, each = error, error.__context__
    while each is not None:
        first, each = each if isinstance(each, OperationalError) else first, each.__context__
    return first


class DatabaseUnreachable(SQLAlchemyError):
    """The database has been unreachable for too long. The caller may retry."""


class PendingWrite:
    """One caller's statements. Their result is delivered only after the commit."""

    def __init__(self, statements: Callable[[Connection], object]) -> None:
        self.done: Future = Future()
        self.error: Exception | None = None
        self._statements = statements
        self._result: object = None

    def run(self, connection: Connection) -> None:
        """Runs the statements in a savepoint, so that an error rolls back no other caller's. If run twice, the last run
        counts.
        """
        try:
            with connection.begin_nested():
                self._result = self._statements(connection)
            self.error = None
        except Exception as error:
            self.error = error

    def resolve(self) -> None:
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self._result)
