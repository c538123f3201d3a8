"""RunHistory: what a run has done, and the metrics that its client logs.

Ended operations are written together with their results (see Futures), so that a crash neither loses nor repeats one.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from ...schemas.batches import merge_metrics
from ...schemas.errors import RequestError
from ...schemas.history import LoggedMetrics, MetricSeries
from ...schemas.models import Limit
from ..config.sections import LimitsSection
from ..operations.operation import WEIGHT
from ..store import LoggedMetricsRecord, OperationRecord, RunRecord, Store
from ..store.database.tenant_queue import TenantQueue

_BLOCK = 1000
"""Steps that are read at a time."""
_MAX_NAMES = 200
"""Metrics in a response; a step of a draft has about 100."""
_MAX_LOGGED_BYTES = 16 << 20
_KEPT_OPERATIONS = 10_000
"""Newest operations of a run that are kept one by one; of older ones only the steps, with the metrics of their
passes, and one pass with those of a window that has not ended yet."""


@dataclass(frozen=True)
class SeriesQuery:
    """Selects steps of a run, and metrics of them.

    after: only steps after this one: by seq_id for optimizer steps, by number for the client's.
    limit: of steps.
    points: None, or how many values to return at most: each is then the mean over as many consecutive steps.
    names: of metrics; empty for all.
    """

    after: int
    limit: int
    points: int | None
    names: Sequence[str]

    def steps_per_point(self, num_steps: int) -> int:
        return 1 if self.points is None else max(1, -(-min(num_steps, self.limit) // self.points))


class RunHistory:
    """Stores, reads and shortens the history of runs; `tidy_up` deletes what is older than `ttl_seconds`."""

    def __init__(
        self, store: Store, ttl_seconds: float, tenant_metric_bytes: int = LimitsSection.tenant_metric_bytes
    ) -> None:
        self._store = store
        self.logged_bytes = LoggedBytes(store, tenant_metric_bytes)
        self._ttl_seconds = ttl_seconds
        self._shortened: dict[str, int] = {}  # by run id: the seq_id up to which only steps are kept
        self._watches: dict[str, set[asyncio.Event]] = {}  # by run id

    @contextmanager
    def watching(self, run_ids: Iterable[str]) -> Iterator[asyncio.Event]:
        """Yields an event that is set whenever the history of one of these runs grows."""
        changed, run_ids = asyncio.Event(), frozenset(run_ids)
        for run_id in run_ids:
            self._watches.setdefault(run_id, set()).add(changed)
        try:
            yield changed
        finally:
            for run_id in run_ids:
                self._watches[run_id].discard(changed)
                if not self._watches[run_id]:
                    del self._watches[run_id]

    def has_grown(self, run_ids: Iterable[str]) -> None:
        """Sets the events of those who watch these runs."""
        for run_id in run_ids:
            for changed in self._watches.get(run_id, ()):
                changed.set()

    async def log(self, run: RunRecord, entries: Iterable[LoggedMetrics]) -> None:
        """Adds the client's metrics. Raises RequestError 413 if the run or its tenant would have too many."""
        by_step: dict[int, dict[str, float]] = {}
        for entry in entries:
            by_step.setdefault(entry.step, {}).update(entry.metrics)
        async with self.logged_bytes.turn(run.tenant_id) as by_run:
            of_run, of_tenant = by_run.get(run.run_id, 0), sum(by_run.values())
            room = min(_MAX_LOGGED_BYTES - of_run, self.logged_bytes.most_bytes - of_tenant)
            growth = await self._store.logged_metrics.merge(run.run_id, time.time(), by_step, room)
            if growth is None:
                raise RequestError(self._no_room(run.run_id, of_run, of_tenant), 413)
            by_run[run.run_id] = by_run.get(run.run_id, 0) + growth  # old metrics may have been taken off meanwhile
        self.has_grown((run.run_id,))

    def _no_room(self, run_id: str, of_run: int, of_tenant: int) -> str:
        most, most_of_tenant = _MAX_LOGGED_BYTES, self.logged_bytes.most_bytes
        if most - of_run <= most_of_tenant - of_tenant:
            remedy = "log fewer metrics, or log them less often"
            return f"the metrics logged for {run_id} would take more than {most} bytes: {remedy}"
        return (
            f"the metrics logged for your runs take {of_tenant} bytes, and with these they would take more than the "
            f"limit of {most_of_tenant}: log fewer metrics, or start the server with a larger --tenant-metric-bytes or "
            "a smaller --history-ttl-seconds, after which they are deleted"
        )

    async def training_metrics(self, run_id: str, query: SeriesQuery) -> MetricSeries:
        """Returns the metrics of optimizer steps, each with those of the passes since the one before."""
        num_steps = await self._store.operations.count_steps(run_id, query.after)
        points, last = _Points(query.steps_per_point(num_steps)), None
        async for steps in self._steps(run_id, query):
            await asyncio.to_thread(points.extend, [(one.step or 0, one.ended_at, one.metrics) for one in steps])
            last = steps[-1]
        return points.series(query.names, None if last is None else last.seq_id, num_steps > query.limit)

    async def logged_metrics(self, run_id: str, query: SeriesQuery) -> MetricSeries:
        """Returns the metrics that the client has logged."""
        num_steps = await self._store.logged_metrics.count_steps(run_id, query.after)
        points, last = _Points(query.steps_per_point(num_steps)), None
        async for entries in self._logged(run_id, query):
            await asyncio.to_thread(points.extend, [(one.step, one.logged_at, one.metrics) for one in entries])
            last = entries[-1]
        return points.series(query.names, None if last is None else last.step, num_steps > query.limit)

    async def tidy_up(self, run_ids: Iterable[str]) -> None:
        """Deletes what is too old, and shortens the history of these runs."""
        oldest = time.time() - self._ttl_seconds
        await self._store.operations.delete(oldest)
        async with self.logged_bytes.deleting():
            self.logged_bytes.subtract(await self._store.logged_metrics.delete(oldest))
        for run_id in run_ids:
            await self._shorten(run_id)

    async def _shorten(self, run_id: str) -> None:
        if (shortened := self._shortened.get(run_id)) is None:
            shortened = await self._store.operations.last_seq_id_of_steps_only(run_id)
        last = await self._store.operations.newest_seq_id(run_id) - _KEPT_OPERATIONS
        while last - shortened > _BLOCK:
            blocks = self._steps(run_id, SeriesQuery(shortened, _BLOCK, None, ()))
            steps = [step async for block in blocks for step in block]
            if not steps:  # a run need not take steps at all
                await self._shorten_window(run_id, shortened, last)
                return
            old = [step for step in steps if step.seq_id <= last] or steps[:1]
            self._shortened[run_id] = shortened = old[-1].seq_id
            await self._store.operations.keep_only(run_id, old, shortened)

    async def _shorten_window(self, run_id: str, after: int, last: int) -> None:
        """Merges the passes up to the seq_id `last` of a window that has not ended."""
        window: list[OperationRecord] = []
        while operations := await self._store.operations.list_between(run_id, after, last, _BLOCK):
            _, window = await asyncio.to_thread(_merged_steps, window, operations)
            after = operations[-1].seq_id
        await self._store.operations.keep_only(run_id, window, last)
        self._shortened[run_id] = window[0].seq_id - 1 if window else last

    async def _steps(self, run_id: str, query: SeriesQuery) -> AsyncIterator[Sequence[OperationRecord]]:
        """Yields blocks of optimizer steps with the metrics of their windows; none is empty."""
        after, left = query.after, query.limit
        window: list[OperationRecord] = []  # since the last step; a window can be longer than what is read at a time
        while left > 0 and (operations := await self._store.operations.list_of_steps(run_id, after, min(left, _BLOCK))):
            # A block may have thousands of passes, and merging their metrics takes seconds.
            steps, window = await asyncio.to_thread(_merged_steps, window, operations)
            if steps:
                yield steps
            after, left = operations[-1].seq_id, left - len(steps)

    async def _logged(self, run_id: str, query: SeriesQuery) -> AsyncIterator[Sequence[LoggedMetricsRecord]]:
        after, left = query.after, query.limit
        while left > 0 and (entries := await self._store.logged_metrics.list_of_run(run_id, after, min(left, _BLOCK))):
            yield entries
            after, left = entries[-1].step, left - len(entries)


