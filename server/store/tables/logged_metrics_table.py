"""Queries on the metrics that clients log."""

import json
from collections.abc import Mapping

from sqlalchemy import Connection, delete, func, insert, not_, select

from ..database.database import Database
from ..database.records import LoggedMetricsRecord
from ..database.rows import row_values
from ..database.schema import logged_metrics

_ROW_BYTES = 100
"""Approximate size of a row without its metrics."""


class LoggedMetricsTable:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def merge(
        self, run_id: str, logged_at: float, by_step: Mapping[int, Mapping[str, float]], max_bytes: int
    ) -> bool:
        """Adds metrics to those of the steps; a metric that a step has is replaced.

        False if the run would have more than `max_bytes` of them: then nothing is stored.
        """
        of_run = logged_metrics.c.run_id == run_id
        named = of_run & logged_metrics.c.step.in_(by_step)
        others = select(func.coalesce(func.sum(logged_metrics.c.num_bytes), 0)).where(of_run, not_(named))

        def statements(connection: Connection) -> bool:
            stored = {row.step: row.metrics for row in connection.execute(select(logged_metrics).where(named))}
            merged = [
                _record(run_id, step, logged_at, {**stored.get(step, {}), **metrics})
                for step, metrics in by_step.items()
            ]
            if connection.execute(others).scalar_one() + sum(one.num_bytes for one in merged) > max_bytes:
                return False
            connection.execute(delete(logged_metrics).where(named))
            connection.execute(insert(logged_metrics), [row_values(one) for one in merged])
            return True

        return await self._database.write(statements)

    async def list_of_run(self, run_id: str, after: int, limit: int) -> tuple[LoggedMetricsRecord, ...]:
        """Returns the metrics of the steps after `after`, in the order of steps."""
        query = select(logged_metrics).where(logged_metrics.c.run_id == run_id, logged_metrics.c.step > after)
        return await self._database.select_all(LoggedMetricsRecord, query.order_by(logged_metrics.c.step).limit(limit))

    async def count_steps(self, run_id: str, after: int) -> int:
        query = select(func.count()).where(logged_metrics.c.run_id == run_id, logged_metrics.c.step > after)
        return await self._database.read(lambda connection: connection.execute(query).scalar_one())

    async def delete(self, logged_before: float) -> None:
        await self._database.delete(logged_metrics, logged_metrics.c.logged_at < logged_before)


def _record(run_id: str, step: int, logged_at: float, metrics: dict[str, float]) -> LoggedMetricsRecord:
    return LoggedMetricsRecord(run_id, step, logged_at, len(json.dumps(metrics)) + _ROW_BYTES, metrics)
