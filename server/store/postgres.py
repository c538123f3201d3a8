"""A store on a PostgreSQL database that several servers may share and that may be unreachable for a while.

The database may restart and connections may break at any moment. Reads are retried. So are writes, after asking the
database whether the first attempt was committed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError

from .database.database import NUM_READERS, PendingWrite
from .database.database_errors import DatabaseUnreachable, driver_message
from .migrations import create_or_migrate
from .store import Store
from .store_config import StoreConfig

T = TypeVar("T")

_OUTAGE_SECONDS = 30.0
"""Shorter than a long poll, so that a poll can report the outage."""
_CLOSING_SECONDS = 2.0
_RETRY_SECONDS = 0.2
_IDLE_MILLISECONDS = 10_000
"""The database rolls back a transaction that is idle for longer, since its server is gone, and releases its locks."""
_OPENING_LOCK = int.from_bytes(b"trainhou")
_CONNECTING: Mapping[str, str] = {
    "application_name": "trainhouse",
    "connect_timeout": "10",
    # Detects a silently dead peer within seconds, not hours.
    "keepalives_idle": "5",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
"""Parameters of libpq; those in the URL win."""
_TEMPORARY_STATES = frozenset(
    {
        "25P03",  # idle-in-transaction timeout: the database assumed that this server is gone
        "40001",  # serialization failure
        "40P01",  # deadlock
        "53300",  # too many connections
        "57P01",  # the database is shutting down
        "57P02",  # the database crashed
        "57P03",  # the database is starting
    }
)


class PostgresStore(Store):
    """Keeps the store in PostgreSQL 13 or newer. Several servers may open the same database."""

    def __init__(self, url: str) -> None:
        """Connects to postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, and creates the tables if needed. Raises
        DatabaseUnreachable, also for a wrong password or host; ValueError if it cannot be used, or a newer trainhouse
        wrote it."""
        parsed = _parsed(url)
        self._shown_url = parsed.set(query={}).render_as_string(hide_password=True)
        engine = _engine(parsed)
        try:
            with engine.begin() as connection:
                # Two servers may start at the same time on an empty database or after an upgrade.
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _OPENING_LOCK})
                create_or_migrate(connection, self._shown_url, "--database-url")
        except SQLAlchemyError as error:
            engine.dispose()
            kind = DatabaseUnreachable if _is_temporary(error) else ValueError
            raise kind(f"{self._shown_url} cannot be used: {_reason(error)}") from None
        except BaseException:
            engine.dispose()
            raise
        self._is_closing = False
        # Over all threads, so that late callers do not wait the full time again.
        self._failing_since: float | None = None
        self._in_doubt: str | None = None
        super().__init__(engine, engine.execution_options(isolation_level="AUTOCOMMIT"))

    @classmethod
    def open(cls, config: StoreConfig) -> "PostgresStore":
        assert config.database_url is not None
        return cls(config.database_url)

    def close(self) -> None:
        self._is_closing = True
        super().close()

    def _read_now(self, statements: Callable[[Connection], T]) -> T:
        return self._retry(lambda: super(PostgresStore, self)._read_now(statements))

    def _commit(self, group: Sequence[PendingWrite]) -> None:
        self._in_doubt = None
        self._retry(lambda: self._commit_once(group))

    def _commit_once(self, group: Sequence[PendingWrite]) -> None:
        if self._in_doubt is not None and self._was_committed(self._in_doubt):
            return
        self._in_doubt = None
        with self._writing.begin() as connection:
            transaction = connection.execute(text("SELECT CAST(pg_current_xact_id() AS text)")).scalar_one()
            self._require_lease(connection)
            for write in group:
                _run(write, connection)
            self._in_doubt = transaction  # the commit that follows may succeed although its response is lost

    def _was_committed(self, transaction: str) -> bool:
        status = text("SELECT pg_xact_status(CAST(:id AS xid8))")
        with self._reading.connect() as connection:
            while (found := connection.execute(status, {"id": transaction}).scalar_one()) == "in progress":
                time.sleep(_RETRY_SECONDS)  # in total at most _IDLE_MILLISECONDS
        return found == "committed"

    def _retry(self, attempt: Callable[[], T]) -> T:
        """Retries errors that may pass. Raises DatabaseUnreachable if they last too long."""
        while True:
            try:
                result = attempt()
            except DBAPIError as error:
                if not _is_temporary(error):
                    raise
                since = self._failing_since = self._failing_since or time.monotonic()
                if time.monotonic() - since > (_CLOSING_SECONDS if self._is_closing else _OUTAGE_SECONDS):
                    raise DatabaseUnreachable(f"{self._shown_url} is out of reach: {_reason(error)}") from None
                time.sleep(_RETRY_SECONDS)
            else:
                self._failing_since = None
                return result

    def clock(self, connection: Connection, now: float) -> float:
        clock = text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")
        return connection.execute(clock).scalar_one()


def _run(write: PendingWrite, connection: Connection) -> None:
    """Runs the write. Raises only errors that end the whole transaction."""
    write.run(connection)
    if isinstance(write.error, IntegrityError):
        # Another server may have inserted the same row after the statements looked; now they see it.
        write.run(connection)
    if write.error is not None and _is_temporary(write.error):
        raise write.error


def _is_temporary(error: Exception) -> bool:
    """True if the same statements may succeed on another connection or later."""
    if not isinstance(error, DBAPIError):
        return False
    state = getattr(error.orig, "sqlstate", None)
    is_lost = isinstance(error, OperationalError) and (state is None or state.startswith("08"))
    return error.connection_invalidated or is_lost or state in _TEMPORARY_STATES


def _reason(error: SQLAlchemyError) -> str:
    return " ".join(driver_message(error).split())


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # The message leaves out the URL, which may contain a password.
        raise ValueError(
            "database_url cannot be parsed: expected postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"
        ) from None
    return parsed.set(drivername="postgresql+psycopg", query={**_CONNECTING, **parsed.query})


def _engine(url: URL) -> Engine:
    try:
        engine = create_engine(url, pool_size=NUM_READERS + 1, max_overflow=0, hide_parameters=True)
    except ModuleNotFoundError:
        raise ValueError("--database-url needs the driver psycopg: pip install 'psycopg[binary]'") from None
    event.listen(engine, "connect", _configure)
    return engine


def _configure(connection: DBAPIConnection, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute(f"SET idle_in_transaction_session_timeout = {_IDLE_MILLISECONDS}")
    cursor.close()
    connection.commit()
