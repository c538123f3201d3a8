"""The tables of the newest format. Large payloads are files; rows only say where they are.

A change here needs a new FORMAT_VERSION and a migration: see format.py.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)

metadata = MetaData()

format_table = Table("format", metadata, Column("version", Integer, nullable=False))

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", String, primary_key=True),
    Column("name", String, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", Integer, primary_key=True, autoincrement=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("key_hash", String, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
    Column("scopes", JSON(none_as_null=True)),
    Column("requests_per_minute", Integer),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("last_heartbeat_at", Float, nullable=False),
    Column("finished_at", Float, index=True),
    Column("end", String),
    Column("end_detail", String),
    Column("tags", JSON, nullable=False),
    Column("user_metadata", JSON(none_as_null=True)),
    Column("sdk_version", String),
    Column("project_id", String),
    Column("display_name", String),
    Column("idempotency_key", String),
    UniqueConstraint("tenant_id", "idempotency_key"),
    Index("sessions_by_tenant", "tenant_id", "created_at"),
)

runs = Table(
    "runs",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("session_id", ForeignKey("sessions.session_id"), nullable=False, index=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("last_request_at", Float, nullable=False),
    Column("user_metadata", JSON(none_as_null=True)),
    Index("runs_by_tenant", "tenant_id", "last_request_at"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("run_id", ForeignKey("runs.run_id"), primary_key=True),
    Column("kind", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("directory", String, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, index=True),
    Column("public", Boolean, nullable=False),
    Column("user_metadata", JSON(none_as_null=True)),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("has_optimizer", Boolean, nullable=False),
    Index("checkpoints_by_tenant", "tenant_id", "created_at"),
)

samplers = Table(
    "samplers",
    metadata,
    Column("sampler_id", String, primary_key=True),
    Column("session_id", ForeignKey("sessions.session_id"), nullable=False, index=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("base_model", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("kind", String, nullable=False),
    Column("model_path", String),
    Column("run_id", String),
    Column("directory", String),
)

results = Table(
    "results",
    metadata,
    Column("request_id", String, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("place", String, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("encoding", String, nullable=False),
    Column("created_at", Float, nullable=False, index=True),
)

checkpoint_copies = Table(
    "checkpoint_copies",
    metadata,
    Column("directory", String, primary_key=True),
    Column("mirror", String, primary_key=True),
    Column("url", String, nullable=False),
    Column("state", String, nullable=False),
    Column("error", String),
    Column("num_tries", Integer, nullable=False),
    Column("updated_at", Float, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("base_model", String, primary_key=True),
    Column("holder", String, nullable=False),
    Column("url", String, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", Float, nullable=False),
)