def _merged_steps(
    window: Sequence[OperationRecord], operations: Sequence[OperationRecord]
) -> tuple[list[OperationRecord], list[OperationRecord]]:
    """Returns the optimizer steps among the operations, each with the metrics of its window, and the window after them,
    in which the passes are merged.

    Args:
        window: the operations since the step before, without those in `operations`.
    """
    steps, window = [], list(window)
    for operation in operations:
        if operation.step is not None:
            steps.append(replace(operation, metrics=_window_metrics(window, operation)))
            window = []
        elif operation.kind == "forward_backward" and operation.error is None:
            window.append(operation)
    return steps, [_merged_passes(window)] if window else []


def _merged_passes(passes: Sequence[OperationRecord]) -> OperationRecord:
    """Returns a pass with the metrics of all of these, from the start of the first to the end of the last."""
    if len(passes) == 1:
        return passes[0]
    began_at = min(one.ended_at - one.busy_seconds for one in passes)
    return replace(
        passes[-1],
        busy_seconds=passes[-1].ended_at - began_at,
        queued_seconds=max(one.queued_seconds for one in passes),
        num_tokens=sum(one.num_tokens for one in passes),
        metrics=merge_metrics([one.metrics for one in passes], [one.num_tokens for one in passes]),
    )


def _window_metrics(passes: Sequence[OperationRecord], step: OperationRecord) -> dict[str, float]:
    """Returns the metrics of a step: its own, and those of the passes since the step before."""
    if not passes:
        return dict(step.metrics)  # or those of the passes were merged into it
    merged = _merged_passes(passes)
    metrics = dict(merged.metrics)
    if (weight := metrics.get(WEIGHT, 0.0)) > 0:
        metrics.setdefault("loss:mean", metrics["loss:sum"] / weight)
    seconds = step.ended_at - (merged.ended_at - merged.busy_seconds)
    metrics |= {
        "tokens": float(merged.num_tokens),
        "tokens_per_second": merged.num_tokens / max(seconds, 1e-6),
        "step_seconds": seconds,
        "queued_seconds": max(merged.queued_seconds, step.queued_seconds),
    }
    return metrics | step.metrics


