"""Store: the tables and every query on them. How statements reach a database is left to the subclass.

The SQL is portable: no dialect's own types or upserts. Large payloads are files; rows only say where they are.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    UniqueConstraint,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.sql import ColumnElement, Select

from ...schemas.models import LoraConfig
from .records import (
    ApiKeyRecord,
    CheckpointKind,
    CheckpointRecord,
    KeyCounts,
    ResultRecord,
    RunRecord,
    SamplerRecord,
    SessionEnd,
    SessionRecord,
    TenantRecord,
)

FORMAT_VERSION = 1

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

Record = TypeVar("Record")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Page:
    """A slice of a listing; `total_count` counts all of it."""

    offset: int
    limit: int
    total_count: int


class Store:
    """What must survive. Every method is awaited; a write has been committed when it returns.

    A duplicate key raises sqlalchemy.exc.IntegrityError. Get methods answer None for what is not there, update and
    delete methods do nothing then.
    """

    def write(self, statements: Callable[[Connection], T]) -> "Future[T]":
        """Runs `statements` all or nothing, perhaps in one transaction with other writers' statements."""
        raise NotImplementedError

    def read(self, statements: Callable[[Connection], T]) -> "Future[T]":
        raise NotImplementedError

    def close(self) -> None:
        """Commits what was handed over and lets go of the database."""
        raise NotImplementedError

    # Tenants and keys

    async def ensure_tenant(self, tenant: TenantRecord) -> None:
        """Inserts the tenant unless its id is there."""

        def statements(connection: Connection) -> None:
            known = connection.execute(select(tenants.c.tenant_id).where(tenants.c.tenant_id == tenant.tenant_id))
            if known.first() is None:
                connection.execute(insert(tenants).values(_row_values(tenant)))

        await self._write(statements)

    async def get_tenant(self, tenant_id: str) -> TenantRecord | None:
        return await self._one(TenantRecord, select(tenants).where(tenants.c.tenant_id == tenant_id))

    async def find_tenant(self, name: str) -> TenantRecord | None:
        return await self._one(TenantRecord, select(tenants).where(tenants.c.name == name))

    async def list_tenants(self) -> tuple[TenantRecord, ...]:
        return await self._all(TenantRecord, select(tenants))

    async def insert_key(self, tenant_id: str, key_hash: str, created_at: float) -> ApiKeyRecord:
        values = {"tenant_id": tenant_id, "key_hash": key_hash, "created_at": created_at}

        def statements(connection: Connection) -> int:
            (key_id,) = connection.execute(insert(api_keys).values(values)).inserted_primary_key or (0,)
            return key_id

        return ApiKeyRecord(key_id=await self._write(statements), **values)

    async def find_key(self, key_hash: str) -> ApiKeyRecord | None:
        """Revoked keys included."""
        return await self._one(ApiKeyRecord, select(api_keys).where(api_keys.c.key_hash == key_hash))

    async def list_keys(self) -> tuple[ApiKeyRecord, ...]:
        """Revoked keys included, in the order they were made."""
        return await self._all(ApiKeyRecord, select(api_keys).order_by(api_keys.c.key_id))

    async def count_keys(self) -> KeyCounts:
        """Changes with every change of a key: none is ever deleted or put back in force."""
        counts = select(func.count(), func.count(api_keys.c.revoked_at)).select_from(api_keys)
        return await self._read(lambda connection: KeyCounts(*connection.execute(counts).one()))

    async def revoke_key(self, key_id: int, revoked_at: float) -> bool:
        """Whether there was such a key in force."""
        in_force = (api_keys.c.key_id == key_id) & api_keys.c.revoked_at.is_(None)
        return await self._update(api_keys, in_force, {"revoked_at": revoked_at}) > 0

    # Sessions

    async def insert_session(self, session: SessionRecord) -> SessionRecord:
        """Unless its tenant has one of the same idempotency key: that one is answered then."""

        def statements(connection: Connection) -> SessionRecord:
            if row := connection.execute(select(sessions).where(_same_request(session))).first():
                return _record(SessionRecord, row)
            connection.execute(insert(sessions).values(_row_values(session)))
            return session

        return await self._write(statements)

    async def get_session(self, session_id: str) -> SessionRecord | None:
        return await self._one(SessionRecord, select(sessions).where(sessions.c.session_id == session_id))

    async def list_open_sessions(self) -> tuple[SessionRecord, ...]:
        """Of all tenants, those that have not ended."""
        return await self._all(SessionRecord, select(sessions).where(sessions.c.finished_at.is_(None)))

    async def list_sessions(self, tenant_id: str, offset: int, limit: int) -> tuple[SessionRecord, ...]:
        """Newest first."""
        newest = select(sessions).where(sessions.c.tenant_id == tenant_id).order_by(sessions.c.created_at.desc())
        return await self._all(SessionRecord, newest.offset(offset).limit(limit))

    async def touch_sessions(self, heartbeats: Mapping[str, float]) -> None:
        """session_id -> time of the last heartbeat."""

        def statements(connection: Connection) -> None:
            for session_id, heard_at in heartbeats.items():
                same = sessions.c.session_id == session_id
                connection.execute(update(sessions).where(same).values(last_heartbeat_at=heard_at))

        await self._write(statements)

    async def end_session(self, session_id: str, finished_at: float, end: SessionEnd, detail: str | None) -> bool:
        """Whether the session was open: the first end wins."""
        is_open = (sessions.c.session_id == session_id) & sessions.c.finished_at.is_(None)
        ended = {"finished_at": finished_at, "end": end, "end_detail": detail}
        return await self._update(sessions, is_open, ended) > 0

    async def set_session_project(self, session_id: str, project_id: str) -> None:
        await self._update(sessions, sessions.c.session_id == session_id, {"project_id": project_id})

    # Runs

    async def insert_run(self, run: RunRecord) -> None:
        """Its session must be there."""
        await self._insert(runs, run)

    async def get_run(self, run_id: str) -> RunRecord | None:
        return await self._one(RunRecord, select(runs).where(runs.c.run_id == run_id))

    async def list_run_ids(self) -> frozenset[str]:
        """Of all tenants, ended ones included."""
        return await self._read(lambda connection: frozenset(connection.execute(select(runs.c.run_id)).scalars()))

    async def list_session_runs(self, session_id: str) -> tuple[RunRecord, ...]:
        """In the order they were made."""
        return await self._all(
            RunRecord, select(runs).where(runs.c.session_id == session_id).order_by(runs.c.created_at)
        )

    async def list_runs(
        self, tenant_id: str, offset: int, limit: int, project_id: str | None = None, public_at: float | None = None
    ) -> tuple[tuple[RunRecord, ...], Page]:
        """Most recently used first. public_at: also other tenants' runs with a public checkpoint unexpired then."""
        visible: ColumnElement[bool] = runs.c.tenant_id == tenant_id
        if public_at is not None:
            public = select(checkpoints.c.run_id).where(checkpoints.c.public, _unexpired(public_at))
            visible = or_(visible, runs.c.run_id.in_(public))
        query = select(runs).where(visible)
        if project_id is not None:
            query = query.join(sessions).where(sessions.c.project_id == project_id)
        return await self._page(RunRecord, query, runs.c.last_request_at.desc(), offset, limit)

    async def touch_runs(self, requests: Mapping[str, float]) -> None:
        """run_id -> time of the last request. For many runs at once, now and then: not once a request."""

        def statements(connection: Connection) -> None:
            for run_id, requested_at in requests.items():
                connection.execute(update(runs).where(runs.c.run_id == run_id).values(last_request_at=requested_at))

        await self._write(statements)

    # Checkpoints

    async def put_checkpoint(self, checkpoint: CheckpointRecord, overwrite: bool) -> CheckpointRecord | None:
        """Inserts it. With `overwrite` in place of one of the same name, which is answered; else IntegrityError."""
        same = _same_checkpoint(checkpoint.run_id, checkpoint.kind, checkpoint.name)

        def statements(connection: Connection) -> CheckpointRecord | None:
            row = connection.execute(select(checkpoints).where(same)).first() if overwrite else None
            if row is not None:
                connection.execute(delete(checkpoints).where(same))
            connection.execute(insert(checkpoints).values(_row_values(checkpoint)))
            return None if row is None else _record(CheckpointRecord, row)

        return await self._write(statements)

    async def insert_copy(self, session: SessionRecord, run: RunRecord, checkpoint: CheckpointRecord) -> None:
        """A copied checkpoint with the run and the session that it belongs to, all or nothing."""

        def statements(connection: Connection) -> None:
            for table, record in ((sessions, session), (runs, run), (checkpoints, checkpoint)):
                connection.execute(insert(table).values(_row_values(record)))

        await self._write(statements)

    async def find_copy(self, session: SessionRecord) -> CheckpointRecord | None:
        """The copy that was made for the same tenant under the same idempotency key."""
        copies = select(checkpoints).join(runs, runs.c.run_id == checkpoints.c.run_id).join(sessions)
        return await self._one(CheckpointRecord, copies.where(_same_request(session)))

    async def get_checkpoint(self, run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None:
        """Expired ones included, as long as they are there."""
        same = _same_checkpoint(run_id, kind, name)
        return await self._one(CheckpointRecord, select(checkpoints).where(same))

    async def list_run_checkpoints(self, run_ids: Collection[str], unexpired_at: float) -> tuple[CheckpointRecord, ...]:
        """Oldest first."""
        of_runs = select(checkpoints).where(checkpoints.c.run_id.in_(run_ids), _unexpired(unexpired_at))
        return await self._all(CheckpointRecord, of_runs.order_by(checkpoints.c.created_at))

    async def list_checkpoints(
        self, tenant_id: str, unexpired_at: float, offset: int, limit: int
    ) -> tuple[tuple[CheckpointRecord, ...], Page]:
        """Newest first."""
        query = select(checkpoints).where(checkpoints.c.tenant_id == tenant_id, _unexpired(unexpired_at))
        return await self._page(CheckpointRecord, query, checkpoints.c.created_at.desc(), offset, limit)

    async def list_expired_checkpoints(self, now: float) -> tuple[CheckpointRecord, ...]:
        return await self._all(CheckpointRecord, select(checkpoints).where(checkpoints.c.expires_at <= now))

    async def list_checkpoint_directories(self) -> frozenset[str]:
        """Of all checkpoints of all tenants."""
        query = select(checkpoints.c.directory)
        return await self._read(lambda connection: frozenset(connection.execute(query).scalars()))

    async def move_checkpoint_directories(self, moves: Mapping[str, str]) -> None:
        """Old directory -> new directory."""

        def statements(connection: Connection) -> None:
            for old, new in moves.items():
                connection.execute(update(checkpoints).where(checkpoints.c.directory == old).values(directory=new))

        await self._write(statements)

    async def set_checkpoint_public(self, checkpoint: CheckpointRecord, public: bool) -> None:
        await self._update(checkpoints, _exactly(checkpoint), {"public": public})

    async def set_checkpoint_expiry(self, checkpoint: CheckpointRecord, expires_at: float | None) -> None:
        await self._update(checkpoints, _exactly(checkpoint), {"expires_at": expires_at})

    async def delete_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Leaves one of the same name alone that was saved since."""
        await self._delete(checkpoints, _exactly(checkpoint))

    # Samplers

    async def insert_sampler(self, sampler: SamplerRecord) -> None:
        """Its session must be there."""
        await self._insert(samplers, sampler)

    async def get_sampler(self, sampler_id: str) -> SamplerRecord | None:
        return await self._one(SamplerRecord, select(samplers).where(samplers.c.sampler_id == sampler_id))

    async def list_session_samplers(self, session_id: str) -> tuple[SamplerRecord, ...]:
        """In the order they were made."""
        of_session = select(samplers).where(samplers.c.session_id == session_id)
        return await self._all(SamplerRecord, of_session.order_by(samplers.c.created_at))

    async def list_open_samplers(self) -> tuple[SamplerRecord, ...]:
        """Of all tenants, the samplers whose session has not ended."""
        query = select(samplers).join(sessions).where(sessions.c.finished_at.is_(None))
        return await self._all(SamplerRecord, query.order_by(samplers.c.created_at))

    # Results

    async def put_results(self, put: Sequence[ResultRecord]) -> None:
        """Inserts them, in place of those of the same request that are there."""

        def statements(connection: Connection) -> None:
            connection.execute(delete(results).where(results.c.request_id.in_([one.request_id for one in put])))
            connection.execute(insert(results), [_row_values(one) for one in put])

        await self._write(statements)

    async def get_result(self, request_id: str) -> ResultRecord | None:
        return await self._one(ResultRecord, select(results).where(results.c.request_id == request_id))

    async def newest_result(self) -> ResultRecord | None:
        return await self._one(ResultRecord, select(results).order_by(results.c.created_at.desc()).limit(1))

    async def delete_results(self, created_before: float) -> tuple[ResultRecord, ...]:
        """The deleted ones, so that their payloads can go, too."""
        old = results.c.created_at < created_before

        def statements(connection: Connection) -> tuple[ResultRecord, ...]:
            rows = connection.execute(select(results).where(old)).all()
            connection.execute(delete(results).where(old))
            return tuple(_record(ResultRecord, row) for row in rows)

        return await self._write(statements)

    async def _write(self, statements: Callable[[Connection], T]) -> T:
        return await asyncio.wrap_future(self.write(statements))

    async def _read(self, statements: Callable[[Connection], T]) -> T:
        return await asyncio.wrap_future(self.read(statements))

    async def _insert(self, table: Table, record: object) -> None:
        await self._write(lambda connection: connection.execute(insert(table).values(_row_values(record))) and None)

    async def _update(self, table: Table, which: ColumnElement[bool], values: Mapping[str, object]) -> int:
        return await self._write(
            lambda connection: connection.execute(update(table).where(which).values(**values)).rowcount
        )

    async def _delete(self, table: Table, which: ColumnElement[bool]) -> None:
        await self._write(lambda connection: connection.execute(delete(table).where(which)) and None)

    async def _one(self, record_type: type[Record], query: Select) -> Record | None:
        row = await self._read(lambda connection: connection.execute(query).first())
        return None if row is None else _record(record_type, row)

    async def _all(self, record_type: type[Record], query: Select) -> tuple[Record, ...]:
        rows = await self._read(lambda connection: connection.execute(query).all())
        return tuple(_record(record_type, row) for row in rows)

    async def _page(
        self, record_type: type[Record], query: Select, order: ColumnElement, offset: int, limit: int
    ) -> tuple[tuple[Record, ...], Page]:
        def statements(connection: Connection) -> tuple[Sequence[Row], int]:
            rows = connection.execute(query.order_by(order).offset(offset).limit(limit)).all()
            return rows, _count(connection, query)

        rows, total_count = await self._read(statements)
        return tuple(_record(record_type, row) for row in rows), Page(offset, limit, total_count)


def _count(connection: Connection, query: Select) -> int:
    return connection.execute(select(func.count()).select_from(query.subquery())).scalar_one()


def _unexpired(now: float) -> ColumnElement[bool]:
    return checkpoints.c.expires_at.is_(None) | (checkpoints.c.expires_at > now)


def _same_request(session: SessionRecord) -> ColumnElement[bool]:
    """Never true without an idempotency key."""
    same = (sessions.c.tenant_id == session.tenant_id) & (sessions.c.idempotency_key == session.idempotency_key)
    return same & sessions.c.idempotency_key.is_not(None)


def _same_checkpoint(run_id: str, kind: str, name: str) -> ColumnElement[bool]:
    return (checkpoints.c.run_id == run_id) & (checkpoints.c.kind == kind) & (checkpoints.c.name == name)


def _exactly(checkpoint: CheckpointRecord) -> ColumnElement[bool]:
    same = _same_checkpoint(checkpoint.run_id, checkpoint.kind, checkpoint.name)
    return same & (checkpoints.c.directory == checkpoint.directory)


def _row_values(record: object) -> dict[str, object]:
    """A record's fields are its table's columns."""
    assert dataclasses.is_dataclass(record)
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {name: _column_value(value) for name, value in values.items()}


def _column_value(value: object) -> object:
    if isinstance(value, LoraConfig):
        return value.model_dump()
    return list(value) if isinstance(value, tuple) else value


def _record(record_type: type[Record], row: Row) -> Record:
    values = dict(row._mapping)
    if "lora" in values:
        values["lora"] = LoraConfig.model_validate(values["lora"])
    if "tags" in values:
        values["tags"] = tuple(values["tags"])
    return record_type(**values)
