"""Times out an operation that has not arrived while later operations of its run wait for it."""

import asyncio
import math
import time
from collections.abc import Callable

_RETRY_SECONDS = 5.0
"""Pause before giving up is retried; it fails as long as the journal cannot be written."""


class MissingSeqTimer:
    """Timer of one run: calls `give_up` if a gap in the seq_ids has blocked later operations for `seconds`.

    It calls again after a pause for as long as `watch` reports the gap.
    """

    def __init__(self, seconds: float, give_up: Callable[[], None]) -> None:
        self._seconds = seconds
        self._give_up = give_up
        self._tried_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, since: float | None) -> None:
        """Restarts the timer; call it at each arrival.

        Args:
            since: monotonic time from which the gap has blocked other operations; None: there is no gap.
        """
        self.close()
        if since is not None:
            at = max(since + self._seconds, self._tried_at + _RETRY_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(at - time.monotonic(), self._try)

    def seconds_left(self, since: float) -> float:
        """Returns the seconds until the gap is given up."""
        return max(0.0, since + self._seconds - time.monotonic())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _try(self) -> None:
        self._tried_at = time.monotonic()
        self._give_up()
