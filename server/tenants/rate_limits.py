"""Rate limits: how many requests a minute a key may send, where it was made with a limit, and how many may come without
a key in force. Counted by this process."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from ...schemas.errors import RequestError

UNCOUNTED = frozenset(
    {
        "POST /api/v1/retrieve_future",
        "POST /api/v1/retrieve_futures",
        "POST /api/v1/session_heartbeat",
    }
)
"""Polls and heartbeats: how many there are is the server's and the client's doing, not the user's."""

_MOST_ADDRESSES = 4096
_ADDRESSES_IN_ALL = 10
"""So many addresses together may send as many requests without a key as they would alone."""


@dataclass
class _Bucket:
    """level: requests that may be sent at once, of a minute's worth at most, as of `at`."""

    per_minute: int
    level: float
    at: float

    def seconds_to_wait(self, now: float) -> float:
        """Until there is room for a request; 0: there is."""
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now
        return max(0.0, (1 - self.level) * 60 / self.per_minute)


class RateLimits:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[int, _Bucket] = {}

    def take(self, key_id: int, per_minute: int) -> None:
        """One request. Raises RequestError 429."""
        now = self._clock()
        bucket = self._buckets.setdefault(key_id, _Bucket(per_minute, per_minute, now))
        if seconds := bucket.seconds_to_wait(now):
            raise RequestError(
                f"this key may send {per_minute} requests a minute, and has: send fewer, larger ones, or use a key "
                f"made by `trainhouse keys create NAME --requests-per-minute {2 * per_minute}`",
                status=429,
                retry_after_seconds=seconds,
            )
        bucket.level -= 1


class Strangers:
    """Requests without a key in force: how many an address, and all addresses together, may send. Of the addresses the
    last _MOST_ADDRESSES are known. `clock`: monotonic seconds."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._of_address: dict[str, _Bucket] = {}
        self._of_all = _full_bucket(_ADDRESSES_IN_ALL * per_minute, clock())

    def check(self, address: str) -> None:
        """Raises RequestError 429 where the address, or all together, have sent too many."""
        now, bucket = self._clock(), self._of_address.get(network_of(address))
        if seconds := max(self._of_all.seconds_to_wait(now), bucket.seconds_to_wait(now) if bucket else 0.0):
            raise RequestError(
                f"too many requests without an API key in force: {self._per_minute} a minute are answered to an "
                "address: send one with X-API-Key",
                status=429,
                retry_after_seconds=seconds,
            )

    def take(self, address: str) -> None:
        """One request. Raises RequestError 429."""
        self.check(address)
        now, network = self._clock(), network_of(address)
        bucket = self._of_address.pop(network, None) or _full_bucket(self._per_minute, now)
        while len(self._of_address) >= _MOST_ADDRESSES:
            del self._of_address[next(iter(self._of_address))]
        self._of_address[network] = bucket
        bucket.level -= 1
        self._of_all.level -= 1


def network_of(address: str) -> str:
    """The address; of IPv6 the first half, since who has one has as many as the other half says."""
    try:
        known = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(IPv6Address(int(known) >> 64 << 64)) if isinstance(known, IPv6Address) else address


def _full_bucket(per_minute: int, now: float) -> _Bucket:
    return _Bucket(per_minute, per_minute, now)
