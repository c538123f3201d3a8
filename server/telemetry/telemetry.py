"""Telemetry, to which the parts of a server report what happened: for its metrics, its log and its traces."""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...schemas.errors import Category, OperationError, RequestError
from ...schemas.sampling import SampleResponse
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.work_context import CURRENT_WORK, WorkContext
from ...workers.scheduler.calls import EndedCall
from ...workers.scheduler.work import CallSize, RunWork
from ..logs.activity_log import ActivityLog
from ..store import OperationRecord
from .server_metrics import EndedSample, ServerMetrics

if TYPE_CHECKING:
    from .tracing import Tracing

logger = logging.getLogger(__name__)

_BACKLOG_SECONDS = 0.25
"""Reports wait for this long, to be recorded many at a time."""
_TURN_SECONDS, _PAUSE_SECONDS = 0.003, 0.01
"""Recording blocks the event loop for about this long at a time, and leaves it to others in between."""
_MOST_REPORTS = 2000
"""Reports that wait at most: each one more takes the time to record the oldest, so that they cannot pile up."""

_OTHER_ROUTES = "other"
"""The name, in metrics, of all routes that take no key, and of paths that do not exist."""

_RECENT_CALLS = 60


@dataclass(frozen=True)
class RecentCall:
    """A call of a group's ranks, without its data.

    began_at: in seconds since 1970. num_works: operations or steps in it. num_runs, num_tenants: to which these belong.
    error: the reason if all of it failed.
    """

    group: str
    activity: str
    began_at: float
    seconds: float
    num_tokens: int
    num_works: int
    num_runs: int
    num_tenants: int
    error: str | None


