"""The page of what the workers do and hold, over all tenants; for operators."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from ...schemas.models import Workers
from ...workers.scheduler.rank_group import RankGroup
from ..routes.models import get_workers
from ..routes.services import Services, ServicesDependency
from ..tenants.auth import Tenant
from .paths import CONSOLE
from .visitor import VisitorDependency, page

router = APIRouter(prefix=CONSOLE, include_in_schema=False)

_REPORT_SECONDS = 2.0
"""The page waits this long for the workers' report; ranks in a long pass answer only after it."""


@dataclass(frozen=True)
class TenantQueue:
    """Counts the work of a tenant that waits for the ranks of a group, and its sampling jobs, which wait or run."""

    group: str
    tenant: str
    num_works: int
    num_tokens: int
    num_sampling_jobs: int


@router.get("/capacity")
async def show_capacity(services: ServicesDependency, visitor: VisitorDependency) -> HTMLResponse:
    groups = services.dispatch.groups
    report, queues = await _report(services, visitor.tenant), await _queues(services, groups)
    services.telemetry.catch_up()
    return page(
        visitor,
        "capacity.html",
        groups=groups,
        report=report,
        queues=queues,
        calls=list(services.telemetry.recent_calls),
        num_live=services.runs.num_live(),
        num_lost=services.runs.num_lost,
        num_sessions=len(services.sessions.open_ids),
    )


async def _report(services: Services, tenant: Tenant) -> Workers | None:
    """Returns None if the ranks are busy for longer."""
    try:
        async with asyncio.timeout(_REPORT_SECONDS):
            return await get_workers(services, tenant)
    except TimeoutError:
        return None


async def _queues(services: Services, groups: Iterable[RankGroup]) -> Sequence[TenantQueue]:
    """Returns the queues of tenants that have something waiting, the longest first."""
    waiting: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    jobs: Counter[tuple[str, str]] = Counter()
    for group in groups:
        for work in group.scheduler.queue.works():
            waiting[group.name, work.tenant_id] += 1
            tokens[group.name, work.tenant_id] += work.tokens
        jobs.update((group.name, sampling.job.tenant_id) for sampling in group.scheduler.cohorts.works())
    keys = sorted({*waiting, *jobs}, key=lambda key: (-tokens[key], -waiting[key], -jobs[key], key))
    names = {tenant_id: await _name(services, tenant_id) for _, tenant_id in keys}
    return [
        TenantQueue(
            group, names[tenant_id], waiting[group, tenant_id], tokens[group, tenant_id], jobs[group, tenant_id]
        )
        for group, tenant_id in keys
    ]


async def _name(services: Services, tenant_id: str) -> str:
    tenant = await services.store.tenants.get(tenant_id)
    return "the server itself" if tenant is None else tenant.name
