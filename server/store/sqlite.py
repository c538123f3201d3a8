"""Stores everything in one SQLite file in WAL mode."""

import sqlite3
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DatabaseError

from .migrations import create_or_migrate
from .store import Store
from .store_config import StoreConfig

DATABASE_NAME = "trainhouse.db"  # inside the state directory
_BUSY_MILLISECONDS = 10_000
_OF_DAMAGE = ("malformed", "not a database")
DAMAGE_REMEDY = (
    "restore it from a backup; or move it away with its -wal and -shm files and make new keys for the same names: the "
    "next start restores the checkpoints whose manifests name their owner"
)
"""The advice in messages about a damaged database."""

_UNUSABLE_REMEDY = (
    "it and what is named like it with -wal and -shm, if they exist, must be files that this user may write; see also "
    "that the disk has room"
)


class SqliteStore(Store):
    """Keeps the store in one file, which other processes may open, too (`trainhouse keys` while a server runs)."""

    def __init__(self, path: Path, sync: bool = False) -> None:
        """Opens or creates the file; with `sync` each commit waits for the disk. Raises ValueError: a newer trainhouse
        wrote the file, or it is damaged or cannot be used."""
        path.parent.mkdir(parents=True, exist_ok=True)
        engine = _engine(path, sync)
        # Take the write lock first: a transaction that upgrades to it midway can fail at once instead of waiting.
        writing = engine.execution_options(begin="BEGIN IMMEDIATE")
        try:
            with writing.begin() as connection:
                create_or_migrate(connection, f"{path}", "--state-dir")
        except DatabaseError as error:
            engine.dispose()
            if any(words in str(error.orig) for words in _OF_DAMAGE):
                raise _damage(path, str(error.orig)) from None
            # Else a statement is wrong, and the fault ours.
            if getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_ERROR) == sqlite3.SQLITE_ERROR:
                raise
            raise ValueError(f"database {path} cannot be used ({error.orig}): {_UNUSABLE_REMEDY}") from None
        except BaseException:
            engine.dispose()
            raise
        super().__init__(writing, engine)
        self._path = path

    async def check_integrity(self) -> None:
        """Reads the whole file. Raises ValueError if it is damaged."""
        try:
            found = await self.read(lambda connection: connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one())
        except DatabaseError as error:
            found = str(error.orig)
        if found != "ok":
            raise _damage(self._path, found)

    @classmethod
    def open(cls, config: StoreConfig) -> "SqliteStore":
        return cls(config.state_dir / DATABASE_NAME, sync=config.durability == "power")


def _damage(path: Path, reason: str) -> ValueError:
    return ValueError(f"database {path} is damaged ({' '.join(reason.split())}): {DAMAGE_REMEDY}")


def _engine(path: Path, sync: bool) -> Engine:
    def configure(connection: DBAPIConnection, _: object) -> None:
        connection.isolation_level = None  # else the driver begins transactions itself, which breaks savepoints
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute(f"PRAGMA synchronous = {'FULL' if sync else 'NORMAL'}")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    engine = create_engine(f"sqlite:///{path}", hide_parameters=True)
    event.listen(engine, "connect", configure)
    event.listen(engine, "begin", _begin)
    return engine


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))
