"""The tables of the newest format, with a column for each field of their records. Large payloads are stored in files;
rows only locate them.

A change of a record needs a new FORMAT_VERSION and a migration: see migrations.py.
"""

import json
import re
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

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

from .records import (
    ApiKeyRecord,
    CheckpointCopyRecord,
    CheckpointRecord,
    LeaseRecord,
    LoggedMetricsRecord,
    OperationRecord,
    ResultRecord,
    RunRecord,
    SamplerRecord,
    SessionRecord,
    Stored,
    TenantRecord,
)

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

_TYPES = {str: PortableText, float: Float, int: BigInteger, bool: Boolean}


def _table(name: str, record: type, *constraints: Index | UniqueConstraint) -> Table:
    """Returns a table with a column for each field of the record."""
    hints = get_type_hints(record, include_extras=True)
    return Table(name, metadata, *(_column(field, hint) for field, hint in hints.items()), *constraints)


def _column(name: str, hint: Any) -> Column[Any]:
    kind, stored = (hint.__origin__, hint.__metadata__[0]) if get_origin(hint) is Annotated else (hint, Stored())
    is_optional = NoneType in get_args(kind)
    if is_optional:
        kind, _ = get_args(kind)
    form = PortableText if get_origin(kind) is Literal else _TYPES.get(kind)
    if form is None:
        is_optional |= stored.may_lack
        form = PortableJson(none_as_null=is_optional)
    type_or_key = ForeignKey(stored.refers_to) if stored.refers_to else Integer if stored.is_small else form
    rules = {"primary_key": stored.is_key, "nullable": is_optional, "unique": stored.is_unique or None}
    return Column(name, type_or_key, **rules, index=stored.is_indexed or None)


tenants = _table("tenants", TenantRecord)
api_keys = _table("api_keys", ApiKeyRecord)
sessions = _table(
    "sessions",
    SessionRecord,
    UniqueConstraint("tenant_id", "idempotency_key"),
    Index("sessions_by_tenant", "tenant_id", "created_at"),
)
runs = _table("runs", RunRecord, Index("runs_by_tenant", "tenant_id", "last_request_at"))
checkpoints = _table("checkpoints", CheckpointRecord, Index("checkpoints_by_tenant", "tenant_id", "created_at"))
samplers = _table("samplers", SamplerRecord)
results = _table("results", ResultRecord)
operations = _table("operations", OperationRecord)
logged_metrics = _table("logged_metrics", LoggedMetricsRecord)
checkpoint_copies = _table("checkpoint_copies", CheckpointCopyRecord)
leases = _table("leases", LeaseRecord)


def unexpired(now: float) -> ColumnElement[bool]:
    return checkpoints.c.expires_at.is_(None) | (checkpoints.c.expires_at > now)
