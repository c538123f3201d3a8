"""Configures where the store is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ...workers.protocol.option import matching, option

DatabaseUrl = Annotated[
    str, matching(r"postgresql(\+psycopg)?://[^\s]+", "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE")
]


@dataclass(frozen=True)
class StoreConfig:
    """The directory and database of a server, and the crashes that its state survives."""

    state_dir: Path = option(Path(".trainhouse"), "all state, for one server at a time", metavar="DIR", common=True)
    database_url: DatabaseUrl | None = option(
        None, "PostgreSQL instead of SQLite (better set in the environment)", secret=True
    )
    durability: Literal["process", "power"] = option("process", "survives kill -9; power: also a power cut (fsync)")

    @property
    def scheme(self) -> str:
        return self.database_url.partition(":")[0].partition("+")[0] if self.database_url else "sqlite"
