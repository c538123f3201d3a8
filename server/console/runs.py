"""Pages that list runs and show their curves and operations, and the curves as CSV."""

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, StreamingResponse

from ...schemas.bounds import Id
from ...schemas.history import MetricSeries, RunOperation
from ...schemas.models import FullConfig, LoraConfig, TrainingRun
from ..routes.examples import RunIdPath
from ..routes.history import list_run_operations, own_run
from ..routes.listing import list_run_checkpoints, list_training_runs
from ..routes.services import Services, ServicesDependency
from ..runs.history import SeriesQuery
from ..store import OperationRecord, RunRecord, SessionRecord
from ..tenants.auth import Tenant
from ..text.spreadsheet import cell_text
from .paths import CONSOLE
from .visitor import PER_PAGE, PageNumber, Pages, Search, Visitor, VisitorDependency, offset_of, page

router = APIRouter(prefix=CONSOLE, include_in_schema=False)

MAX_COMPARED = 8
"""Runs whose curves a page can show together."""
_RECENT = 20
_CSV_STEPS = 1000
_ALL_STEPS = 100_000
_TIMELINE = 100
_WIDTH = 1000
_LEAST_WIDTH = 2.0
"""A bar has at least this width, so that short operations are seen."""

RunIds = Annotated[list[Id], Query(max_length=MAX_COMPARED)]


@dataclass(frozen=True)
class RunRow:
    """A run in a list. step: its last optimizer step."""

    run: TrainingRun
    session: SessionRecord
    is_open: bool
    step: OperationRecord | None


@router.get("/runs")
async def list_runs(
    services: ServicesDependency, visitor: VisitorDependency, search: Search = "", number: PageNumber = 1
) -> HTMLResponse:
    offset = offset_of(number)
    await services.futures.store_now()
    listed = await list_training_runs(services, visitor.tenant, PER_PAGE, offset, search=search.strip())
    rows = await asyncio.gather(*(_row(services, visitor.tenant, run) for run in listed.training_runs))
    pages = Pages(f"{CONSOLE}/runs", {"search": search}, number, listed.cursor.total_count)
    return page(visitor, "runs.html", rows=rows, search=search, pages=pages)


async def _row(services: Services, tenant: Tenant, run: TrainingRun) -> RunRow:
    session_id = run.training_run_id.partition(":train:")[0]
    session = await services.sessions.get(tenant, session_id)
    step = await services.store.operations.newest_step(run.training_run_id)
    return RunRow(run, session, services.sessions.is_open(session_id), step)


@router.get("/compare")
async def compare(
    services: ServicesDependency,
    visitor: VisitorDependency,
    run: RunIds = [],  # noqa: B006 (FastAPI copies it)
) -> HTMLResponse:
    """Shows the curves of several runs together."""
    run_ids = list(dict.fromkeys(one.strip() for one in run if one.strip()))
    compared = [await own_run(services, visitor.tenant, run_id) for run_id in run_ids]
    sessions = {one.run_id: await services.sessions.get(visitor.tenant, one.session_id) for one in compared}
    content = {
        "run_ids": run_ids,
        "titles": {run_id: session.display_name for run_id, session in sessions.items()},
        "is_open": any(services.sessions.is_open(one.session_id) for one in compared),
        "recent": await _recent(services, visitor.tenant),
    }
    return page(visitor, "compare.html", **content)


@router.get("/runs/{run_id}")
async def show_run(run_id: RunIdPath, services: ServicesDependency, visitor: VisitorDependency) -> HTMLResponse:
    run = await own_run(services, visitor.tenant, run_id)
    recent = [one for one in await _recent(services, visitor.tenant) if one != run_id]
    return page(visitor, "run.html", tab="curves", recent=recent, **await _facts(services, visitor, run))


@router.get("/runs/{run_id}/operations")
async def show_operations(
    run_id: RunIdPath,
    services: ServicesDependency,
    visitor: VisitorDependency,
    before: Annotated[int | None, Query(ge=0, le=2**53)] = None,
    failed: bool = False,
) -> HTMLResponse:
    """Shows what the run did, operation by operation, and why some failed."""
    run = await own_run(services, visitor.tenant, run_id)
    listed = await list_run_operations(run_id, services, visitor.tenant, before, _TIMELINE, failed)
    facts = await _facts(services, visitor, run)
    content = {"timeline": timeline_of(listed.operations), "failed": failed, "before": before, "next": listed.next}
    return page(visitor, "operations.html", tab="operations", operations=listed.operations, **content, **facts)


