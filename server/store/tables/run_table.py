"""Queries on runs."""

from collections.abc import Mapping

from sqlalchemy import Connection, or_, select, update
from sqlalchemy.sql import ColumnElement

from ....schemas.schedules import RunSchedules
from ..database.database import PageInfo
from ..database.records import RunRecord
from ..database.schema import checkpoints, contains, runs, sessions, unexpired
from .record_table import RecordTable


class RunTable(RecordTable[RunRecord]):
    table, record_type = runs, RunRecord

    async def insert(self, run: RunRecord) -> None:
        await self._insert(run)

    async def get(self, run_id: str) -> RunRecord | None:
        return await self._one(select(runs).where(runs.c.run_id == run_id))

    async def set_target(self, run_id: str, target_path: str | None) -> None:
        await self._update(runs.c.run_id == run_id, target_path=target_path)

    async def set_schedules(self, run_id: str, schedules: RunSchedules) -> None:
        await self._update(runs.c.run_id == run_id, schedules=schedules.model_dump())

    async def list_ids(self) -> frozenset[str]:
        query = select(runs.c.run_id)
        return await self.database.read(lambda connection: frozenset(connection.execute(query).scalars()))

    async def list_ids_of_tenant(self, tenant_id: str) -> tuple[str, ...]:
        query = select(runs.c.run_id).where(runs.c.tenant_id == tenant_id)
        return await self.database.read(lambda connection: tuple(connection.execute(query).scalars()))

    async def list_of_session(self, session_id: str) -> tuple[RunRecord, ...]:
        of_session = select(runs).where(runs.c.session_id == session_id)
        return await self._all(of_session.order_by(runs.c.created_at))

    async def list_of_tenant(
        self,
        tenant_id: str,
        offset: int,
        limit: int,
        project_id: str | None = None,
        public_at: float | None = None,
        search: str = "",
    ) -> tuple[tuple[RunRecord, ...], PageInfo]:
        """Returns the tenant's runs, most recently used first.

        Args:
            project_id: only the tenant's own runs in this project.
            public_at: include other tenants' runs that have a public checkpoint unexpired at this time.
            search: only the tenant's own runs with this text, in any case, in their id, base model or metadata, or in
                the name of their session.
        """
        visible: ColumnElement[bool] = runs.c.tenant_id == tenant_id
        if public_at is not None:
            public = select(checkpoints.c.run_id).where(checkpoints.c.public, unexpired(public_at))
            visible = or_(visible, runs.c.run_id.in_(public))
        query = select(runs).where(visible)
        if project_id is not None:  # other tenants' projects are private
            query = query.join(sessions).where(sessions.c.project_id == project_id, runs.c.tenant_id == tenant_id)
        query = query.order_by(runs.c.last_request_at.desc(), runs.c.run_id)
        if not search:
            return await self._page(query, offset, limit)
        of_run = sessions.alias()
        name = select(of_run.c.display_name).where(of_run.c.session_id == runs.c.session_id).scalar_subquery()
        texts = (runs.c.run_id, runs.c.base_model, runs.c.user_metadata, name)
        query = query.where(or_(*(contains(text, search) for text in texts)), runs.c.tenant_id == tenant_id)
        return await self._search(query, runs.c.run_id, PageInfo(offset, limit), tenant_id)

    async def touch(self, requests: Mapping[str, float]) -> None:
        """Stores the times of the last requests, by run_id; now and then for many runs, not per request."""

        def statements(connection: Connection) -> None:
            for run_id, requested_at in requests.items():
                connection.execute(update(runs).where(runs.c.run_id == run_id).values(last_request_at=requested_at))

        await self.database.write(statements)
