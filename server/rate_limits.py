"""Rate limits: how many requests a minute a key may send, where it was made with a limit. Counted by this process."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..schemas.errors import RequestError

UNCOUNTED = frozenset(
    {
        "POST /api/v1/retrieve_future",
        "POST /api/v1/retrieve_futures",
        "POST /api/v1/session_heartbeat",
    }
)
"""Polls and heartbeats: how many there are is the server's and the client's doing, not the user's."""


@dataclass
class _Bucket:
    """level: requests that may be sent at once, of a minute's worth at most, as of `at`."""

    level: float
    at: float


class RateLimits:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[int, _Bucket] = {}

    def take(self, key_id: int, per_minute: int) -> None:
        """One request. Raises RequestError 429."""
        now = self._clock()
        bucket = self._buckets.setdefault(key_id, _Bucket(per_minute, now))
        bucket.level = min(per_minute, bucket.level + (now - bucket.at) * per_minute / 60)
        bucket.at = now
        if bucket.level < 1:
            raise RequestError(
                f"this key may send {per_minute} requests a minute, and has: send fewer, larger ones, or use a key "
                f"made by `trainhouse keys create NAME --requests-per-minute {2 * per_minute}`",
                status=429,
                retry_after_seconds=(1 - bucket.level) * 60 / per_minute,
            )
        bucket.level -= 1
