"""Routes that list training runs, checkpoints and sessions."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request

from ...schemas.bounds import MAX_ID
from ...schemas.errors import RequestError
from ...schemas.models import (
    Checkpoint,
    CheckpointCopy,
    CheckpointList,
    Cursor,
    SessionInfo,
    SessionList,
    TrainingRun,
    TrainingRunList,
    lora_of,
)
from ..http.sdk_version import FIRST_WITH_EXTERNAL, SdkVersion, sdk_version
from ..store import CheckpointCopyRecord, CheckpointRecord, PageInfo, RunRecord
from ..tenants.auth import Tenant, TenantDependency
from .examples import RunIdPath, SessionIdPath
from .services import Services, ServicesDependency

router = APIRouter(prefix="/api/v1", tags=["listing"])

AccessScope = Literal["owned", "accessible"]
Offset = Annotated[int, Query(ge=0, le=2**31 - 1)]
Limit = Annotated[int, Query(ge=1, le=1000)]


async def _sdk_of(request: Request) -> SdkVersion | None:
    return sdk_version(request.headers.get("user-agent", ""))


SdkDependency = Annotated[SdkVersion | None, Depends(_sdk_of)]

_STRANGER = "another tenant"
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


@router.get("/training_runs")
async def list_training_runs(
    services: ServicesDependency,
    tenant: TenantDependency,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: AccessScope = "owned",
    project_id: Annotated[str | None, Query(max_length=MAX_ID)] = None,
    search: Annotated[str, Query(max_length=MAX_ID)] = "",
) -> TrainingRunList:
    """Lists training runs, the last used first.

    `access_scope` "accessible" adds other tenants' runs that have a public checkpoint. `project_id` and `search` (a
    text in their id, base model or metadata, or in their session's name) select among your own runs only.
    """
    public_at = services.checkpoints.now() if access_scope == "accessible" else None
    runs, page = await services.store.runs.list_of_tenant(tenant.id, offset, limit, project_id, public_at, search)
    return TrainingRunList(training_runs=await _training_runs(services, tenant, runs), cursor=_cursor(page))


@router.get("/training_runs/{run_id}")
async def get_training_run(
    run_id: RunIdPath, services: ServicesDependency, tenant: TenantDependency, access_scope: AccessScope = "owned"
) -> TrainingRun:
    """Describes a training run: its base model, its newest checkpoints, and when it was last used."""
    run = await services.store.runs.get(run_id)
    if run is None or (run.tenant_id != tenant.id and not await _readable(services, tenant, run, access_scope)):
        raise no_run(run_id)
    if not (found := await _training_runs(services, tenant, [run])):  # its public checkpoint has just expired
        raise no_run(run_id)
    return found[0]


@router.get("/training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(
    run_id: RunIdPath, services: ServicesDependency, tenant: TenantDependency, sdk: SdkDependency = None
) -> CheckpointList:
    """Lists the checkpoints of a run, oldest first; only the public ones if the run belongs to another tenant.

    To SDKs before 0.28, which know no external checkpoints, these are samplers'.
    """
    run = await services.store.runs.get(run_id)
    if run is None:
        raise no_run(run_id)
    readable = await _readable(services, tenant, run, "accessible")
    if run.tenant_id != tenant.id and not readable:
        raise no_run(run_id)
    return CheckpointList(checkpoints=await _checkpoints(services, tenant, readable, sdk))


@router.get("/checkpoints")
async def list_user_checkpoints(
    services: ServicesDependency,
    tenant: TenantDependency,
    limit: Limit = 100,
    offset: Offset = 0,
    sdk: SdkDependency = None,
) -> CheckpointList:
    """Lists your own checkpoints, newest first. To SDKs before 0.28 external checkpoints are samplers'."""
    now = services.checkpoints.now()
    records, page = await services.store.checkpoints.list_of_tenant(tenant.id, now, offset, limit)
    return CheckpointList(checkpoints=await _checkpoints(services, tenant, records, sdk), cursor=_cursor(page))


@router.get("/sessions")
async def list_sessions(
    services: ServicesDependency,
    tenant: TenantDependency,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: AccessScope = "owned",
) -> SessionList:
    """Lists your own sessions, newest first.

    `access_scope` "accessible" adds other tenants' sessions of runs that have a public checkpoint.
    """
    public_at = services.checkpoints.now() if access_scope == "accessible" else None
    records = await services.store.sessions.list_of_tenant(tenant.id, offset, limit, public_at)
    names = {
        each.session_id: each.display_name for each in records if each.display_name and each.tenant_id == tenant.id
    }
    return SessionList(sessions=[record.session_id for record in records], names=names)


