"""A database, on SQLAlchemy. One thread writes and commits in groups; reads run concurrently in other threads."""

import asyncio
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import OperationalError

from .database_errors import LeaseLost
from .records import LeaseRecord
from .schema import leases
from .tenant_queue import TenantQueue

T = TypeVar("T")

NUM_READERS = 4
_MAX_PER_COMMIT = 256
_SEARCH_PAUSE = 3.0
"""Searches pause for this many times as long as the last one took, since they need a whole core."""
_MAX_PAUSE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class PageInfo:
    """A slice of a listing, which has `total_count` entries in all."""

    offset: int
    limit: int
    total_count: int = 0


class Database:
    """Runs statements on a writer thread and NUM_READERS reader threads.

    A write has been committed when it is done. With `required_lease`, every write raises LeaseLost as soon as its base
    model's lease has another holder or epoch; a transaction that has seen the lease keeps other servers from taking it
    until the commit. `writing` and `reading` may share a connection pool, which needs NUM_READERS + 1 connections.
    """

    def __init__(self, writing: Engine, reading: Engine) -> None:
        self.required_lease: LeaseRecord | None = None
        self._writing, self._reading = writing, reading
        self._search_again_at = 0.0
        self._searches, self._search = TenantQueue("search", "send one after another"), asyncio.Lock()
        self._writes: queue.SimpleQueue[PendingWrite | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_until_closed, name="store-writer", daemon=True)
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="store-reader")
        self._writer.start()

    def write(self, statements: Callable[[Connection], T]) -> "asyncio.Future[T]":
        """Runs `statements` atomically, possibly in one transaction with other callers' statements."""
        write = PendingWrite(statements)
        self._writes.put(write)
        return asyncio.wrap_future(write.done)

    def read(self, statements: Callable[[Connection], T]) -> "asyncio.Future[T]":
        return asyncio.wrap_future(self._readers.submit(self._read_now, statements))

    def close(self) -> None:
        """Commits pending writes and releases the database."""
        self._writes.put(None)
        self._writer.join()
        self._readers.shutdown()
        self._writing.dispose()

    async def check_integrity(self) -> None:
        """Raises ValueError if the stored data is damaged. Databases that check it themselves do nothing."""

    def clock(self, connection: Connection, now: float) -> float:
        """Returns the seconds since the epoch by which servers compare leases. `now` is the caller's clock."""
        return now

    async def search(self, statements: Callable[[Connection], T], tenant_id: str) -> T:
        """Reads all rows of a tenant. One search runs at a time, of any tenant, so the other readers stay free; each
        tenant has at most one search waiting for that."""
        async with self._searches.turn(tenant_id), self._search:
            await asyncio.sleep(self._search_again_at - time.monotonic())
            began_at = time.monotonic()
            try:
                return await self.read(statements)
            finally:
                now = time.monotonic()
                self._search_again_at = now + min(_SEARCH_PAUSE * (now - began_at), _MAX_PAUSE_SECONDS)

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

    def _require_lease(self, connection: Connection) -> None:
        """Called at the beginning of every write transaction. Raises LeaseLost if another server has the lease."""
        if (lease := self.required_lease) is None:
            return
        same = (leases.c.base_model == lease.base_model) & (leases.c.holder == lease.holder)
        mine = select(leases.c.epoch).where(same, leases.c.epoch == lease.epoch)
        if connection.execute(mine.with_for_update(read=True, key_share=True)).first() is None:
            raise LeaseLost(f"this server no longer has the lease of epoch {lease.epoch}: another server has taken it")

    def _next_group(self) -> "list[PendingWrite]":
        """Waits for a write and returns it with those already queued; empty after the store is closed."""
        group: list[PendingWrite] = []
        while len(group) < _MAX_PER_COMMIT and not (group and self._writes.empty()):
            write = self._writes.get()
            if write is None:
                self._writes.put(None)
                break
            group.append(write)
        return group

    def _write_until_closed(self) -> None:
        while group := self._next_group():
            self._commit_and_resolve([write for write in group if write.done.set_running_or_notify_cancel()])

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
    first, cause = error, error.__context__
    while cause is not None:
        first, cause = cause if isinstance(cause, OperationalError) else first, cause.__context__
    return first


class PendingWrite:
    """One caller's statements. Their result is delivered only after the commit."""

    def __init__(self, statements: Callable[[Connection], object]) -> None:
        self.done: Future = Future()
        self.error: Exception | None = None
        self._statements = statements
        self._result: object = None

    def run(self, connection: Connection) -> None:
        """Runs the statements in a savepoint, so that an error rolls back no other caller's. The last run counts."""
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