class _Points:
    """Collects a series, each point being the mean of `size` consecutive steps."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._group: list[Mapping[str, float]] = []
        self._steps: list[int] = []
        self._times: list[float] = []
        self._points: list[Mapping[str, float]] = []

    def extend(self, steps: Iterable[tuple[int, float, Mapping[str, float]]]) -> None:
        """Adds steps: number, time of their end, metrics."""
        for step, ended_at, metrics in steps:
            if not self._group:
                self._steps.append(step)
                self._times.append(ended_at)
                self._points.append({})
            self._group.append(metrics)
            self._steps[-1], self._times[-1] = step, ended_at
            if len(self._group) == self._size:
                self._end_group()

    def series(self, names: Sequence[str], last: int | None, has_more: bool) -> MetricSeries:
        if self._group:
            self._end_group()
        found = dict.fromkeys(name for point in self._points for name in point)
        shown = [name for name in found if not names or name in names][:_MAX_NAMES]
        values = {name: [point.get(name) for point in self._points] for name in shown}
        next_ = last if has_more else None
        return MetricSeries(steps=self._steps, times=self._times, metrics=values, next=next_, last=last)

    def _end_group(self) -> None:
        columns: dict[str, list[float]] = {}
        for metrics in self._group:
            for name, value in metrics.items():
                columns.setdefault(name, []).append(value)
        self._points[-1] = {name: sum(values) / len(values) for name, values in columns.items()}
        self._group = []


class LoggedBytes:
    """Counts the bytes of metrics that tenants have logged, by run, ended ones included.

    Each tenant logs one request at a time, so that its requests cannot fill the queue of the store's writer.
    """

    def __init__(self, store: Store, most_bytes: int) -> None:
        self._store = store
        self.most_bytes = most_bytes
        self._counting = asyncio.Lock()  # held while a run is counted, and while metrics are deleted and taken off
        self._turns = TenantQueue("log metrics", "send several steps in one request, or one request after another")
        self._of_tenants: dict[str, dict[str, int]] = {}  # tenant id -> run id -> bytes

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[dict[str, int]]:
        """Waits for the tenant's turn, then yields the bytes of each of its runs, which the caller updates.

        Raises:
            RequestError: 429 if too many requests of the tenant are waiting.
        """
        async with self._turns.turn(tenant_id):
            try:
                yield await self._by_run(tenant_id)
            except RequestError:
                raise
            except BaseException:  # the metrics may have been stored
                self._of_tenants.pop(tenant_id, None)
                raise

    async def limit(self, tenant_id: str) -> Limit:
        async with self.turn(tenant_id) as by_run:
            return Limit(limit=self.most_bytes, used=sum(by_run.values()))

    @asynccontextmanager
    async def deleting(self) -> AsyncIterator[None]:
        """Delete metrics, and call `subtract` or `forget_sessions`, in this block."""
        async with self._counting:
            try:
                yield
            except BaseException:  # some may have been deleted
                self._of_tenants.clear()
                raise

    def subtract(self, by_run: Mapping[str, int]) -> None:
        """Takes off what was deleted of these runs."""
        for counted in self._of_tenants.values():
            for run_id in by_run.keys() & counted.keys():
                counted[run_id] -= by_run[run_id]
                if not counted[run_id]:
                    del counted[run_id]
        for tenant_id in [one for one, counted in self._of_tenants.items() if not counted]:
            if self._turns.is_free(tenant_id):
                del self._of_tenants[tenant_id]

    def forget_sessions(self, session_ids: Iterable[str]) -> None:
        """Takes off the runs of deleted sessions."""
        ids = frozenset(session_ids)
        for counted in self._of_tenants.values() if ids else ():
            for run_id in [one for one in counted if one.partition(":")[0] in ids]:
                del counted[run_id]

    async def _by_run(self, tenant_id: str) -> dict[str, int]:
        if (counted := self._of_tenants.get(tenant_id)) is not None:
            return counted
        counted = self._of_tenants[tenant_id] = {}
        # Run by run: the rows of all together would keep one of the store's readers for seconds.
        for run_id in await self._store.runs.list_ids_of_tenant(tenant_id):
            async with self._counting:
                if num := await self._store.logged_metrics.num_bytes(run_id):
                    counted[run_id] = num
        return counted
