"""Streams of events by which curves grow while a run trains."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from ...schemas.errors import RequestError
from ...schemas.history import RunMetrics
from ..http.event_stream import EventStream
from ..routes.history import own_run
from ..routes.services import Services, ServicesDependency
from ..runs.history import SeriesQuery
from ..tenants.auth import TenantDependency
from .paths import CONSOLE
from .runs import MAX_COMPARED, RunIds

router = APIRouter(prefix=CONSOLE, include_in_schema=False)

_STREAM_SECONDS = 600.0
"""After this time a browser connects again, and its key is checked again."""
_QUIET_SECONDS = 15.0
"""A comment is sent at least this often, so that no proxy closes the connection."""
_PERIOD_SECONDS = 0.5
"""A stream has news at most this often."""
_MAX_STEPS = 500
_SINCE = re.compile(r"-?[0-9]{1,16}_-?[0-9]{1,16}")
_SINCE_LENGTH = 40 * MAX_COMPARED

Since = Annotated[str, Query(max_length=_SINCE_LENGTH)]


@dataclass
class _Followed:
    """A run that a page follows, and MetricSeries.last of both of the page's series."""

    run_id: str
    training: int
    logged: int
    logged_at: float = 0.0
    """When that logged step last changed."""

    async def news(self, services: Services) -> RunMetrics | None:
        """Returns later steps, and the last logged one again if it has changed; None if nothing has."""
        read = services.history
        training = await read.training_metrics(self.run_id, SeriesQuery(self.training, _MAX_STEPS, None, ()))
        logged = await read.logged_metrics(self.run_id, SeriesQuery(max(self.logged - 1, -1), _MAX_STEPS, None, ()))
        logged_at = logged.times[-1] if logged.times else 0.0
        if training.last is None and logged_at == self.logged_at:
            return None
        self.training = self.training if training.last is None else training.last
        self.logged = self.logged if logged.last is None else logged.last
        self.logged_at = logged_at
        return RunMetrics(training=training, logged=logged)


@router.get("/events")
async def stream_metrics(
    request: Request,
    services: ServicesDependency,
    tenant: TenantDependency,
    run: RunIds,
    since: Since = "",
    last_event_id: Annotated[str, Header(max_length=_SINCE_LENGTH)] = "",
) -> Response:
    """Streams the metrics of these runs from now on.

    `since` names the last steps that the page has, TRAINING_LOGGED for each run, divided by dots; a browser that
    connects again sends the id of the last event, in the same form, instead.
    """
    for run_id in run:
        await own_run(services, tenant, run_id)
    position = last_event_id or since
    steps = position.split(".") if position else ["-1_-1"] * len(run)
    if len(steps) != len(run) or not all(map(_SINCE.fullmatch, steps)):
        raise RequestError(f"since={position[:80]} does not name a step for each of {len(run)} runs: reload the page")
    followed = [_Followed(run_id, *map(int, step.split("_"))) for run_id, step in zip(run, steps, strict=True)]
    stack = ExitStack()
    stack.enter_context(services.browsers.streaming(tenant.id))
    changed = stack.enter_context(services.history.watching(run))
    return EventStream(_events(request, services, followed, changed), stack.close)


async def _events(
    request: Request, services: Services, followed: Sequence[_Followed], changed: asyncio.Event
) -> AsyncIterator[bytes]:
    ends_at = time.monotonic() + _STREAM_SECONDS
    yield b": connected\n\n"
    while time.monotonic() < ends_at and await _may_continue(request, services):
        changed.clear()
        for run in followed:
            if (news := await run.news(services)) is not None:
                yield _event(followed, run, news)
                if news.training.next is not None or news.logged.next is not None:
                    changed.set()
        # A server that stops refuses new work first, and ends the waits next.
        if not services.quotas.is_closed and not await services.futures.long_polls.wait(changed, _QUIET_SECONDS):
            yield b": quiet\n\n"
        await asyncio.sleep(_PERIOD_SECONDS)


def _event(followed: Sequence[_Followed], run: _Followed, news: RunMetrics) -> bytes:
    """Returns an event; its id says what the page has of all runs after it."""
    position = ".".join(f"{one.training}_{one.logged}" for one in followed)
    data = f'{{"run": {json.dumps(run.run_id)}, "metrics": {news.model_dump_json()}}}'
    return f"id: {position}\nevent: metrics\ndata: {data}\n\n".encode()


async def _may_continue(request: Request, services: Services) -> bool:
    """False if the server stops, the browser has signed out, or the key was revoked."""
    if services.quotas.is_closed:
        return False
    try:
        await services.auth.confirm(request)
    except RequestError:
        return False
    return True
