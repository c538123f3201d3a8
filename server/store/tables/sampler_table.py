"""Queries on samplers."""

from sqlalchemy import select

from ..database.database import Database
from ..database.records import SamplerRecord
from ..database.schema import samplers, sessions


class SamplerTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def insert(self, sampler: SamplerRecord) -> None:
        """Inserts the sampler, whose session must exist."""
        await self._database.insert(samplers, sampler)

    async def get(self, sampler_id: str) -> SamplerRecord | None:
        query = select(samplers).where(samplers.c.sampler_id == sampler_id)
        return await self._database.select_one(SamplerRecord, query)

    async def list_of_session(self, session_id: str) -> tuple[SamplerRecord, ...]:
        """Returns the session's samplers in the order of creation."""
        of_session = select(samplers).where(samplers.c.session_id == session_id)
        return await self._database.select_all(SamplerRecord, of_session.order_by(samplers.c.created_at))

    async def list_open(self) -> tuple[SamplerRecord, ...]:
        """Returns the samplers of all tenants whose session has not ended."""
        query = select(samplers).join(sessions).where(sessions.c.finished_at.is_(None))
        return await self._database.select_all(SamplerRecord, query.order_by(samplers.c.created_at))
