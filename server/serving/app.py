"""The ASGI application of a server, and the life of its parts. The caller starts and closes the worker dispatch."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI

from ... import __version__
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.plugins import plugin_rows
from ..config.server_config import ServerConfig
from ..files.state_lock import LiveState
from ..http.errors import ERROR_HANDLERS, internal_error
from ..logs.repeated_errors import RepeatedErrorLog
from ..routes import auth, checkpoints, futures, history, listing, models, pages, sampling, sessions, training
from ..routes.gate import Gate, check_query, find_endpoints
from ..routes.services import Services
from ..store import open_store

if TYPE_CHECKING:
    from ..telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_HOUSEKEEPING_SECONDS = 30.0
_ENDED_SESSIONS = 10
"""Ended sessions that are kept per tenant, as a multiple of those that it may have open."""

_BUSY = ("forward_backward", "forward", "optim_step", "asample", "retrieve_future")
"""Routes that clients call for every operation."""

_DESCRIPTION = """
Trains and samples language models over HTTP, in the protocol of the Tinker SDK. Send your key as `X-API-Key`.

Operations return a `request_id` at once; `retrieve_future` waits for the result. With the header `Prefer: wait=30` the
operation returns the result itself if it is ready within 30 seconds. `seq_id` numbers the operations of a model; if you
leave it out, the server numbers them in the order of arrival.
"""


def create_app(
    config: ServerConfig,
    dispatch: WorkerDispatch,
    live: LiveState | None = None,
    tracing: "Tracing | None" = None,
) -> FastAPI:
    """Returns an ASGI application whose lifespan opens and closes everything under `config.store.state_dir`.

    Args:
        live: None if this server alone uses the state directory, without checking that.
        tracing: None if no traces are exported.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Closed last, and also if the rest cannot be opened, which a standby retries.
        with contextlib.closing(open_store(config.store)) as store:
            state = LiveState(config.store.state_dir) if live is None else live
            app.state.services = Services(config, dispatch, store, state, tracing)
            async with _running(app.state.services):
                yield

    app = FastAPI(
        title="trainhouse",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        openapi_url=None,  # our own route encodes the document once
        docs_url=None,  # our own page loads nothing from a CDN
        redoc_url=None,
        # It would not see requests that bypass FastAPI, but cost every request a lookup of listeners.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    for routes in (sessions, models, training, sampling, futures, checkpoints, listing, history, auth):
        app.include_router(routes.router, dependencies=[Depends(check_query)])
    for router in plugin_rows("server.drafts.rows", "ROUTERS").values():
        app.include_router(router, dependencies=[Depends(check_query)])
    of_openai, of_console = (plugin_rows(f"server.{name}.rows", "ROUTERS").values() for name in ("openai", "console"))
    for router in (*of_openai, pages.router, *of_console):
        app.include_router(router)
    for kind, handler in ERROR_HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, internal_error)
    busy = find_endpoints((training.router, sampling.router, futures.router), _BUSY)
    app.add_middleware(Gate, config=config, endpoints=busy)
    return app


@asynccontextmanager
async def _running(services: Services) -> AsyncIterator[None]:
    """Opens the parts in the order of their dependencies, and closes them in reverse order."""
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(services.telemetry.catch_up)
        stack.push_async_callback(services.journal.close)
        stack.push_async_callback(services.context.recordings.close)
        await _warn_of_unknown_tenants(services)
        await services.futures.open()
        stack.push_async_callback(services.futures.close)
        await services.checkpoints.start()
        stack.push_async_callback(services.checkpoints.close)
        await services.context.features.open()
        await services.samplers.restore()
        stack.push_async_callback(services.sampler_weights.close)
        stack.push_async_callback(services.drafts.close)
        stack.push_async_callback(services.sampling.close)
        stack.push_async_callback(services.runs.close)
        stack.callback(services.checkpoints.schedule_transfer_cancellation)
        services.sessions.on_end += [services.runs.end_session, services.samplers.end_session]
        await services.sessions.start()
        stack.push_async_callback(services.sessions.close)
        await _resume(services)
        services.sessions.start_expiry()
        for name, chores in (
            ("housekeeping", partial(_tidy_up, services)),
            ("taking snapshots of old runs", services.runs.snapshot_old_runs),
            ("checking whether the journal is writable", services.journal.check_writable),
        ):
            stack.callback(asyncio.create_task(_run_periodically(name, chores)).cancel)
        yield


async def _resume(services: Services) -> None:
    """Resumes journaled operations of an earlier process; those that no run or sampler resumes are answered as lost."""
    journaled = await asyncio.to_thread(services.journal.list_earlier)
    held = await services.runs.resume(journaled, services.sessions.open_ids)
    held |= await services.sampling.resume(journaled)
    others = [one for one in journaled if one.place not in held]
    await services.futures.fail_lost(one.header for one in others)
    for one in others:
        services.journal.release(one.place)
    services.journal.delete_unneeded_segments()
    await services.runs.sweep()


async def _warn_of_unknown_tenants(services: Services) -> None:
    # Not an error: keys may be created later. But the name may be misspelt.
    known = {tenant.name for tenant in await services.store.tenants.list_all()}
    for weight in services.config.scheduler.tenant_weights:
        if weight.name not in known:
            logger.warning("tenant_weights names %s, which has no key yet: see `trainhouse keys list`", weight.name)


async def _tidy_up(services: Services) -> None:
    await services.history.tidy_up(await services.runs.save_request_times())
    await services.futures.expire()
    await services.context.recordings.expire()
    await services.context.features.delete_unneeded()
    services.quotas.forget_idle()
    config = services.config
    most_ended = _ENDED_SESSIONS * config.limits.tenant_sessions
    async with services.history.logged_bytes.deleting():
        deleted = await services.sessions.delete_ended(
            config.sessions.session_ttl_seconds, most_ended, services.runs.ending_session_ids
        )
        services.history.logged_bytes.forget_sessions(deleted)


async def _run_periodically(name: str, chores: Callable[[], Awaitable[object]]) -> None:
    errors = RepeatedErrorLog(logger, name)
    while True:
        await asyncio.sleep(_HOUSEKEEPING_SECONDS)
        try:
            await chores()
        except Exception as error:
            # The next round may succeed, for example after a full disk was cleaned up.
            errors.failed(error)
        else:
            errors.succeeded()
