"""Queries on sessions."""

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection, String, cast, delete, func, insert, or_, select, update
from sqlalchemy.sql import ColumnElement

from ..database.database import PageInfo
from ..database.records import SessionEnd, SessionRecord
from ..database.rows import record_of, row_values
from ..database.schema import checkpoints, contains, logged_metrics, operations, runs, samplers, sessions, unexpired
from .record_table import RecordTable


class SessionTable(RecordTable[SessionRecord]):
    table, record_type = sessions, SessionRecord

    async def insert(self, session: SessionRecord) -> SessionRecord:
        """Inserts the session, or returns the one that its tenant already has with the same idempotency key."""

        def statements(connection: Connection) -> SessionRecord:
            if row := connection.execute(select(sessions).where(same_request(session))).first():
                return record_of(SessionRecord, row)
            connection.execute(insert(sessions).values(row_values(session)))
            return session

        return await self.database.write(statements)

    async def find(self, session: SessionRecord) -> SessionRecord | None:
        return await self._one(select(sessions).where(same_request(session)))

    async def get(self, session_id: str) -> SessionRecord | None:
        return await self._one(select(sessions).where(sessions.c.session_id == session_id))

    async def list_open(self) -> tuple[SessionRecord, ...]:
        """Returns the sessions of all tenants that have not ended."""
        return await self._all(select(sessions).where(sessions.c.finished_at.is_(None)))

    async def list_of_tenant(
        self, tenant_id: str, offset: int, limit: int, public_at: float | None = None
    ) -> tuple[SessionRecord, ...]:
        """Returns the tenant's sessions, newest first; with `public_at` also other tenants' sessions of runs that have
        a public checkpoint unexpired at this time."""
        visible: ColumnElement[bool] = sessions.c.tenant_id == tenant_id
        if public_at is not None:
            public = select(runs.c.session_id).join(checkpoints, checkpoints.c.run_id == runs.c.run_id)
            visible = or_(visible, sessions.c.session_id.in_(public.where(checkpoints.c.public, unexpired(public_at))))
        order = (sessions.c.created_at.desc(), sessions.c.session_id)
        newest = select(sessions).where(visible).order_by(*order)
        return await self._all(newest.offset(offset).limit(limit))

    async def names(self, session_ids: Collection[str]) -> dict[str, str]:
        """Returns the names of those of these sessions that have one."""
        named = select(sessions).where(sessions.c.session_id.in_(session_ids), sessions.c.display_name.is_not(None))
        found = await self._all(named)
        return {one.session_id: one.display_name for one in found if one.display_name}

    async def page_of_tenant(
        self, tenant_id: str, offset: int, limit: int, search: str, is_open: bool | None
    ) -> tuple[tuple[SessionRecord, ...], PageInfo]:
        """Returns the tenant's sessions, newest first: with a text in their id, name, project, tags or metadata, in any
        case ("" for all), and only open or only ended ones unless `is_open` is None."""
        columns = sessions.c
        query = select(sessions).where(columns.tenant_id == tenant_id)
        query = query.order_by(columns.created_at.desc(), columns.session_id)
        if is_open is not None:
            query = query.where(columns.finished_at.is_(None) == is_open)
        if not search:
            return await self._page(query, offset, limit)
        texts = (columns.session_id, columns.display_name, columns.project_id, columns.user_metadata, columns.tags)
        matches = or_(*(contains(text, search) for text in texts))
        return await self._search(query.where(matches), columns.session_id, PageInfo(offset, limit), tenant_id)

    async def touch(self, heartbeats: Mapping[str, float]) -> None:
        """Stores the times of the last heartbeats, by session_id."""

        def statements(connection: Connection) -> None:
            for session_id, heard_at in heartbeats.items():
                same = sessions.c.session_id == session_id
                connection.execute(update(sessions).where(same).values(last_heartbeat_at=heard_at))

        await self.database.write(statements)

    async def end(self, session_id: str, finished_at: float, end: SessionEnd, detail: str | None) -> bool:
        """Ends the session. False if it had already ended: the first end wins."""
        is_open = (sessions.c.session_id == session_id) & sessions.c.finished_at.is_(None)
        return await self._update(is_open, finished_at=finished_at, end=end, end_detail=detail) > 0

    async def set_project(self, session_id: str, project_id: str) -> None:
        await self._update(sessions.c.session_id == session_id, project_id=project_id)

    async def truncate_texts(self, most_text: int, most_json: int) -> None:
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

        await self.database.write(statements)

    async def list_deletable(self, ended_before: float, crowded_before: float, most: int) -> list[str]:
        """Returns the sessions without a checkpoint that ended before `ended_before` and, of a tenant with more than
        `most` of them, the oldest beyond `most` that ended before `crowded_before`."""
        id_of, ended_at, tenant_id = sessions.c.session_id, sessions.c.finished_at, sessions.c.tenant_id
        is_over = ended_at.is_not(None) & ~_has_checkpoint()
        crowded = select(tenant_id, func.count()).where(is_over).group_by(tenant_id).having(func.count() > most)

        def statements(connection: Connection) -> list[str]:
            found = list(connection.execute(select(id_of).where(is_over, ended_at < ended_before)).scalars())
            for tenant, num in connection.execute(crowded).all():
                oldest = select(id_of).where(is_over, tenant_id == tenant, ended_at < crowded_before)
                found += connection.execute(oldest.order_by(ended_at).limit(num - most)).scalars()
            return list(dict.fromkeys(found))

        return await self.database.read(statements)

    async def delete(self, session_ids: Sequence[str]) -> None:
        """Deletes sessions with their samplers, their runs and the history of these; skips those that have a checkpoint
        or have not ended."""
        these = sessions.c.session_id.in_(session_ids) & sessions.c.finished_at.is_not(None) & ~_has_checkpoint()

        def statements(connection: Connection) -> None:
            ids = connection.execute(select(sessions.c.session_id).where(these)).scalars().all()
            run_ids = connection.execute(select(runs.c.run_id).where(runs.c.session_id.in_(ids))).scalars().all()
            for table in (operations, logged_metrics):
                connection.execute(delete(table).where(table.c.run_id.in_(run_ids)))
            for table in (samplers, runs, sessions):
                connection.execute(delete(table).where(table.c.session_id.in_(ids)))

        await self.database.write(statements)


def same_request(session: SessionRecord) -> ColumnElement[bool]:
    """True for the session of the same tenant and idempotency key; never true without a key."""
    same = (sessions.c.tenant_id == session.tenant_id) & (sessions.c.idempotency_key == session.idempotency_key)
    return same & sessions.c.idempotency_key.is_not(None)


def _has_checkpoint() -> ColumnElement[bool]:
    of_session = select(checkpoints.c.name).join(runs, runs.c.run_id == checkpoints.c.run_id)
    return of_session.where(runs.c.session_id == sessions.c.session_id).correlate(sessions).exists()
