"""Gap: how long a run waits for an operation that has not arrived while others behind it have."""

import asyncio
import math
import time
from collections.abc import Callable

_RETRY_SECONDS = 5.0
"""Until it is tried again to give one up, which fails as long as the journal cannot be written."""


class Gap:
    """Of one run: there is one, or none. give_up: called once it has held something up for `seconds`.

    Again and again, unless it is none then.
    """

    def __init__(self, seconds: float, give_up: Callable[[], None]) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._tried_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, since: float | None) -> None:
        """To be called at each arrival. since: monotonic, from when it holds something up; None: there is no gap."""
        self.close()
        if since is not None:
            at = max(since + self._seconds, self._tried_at + _RETRY_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(at - time.monotonic(), self._try)

    def seconds_left(self, since: float) -> float:
        """Until it is given up."""
        return max(0.0, since + self._seconds - time.monotonic())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _try(self) -> None:
        self._tried_at = time.monotonic()
        self._give_up()
