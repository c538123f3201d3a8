"""Configures where the store is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class StoreConfig:
    """The database of a server.

    database_url: for SQLAlchemy; None means SQLite in the state directory.
    durability: see ServerConfig.
    """

    state_dir: Path
    database_url: str | None = None
    durability: Literal["process", "power"] = "process"

    @property
    def scheme(self) -> str:
        """Returns "sqlite" or "postgresql"."""
        return self.database_url.partition(":")[0].partition("+")[0] if self.database_url else "sqlite"
