"""Backlog: reports that are recorded a little later, many at a time."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

_SECONDS = 0.25
"""Reports wait for this long, to be recorded many at a time."""
_TURN_SECONDS, _PAUSE_SECONDS = 0.003, 0.01
"""Recording blocks the event loop for about this long at a time, and leaves it to others in between."""
_MOST = 2000
"""Reports that wait at most: each one more takes the time to record the oldest, so that they cannot pile up."""


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
            asyncio.get_running_loop().call_later(_SECONDS, self._take_turn)
            self._has_timer = True
        self._reports.append(report)
        if len(self._reports) > _MOST:
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