class Telemetry:
    """Gives work its context, and records what ended: the log at once, metrics and traces from the backlog."""

    def __init__(self, dispatch: WorkerDispatch, slow_pass_seconds: float, tracing: "Tracing | None" = None) -> None:
        self.metrics = ServerMetrics(dispatch)
        self.recent_calls: deque[RecentCall] = deque(maxlen=_RECENT_CALLS)
        """The last call first."""
        self._log = ActivityLog(slow_pass_seconds)
        self._tracing = tracing
        self._backlog = Backlog()
        for group in dispatch.groups:
            group.on_call = self.call_ended

    def catch_up(self) -> None:
        """Records what was reported until now; called before `metrics` and `recent_calls` are read."""
        self._backlog.work_off()

    def request_began(self, method: str, route: str | None, headers: Mapping[str, str]) -> WorkContext:
        """Returns the context of a request that has arrived, which becomes that of the present task.

        Args:
            route: "METHOD path-template"; None for routes that take no key, and for paths that do not exist.
        """
        work = WorkContext(request=f"{random.getrandbits(64):016x}")
        if self._tracing is not None and route is not None:
            self._tracing.request_began(work, method, route, headers)
        CURRENT_WORK.set(work)
        return work

    def request_ended(
        self, work: WorkContext, method: str, route: str | None, path: str, status: int, seconds: float
    ) -> None:
        """Records a request that has been answered; for `route` see `request_began`."""
        CURRENT_WORK.set(work)
        template = None if route is None else route.partition(" ")[2]
        self._log.request(method, template, path, status, seconds, work.refusal)
        self._backlog.add(partial(self.metrics.request_ended, route or _OTHER_ROUTES, status, seconds))
        if self._tracing is not None:
            self._backlog.add(partial(self._tracing.request_ended, work, status, time.time()))

    def work_began(self, kind: str, tenant_id: str, run_id: str) -> WorkContext:
        """Returns the context of an operation, or of a sampling request, that has arrived or was left by an earlier
        process."""
        request = CURRENT_WORK.get() or WorkContext()
        work = WorkContext(request.request, tenant_id, run_id, request.trace, request.span)
        if self._tracing is not None:
            self._tracing.work_began(work, kind)
        return work

    def operation_ended(
        self, work: WorkContext, ended: OperationRecord, size: CallSize | None, category: Category, reason: str | None
    ) -> None:
        """Records an operation of a run, in a task that has its context.

        Args:
            reason: why it failed, without data of the request; None if it succeeded.
        """
        self._log.operation(ended, size, category, reason)
        self._backlog.add(partial(self.metrics.operation_ended, ended))
        if self._tracing is not None:
            self._backlog.add(partial(self._tracing.operation_ended, work, ended, reason))

    def sample_ended(
        self,
        work: WorkContext,
        base_model: str,
        request_id: str,
        prompt_tokens: int,
        sampled: SampleResponse | None,
        seconds: float,
        error: Exception | None,
    ) -> None:
        """Records a sampling request; its result is None if it failed or was cancelled."""
        category, reason = _explain(error)
        num_tokens = None if sampled is None else sampled.num_tokens
        guesses = None if sampled is None else sampled.guesses
        self._log.sample(request_id, prompt_tokens, num_tokens, seconds, category, reason)
        sample = EndedSample(base_model, prompt_tokens, num_tokens, guesses, seconds, time.time(), reason)
        self._backlog.add(partial(self.metrics.sample_ended, sample))
        if self._tracing is not None:
            self._backlog.add(partial(self._tracing.sample_ended, work, sample))

    def call_ended(self, ended: EndedCall) -> None:
        """Records a call of a group's ranks."""
        self._log.call(ended)
        self._backlog.add(partial(self.metrics.call_ended, ended))
        self._backlog.add(partial(self._add_recent_call, ended))
        if self._tracing is not None:
            self._backlog.add(partial(self._tracing.call_ended, ended))

    def _add_recent_call(self, ended: EndedCall) -> None:
        call = ended.call
        # Without slices of sampling, of which there are many every second, and questions of the server itself.
        works = [work for work in call.works if isinstance(work, RunWork) and work.tenant_id]
        if works:
            num_runs, num_tenants = len({work.key for work in works}), len({work.tenant_id for work in works})
            size = (call.size.tokens, len(works), num_runs, num_tenants)
            recent = RecentCall(ended.group, call.activity, ended.began_at, ended.seconds, *size, ended.error)
            self.recent_calls.appendleft(recent)

    def journal_written(self, seconds: float) -> None:
        self._backlog.add(partial(self.metrics.journal_written, seconds))


def _explain(error: Exception | None) -> tuple[Category, str | None]:
    """Returns an error's category and message; unforeseen errors are in the log with their traceback."""
    if isinstance(error, OperationError):
        return error.category, error.message
    if isinstance(error, RequestError):
        return "user", error.message
    return "server", None if error is None else f"internal error ({type(error).__name__})"


class Backlog:
    """Calls functions later, in order, on the event loop. What they raise is logged: their callers are gone.

    Recording a report takes a few microseconds after another one of its kind, but several times as long between other
    work, which has displaced the code from the processor's caches, and an operation would wait for it.
    """

    def __init__(self) -> None:
        self._reports: deque[Callable[[], None]] = deque()
        self._has_timer = False

    def add(self, report: Callable[[], None]) -> None:
        if not self._has_timer:
            asyncio.get_running_loop().call_later(_BACKLOG_SECONDS, self._take_turn)
            self._has_timer = True
        self._reports.append(report)
        if len(self._reports) > _MOST_REPORTS:
            self._record_oldest()

    def work_off(self) -> None:
        """Records all that wait."""
        while self._reports:
            self._record_oldest()

    def _take_turn(self) -> None:
        until = time.perf_counter() + _TURN_SECONDS
        while self._reports and time.perf_counter() < until:
            self._record_oldest()
        self._has_timer = bool(self._reports)
        if self._has_timer:
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._take_turn)

    def _record_oldest(self) -> None:
        report = self._reports.popleft()
        try:
            report()
        except Exception:
            logger.exception("a report is missing from the metrics, or from the traces")
