"""WorkContext, for whom the present task works: what log lines and spans of the server's process name."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class WorkContext:
    """Names the request, or the operation, for which a task works.

    request: id of the HTTP request that brought the work; None after a restart.
    tenant, run: their ids, as soon as they are known. A sampler's id counts as a run's.
    trace: id of its trace, 32 hex digits; None without tracing.
    span: its span of OpenTelemetry, of which further ones are children; None without tracing.
    refusal: the reason for which the request is refused, for the log.
    """

    request: str | None = None
    tenant: str | None = None
    run: str | None = None
    trace: str | None = None
    span: object = None
    refusal: str | None = None


CURRENT_WORK: ContextVar[WorkContext | None] = ContextVar("trainhouse_work", default=None)
"""The context of the present task, and of the tasks that it creates."""


def note_refusal(reason: str) -> None:
    """Adds the reason for which the present request is refused to its context, if there is one."""
    if (work := CURRENT_WORK.get()) is not None:
        work.refusal = reason
