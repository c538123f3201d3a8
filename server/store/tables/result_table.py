"""Queries on results."""

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, delete, func, insert, select

from ..database.records import OperationRecord, ResultRecord
from ..database.schema import results
from .operation_table import OperationTable
from .record_table import RecordTable

_MAX_NAMED = 500
_DELETE_SAME = delete(results).where(results.c.request_id == bindparam("same"))


class ResultTable(RecordTable[ResultRecord]):
    table, record_type = results, ResultRecord

    async def put(self, put: Sequence[ResultRecord], ended: Sequence[OperationRecord] = ()) -> None:
        """Inserts results and the operations that they end, replacing earlier records of the same ones."""

        def statements(connection: Connection) -> None:
            if put:
                connection.execute(_DELETE_SAME, [{"same": one.request_id} for one in put])
                connection.execute(insert(results), [{**vars(one)} for one in put])
            OperationTable.put(connection, ended)

        await self.database.write(statements)

    async def get(self, request_id: str) -> ResultRecord | None:
        return await self._one(select(results).where(results.c.request_id == request_id))

    async def get_many(self, request_ids: Sequence[str]) -> list[ResultRecord]:
        """Returns the results that exist for these requests."""
        found: list[ResultRecord] = []
        for first in range(0, len(request_ids), _MAX_NAMED):
            named = results.c.request_id.in_(request_ids[first : first + _MAX_NAMED])
            found += await self._all(select(results).where(named))
        return found

    async def newest(self) -> ResultRecord | None:
        query = select(results).order_by(results.c.created_at.desc()).limit(1)
        return await self._one(query)

    async def list_by_prefix(self, prefix: str) -> tuple[ResultRecord, ...]:
        """Returns the results of requests whose ids begin with `prefix`, oldest first."""
        following = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        named = (results.c.request_id >= prefix) & (results.c.request_id < following)
        return await self._all(select(results).where(named).order_by(results.c.created_at))

    async def sum_by_tenant(self) -> dict[str, tuple[int, int]]:
        """Returns the number and total bytes of results, by tenant."""
        columns = (results.c.tenant_id, func.count(), func.sum(results.c.size_bytes))
        query = select(*columns).group_by(results.c.tenant_id)
        rows = await self.database.read(lambda connection: connection.execute(query).all())
        return {tenant_id: (num, int(num_bytes)) for tenant_id, num, num_bytes in rows}

    async def delete(self, created_before: float) -> None:
        await self._delete(results.c.created_at < created_before)
