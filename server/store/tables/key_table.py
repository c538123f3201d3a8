"""Queries on API keys."""

import dataclasses

from sqlalchemy import Connection, func, insert, select

from ..database.records import ApiKeyRecord, KeyCounts
from ..database.rows import row_values
from ..database.schema import api_keys
from .record_table import RecordTable


class KeyTable(RecordTable[ApiKeyRecord]):
    table, record_type = api_keys, ApiKeyRecord

    async def insert(
        self,
        tenant_id: str,
        key_hash: str,
        created_at: float,
        scopes: tuple[str, ...] | None = None,
        requests_per_minute: int | None = None,
    ) -> ApiKeyRecord:
        new = ApiKeyRecord(0, tenant_id, key_hash, created_at, None, scopes, requests_per_minute)
        values = {name: value for name, value in row_values(new).items() if name != "key_id"}

        def statements(connection: Connection) -> int:
            (key_id,) = connection.execute(insert(api_keys).values(values)).inserted_primary_key or (0,)
            return key_id

        return dataclasses.replace(new, key_id=await self.database.write(statements))

    async def find(self, key_hash: str) -> ApiKeyRecord | None:
        return await self._one(select(api_keys).where(api_keys.c.key_hash == key_hash))

    async def list_all(self) -> tuple[ApiKeyRecord, ...]:
        """Returns all keys, revoked ones included, in the order of creation."""
        return await self._all(select(api_keys).order_by(api_keys.c.key_id))

    async def count(self) -> KeyCounts:
        """Returns counts that change with every change of a key, since keys are never deleted or reinstated."""
        counts = select(func.count(), func.count(api_keys.c.revoked_at)).select_from(api_keys)
        return await self.database.read(lambda connection: KeyCounts(*connection.execute(counts).one()))

    async def revoke(self, key_id: int, revoked_at: float) -> bool:
        """True if this revoked a key; False if there is no such key in force."""
        in_force = (api_keys.c.key_id == key_id) & api_keys.c.revoked_at.is_(None)
        return await self._update(in_force, revoked_at=revoked_at) > 0
