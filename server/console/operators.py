"""Pages for operators: the tenants with keys and limits, and what the workers do and hold over all tenants."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from fastapi import APIRouter, Path
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import Field

from ...schemas.bounds import Id
from ...schemas.errors import RequestError
from ...schemas.training import MAX_INTEGER, Strict
from ...workers.scheduler.rank_group import RankGroup
from ..http.bodies import json_parameter
from ..routes.models import get_limits, get_workers
from ..routes.services import Services, ServicesDependency
from ..tenants.auth import Tenant, create_key, list_keys
from ..tenants.scopes import SCOPES, TENANT_SCOPES
from .paths import CONSOLE
from .visitor import PER_PAGE, PageNumber, Pages, Visitor, VisitorDependency, offset_of, page

router = APIRouter(prefix=CONSOLE, include_in_schema=False)


class NewKey(Strict):
    """Asks for a key of the tenant with this name, and for the tenant if there is none."""

    name: Id
    scopes: Annotated[list[Literal["train", "sample", "read", "admin", "operator"]], Field(min_length=1, max_length=5)]
    requests_per_minute: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None


@router.get("/admin")
async def show_admin(services: ServicesDependency, visitor: VisitorDependency, number: PageNumber = 1) -> HTMLResponse:
    keys = await list_keys(services.store)
    tenants = sorted(await services.store.tenants.list_all(), key=lambda one: one.created_at, reverse=True)
    shown = tenants[offset_of(number) :][:PER_PAGE]
    usage = [await get_limits(services, Tenant(one.tenant_id, one.name), True) for one in shown]
    names = {one.name for one in shown}
    limits = services.config.limits
    return page(
        visitor,
        "admin.html",
        tenants=list(zip(shown, usage, strict=True)),
        keys=[key for key in reversed(keys) if key.name in names],
        pages=Pages(f"{CONSOLE}/admin", {}, number, len(tenants)),
        scopes=SCOPES,
        usual_scopes=TENANT_SCOPES,
        limits={field.name: getattr(limits, field.name) for field in fields(limits)},
        has_keys=bool(keys),
        may_change="admin" in visitor.scopes and bool(visitor.form_token),
    )


@router.post("/admin/keys")
async def make_key(
    request: Annotated[NewKey, json_parameter(NewKey)], services: ServicesDependency, visitor: VisitorDependency
) -> JSONResponse:
    """Makes a key, which is shown this once."""
    _require_admin(visitor)
    if not await list_keys(services.store):
        raise RequestError(
            "this server has no keys, so everyone who reaches it may do everything: make the first one with "
            "`trainhouse keys create NAME`, after which made-up keys no longer work"
        )
    scopes = tuple(scope for scope in SCOPES if scope in request.scopes)
    try:
        key = await create_key(services.store, request.name, scopes, request.requests_per_minute)
    except ValueError as error:
        raise RequestError(str(error)) from None
    return JSONResponse({"key": key})


@router.post("/admin/keys/{key_id}/revoke", status_code=204)
async def revoke_key(
    key_id: Annotated[int, Path(ge=0, le=MAX_INTEGER)], services: ServicesDependency, visitor: VisitorDependency
) -> None:
    """Revokes a key of any tenant at once."""
    _require_admin(visitor)
    found = [key for key in await services.store.keys.list_all() if key.key_id == key_id and key.revoked_at is None]
    if not found:
        raise RequestError(f"there is no key {key_id} in force: reload the page", status=404)
    await services.auth.revoke(found[0])


def _require_admin(visitor: Visitor) -> None:
    if "admin" not in visitor.scopes:
        raise RequestError(
            "this key has the scope operator without admin, so it sees all tenants and changes nothing: sign in with a "
            "key made by `trainhouse keys create NAME --scopes admin,operator`",
            status=403,
        )


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
    try:
        async with asyncio.timeout(_REPORT_SECONDS):
            report = await get_workers(services, visitor.tenant)
    except TimeoutError:
        report = None
    queues = await _queues(services, groups)
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
    names: dict[str, str] = {}
    for _, tenant_id in keys:
        tenant = await services.store.tenants.get(tenant_id)
        names[tenant_id] = "the server itself" if tenant is None else tenant.name
    return [TenantQueue(key[0], names[key[1]], waiting[key], tokens[key], jobs[key]) for key in keys]