@dataclass(frozen=True)
class Bar:
    """An operation on a line of _WIDTH: it waits from `x`, and runs for `busy` from `x + queued`."""

    operation: RunOperation
    x: float
    queued: float
    busy: float


@dataclass(frozen=True)
class Timeline:
    """Bars, the last operation first. seconds: the time that _WIDTH stands for."""

    bars: Sequence[Bar]
    seconds: float


def timeline_of(operations: Sequence[RunOperation]) -> Timeline:
    if not operations:
        return Timeline((), 0.0)
    begin = min(map(_ready_at, operations))
    seconds = max(one.ended_at.timestamp() for one in operations) - begin
    scale = _WIDTH / max(seconds, 1e-3)
    bars = []
    for one in operations:
        x = min((_ready_at(one) - begin) * scale, _WIDTH - _LEAST_WIDTH)
        busy = max(one.busy_seconds * scale, _LEAST_WIDTH)
        bars.append(Bar(one, round(x, 2), round(one.queued_seconds * scale, 2), round(busy, 2)))
    return Timeline(bars, seconds)


def _ready_at(operation: RunOperation) -> float:
    return operation.ended_at.timestamp() - operation.busy_seconds - operation.queued_seconds


@router.get("/runs/{run_id}/checkpoints")
async def show_checkpoints(run_id: RunIdPath, services: ServicesDependency, visitor: VisitorDependency) -> HTMLResponse:
    run = await own_run(services, visitor.tenant, run_id)
    listed = await list_run_checkpoints(run_id, services, visitor.tenant)
    facts = await _facts(services, visitor, run)
    return page(visitor, "run_checkpoints.html", tab="checkpoints", checkpoints=listed.checkpoints[::-1], **facts)


async def _facts(services: Services, visitor: Visitor, run: RunRecord) -> dict[str, object]:
    """Returns what the head of all pages of a run shows."""
    is_open = services.sessions.is_open(run.session_id)
    is_served = run.base_model in services.dispatch.models
    return {
        "run": run,
        "kind": _kind_of(run),
        "num_parameters": services.runs.num_parameters(run.run_id),
        "session": await services.sessions.get(visitor.tenant, run.session_id),
        "is_open": is_open,
        "waiting": services.dispatch.status(run.base_model, run.role) if is_open and is_served else None,
    }


def _kind_of(run: RunRecord) -> str:
    match run.training:
        case LoraConfig(rank=rank):
            return f"LoRA, rank {rank}"
        case FullConfig():
            return "all weights"
        case _:
            return "draft"


async def _recent(services: Services, tenant: Tenant) -> list[str]:
    runs, _ = await services.store.runs.list_of_tenant(tenant.id, 0, _RECENT)
    return [run.run_id for run in runs]


@router.get("/runs/{run_id}/metrics.csv")
async def download_metrics(
    run_id: RunIdPath, services: ServicesDependency, visitor: VisitorDependency
) -> StreamingResponse:
    """Streams all metrics of the run, a line for each step: first those of training, next those that were logged."""
    await own_run(services, visitor.tenant, run_id)
    await services.futures.store_now()
    name = "".join(letter if letter.isalnum() else "-" for letter in run_id)
    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return StreamingResponse(_csv(services, run_id), media_type="text/csv; charset=utf-8", headers=headers)


async def _csv(services: Services, run_id: str) -> AsyncIterator[str]:
    sources = {"training": services.history.training_metrics, "logged": services.history.logged_metrics}
    whole = [await read(run_id, SeriesQuery(-1, _ALL_STEPS, _CSV_STEPS, ())) for read in sources.values()]
    names = list(dict.fromkeys(name for series in whole for name in series.metrics))
    yield _lines([["source", "step", "time", *map(cell_text, names)]])
    for source, read in sources.items():
        after: int | None = -1
        while after is not None:
            series = await read(run_id, SeriesQuery(after, _CSV_STEPS, None, names))
            yield await asyncio.to_thread(_series_lines, source, series, names)
            after = series.next


def _series_lines(source: str, series: MetricSeries, names: Sequence[str]) -> str:
    nothing: list[float | None] = [None] * len(series.steps)
    columns = [series.metrics.get(name, nothing) for name in names]
    return _lines([source, *row] for row in zip(series.steps, series.times, *columns, strict=True))


def _lines(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()
