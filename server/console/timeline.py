"""Bars of a timeline: when each operation of a run waited for the ranks, behind others' work, and ran."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...schemas.history import RunOperation

WIDTH = 1000
_LEAST = 2.0
"""A bar has at least this width, so that short operations are seen."""


@dataclass(frozen=True)
class Bar:
    """An operation on a line of WIDTH: it waits from `x`, and runs for `busy` from `x + queued`."""

    operation: RunOperation
    x: float
    queued: float
    busy: float


@dataclass(frozen=True)
class Timeline:
    """Bars, the last operation first. seconds: the time that WIDTH stands for."""

    bars: Sequence[Bar]
    seconds: float


def timeline_of(operations: Sequence[RunOperation]) -> Timeline:
    if not operations:
        return Timeline((), 0.0)
    begin = min(map(_ready_at, operations))
    seconds = max(one.ended_at.timestamp() for one in operations) - begin
    scale = WIDTH / max(seconds, 1e-3)
    return Timeline([_bar(one, (_ready_at(one) - begin) * scale, scale) for one in operations], seconds)


def _ready_at(operation: RunOperation) -> float:
    return operation.ended_at.timestamp() - operation.busy_seconds - operation.queued_seconds


def _bar(operation: RunOperation, x: float, scale: float) -> Bar:
    queued, busy = operation.queued_seconds * scale, max(operation.busy_seconds * scale, _LEAST)
    return Bar(operation, round(min(x, WIDTH - _LEAST), 2), round(queued, 2), round(busy, 2))
