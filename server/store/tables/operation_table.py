"""Queries on ended operations."""

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from ..database.records import OperationRecord
from ..database.schema import operations
from .record_table import RecordTable

_seq_id = operations.c.seq_id
_MAX_READ = 20_000
"""Operations that are read at a time."""

_DELETE_SAME = delete(operations).where(operations.c.run_id == bindparam("run"), _seq_id == bindparam("seq"))


class OperationTable(RecordTable[OperationRecord]):
    table, record_type = operations, OperationRecord

    @staticmethod
    def put(connection: Connection, ended: Sequence[OperationRecord]) -> None:
        """Inserts the operations in the caller's transaction, replacing earlier records of the same ones."""
        if ended:
            connection.execute(_DELETE_SAME, [{"run": one.run_id, "seq": one.seq_id} for one in ended])
            connection.execute(insert(operations), [{**vars(one)} for one in ended])

    async def list_newest(
        self, run_id: str, before: int | None, limit: int, failed: bool = False
    ) -> tuple[OperationRecord, ...]:
        """Returns operations of the run with a seq_id below `before`, if `failed` only failed ones, the highest seq_id
        first."""
        query = select(operations).where(operations.c.run_id == run_id)
        if before is not None:
            query = query.where(_seq_id < before)
        if failed:
            query = query.where(operations.c.error.is_not(None))
        return await self._all(query.order_by(_seq_id.desc()).limit(limit))

    async def list_of_steps(self, run_id: str, after: int, num_steps: int) -> tuple[OperationRecord, ...]:
        """Returns the operations after a seq_id, in order, up to and including the `num_steps`-th optimizer step.

        At most _MAX_READ of them: more may follow the last one, and the last steps may be missing.
        """
        ahead = (operations.c.run_id == run_id) & (_seq_id > after)
        steps = select(_seq_id).where(ahead, operations.c.step.is_not(None)).order_by(_seq_id).limit(num_steps)
        last = select(func.max(steps.subquery().c.seq_id)).scalar_subquery()
        query = select(operations).where(ahead, _seq_id <= last).order_by(_seq_id).limit(_MAX_READ)
        return await self._all(query)

    async def list_between(self, run_id: str, after: int, last: int, limit: int) -> tuple[OperationRecord, ...]:
        """Returns the operations after a seq_id, up to and including `last`, those with the lowest seq_id first."""
        between = (operations.c.run_id == run_id) & (_seq_id > after) & (_seq_id <= last)
        query = select(operations).where(between).order_by(_seq_id).limit(limit)
        return await self._all(query)

    async def count_steps(self, run_id: str, after: int) -> int:
        ahead = (operations.c.run_id == run_id) & (_seq_id > after)
        query = select(func.count()).where(ahead, operations.c.step.is_not(None))
        return await self._scalar(query)

    async def newest_seq_id(self, run_id: str) -> int:
        """Returns the highest seq_id of the run's operations, -1 if it has none."""
        query = select(func.coalesce(func.max(_seq_id), -1)).where(operations.c.run_id == run_id)
        return await self._scalar(query)

    async def newest_step(self, run_id: str) -> OperationRecord | None:
        steps = select(operations).where(operations.c.run_id == run_id, operations.c.step.is_not(None))
        return await self._one(steps.order_by(_seq_id.desc()).limit(1))

    async def last_seq_id_of_steps_only(self, run_id: str) -> int:
        """Returns the seq_id up to which the run has only steps (see keep_only), or one before; -1 for none."""
        others = (operations.c.run_id == run_id) & operations.c.step.is_(None)
        query = select(func.coalesce(func.min(_seq_id), 0) - 1).where(others)
        return await self._scalar(query)

    async def keep_only(self, run_id: str, kept: Sequence[OperationRecord], last: int) -> None:
        """Replaces these operations of the run, and deletes its other ones up to the seq_id `last`, except for steps.

        Args:
            kept: with a seq_id of at most `last`; all steps, and at most one that is none.
        """
        of_run = operations.c.run_id == run_id
        passes = [one.seq_id for one in kept if one.step is None]

        def statements(connection: Connection) -> None:
            others = delete(operations).where(of_run, _seq_id <= last, operations.c.step.is_(None))
            connection.execute(others.where(_seq_id.not_in(passes)))
            for one in kept:
                connection.execute(update(operations).where(of_run, _seq_id == one.seq_id).values(**vars(one)))

        await self.database.write(statements)

    async def delete(self, ended_before: float) -> None:
        await self._delete(operations.c.ended_at < ended_before)
