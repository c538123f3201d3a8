"""Every query on the tables. Subclasses decide how statements reach a database.

The SQL is portable: it uses no types or upserts of one dialect.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from sqlalchemy import Connection, Row, String, Table, cast, delete, func, insert, or_, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.sql import ColumnElement, Select

from ...schemas.models import TrainingConfig, training_of
from .records import (
    ApiKeyRecord,
    CheckpointCopyRecord,
    CheckpointKind,
    CheckpointRecord,
    KeyCounts,
    LeaseRecord,
    ResultRecord,
    RunRecord,
    SamplerRecord,
    SessionEnd,
    SessionRecord,
    TenantRecord,
)
from .tables import api_keys, checkpoint_copies, checkpoints, leases, results, runs, samplers, sessions, tenants

_MOST_NAMED = 500

Record = TypeVar("Record")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class PageInfo:
    """A slice of a listing.

    total_count: entries of the whole listing.
    """

    offset: int
    limit: int
    total_count: int


class LeaseLost(SQLAlchemyError):
    """Another server has the lease that this store's writes need. Nothing was written, and no later write will
    succeed.
    """


class Store:
    """Everything that must survive a restart. Every method is awaited; a write has been committed when it returns.

    A duplicate key raises sqlalchemy.exc.IntegrityError. Get methods return None for a missing row; update and delete
    methods then do nothing. With `required_lease`, every write raises LeaseLost as soon as its base model's lease has
    another holder or epoch; a transaction that has seen the lease keeps other servers from taking it until the commit.
    """

    required_lease: LeaseRecord | None = None

    def write(self, statements: Callable[[Connection], T]) -> "Future[T]":
        """Runs `statements` atomically, possibly in one transaction with other callers' statements."""
        raise NotImplementedError

    def read(self, statements: Callable[[Connection], T]) -> "Future[T]":
        raise NotImplementedError

    def close(self) -> None:
        """Commits pending writes and releases the database."""
        raise NotImplementedError

    async def check_integrity(self) -> None:
        """Raises ValueError if the stored data is damaged. Does nothing for databases that check their data
        themselves.
        """

    # Tenants and keys

    async def ensure_tenant(self, tenant: TenantRecord) -> None:
        """Inserts the tenant unless its id exists."""

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

    async def insert_key(
        self,
        tenant_id: str,
        key_hash: str,
        created_at: float,
        scopes: tuple[str, ...] | None = None,
        requests_per_minute: int | None = None,
    ) -> ApiKeyRecord:
        new = ApiKeyRecord(0, tenant_id, key_hash, created_at, None, scopes, requests_per_minute)
        values = {name: value for name, value in _row_values(new).items() if name != "key_id"}

        def statements(connection: Connection) -> int:
            (key_id,) = connection.execute(insert(api_keys).values(values)).inserted_primary_key or (0,)
            return key_id

        return dataclasses.replace(new, key_id=await self._write(statements))

    async def find_key(self, key_hash: str) -> ApiKeyRecord | None:
        """Finds a key, revoked or not."""
        return await self._one(ApiKeyRecord, select(api_keys).where(api_keys.c.key_hash == key_hash))

    async def list_keys(self) -> tuple[ApiKeyRecord, ...]:
        """Returns all keys, revoked ones included, in the order of creation."""
        return await self._all(ApiKeyRecord, select(api_keys).order_by(api_keys.c.key_id))

    async def count_keys(self) -> KeyCounts:
        """Returns counts that change with every change of a key, since keys are never deleted or reinstated."""
        counts = select(func.count(), func.count(api_keys.c.revoked_at)).select_from(api_keys)
        return await self._read(lambda connection: KeyCounts(*connection.execute(counts).one()))

    async def revoke_key(self, key_id: int, revoked_at: float) -> bool:
        """True if this revoked a key; False if there is no such key in force."""
        in_force = (api_keys.c.key_id == key_id) & api_keys.c.revoked_at.is_(None)
        return await self._update(api_keys, in_force, {"revoked_at": revoked_at}) > 0

    # Sessions

    async def insert_session(self, session: SessionRecord) -> SessionRecord:
        """Inserts the session, or returns the one that its tenant already has with the same idempotency key."""

        def statements(connection: Connection) -> SessionRecord:
            if row := connection.execute(select(sessions).where(_same_request(session))).first():
                return _record(SessionRecord, row)
            connection.execute(insert(sessions).values(_row_values(session)))
            return session

        return await self._write(statements)

    async def find_session(self, session: SessionRecord) -> SessionRecord | None:
        """Returns the session of the same tenant and idempotency key."""
        return await self._one(SessionRecord, select(sessions).where(_same_request(session)))

    async def truncate_session_texts(self, most_text: int, most_json: int) -> None:
        """Truncates texts, and drops JSON, of sessions and runs that an older trainhouse accepted at any length."""

        def statements(connection: Connection) -> None:
            for column in (sessions.c.display_name, sessions.c.end_detail, sessions.c.project_id):
                cut = update(sessions).values({column.name: func.substr(column, 1, most_text)})
                connection.execute(cut.where(func.length(column) > most_text))
            for column, empty in (
                (sessions.c.tags, []),
                (sessions.c.user_metadata, None),
                (runs.c.user_metadata, None),
            ):
                too_long = func.length(cast(column, String)) > most_json
                connection.execute(update(column.table).values({column.name: empty}).where(too_long))

        await self._write(statements)

    async def list_deletable_sessions(self, ended_before: float, crowded_before: float, most: int) -> list[str]:
        """Returns ended sessions without a checkpoint: those that ended before `ended_before`, and the excess of busy
        tenants.

        Of a tenant with more than `most` of them, the oldest beyond `most` are included if they ended before
        `crowded_before`.
        """
        id_of, ended_at, tenant_id = sessions.c.session_id, sessions.c.finished_at, sessions.c.tenant_id
        is_over = ended_at.is_not(None) & ~_has_checkpoint()
        crowded = select(tenant_id, func.count()).where(is_over).group_by(tenant_id).having(func.count() > most)

        def statements(connection: Connection) -> list[str]:
            found = list(connection.execute(select(id_of).where(is_over, ended_at < ended_before)).scalars())
            for tenant, num in connection.execute(crowded).all():
                oldest = select(id_of).where(is_over, tenant_id == tenant, ended_at < crowded_before)
                found += connection.execute(oldest.order_by(ended_at).limit(num - most)).scalars()
            return list(dict.fromkeys(found))

        return await self._read(statements)

    async def delete_sessions(self, session_ids: Sequence[str]) -> None:
        """Deletes sessions with their runs and samplers; skips those that have a checkpoint or have not ended."""
        these = sessions.c.session_id.in_(session_ids) & sessions.c.finished_at.is_not(None) & ~_has_checkpoint()

        def statements(connection: Connection) -> None:
            ids = connection.execute(select(sessions.c.session_id).where(these)).scalars().all()
            for table in (samplers, runs, sessions):
                connection.execute(delete(table).where(table.c.session_id.in_(ids)))

        await self._write(statements)

    async def get_session(self, session_id: str) -> SessionRecord | None:
        return await self._one(SessionRecord, select(sessions).where(sessions.c.session_id == session_id))

    async def list_open_sessions(self) -> tuple[SessionRecord, ...]:
        """Returns the sessions of all tenants that have not ended."""
        return await self._all(SessionRecord, select(sessions).where(sessions.c.finished_at.is_(None)))

    async def list_sessions(self, tenant_id: str, offset: int, limit: int) -> tuple[SessionRecord, ...]:
        """Returns the tenant's sessions, newest first."""
        order = (sessions.c.created_at.desc(), sessions.c.session_id)
        newest = select(sessions).where(sessions.c.tenant_id == tenant_id).order_by(*order)
        return await self._all(SessionRecord, newest.offset(offset).limit(limit))

    async def touch_sessions(self, heartbeats: Mapping[str, float]) -> None:
        """Stores the times of the last heartbeats, by session_id."""

        def statements(connection: Connection) -> None:
            for session_id, heard_at in heartbeats.items():
                same = sessions.c.session_id == session_id
                connection.execute(update(sessions).where(same).values(last_heartbeat_at=heard_at))

        await self._write(statements)

    async def end_session(self, session_id: str, finished_at: float, end: SessionEnd, detail: str | None) -> bool:
        """Ends the session. False if it had already ended: the first end wins."""
        is_open = (sessions.c.session_id == session_id) & sessions.c.finished_at.is_(None)
        ended = {"finished_at": finished_at, "end": end, "end_detail": detail}
        return await self._update(sessions, is_open, ended) > 0

    async def set_session_project(self, session_id: str, project_id: str) -> None:
        await self._update(sessions, sessions.c.session_id == session_id, {"project_id": project_id})

    # Runs

    async def insert_run(self, run: RunRecord) -> None:
        """Inserts the run, whose session must exist."""
        await self._insert(runs, run)

    async def get_run(self, run_id: str) -> RunRecord | None:
        return await self._one(RunRecord, select(runs).where(runs.c.run_id == run_id))

    async def set_run_target(self, run_id: str, target_path: str | None) -> None:
        await self._update(runs, runs.c.run_id == run_id, {"target_path": target_path})

    async def list_run_ids(self) -> frozenset[str]:
        """Returns the run ids of all tenants, ended ones included."""
        return await self._read(lambda connection: frozenset(connection.execute(select(runs.c.run_id)).scalars()))

    async def list_session_runs(self, session_id: str) -> tuple[RunRecord, ...]:
        """Returns the session's runs in the order of creation."""
        return await self._all(
            RunRecord, select(runs).where(runs.c.session_id == session_id).order_by(runs.c.created_at)
        )

    async def list_runs(
        self, tenant_id: str, offset: int, limit: int, project_id: str | None = None, public_at: float | None = None
    ) -> tuple[tuple[RunRecord, ...], PageInfo]:
        """Returns the tenant's runs, most recently used first.

        Args:
            project_id: only the tenant's own runs in this project.
            public_at: include other tenants' runs that have a public checkpoint unexpired at this time.
        """
        visible: ColumnElement[bool] = runs.c.tenant_id == tenant_id
        if public_at is not None:
            public = select(checkpoints.c.run_id).where(checkpoints.c.public, _unexpired(public_at))
            visible = or_(visible, runs.c.run_id.in_(public))
        query = select(runs).where(visible)
        if project_id is not None:  # other tenants' projects are private
            query = query.join(sessions).where(sessions.c.project_id == project_id, runs.c.tenant_id == tenant_id)
        return await self._page(RunRecord, query.order_by(runs.c.last_request_at.desc(), runs.c.run_id), offset, limit)

    async def touch_runs(self, requests: Mapping[str, float]) -> None:
        """Stores the times of the last requests, by run_id. Call it now and then for many runs, not per request."""

        def statements(connection: Connection) -> None:
            for run_id, requested_at in requests.items():
                connection.execute(update(runs).where(runs.c.run_id == run_id).values(last_request_at=requested_at))

        await self._write(statements)

    # Checkpoints

    async def put_checkpoint(self, checkpoint: CheckpointRecord, overwrite: bool) -> CheckpointRecord | None:
        """Inserts the checkpoint. With `overwrite`, replaces and returns one of the same name; else that is an
        IntegrityError.
        """
        same = _same_checkpoint(checkpoint.run_id, checkpoint.kind, checkpoint.name)

        def statements(connection: Connection) -> CheckpointRecord | None:
            row = connection.execute(select(checkpoints).where(same)).first() if overwrite else None
            if row is not None:
                connection.execute(delete(checkpoints).where(same))
            connection.execute(insert(checkpoints).values(_row_values(checkpoint)))
            return None if row is None else _record(CheckpointRecord, row)

        return await self._write(statements)

    async def insert_copied_checkpoint(
        self, session: SessionRecord, run: RunRecord, checkpoint: CheckpointRecord
    ) -> None:
        """Inserts a copied checkpoint with its run and its session, all or nothing."""

        def statements(connection: Connection) -> None:
            for table, record in ((sessions, session), (runs, run), (checkpoints, checkpoint)):
                connection.execute(insert(table).values(_row_values(record)))

        await self._write(statements)

    async def find_copied_checkpoint(self, session: SessionRecord) -> CheckpointRecord | None:
        """Returns the copy made for the same tenant under the same idempotency key."""
        copies = select(checkpoints).join(runs, runs.c.run_id == checkpoints.c.run_id).join(sessions)
        return await self._one(CheckpointRecord, copies.where(_same_request(session)))

    async def get_checkpoint(self, run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None:
        """Returns the checkpoint, even if it has expired but is not deleted yet."""
        same = _same_checkpoint(run_id, kind, name)
        return await self._one(CheckpointRecord, select(checkpoints).where(same))

    async def list_run_checkpoints(self, run_ids: Collection[str], unexpired_at: float) -> tuple[CheckpointRecord, ...]:
        """Returns the runs' unexpired checkpoints, oldest first."""
        of_runs = select(checkpoints).where(checkpoints.c.run_id.in_(run_ids), _unexpired(unexpired_at))
        return await self._all(CheckpointRecord, of_runs.order_by(checkpoints.c.created_at))

    async def list_checkpoints(
        self, tenant_id: str, unexpired_at: float, offset: int, limit: int
    ) -> tuple[tuple[CheckpointRecord, ...], PageInfo]:
        """Returns the tenant's unexpired checkpoints, newest first."""
        query = select(checkpoints).where(checkpoints.c.tenant_id == tenant_id, _unexpired(unexpired_at))
        order = (checkpoints.c.created_at.desc(), *checkpoints.primary_key)
        return await self._page(CheckpointRecord, query.order_by(*order), offset, limit)

    async def list_expired_checkpoints(self, now: float) -> tuple[CheckpointRecord, ...]:
        return await self._all(CheckpointRecord, select(checkpoints).where(checkpoints.c.expires_at <= now))

    async def list_checkpoint_directories(self) -> frozenset[str]:
        """Returns the directories of all checkpoints of all tenants."""
        query = select(checkpoints.c.directory)
        return await self._read(lambda connection: frozenset(connection.execute(query).scalars()))

    async def move_checkpoint_directories(self, moves: Mapping[str, str]) -> None:
        """Changes directories, old -> new."""

        def statements(connection: Connection) -> None:
            for old, new in moves.items():
                connection.execute(update(checkpoints).where(checkpoints.c.directory == old).values(directory=new))

        await self._write(statements)

    async def set_checkpoint_public(self, checkpoint: CheckpointRecord, public: bool) -> None:
        await self._update(checkpoints, _same_version(checkpoint), {"public": public})

    async def set_checkpoint_expiry(self, checkpoint: CheckpointRecord, expires_at: float | None) -> None:
        await self._update(checkpoints, _same_version(checkpoint), {"expires_at": expires_at})

    async def delete_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Deletes this version of the checkpoint, but not one that was saved under the same name since."""
        await self._delete(checkpoints, _same_version(checkpoint))

    # Copies of checkpoints

    async def put_mirror_copy(self, copy: CheckpointCopyRecord) -> None:
        """Inserts or replaces the record of a copy."""

        def statements(connection: Connection) -> None:
            connection.execute(delete(checkpoint_copies).where(_same_copy(copy)))
            connection.execute(insert(checkpoint_copies).values(_row_values(copy)))

        await self._write(statements)

    async def list_mirror_copies(self, directories: Collection[str]) -> tuple[CheckpointCopyRecord, ...]:
        """Returns the copies of the checkpoints in these directories, by directory and mirror."""
        of_these = select(checkpoint_copies).where(checkpoint_copies.c.directory.in_(directories))
        return await self._all(CheckpointCopyRecord, of_these.order_by(*checkpoint_copies.primary_key))

    async def list_unfinished_mirror_copies(self) -> tuple[CheckpointCopyRecord, ...]:
        """Returns waiting and failed copies, the least recently updated first."""
        unfinished = select(checkpoint_copies).where(checkpoint_copies.c.state != "copied")
        return await self._all(CheckpointCopyRecord, unfinished.order_by(checkpoint_copies.c.updated_at))

    async def delete_mirror_copy(self, copy: CheckpointCopyRecord) -> None:
        await self._delete(checkpoint_copies, _same_copy(copy))

    async def delete_mirror_copies(self, directories: Collection[str]) -> None:
        await self._delete(checkpoint_copies, checkpoint_copies.c.directory.in_(directories))

    # Leases

    async def acquire_leases(
        self, base_models: Collection[str], holder: str, url: str, now: float, seconds: float
    ) -> tuple[LeaseRecord, ...] | None:
        """Takes all leases for `seconds`, in the order of `base_models`; None if another holder has one that has not
        expired.

        A lease that changes hands has its epoch raised by one. Its holder may take it again without that, expired or
        not. The clock is the database's if it has one (PostgreSQL), since the clocks of servers differ; else `now`,
        which all processes of one machine share.
        """
        of_these = select(leases).where(leases.c.base_model.in_(base_models)).order_by(leases.c.base_model)

        def statements(connection: Connection) -> tuple[LeaseRecord, ...] | None:
            rows = connection.execute(of_these.with_for_update()).all()
            known = {row.base_model: _record(LeaseRecord, row) for row in rows}
            clock = self._clock(connection, now)
            if any(lease.holder != holder and lease.expires_at > clock for lease in known.values()):
                return None
            taken = tuple(
                LeaseRecord(name, holder, url, _next_epoch(known.get(name), holder), clock + seconds)
                for name in base_models
            )
            for lease in taken:
                same = leases.c.base_model == lease.base_model
                is_known = lease.base_model in known
                connection.execute((update(leases).where(same) if is_known else insert(leases)).values(**vars(lease)))
            return taken

        return await self._write(statements)

    async def renew_leases(self, holder: str, now: float, seconds: float) -> bool:
        """Extends the holder's leases by `seconds`, by the clock of `acquire_leases`. False if one has expired.

        After False nothing has been renewed. Acquiring the leases again shows whether another server has taken one.
        """
        his = leases.c.holder == holder

        def statements(connection: Connection) -> bool:
            # key_share: this holder's own writes, which lock the row to check the lease, can run concurrently.
            mine = select(leases.c.expires_at).where(his).with_for_update(key_share=True)
            expiries = connection.execute(mine).scalars().all()
            clock = self._clock(connection, now)
            if not expiries or min(expiries) <= clock:
                return False
            connection.execute(update(leases).where(his).values(expires_at=clock + seconds))
            return True

        return await self._write(statements)

    async def release_leases(self, holder: str) -> None:
        """Expires the holder's leases, so that any server may take them. Their epochs stay."""
        await self._update(leases, leases.c.holder == holder, {"expires_at": 0.0})

    async def list_leases(self) -> tuple[LeaseRecord, ...]:
        """Returns all leases that were ever taken, by base model; expired and released ones included."""
        return await self._all(LeaseRecord, select(leases).order_by(leases.c.base_model))

    def _require_lease(self, connection: Connection) -> None:
        """Called at the beginning of every write transaction. Raises LeaseLost if another server has the needed
        lease.
        """
        lease = self.required_lease
        if lease is None:
            return
        same = (leases.c.base_model == lease.base_model) & (leases.c.holder == lease.holder)
        mine = select(leases.c.epoch).where(same, leases.c.epoch == lease.epoch)
        if connection.execute(mine.with_for_update(read=True, key_share=True)).first() is None:
            raise LeaseLost(f"this server no longer has the lease of epoch {lease.epoch}: another server has taken it")

    # Samplers

    async def insert_sampler(self, sampler: SamplerRecord) -> None:
        """Inserts the sampler, whose session must exist."""
        await self._insert(samplers, sampler)

    async def get_sampler(self, sampler_id: str) -> SamplerRecord | None:
        return await self._one(SamplerRecord, select(samplers).where(samplers.c.sampler_id == sampler_id))

    async def list_session_samplers(self, session_id: str) -> tuple[SamplerRecord, ...]:
        """Returns the session's samplers in the order of creation."""
        of_session = select(samplers).where(samplers.c.session_id == session_id)
        return await self._all(SamplerRecord, of_session.order_by(samplers.c.created_at))

    async def list_open_samplers(self) -> tuple[SamplerRecord, ...]:
        """Returns the samplers of all tenants whose session has not ended."""
        query = select(samplers).join(sessions).where(sessions.c.finished_at.is_(None))
        return await self._all(SamplerRecord, query.order_by(samplers.c.created_at))

    # Results

    async def put_results(self, put: Sequence[ResultRecord]) -> None:
        """Inserts the results, replacing earlier ones of the same requests."""

        def statements(connection: Connection) -> None:
            connection.execute(delete(results).where(results.c.request_id.in_([one.request_id for one in put])))
            connection.execute(insert(results), [_row_values(one) for one in put])

        await self._write(statements)

    async def get_result(self, request_id: str) -> ResultRecord | None:
        return await self._one(ResultRecord, select(results).where(results.c.request_id == request_id))

    async def get_results(self, request_ids: Sequence[str]) -> list[ResultRecord]:
        """Returns the results that exist for these requests."""
        found: list[ResultRecord] = []
        for first in range(0, len(request_ids), _MOST_NAMED):
            named = results.c.request_id.in_(request_ids[first : first + _MOST_NAMED])
            found += await self._all(ResultRecord, select(results).where(named))
        return found

    async def newest_result(self) -> ResultRecord | None:
        return await self._one(ResultRecord, select(results).order_by(results.c.created_at.desc()).limit(1))

    async def list_results(self, prefix: str) -> tuple[ResultRecord, ...]:
        """Returns the results of requests whose ids begin with `prefix`, oldest first."""
        following = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        named = (results.c.request_id >= prefix) & (results.c.request_id < following)
        return await self._all(ResultRecord, select(results).where(named).order_by(results.c.created_at))

    async def sum_results(self) -> dict[str, tuple[int, int]]:
        """Returns the number and total bytes of results, by tenant."""
        columns = (results.c.tenant_id, func.count(), func.sum(results.c.size_bytes))
        query = select(*columns).group_by(results.c.tenant_id)
        rows = await self._read(lambda connection: connection.execute(query).all())
        return {tenant_id: (num, int(num_bytes)) for tenant_id, num, num_bytes in rows}

    async def delete_results(self, created_before: float) -> None:
        await self._delete(results, results.c.created_at < created_before)

    def _clock(self, connection: Connection, now: float) -> float:
        """Returns the seconds since the epoch by which servers compare leases. `now` is the caller's clock."""
        return now

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
        self, record_type: type[Record], query: Select, offset: int, limit: int
    ) -> tuple[tuple[Record, ...], PageInfo]:
        """Returns one page. `query` must have an order without ties, so that pages neither overlap nor skip rows."""

        def statements(connection: Connection) -> tuple[Sequence[Row], int]:
            rows = connection.execute(query.offset(offset).limit(limit)).all()
            return rows, _count(connection, query)

        rows, total_count = await self._read(statements)
        return tuple(_record(record_type, row) for row in rows), PageInfo(offset, limit, total_count)


