"""What must survive a restart: records, and the databases that hold them."""

from collections.abc import Mapping

from .base import Page, Store
from .records import (
    ApiKeyRecord,
    CheckpointCopyRecord,
    CheckpointKind,
    CheckpointRecord,
    CopyState,
    KeyCounts,
    LeaseRecord,
    ResultRecord,
    RunRecord,
    SamplerRecord,
    SessionEnd,
    SessionRecord,
    TenantRecord,
    string_metadata,
)
from .sqlite import DATABASE_NAME, SqliteStore

STORES: Mapping[str, type[SqliteStore]] = {"sqlite": SqliteStore}

__all__ = [
    "DATABASE_NAME",
    "STORES",
    "ApiKeyRecord",
    "CheckpointCopyRecord",
    "CheckpointKind",
    "CheckpointRecord",
    "CopyState",
    "KeyCounts",
    "LeaseRecord",
    "Page",
    "ResultRecord",
    "RunRecord",
    "SamplerRecord",
    "SessionEnd",
    "SessionRecord",
    "SqliteStore",
    "Store",
    "TenantRecord",
    "string_metadata",
]
