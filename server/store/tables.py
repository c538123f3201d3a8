"""The tables of the newest format. Large payloads are stored in files; rows only locate them.

A change here needs a new FORMAT_VERSION and a migration: see format.py.
"""

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
)
from sqlalchemy.types import TypeEngine

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


class Text(TypeDecorator):
    """Text that all databases store and compare alike, by code point and not by language.

    NUL and lone surrogates, which JSON allows and databases do not, become U+FFFD, in rows and in queries.
    """

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[str]:
        return dialect.type_descriptor(String(collation="C" if dialect.name == "postgresql" else None))

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else _UNSTORABLE.sub("\ufffd", value)


def storable(value: JsonValue) -> JsonValue:
    """Replaces characters that a database or a response cannot hold with U+FFFD."""
    match value:
        case str():
            return _UNSTORABLE.sub("\ufffd", value)
        case list():
            return [storable(entry) for entry in value]
        case dict():
            return {_UNSTORABLE.sub("\ufffd", key): storable(entry) for key, entry in value.items()}
        case _:
            return value


class Json(TypeDecorator):
    """JSON that replaces unstorable characters like Text, also when reading rows of earlier versions."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> JsonValue:
        return storable(list(value) if isinstance(value, tuple) else value)

    def process_result_value(self, value: Any, dialect: Dialect) -> JsonValue:
        return storable(value)


metadata = MetaData()

format_table = Table("format", metadata, Column("version", Integer, nullable=False))

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", Integer, primary_key=True, autoincrement=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("key_hash", Text, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
    Column("scopes", Json(none_as_null=True)),
    Column("requests_per_minute", Integer),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("last_heartbeat_at", Float, nullable=False),
    Column("finished_at", Float, index=True),
    Column("end", Text),
    Column("end_detail", Text),
    Column("tags", Json, nullable=False),
    Column("user_metadata", Json(none_as_null=True)),
    Column("sdk_version", Text),
    Column("project_id", Text),
    Column("display_name", Text),
    Column("idempotency_key", Text),
    UniqueConstraint("tenant_id", "idempotency_key"),
    Index("sessions_by_tenant", "tenant_id", "created_at"),
)

runs = Table(
    "runs",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("session_id", ForeignKey("sessions.session_id"), nullable=False, index=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("base_model", Text, nullable=False),
    Column("training", Json, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("last_request_at", Float, nullable=False),
    Column("user_metadata", Json(none_as_null=True)),
    Column("role", Text, nullable=False),
    Column("target_path", Text),
    Column("asked", Text),
    Index("runs_by_tenant", "tenant_id", "last_request_at"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("run_id", ForeignKey("runs.run_id"), primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("directory", Text, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, index=True),
    Column("public", Boolean, nullable=False),
    Column("user_metadata", Json(none_as_null=True)),
    Column("base_model", Text, nullable=False),
    Column("training", Json, nullable=False),
    Column("has_optimizer", Boolean, nullable=False),
    Column("role", Text, nullable=False),
    Column("target_path", Text),
    Index("checkpoints_by_tenant", "tenant_id", "created_at"),
)

samplers = Table(
    "samplers",
    metadata,
    Column("sampler_id", Text, primary_key=True),
    Column("session_id", ForeignKey("sessions.session_id"), nullable=False, index=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("base_model", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("kind", Text, nullable=False),
    Column("model_path", Text),
    Column("run_id", Text),
    Column("draft_path", Text),
)

results = Table(
    "results",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("place", Text, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("encoding", Text, nullable=False),
    Column("created_at", Float, nullable=False, index=True),
)

checkpoint_copies = Table(
    "checkpoint_copies",
    metadata,
    Column("directory", Text, primary_key=True),
    Column("mirror", Text, primary_key=True),
    Column("url", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("error", Text),
    Column("num_tries", Integer, nullable=False),
    Column("updated_at", Float, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("base_model", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", Float, nullable=False),
)
