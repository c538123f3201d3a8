"""Delays between retries, in seconds."""

import math
import time
from dataclasses import dataclass

# Far beyond every limit; a float overflows at 1024.
_MAX_DOUBLINGS = 64


def backoff(num_failures: int, first: float, limit: float = math.inf) -> float:
    """Returns the delay after so many failures in a row: 0, first, twice that, and so on up to the limit."""
    return min(limit, first * 2.0 ** min(num_failures - 1, _MAX_DOUBLINGS)) if num_failures else 0.0


@dataclass
class RestartBackoff:
    """Delays restarts: none for a worker that served for a while, growing delays for one that keeps dying."""

    first: float = 1.0
    limit: float = 60.0
    steady_after: float = 60.0
    _started_at: float = 0.0
    _num_quick_deaths: int = 0

    def started(self) -> None:
        self._started_at = time.monotonic()

    def next_delay(self) -> float:
        if time.monotonic() - self._started_at > self.steady_after + self._delay():
            self._num_quick_deaths = 0
        delay = self._delay()
        self._num_quick_deaths += 1
        return delay

    def _delay(self) -> float:
        return backoff(self._num_quick_deaths, self.first, self.limit)
