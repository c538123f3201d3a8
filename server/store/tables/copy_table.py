"""Queries on the copies that mirrors have of checkpoints."""

from collections.abc import Collection

from sqlalchemy import Connection, delete, insert, select
from sqlalchemy.sql import ColumnElement

from ..database.records import CheckpointCopyRecord
from ..database.rows import row_values
from ..database.schema import checkpoint_copies
from .record_table import RecordTable


class CopyTable(RecordTable[CheckpointCopyRecord]):
    table, record_type = checkpoint_copies, CheckpointCopyRecord

    async def put(self, copy: CheckpointCopyRecord) -> None:
        """Inserts or replaces the record of a copy."""

        def statements(connection: Connection) -> None:
            connection.execute(delete(checkpoint_copies).where(_same_copy(copy)))
            connection.execute(insert(checkpoint_copies).values(row_values(copy)))

        await self.database.write(statements)

    async def list_in(self, directories: Collection[str]) -> tuple[CheckpointCopyRecord, ...]:
        of_these = select(checkpoint_copies).where(checkpoint_copies.c.directory.in_(directories))
        return await self._all(of_these.order_by(*checkpoint_copies.primary_key))

    async def list_unfinished(self) -> tuple[CheckpointCopyRecord, ...]:
        """Returns waiting and failed copies, the least recently updated first."""
        unfinished = select(checkpoint_copies).where(checkpoint_copies.c.state != "copied")
        return await self._all(unfinished.order_by(checkpoint_copies.c.updated_at))

    async def delete(self, copy: CheckpointCopyRecord) -> None:
        await self._delete(_same_copy(copy))

    async def delete_in(self, directories: Collection[str]) -> None:
        await self._delete(checkpoint_copies.c.directory.in_(directories))


def _same_copy(copy: CheckpointCopyRecord) -> ColumnElement[bool]:
    return (checkpoint_copies.c.directory == copy.directory) & (checkpoint_copies.c.mirror == copy.mirror)
