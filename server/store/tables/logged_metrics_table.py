"""Queries on the metrics that clients log."""

import json
from collections.abc import Mapping

from sqlalchemy import Connection, delete, func, insert, select

from ..database.records import LoggedMetricsRecord
from ..database.rows import row_values
from ..database.schema import logged_metrics
from .record_table import RecordTable

_ROW_BYTES = 100
"""Approximate size of a row without its metrics."""


class LoggedMetricsTable(RecordTable[LoggedMetricsRecord]):
    table, record_type = logged_metrics, LoggedMetricsRecord

    async def merge(
        self, run_id: str, logged_at: float, by_step: Mapping[int, Mapping[str, float]], max_growth: int
    ) -> int | None:
        """Adds metrics to those of the steps, replacing equal ones. Returns the bytes by which the run's metrics have
        grown; None, with nothing stored, if these are more than `max_growth`."""
        named = (logged_metrics.c.run_id == run_id) & logged_metrics.c.step.in_(by_step)

        def statements(connection: Connection) -> int | None:
            stored = {row.step: row for row in connection.execute(select(logged_metrics).where(named))}
            merged = [
                _record(run_id, step, logged_at, {**(stored[step].metrics if step in stored else {}), **metrics})
                for step, metrics in by_step.items()
            ]
            growth = sum(one.num_bytes for one in merged) - sum(row.num_bytes for row in stored.values())
            if growth > max_growth:
                return None
            connection.execute(delete(logged_metrics).where(named))
            connection.execute(insert(logged_metrics), [row_values(one) for one in merged])
            return growth

        return await self.database.write(statements)

    async def num_bytes(self, run_id: str) -> int:
        query = select(func.coalesce(func.sum(logged_metrics.c.num_bytes), 0)).where(logged_metrics.c.run_id == run_id)
        return int(await self._scalar(query))

    async def list_of_run(self, run_id: str, after: int, limit: int) -> tuple[LoggedMetricsRecord, ...]:
        """Returns the metrics of the steps after `after`, in the order of steps."""
        query = select(logged_metrics).where(logged_metrics.c.run_id == run_id, logged_metrics.c.step > after)
        return await self._all(query.order_by(logged_metrics.c.step).limit(limit))

    async def count_steps(self, run_id: str, after: int) -> int:
        query = select(func.count()).where(logged_metrics.c.run_id == run_id, logged_metrics.c.step > after)
        return await self._scalar(query)

    async def delete(self, logged_before: float) -> dict[str, int]:
        """Deletes what was logged before; returns the deleted bytes of each run."""
        old = logged_metrics.c.logged_at < logged_before
        sums = select(logged_metrics.c.run_id, func.sum(logged_metrics.c.num_bytes)).where(old)

        def statements(connection: Connection) -> dict[str, int]:
            rows = connection.execute(sums.group_by(logged_metrics.c.run_id))
            deleted = {row[0]: int(row[1]) for row in rows}
            connection.execute(delete(logged_metrics).where(old))
            return deleted

        return await self.database.write(statements)


def _record(run_id: str, step: int, logged_at: float, metrics: dict[str, float]) -> LoggedMetricsRecord:
    return LoggedMetricsRecord(run_id, step, logged_at, len(json.dumps(metrics)) + _ROW_BYTES, metrics)
