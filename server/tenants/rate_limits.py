"""Limits requests per minute: of keys that were created with a limit, and of addresses without a valid key.

Each process counts for itself.
"""

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
"""Polls and heartbeats are not counted: server and client library, not the user, determine their number."""

_MAX_ADDRESSES = 4096
_ADDRESSES_IN_ALL = 10
"""All addresses together may send this many times the requests without a key of one address."""


@dataclass
class TokenBucket:
    """Holds at most a minute's worth. level: as of time `at`; below zero it is a debt, which shrinks with time."""

    per_minute: int
    level: float
    at: float

    @classmethod
    def full(cls, per_minute: int, now: float) -> "TokenBucket":
        return cls(per_minute, per_minute, now)

    def used(self, now: float) -> float:
        """Returns how much the bucket lacks to be full."""
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now
        return self.per_minute - self.level

    def seconds_until(self, level: float, now: float) -> float:
        """Returns the seconds until the bucket holds `level`, 0 if it does now."""
        missing = level - (self.per_minute - self.used(now))
        return max(0.0, missing * 60 / self.per_minute)


class RateLimits:
    """Counts the requests of each key. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[int, TokenBucket] = {}

    def take(self, key_id: int, per_minute: int) -> None:
        """Counts one request. Raises RequestError 429 if the key has exceeded its rate."""
        now = self._clock()
        bucket = self._buckets.setdefault(key_id, TokenBucket.full(per_minute, now))
        if seconds := bucket.seconds_until(1, now):
            raise RequestError(
                f"this key has used up its limit of {per_minute} requests a minute: send fewer, larger ones, or use a "
                f"key made by `trainhouse keys create NAME --requests-per-minute {2 * per_minute}`",
                status=429,
                retry_after_seconds=seconds,
            )
        bucket.level -= 1


class UnauthenticatedLimits:
    """Limits requests without a valid key, for each address and for all addresses together.

    Keeps the last _MAX_ADDRESSES addresses. clock: monotonic seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._of_address: dict[str, TokenBucket] = {}
        self._of_all = TokenBucket.full(_ADDRESSES_IN_ALL * per_minute, clock())

    def check(self, address: str) -> None:
        """Raises RequestError 429 if the address, or all addresses together, have sent too many."""
        now, bucket = self._clock(), self._of_address.get(network_of(address))
        if seconds := max(each.seconds_until(1, now) for each in (self._of_all, bucket) if each):
            raise RequestError(
                f"too many requests without a valid API key: the limit is {self._per_minute} a minute for each "
                "address: send a key as X-API-Key",
                status=429,
                retry_after_seconds=seconds,
            )

    def take(self, address: str) -> None:
        """Counts one request. Raises RequestError 429 as `check` does."""
        self.check(address)
        now, network = self._clock(), network_of(address)
        bucket = self._of_address.pop(network, None) or TokenBucket.full(self._per_minute, now)
        while len(self._of_address) >= _MAX_ADDRESSES:
            del self._of_address[next(iter(self._of_address))]
        self._of_address[network] = bucket
        bucket.level -= 1
        self._of_all.level -= 1


def network_of(address: str) -> str:
    """Returns an IPv4 address unchanged, and the /64 network of an IPv6 address, since a host often has a whole /64."""
    try:
        known = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(IPv6Address(int(known) >> 64 << 64)) if isinstance(known, IPv6Address) else address
