"""Queries on samplers."""

from sqlalchemy import select

from ..database.records import SamplerRecord
from ..database.schema import samplers, sessions
from .record_table import RecordTable


class SamplerTable(RecordTable[SamplerRecord]):
    table, record_type = samplers, SamplerRecord

    async def insert(self, sampler: SamplerRecord) -> None:
        await self._insert(sampler)

    async def get(self, sampler_id: str) -> SamplerRecord | None:
        return await self._one(select(samplers).where(samplers.c.sampler_id == sampler_id))

    async def list_of_session(self, session_id: str) -> tuple[SamplerRecord, ...]:
        of_session = select(samplers).where(samplers.c.session_id == session_id)
        return await self._all(of_session.order_by(samplers.c.created_at))

    async def list_open(self) -> tuple[SamplerRecord, ...]:
        """Returns the samplers of all tenants whose session has not ended."""
        query = select(samplers).join(sessions).where(sessions.c.finished_at.is_(None))
        return await self._all(query.order_by(samplers.c.created_at))
