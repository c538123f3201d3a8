"""Telemetry, to which the parts of a server report what happened: for its metrics, its log and its traces."""

import secrets
from dataclasses import replace

from ...schemas.errors import Category
from ...schemas.sampling import SampleResponse
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.work_context import WorkContext, current_work, enter_work
from ...workers.scheduler.rank_calls import EndedCall
from ...workers.scheduler.work import CallSize
from ..logs.activity_log import ActivityLog
from ..store import OperationRecord
from .server_metrics import ServerMetrics

_OTHER_ROUTES = "other"
"""The name, in metrics, of all routes that take no key, and of paths that do not exist."""


class Telemetry:
    """Gives work its context, and passes on what ended. metrics: what Prometheus reads."""

    def __init__(self, dispatch: WorkerDispatch, slow_pass_seconds: float) -> None:
        self.metrics = ServerMetrics(dispatch)
        self._log = ActivityLog(slow_pass_seconds)
        for group in dispatch.groups:
            group.on_call = self.call_ended

    def request_began(self) -> WorkContext:
        """Returns the context of a request that has arrived, which becomes that of the present task."""
        work = WorkContext(request=secrets.token_hex(8))
        enter_work(work)
        return work

    def request_ended(
        self, work: WorkContext, method: str, route: str | None, path: str, status: int, seconds: float
    ) -> None:
        """Records a request that has been answered.

        Args:
            route: "METHOD path-template"; None for routes that take no key, and for paths that do not exist.
        """
        enter_work(work)
        self.metrics.request_ended(route or _OTHER_ROUTES, status, seconds)
        template = None if route is None else route.partition(" ")[2]
        self._log.request(method, template, path, status, seconds, work.refusal)

    def operation_began(self, tenant_id: str, run_id: str) -> WorkContext:
        """Returns the context of an operation that has arrived, or was left by an earlier process."""
        return replace(current_work() or WorkContext(), tenant=tenant_id, run=run_id, refusal=None)

    def operation_ended(
        self, ended: OperationRecord, size: CallSize | None, category: Category, reason: str | None
    ) -> None:
        """Records an operation of a run, in a task that has its context.

        Args:
            reason: why it failed, without data of the request; None if it succeeded.
        """
        self.metrics.operation_ended(ended)
        self._log.operation(ended, size, category, reason)

    def sample_ended(
        self,
        base_model: str,
        request_id: str,
        prompt_tokens: int,
        sampled: SampleResponse | None,
        seconds: float,
        error: Exception | None,
    ) -> None:
        """Records a sampling request; its result is None if it failed or was cancelled."""
        self.metrics.sample_ended(base_model, prompt_tokens, sampled, seconds)
        self._log.sample(request_id, prompt_tokens, sampled, seconds, error)

    def call_ended(self, ended: EndedCall) -> None:
        """Records a call of a group's ranks."""
        self.metrics.call_ended(ended)
        self._log.call(ended)
