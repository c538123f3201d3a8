"""SqliteStore: one file in WAL mode."""

from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection

from .config import StoreConfig
from .engine import EngineStore
from .format import open_format

DATABASE_NAME = "trainhouse.db"  # inside the state directory
_BUSY_MILLISECONDS = 10_000


class SqliteStore(EngineStore):
    """Other processes may have the same file open (`trainhouse keys` beside a server)."""

    def __init__(self, path: Path, sync: bool = False) -> None:
        """Makes the file when it is not there; `sync`: each commit waits for the disk.

        Raises ValueError when a newer trainhouse wrote it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        engine = _engine(path, sync)
        # Its transactions take the write lock first: one that took it midway could fail at once instead of waiting.
        writing = engine.execution_options(begin="BEGIN IMMEDIATE")
        try:
            with writing.begin() as connection:
                open_format(connection, f"{path}", "--state-dir")
        except BaseException:
            engine.dispose()
            raise
        super().__init__(writing, engine)

    @classmethod
    def open(cls, config: StoreConfig) -> "SqliteStore":
        return cls(config.state_dir / DATABASE_NAME, sync=config.durability == "power")


def _engine(path: Path, sync: bool) -> Engine:
    def configure(connection: DBAPIConnection, _: object) -> None:
        connection.isolation_level = None  # the driver begins no transactions of its own, so that savepoints work
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
