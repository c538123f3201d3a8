"""The tables of the newest format. Large payloads are stored in files; rows only locate them.

A change here needs a new FORMAT_VERSION and a migration: see migrations.py.
"""

import json
import re
from typing import Any

from pydantic import JsonValue
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    TypeDecorator,
    UniqueConstraint,
    cast,
)
from sqlalchemy.sql import ColumnElement
from sqlalchemy.types import TypeEngine

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class PortableText(TypeDecorator):
    """Text that all databases store and compare alike, by code point and not by language.

    NUL and lone surrogates, which JSON allows and databases do not, become U+FFFD, in rows and in queries.
    """

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[str]:
        return dialect.type_descriptor(String(collation="C" if dialect.name == "postgresql" else None))

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else _UNSTORABLE.sub("\ufffd", value)


def replace_unstorable(value: JsonValue) -> JsonValue:
    """Replaces characters that a database or a response cannot hold with U+FFFD."""
    match value:
        case str():
            return _UNSTORABLE.sub("\ufffd", value)
        case list():
            return [replace_unstorable(entry) for entry in value]
        case dict():
            return {_UNSTORABLE.sub("\ufffd", key): replace_unstorable(entry) for key, entry in value.items()}
        case _:
            return value


class PortableJson(TypeDecorator):
    """JSON that replaces unstorable characters as PortableText does, also when reading rows of earlier versions."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> JsonValue:
        return replace_unstorable(list(value) if isinstance(value, tuple) else value)

    def process_result_value(self, value: Any, dialect: Dialect) -> JsonValue:
        return replace_unstorable(value)


def contains(column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
    """True if the text, in any case, is in the column, or in the keys and values of its JSON."""
    if isinstance(column.type, PortableJson):
        column, text = cast(column, String), json.dumps(text)[1:-1]  # as it is stored, with escapes
    return column.icontains(text, autoescape=True)


metadata = MetaData()

format_table = Table("format", metadata, Column("version", Integer, nullable=False))

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", PortableText, primary_key=True),
    Column("name", PortableText, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", Integer, primary_key=True, autoincrement=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("key_hash", PortableText, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
    Column("scopes", PortableJson(none_as_null=True)),
    Column("requests_per_minute", Integer),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", PortableText, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("last_heartbeat_at", Float, nullable=False),
    Column("finished_at", Float, index=True),
    Column("end", PortableText),
    Column("end_detail", PortableText),
    Column("tags", PortableJson, nullable=False),
    Column("user_metadata", PortableJson(none_as_null=True)),
    Column("sdk_version", PortableText),
    Column("project_id", PortableText),
    Column("display_name", PortableText),
    Column("idempotency_key", PortableText),
    UniqueConstraint("tenant_id", "idempotency_key"),
    Index("sessions_by_tenant", "tenant_id", "created_at"),
)

runs = Table(
    "runs",
    metadata,
    Column("run_id", PortableText, primary_key=True),
    Column("session_id", ForeignKey("sessions.session_id"), nullable=False, index=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("base_model", PortableText, nullable=False),
    Column("training", PortableJson, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("last_request_at", Float, nullable=False),
    Column("user_metadata", PortableJson(none_as_null=True)),
    Column("role", PortableText, nullable=False),
    Column("target_path", PortableText),
    Column("asked", PortableText),
    Column("schedules", PortableJson(none_as_null=True)),
    Index("runs_by_tenant", "tenant_id", "last_request_at"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("run_id", ForeignKey("runs.run_id"), primary_key=True),
    Column("kind", PortableText, primary_key=True),
    Column("name", PortableText, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("directory", PortableText, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, index=True),
    Column("public", Boolean, nullable=False),
    Column("user_metadata", PortableJson(none_as_null=True)),
    Column("base_model", PortableText, nullable=False),
    Column("training", PortableJson, nullable=False),
    Column("has_optimizer", Boolean, nullable=False),
    Column("role", PortableText, nullable=False),
    Column("target_path", PortableText),
    Index("checkpoints_by_tenant", "tenant_id", "created_at"),
)

samplers = Table(
    "samplers",
    metadata,
    Column("sampler_id", PortableText, primary_key=True),
    Column("session_id", ForeignKey("sessions.session_id"), nullable=False, index=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("base_model", PortableText, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("kind", PortableText, nullable=False),
    Column("model_path", PortableText),
    Column("run_id", PortableText),
    Column("draft_path", PortableText),
)

results = Table(
    "results",
    metadata,
    Column("request_id", PortableText, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("place", PortableText, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("encoding", PortableText, nullable=False),
    Column("created_at", Float, nullable=False, index=True),
)

# No foreign keys to runs: rows of both tables are written in batches, which one unknown run must not fail.
operations = Table(
    "operations",
    metadata,
    Column("run_id", PortableText, primary_key=True),
    Column("seq_id", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", PortableText, nullable=False),
    Column("ended_at", Float, nullable=False, index=True),
    Column("queued_seconds", Float, nullable=False),
    Column("busy_seconds", Float, nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("step", BigInteger),
    Column("error", PortableText),
    Column("metrics", PortableJson, nullable=False),
)

logged_metrics = Table(
    "logged_metrics",
    metadata,
    Column("run_id", PortableText, primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("logged_at", Float, nullable=False, index=True),
    Column("num_bytes", BigInteger, nullable=False),
    Column("metrics", PortableJson, nullable=False),
)

checkpoint_copies = Table(
    "checkpoint_copies",
    metadata,
    Column("directory", PortableText, primary_key=True),
    Column("mirror", PortableText, primary_key=True),
    Column("url", PortableText, nullable=False),
    Column("state", PortableText, nullable=False),
    Column("error", PortableText),
    Column("num_tries", Integer, nullable=False),
    Column("updated_at", Float, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("base_model", PortableText, primary_key=True),
    Column("holder", PortableText, nullable=False),
    Column("url", PortableText, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", Float, nullable=False),
)


def unexpired(now: float) -> ColumnElement[bool]:
    return checkpoints.c.expires_at.is_(None) | (checkpoints.c.expires_at > now)
