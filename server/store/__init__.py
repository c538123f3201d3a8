"""Records that must survive a restart, and the databases that hold them."""

from collections.abc import Mapping

from .database.database import PageInfo
from .database.database_errors import DatabaseUnreachable, LeaseLost
from .database.records import (
    LIVE_STATE,
    ApiKeyRecord,
    CheckpointCopyRecord,
    CheckpointKind,
    CheckpointRecord,
    CopyState,
    KeyCounts,
    LeaseRecord,
    LoggedMetricsRecord,
    OperationRecord,
    ResultRecord,
    RunRecord,
    SamplerRecord,
    SessionEnd,
    SessionRecord,
    TenantRecord,
    checkpoint_path,
    string_metadata,
)
from .postgres import PostgresStore
from .sqlite import DATABASE_NAME, SqliteStore
from .store import Store
from .store_config import StoreConfig

STORES: Mapping[str, type[SqliteStore] | type[PostgresStore]] = {"sqlite": SqliteStore, "postgresql": PostgresStore}


def open_store(config: StoreConfig) -> Store:
    """Opens the configured database. Raises ValueError if it cannot be used, DatabaseUnreachable."""
    return STORES[config.scheme].open(config)


__all__ = [
    "DATABASE_NAME",
    "LIVE_STATE",
    "STORES",
    "ApiKeyRecord",
    "CheckpointCopyRecord",
    "CheckpointKind",
    "CheckpointRecord",
    "CopyState",
    "DatabaseUnreachable",
    "KeyCounts",
    "LeaseLost",
    "LeaseRecord",
    "LoggedMetricsRecord",
    "OperationRecord",
    "PageInfo",
    "PostgresStore",
    "ResultRecord",
    "RunRecord",
    "SamplerRecord",
    "SessionEnd",
    "SessionRecord",
    "SqliteStore",
    "Store",
    "StoreConfig",
    "TenantRecord",
    "checkpoint_path",
    "open_store",
    "string_metadata",
]