@router.get("/sessions/{session_id}")
async def get_session(
    session_id: SessionIdPath,
    services: ServicesDependency,
    tenant: TenantDependency,
    access_scope: AccessScope = "owned",
) -> SessionInfo:
    """Describes a session: its training runs, its samplers, its metadata and tags.

    With `access_scope` "accessible" also another tenant's: its runs that have a public checkpoint.
    """
    runs = await services.store.runs.list_of_session(session_id)
    run_ids = [run.run_id for run in runs]
    if access_scope == "accessible" and runs and runs[0].tenant_id != tenant.id:
        records = await services.store.checkpoints.list_of_runs(run_ids, services.checkpoints.now())
        if public := {one.run_id for one in records if one.public}:
            return SessionInfo(training_run_ids=[each for each in run_ids if each in public], sampler_ids=[])
    session = await services.sessions.get(tenant, session_id)
    samplers = await services.store.samplers.list_of_session(session_id)
    return SessionInfo(
        training_run_ids=run_ids,
        sampler_ids=[sampler.sampler_id for sampler in samplers],
        user_metadata=session.user_metadata,
        display_name=session.display_name,
        tags=list(session.tags),
    )


async def _checkpoints(
    services: Services, tenant: Tenant, records: Iterable[CheckpointRecord], sdk: SdkVersion | None
) -> list[Checkpoint]:
    """Converts the records. Only the owner sees where a checkpoint's copies are stored."""
    records = list(records)
    copies = await services.checkpoints.copies([one for one in records if one.tenant_id == tenant.id])
    listed = [checkpoint_of(one, copies.get(one.directory)) for one in records]
    if sdk is None or sdk >= FIRST_WITH_EXTERNAL:
        return listed
    as_sampler = {"checkpoint_type": "sampler"}
    return [one.model_copy(update=as_sampler) if one.checkpoint_type == "external" else one for one in listed]


def checkpoint_of(record: CheckpointRecord, copies: Iterable[CheckpointCopyRecord] | None = None) -> Checkpoint:
    return Checkpoint.model_validate(
        {
            "checkpoint_id": record.checkpoint_id,
            "checkpoint_type": _TYPES[record.kind],
            "time": _time(record.created_at),
            "tinker_path": record.tinker_path,
            "size_bytes": record.size_bytes,
            "public": record.public,
            "user_metadata": record.user_metadata,
            "expires_at": None if record.expires_at is None else _time(record.expires_at),
            "copies": None if copies is None else [_copy_of(copy) for copy in copies],
        }
    )


def _copy_of(copy: CheckpointCopyRecord) -> CheckpointCopy:
    return CheckpointCopy(url=copy.url, state=copy.state, updated_at=_time(copy.updated_at), error=copy.error)


async def _readable(
    services: Services, tenant: Tenant, run: RunRecord, access_scope: AccessScope
) -> list[CheckpointRecord]:
    records = await services.store.checkpoints.list_of_runs([run.run_id], services.checkpoints.now())
    return [one for one in records if one.tenant_id == tenant.id or (one.public and access_scope == "accessible")]


async def _training_runs(services: Services, tenant: Tenant, runs: Iterable[RunRecord]) -> list[TrainingRun]:
    runs = list(runs)
    records = await services.store.checkpoints.list_of_runs([run.run_id for run in runs], services.checkpoints.now())
    seen = [one for one in records if one.public or one.tenant_id == tenant.id]
    # The records are sorted oldest first, so the newest of each kind of each run wins.
    last = {(one.run_id, one.kind): one for one in seen}
    newest_at = {one.run_id: one.created_at for one in seen}
    names = await services.store.sessions.names({run.session_id for run in runs})
    return [
        TrainingRun(
            training_run_id=run.run_id,
            base_model=run.base_model,
            # Other tenants see public checkpoints, but not the owner's name, metadata or hours of work.
            model_owner=tenant.name if (is_own := run.tenant_id == tenant.id) else _STRANGER,
            is_lora=(lora := lora_of(run.training)) is not None,
            lora_rank=lora and lora.rank,
            last_request_time=_time(run.last_request_at if is_own else newest_at[run.run_id]),
            last_checkpoint=_checkpoint_of(last.get((run.run_id, "weights"))),
            last_sampler_checkpoint=_checkpoint_of(last.get((run.run_id, "sampler_weights"))),
            user_metadata=run.user_metadata if is_own else None,
            model_role=run.role,
            schedules=run.schedules if is_own else None,
            display_name=names.get(run.session_id) if is_own else None,
        )
        for run in runs
        if run.tenant_id == tenant.id or run.run_id in newest_at
    ]


def _checkpoint_of(record: CheckpointRecord | None) -> Checkpoint | None:
    return record and checkpoint_of(record)


def _cursor(page: PageInfo) -> Cursor:
    return Cursor(offset=page.offset, limit=page.limit, total_count=page.total_count)


def no_run(run_id: str) -> RequestError:
    remedy = "list yours with `trainhouse runs list`, or GET /api/v1/training_runs"
    return RequestError(f"no training run {run_id} exists: {remedy}", status=404)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
