"""Logs what a server does: a line for each request, operation, sample, and call of the ranks.

Lines of what is frequent and went well are of level debug. The ids of the request, tenant and run are those of the
task's WorkContext, which the formatter adds.
"""

import logging
import time
from collections.abc import Callable

from ...schemas.errors import Category
from ...workers.protocol.log_lines import log_event
from ...workers.scheduler.calls import EndedCall
from ...workers.scheduler.work import CallSize
from ..store import OperationRecord

logger = logging.getLogger(__name__)

_POLL_TIMEOUT = 408
_WARNINGS = (401, 403, 413, 429)
"""Refusals that an operator may have to do something about, as for errors of the server."""

_FREQUENT = frozenset({"forward", "forward_backward", "optim_step"})
"""Kinds of operations that a run has in every step."""

_BURST, _PER_SECOND = 20.0, 2.0
"""Lines of refused requests with one status: a burst, and then a rate per second."""


class ActivityLog:
    """Chooses the level and the fields of the lines.

    Refused requests, which anyone can send, are limited by status; `suppressed` of the next line counts the lines left
    out.

    slow_pass_seconds: passes and steps that take longer are warnings.
    """

    def __init__(self, slow_pass_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._slow_pass_seconds = slow_pass_seconds
        self._clock = clock
        self._refusals: dict[int, _RefusalLimit] = {}

    def request(
        self, method: str, route: str | None, path: str, status: int, seconds: float, reason: str | None
    ) -> None:
        """Logs a request that has been answered. route: the template of its path; None if it takes no key."""
        level, suppressed = logging.DEBUG, None
        if status >= 400 and status != _POLL_TIMEOUT:
            level = logging.WARNING if status >= 500 or status in _WARNINGS else logging.INFO
            suppressed = self._refusals.setdefault(status, _RefusalLimit(self._clock())).take(self._clock())
            if suppressed is None:
                return
        if not logger.isEnabledFor(level):
            return
        fields = {"method": method, "route": route, "path": path if route is None else None, "status": status}
        fields |= {"ms": _milliseconds(seconds), "reason": reason, "suppressed": suppressed or None}
        log_event(logger, level, "request", fields)

    def operation(self, ended: OperationRecord, size: CallSize | None, category: Category, reason: str | None) -> None:
        """Logs an operation of a run that has ended; reason: why it failed, None if it has not."""
        level = logging.DEBUG if ended.kind in _FREQUENT else logging.INFO
        if reason is not None:
            level = logging.INFO if category == "user" else logging.WARNING
        if not logger.isEnabledFor(level):
            return
        fields = {
            "verb": ended.kind,
            "seq": ended.seq_id,
            "step": ended.step,
            "tokens": ended.num_tokens or None,
            "queued_ms": _milliseconds(ended.queued_seconds),
            "ms": _milliseconds(ended.busy_seconds),
            "call_tokens": size and size.tokens,
            "call_operations": size and size.operations,
            "category": None if reason is None else category,
            "reason": reason,
        }
        log_event(logger, level, "operation" if reason is None else "operation failed", fields)

    def sample(
        self,
        request_id: str,
        prompt_tokens: int,
        num_tokens: int | None,
        seconds: float,
        category: Category,
        reason: str | None,
    ) -> None:
        """Logs a sampling request that has ended; `num_tokens` is None if it failed or was cancelled."""
        level = logging.DEBUG if reason is None else logging.INFO if category == "user" else logging.WARNING
        if not logger.isEnabledFor(level):
            return
        fields = {
            "verb": "sample",
            "sample": request_id,
            "prompt_tokens": prompt_tokens,
            "tokens": num_tokens,
            "ms": _milliseconds(seconds),
            "category": None if reason is None else category,
            "reason": reason,
        }
        log_event(logger, level, "operation" if reason is None else "operation failed", fields)

    def call(self, ended: EndedCall) -> None:
        """Logs a call of a group's ranks. A slow pass or step is a warning; failures are those of its operations."""
        is_slow = ended.call.kind == "training" and ended.seconds > self._slow_pass_seconds
        level = logging.WARNING if is_slow else logging.DEBUG
        if not logger.isEnabledFor(level):
            return
        size = ended.call.size
        fields = {
            "group": ended.group,
            "activity": ended.call.activity,
            "tokens": size.tokens or None,
            "operations": size.operations,
            "ms": _milliseconds(ended.seconds),
            "slowest_rank": _slowest(ended),
            "reason": ended.error,
        }
        log_event(logger, level, f"slow {ended.call.activity}" if is_slow else "call of the ranks", fields)


class _RefusalLimit:
    """Limits the lines about one status."""

    def __init__(self, now: float) -> None:
        self._lines, self._at = _BURST, now
        self._suppressed = 0

    def take(self, now: float) -> int | None:
        """Returns how many lines were suppressed before this one; None if it is suppressed too."""
        self._lines = min(_BURST, self._lines + _PER_SECOND * (now - self._at))
        self._at = now
        if self._lines < 1:
            self._suppressed += 1
            return None
        self._lines -= 1
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed


def _slowest(ended: EndedCall) -> int | None:
    times = ended.rank_times
    return max(range(len(times)), key=lambda rank: times[rank].seconds) if len(times) > 1 else None


def _milliseconds(seconds: float) -> float:
    return round(1000 * max(seconds, 0.0), 1)
