"""Queries on the copies that mirrors have of checkpoints."""

from collections.abc import Collection

from sqlalchemy import Connection, delete, insert, select
from sqlalchemy.sql import ColumnElement

from ..database.database import Database
from ..database.records import CheckpointCopyRecord
from ..database.rows import row_values
from ..database.schema import checkpoint_copies


class CopyTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, copy: CheckpointCopyRecord) -> None:
        """Inserts or replaces the record of a copy."""

        def statements(connection: Connection) -> None:
            connection.execute(delete(checkpoint_copies).where(_same_copy(copy)))
            connection.execute(insert(checkpoint_copies).values(row_values(copy)))

        await self._database.write(statements)

    async def list_in(self, directories: Collection[str]) -> tuple[CheckpointCopyRecord, ...]:
        """Returns the copies of the checkpoints in these directories, by directory and mirror."""
        of_these = select(checkpoint_copies).where(checkpoint_copies.c.directory.in_(directories))
        return await self._database.select_all(CheckpointCopyRecord, of_these.order_by(*checkpoint_copies.primary_key))

    async def list_unfinished(self) -> tuple[CheckpointCopyRecord, ...]:
        """Returns waiting and failed copies, the least recently updated first."""
        unfinished = select(checkpoint_copies).where(checkpoint_copies.c.state != "copied")
        return await self._database.select_all(
            CheckpointCopyRecord, unfinished.order_by(checkpoint_copies.c.updated_at)
        )

    async def delete(self, copy: CheckpointCopyRecord) -> None:
        await self._database.delete(checkpoint_copies, _same_copy(copy))

    async def delete_in(self, directories: Collection[str]) -> None:
        await self._database.delete(checkpoint_copies, checkpoint_copies.c.directory.in_(directories))


def _same_copy(copy: CheckpointCopyRecord) -> ColumnElement[bool]:
    return (checkpoint_copies.c.directory == copy.directory) & (checkpoint_copies.c.mirror == copy.mirror)
