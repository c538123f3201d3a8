"""Backlog: reports that are recorded a little later, many at a time."""

import asyncio
from collections import deque
from collections.abc import Callable

_SECONDS = 0.25
_MOST = 200
"""Reports wait for at most this long and number, so that recording them does not block the event loop for long."""


class Backlog:
    """Calls functions later, in order, on the event loop.

    Recording a report takes a few microseconds after another one of its kind, but several times as long between other
    work, which has displaced the code from the processor's caches, and an operation would wait for it.
    """

    def __init__(self) -> None:
        self._reports: deque[Callable[[], None]] = deque()

    def add(self, report: Callable[[], None]) -> None:
        if not self._reports:
            asyncio.get_running_loop().call_later(_SECONDS, self.work_off)
        self._reports.append(report)
        if len(self._reports) >= _MOST:
            self.work_off()

    def work_off(self) -> None:
        while self._reports:
            self._reports.popleft()()
