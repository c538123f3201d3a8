"""Queries on tenants."""

from sqlalchemy import Connection, insert, select

from ..database.records import TenantRecord
from ..database.rows import row_values
from ..database.schema import tenants
from .record_table import RecordTable


class TenantTable(RecordTable[TenantRecord]):
    table, record_type = tenants, TenantRecord

    async def ensure(self, tenant: TenantRecord) -> None:
        """Inserts the tenant unless its id exists."""

        def statements(connection: Connection) -> None:
            known = connection.execute(select(tenants.c.tenant_id).where(tenants.c.tenant_id == tenant.tenant_id))
            if known.first() is None:
                connection.execute(insert(tenants).values(row_values(tenant)))

        await self.database.write(statements)

    async def get(self, tenant_id: str) -> TenantRecord | None:
        return await self._one(select(tenants).where(tenants.c.tenant_id == tenant_id))

    async def find(self, name: str) -> TenantRecord | None:
        return await self._one(select(tenants).where(tenants.c.name == name))

    async def list_all(self) -> tuple[TenantRecord, ...]:
        return await self._all(select(tenants))