def _count(connection: Connection, query: Select) -> int:
    return connection.execute(select(func.count()).select_from(query.order_by(None).subquery())).scalar_one()


def _unexpired(now: float) -> ColumnElement[bool]:
    return checkpoints.c.expires_at.is_(None) | (checkpoints.c.expires_at > now)


def _same_request(session: SessionRecord) -> ColumnElement[bool]:
    """True for the session of the same tenant and idempotency key; never true without a key."""
    same = (sessions.c.tenant_id == session.tenant_id) & (sessions.c.idempotency_key == session.idempotency_key)
    return same & sessions.c.idempotency_key.is_not(None)


def _has_checkpoint() -> ColumnElement[bool]:
    """True for a session of which some run still has a checkpoint."""
    of_session = select(checkpoints.c.name).join(runs, runs.c.run_id == checkpoints.c.run_id)
    return of_session.where(runs.c.session_id == sessions.c.session_id).correlate(sessions).exists()


def _same_checkpoint(run_id: str, kind: str, name: str) -> ColumnElement[bool]:
    return (checkpoints.c.run_id == run_id) & (checkpoints.c.kind == kind) & (checkpoints.c.name == name)


def _same_copy(copy: CheckpointCopyRecord) -> ColumnElement[bool]:
    return (checkpoint_copies.c.directory == copy.directory) & (checkpoint_copies.c.mirror == copy.mirror)


def _same_version(checkpoint: CheckpointRecord) -> ColumnElement[bool]:
    same = _same_checkpoint(checkpoint.run_id, checkpoint.kind, checkpoint.name)
    return same & (checkpoints.c.directory == checkpoint.directory)


def _next_epoch(lease: LeaseRecord | None, holder: str) -> int:
    if lease is None:
        return 1
    return lease.epoch if lease.holder == holder else lease.epoch + 1


def _row_values(record: object) -> dict[str, object]:
    """Returns the values of a row. A record's fields are named like its table's columns."""
    assert dataclasses.is_dataclass(record)
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {name: _column_value(value) for name, value in values.items()}


def _column_value(value: object) -> object:
    if isinstance(value, TrainingConfig):
        return value.model_dump()
    return list(value) if isinstance(value, tuple) else value


def _record(record_type: type[Record], row: Row) -> Record:
    values = dict(row._mapping)
    if "training" in values:
        values["training"] = training_of(values["training"])
    return record_type(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
