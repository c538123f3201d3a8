"""Routes for the history of training runs: the metrics of their steps, and their operations."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query

from ...schemas.history import (
    MAX_STEP,
    LogMetricsRequest,
    LogMetricsResponse,
    MetricName,
    RunMetrics,
    RunOperation,
    RunOperationList,
)
from ..http.bodies import json_body, json_parameter
from ..runs.history import SeriesQuery
from ..store import OperationRecord, RunRecord
from ..tenants.auth import Tenant, TenantDependency
from .examples import RunIdPath
from .listing import no_run
from .services import Services, ServicesDependency

router = APIRouter(prefix="/api/v1", tags=["history"])

Cursor = Annotated[int, Query(ge=-1, le=MAX_STEP)]
_LOGGED: dict[str, object] = {"entries": [{"step": 1, "metrics": {"reward": 0.25, "kl": 0.01}}]}
_MAX_STEPS = 2000
"""Steps in a response without `points`."""


@router.get("/training_runs/{run_id}/metrics")
async def get_run_metrics(
    run_id: RunIdPath,
    services: ServicesDependency,
    tenant: TenantDependency,
    after: Cursor = -1,
    logged_after: Cursor = -1,
    limit: Annotated[int, Query(ge=1, le=100_000)] = 1000,
    points: Annotated[int | None, Query(ge=1, le=2000)] = None,
    names: Annotated[list[MetricName], Query(max_length=100)] = [],  # noqa: B006 (FastAPI copies it)
) -> RunMetrics:
    """Returns the metrics of your run's optimizer steps, and those that its client logged.

    `after` and `logged_after` are `next` of an earlier answer. With `points`, consecutive steps are averaged, so that
    each series has at most so many values; without it, at most 2,000 steps are returned. `names` selects metrics, of
    which an answer has at most 200.
    """
    await own_run(services, tenant, run_id)
    await services.futures.store_now()
    limit = limit if points is not None else min(limit, _MAX_STEPS)
    training = await services.history.training_metrics(run_id, SeriesQuery(after, limit, points, names))
    logged = await services.history.logged_metrics(run_id, SeriesQuery(logged_after, limit, points, names))
    return RunMetrics(training=training, logged=logged)


@router.post("/training_runs/{run_id}/metrics", openapi_extra=json_body(LogMetricsRequest, _LOGGED))
async def log_run_metrics(
    run_id: RunIdPath,
    request: Annotated[LogMetricsRequest, json_parameter(LogMetricsRequest)],
    services: ServicesDependency,
    tenant: TenantDependency,
) -> LogMetricsResponse:
    """Adds metrics of your own to steps of your run. A metric that a step has is replaced; sending an entry twice
    changes nothing."""
    await services.history.log(await own_run(services, tenant, run_id), request.entries)
    return LogMetricsResponse()


@router.get("/training_runs/{run_id}/operations", response_model_exclude_none=True)
async def list_run_operations(
    run_id: RunIdPath,
    services: ServicesDependency,
    tenant: TenantDependency,
    before: Annotated[int | None, Query(ge=0, le=MAX_STEP)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    failed: bool = False,
) -> RunOperationList:
    """Lists the ended operations of your run, the last first: how long each waited and ran, and why it failed.

    `before` is `next` of an earlier answer; `failed` selects failed ones. Of the newest 10,000 all are kept, of older
    ones the optimizer steps.
    """
    await own_run(services, tenant, run_id)
    await services.futures.store_now()
    found = await services.store.operations.list_newest(run_id, before, limit + 1, failed)
    next_ = found[limit - 1].seq_id if len(found) > limit else None
    return RunOperationList(operations=[_operation(one) for one in found[:limit]], next=next_)


async def own_run(services: Services, tenant: Tenant, run_id: str) -> RunRecord:
    """Returns a run of the tenant. Raises RequestError 404."""
    run = await services.store.runs.get(run_id)
    if run is None or run.tenant_id != tenant.id:
        raise no_run(run_id)
    return run


def _operation(record: OperationRecord) -> RunOperation:
    return RunOperation(
        seq_id=record.seq_id,
        kind=record.kind,
        ended_at=datetime.fromtimestamp(record.ended_at, UTC),
        queued_seconds=record.queued_seconds,
        busy_seconds=record.busy_seconds,
        num_tokens=record.num_tokens,
        step=record.step,
        error=record.error,
        metrics=record.metrics,
    )
