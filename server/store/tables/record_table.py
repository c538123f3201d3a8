"""RecordTable: the queries that all tables need."""

from typing import Any, ClassVar, Generic

from sqlalchemy import Column, Connection, Table, delete, func, insert, select, update
from sqlalchemy.sql import ColumnElement, Select

from ..database.database import Database, PageInfo
from ..database.rows import Record, record_of, row_values


class RecordTable(Generic[Record]):
    """A table of the database, whose rows are records of one type."""

    table: ClassVar[Table]
    record_type: type[Record]

    def __init__(self, database: Database) -> None:
        self.database = database

    async def _insert(self, record: Record) -> None:
        new = insert(self.table).values(row_values(record))
        await self.database.write(lambda connection: connection.execute(new))

    async def _update(self, which: ColumnElement[bool], **values: object) -> int:
        changed = update(self.table).where(which).values(**values)
        return await self.database.write(lambda connection: connection.execute(changed).rowcount)

    async def _delete(self, which: ColumnElement[bool]) -> None:
        await self.database.write(lambda connection: connection.execute(delete(self.table).where(which)))

    async def _scalar(self, query: Select) -> Any:
        return await self.database.read(lambda connection: connection.execute(query).scalar_one())

    async def _one(self, query: Select) -> Record | None:
        row = await self.database.read(lambda connection: connection.execute(query).first())
        return None if row is None else record_of(self.record_type, row)

    async def _all(self, query: Select) -> tuple[Record, ...]:
        def statements(connection: Connection) -> tuple[Record, ...]:
            return tuple(record_of(self.record_type, row) for row in connection.execute(query))

        return await self.database.read(
            statements
        )  # converted there, too: thousands of rows would block the event loop

    async def _page(self, query: Select, offset: int, limit: int) -> tuple[tuple[Record, ...], PageInfo]:
        """Returns one page. `query` must have an order without ties, so that pages neither overlap nor skip rows."""
        count = select(func.count()).select_from(query.order_by(None).subquery())

        def statements(connection: Connection) -> tuple[tuple[Record, ...], PageInfo]:
            rows = connection.execute(query.offset(offset).limit(limit))
            total = PageInfo(offset, limit, connection.execute(count).scalar_one())
            return tuple(record_of(self.record_type, row) for row in rows), total

        return await self.database.read(statements)

    async def _search(
        self, found: Select, key: Column[str], page: PageInfo, tenant_id: str
    ) -> tuple[tuple[Record, ...], PageInfo]:
        """Like `_page`, for an ordered query that reads all rows of a tenant, by the records' `key`."""

        def statements(connection: Connection) -> tuple[tuple[Record, ...], PageInfo]:
            keys = connection.execute(found.with_only_columns(key)).scalars().all()
            shown = keys[page.offset : page.offset + page.limit]
            rows = connection.execute(select(key.table).where(key.in_(shown)))
            records = {getattr(row, key.name): record_of(self.record_type, row) for row in rows}
            found_now = tuple(records[one] for one in shown if one in records)  # one may have been deleted since
            return found_now, PageInfo(page.offset, page.limit, len(keys))

        return await self.database.search(statements, tenant_id)
