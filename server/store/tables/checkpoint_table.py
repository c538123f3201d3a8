"""Queries on checkpoints."""

from collections.abc import Collection, Mapping

from sqlalchemy import Connection, delete, func, insert, not_, select, update
from sqlalchemy.sql import ColumnElement

from ..database.database import PageInfo
from ..database.records import CheckpointKind, CheckpointRecord, RunRecord, SessionRecord
from ..database.rows import record_of, row_values
from ..database.schema import checkpoints, runs, sessions, unexpired
from .record_table import RecordTable
from .session_table import same_request


class CheckpointTable(RecordTable[CheckpointRecord]):
    table, record_type = checkpoints, CheckpointRecord

    async def put(self, checkpoint: CheckpointRecord, overwrite: bool) -> CheckpointRecord | None:
        """Inserts the checkpoint. With `overwrite`, replaces and returns one of the same name, else an error."""
        same = _same_name(checkpoint.run_id, checkpoint.kind, checkpoint.name)

        def statements(connection: Connection) -> CheckpointRecord | None:
            row = connection.execute(select(checkpoints).where(same)).first() if overwrite else None
            if row is not None:
                connection.execute(delete(checkpoints).where(same))
            connection.execute(insert(checkpoints).values(row_values(checkpoint)))
            return None if row is None else record_of(CheckpointRecord, row)

        return await self.database.write(statements)

    async def insert_copied(self, session: SessionRecord, run: RunRecord, checkpoint: CheckpointRecord) -> None:
        """Inserts a copied checkpoint with its run and its session, all or nothing."""

        def statements(connection: Connection) -> None:
            for table, record in ((sessions, session), (runs, run), (checkpoints, checkpoint)):
                connection.execute(insert(table).values(row_values(record)))

        await self.database.write(statements)

    async def find_copied(self, session: SessionRecord) -> CheckpointRecord | None:
        copies = select(checkpoints).join(runs, runs.c.run_id == checkpoints.c.run_id).join(sessions)
        return await self._one(copies.where(same_request(session)))

    async def get(self, run_id: str, kind: CheckpointKind, name: str) -> CheckpointRecord | None:
        """Returns the checkpoint, even if it has expired but is not deleted yet."""
        return await self._one(select(checkpoints).where(_same_name(run_id, kind, name)))

    async def list_of_runs(self, run_ids: Collection[str], unexpired_at: float) -> tuple[CheckpointRecord, ...]:
        """Returns the runs' unexpired checkpoints, oldest first."""
        of_runs = select(checkpoints).where(checkpoints.c.run_id.in_(run_ids), unexpired(unexpired_at))
        return await self._all(of_runs.order_by(checkpoints.c.created_at))

    async def list_of_tenant(
        self, tenant_id: str, unexpired_at: float, offset: int, limit: int
    ) -> tuple[tuple[CheckpointRecord, ...], PageInfo]:
        """Returns the tenant's unexpired checkpoints, newest first."""
        query = select(checkpoints).where(checkpoints.c.tenant_id == tenant_id, unexpired(unexpired_at))
        order = (checkpoints.c.created_at.desc(), *checkpoints.primary_key)
        return await self._page(query.order_by(*order), offset, limit)

    async def stock_of_tenant(
        self, tenant_id: str, unexpired_at: float, without: CheckpointRecord | None = None
    ) -> tuple[int, int]:
        """Returns the number and bytes of the tenant's unexpired checkpoints, except the one named like `without`."""
        of_tenant = (checkpoints.c.tenant_id == tenant_id) & unexpired(unexpired_at)
        if without is not None:
            of_tenant &= not_(_same_name(without.run_id, without.kind, without.name))
        query = select(func.count(), func.coalesce(func.sum(checkpoints.c.size_bytes), 0)).where(of_tenant)
        num, num_bytes = await self.database.read(lambda connection: connection.execute(query).one())
        return num, int(num_bytes)  # PostgreSQL's sum is a Decimal

    async def list_expired(self, now: float) -> tuple[CheckpointRecord, ...]:
        return await self._all(select(checkpoints).where(checkpoints.c.expires_at <= now))

    async def list_directories(self) -> frozenset[str]:
        query = select(checkpoints.c.directory)
        return await self.database.read(lambda connection: frozenset(connection.execute(query).scalars()))

    async def move_directories(self, moves: Mapping[str, str]) -> None:
        """Changes directories, old -> new."""

        def statements(connection: Connection) -> None:
            for old, new in moves.items():
                connection.execute(update(checkpoints).where(checkpoints.c.directory == old).values(directory=new))

        await self.database.write(statements)

    async def set_public(self, checkpoint: CheckpointRecord, public: bool) -> None:
        await self._update(_same_version(checkpoint), public=public)

    async def set_expiry(self, checkpoint: CheckpointRecord, expires_at: float | None) -> None:
        await self._update(_same_version(checkpoint), expires_at=expires_at)

    async def delete(self, checkpoint: CheckpointRecord) -> None:
        """Deletes this version of the checkpoint, but not one that was saved under the same name since."""
        await self._delete(_same_version(checkpoint))


def _same_name(run_id: str, kind: str, name: str) -> ColumnElement[bool]:
    return (checkpoints.c.run_id == run_id) & (checkpoints.c.kind == kind) & (checkpoints.c.name == name)


def _same_version(checkpoint: CheckpointRecord) -> ColumnElement[bool]:
    same = _same_name(checkpoint.run_id, checkpoint.kind, checkpoint.name)
    return same & (checkpoints.c.directory == checkpoint.directory)
