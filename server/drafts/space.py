"""Disk space for captured features: limits per tenant and in total; captures reserve it, and may wait for it."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial

from ...schemas.errors import RequestError
from ...schemas.models import Limit
from ..config.server_config import ServerConfig

_RETRY_SECONDS = 5.0
_OWN, _SERVER = "feature_bytes", "server_feature_bytes"
_FLAGS = {_OWN: "--tenant-feature-bytes", _SERVER: "--feature-bytes"}


class FeatureLimitExceeded(RequestError):
    """The features to be captured exceed a limit."""


class FeatureSpace:
    """Counts the bytes of stored features, and reserves space for captures."""

    def __init__(self, config: ServerConfig, expire: Callable[[], Awaitable[None]]) -> None:
        self._limits = {_OWN: config.limits.tenant_feature_bytes, _SERVER: config.features.feature_bytes}
        self._wait_seconds = config.features.feature_wait_seconds
        self._expire = expire
        self._used: Counter[str] = Counter()  # bytes by tenant, stored or reserved
        self._freed = asyncio.Event()
        self.num_waiting = 0
        """Captures that wait for space."""
        self.num_put_off = 0
        """Captures that were refused after waiting."""

    def fill(self, tenant_id: str, num_bytes: int) -> None:
        self._used[tenant_id] += num_bytes

    def free(self, tenant_id: str, num_bytes: int) -> None:
        self._used[tenant_id] -= num_bytes
        self._freed.set()

    def limits(self, tenant_id: str) -> Mapping[str, Limit]:
        """Returns the tenant's limit and that of all tenants; `used` includes what is reserved."""
        return {name: Limit(limit=self._limits[name], used=used) for name, used in self._uses(tenant_id).items()}

    async def reserve(self, tenant_id: str, num_bytes: int) -> Callable[[], None]:
        """Reserves space for a capture, waiting for it if necessary. Returns a function that releases the reservation.
        Raises FeatureLimitExceeded: 413 if it exceeds a limit by itself, 429 if no space was freed in time."""
        for name, limit in self._limits.items():
            if num_bytes > limit:
                raise FeatureLimitExceeded(
                    f"the features of these data have {num_bytes} bytes, more than the limit of {limit} (the server's"
                    f" {_FLAGS[name]}): capture fewer at a time",
                    413,
                )
        if self._limit_exceeded(tenant_id, num_bytes) is not None:
            await self._wait(tenant_id, num_bytes)
        return self.reserve_unchecked(tenant_id, num_bytes)

    def reserve_unchecked(self, tenant_id: str, num_bytes: int) -> Callable[[], None]:
        """Reserves space for a capture that was accepted before, even beyond the limits."""
        self.fill(tenant_id, num_bytes)
        return partial(self.free, tenant_id, num_bytes)

    async def _wait(self, tenant_id: str, num_bytes: int) -> None:
        """Waits for space. Raises FeatureLimitExceeded 429."""
        until = time.monotonic() + self._wait_seconds
        self.num_waiting += 1
        try:
            while True:
                await self._expire()
                self._freed.clear()
                if (reason := self._limit_exceeded(tenant_id, num_bytes)) is None:
                    return
                seconds = min(until - time.monotonic(), _RETRY_SECONDS)
                if seconds <= 0:
                    self.num_put_off += 1
                    raise FeatureLimitExceeded(reason, 429, retry_after_seconds=_RETRY_SECONDS)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), seconds)
        finally:
            self.num_waiting -= 1

    def _limit_exceeded(self, tenant_id: str, num_bytes: int) -> str | None:
        for name, used in self._uses(tenant_id).items():
            if used + num_bytes > self._limits[name]:
                # A tenant must not learn how much others use.
                stored = f"of yours have {used} bytes" if name == _OWN else "of all tenants leave no room"
                return (
                    f"captured features {stored}, these have {num_bytes}, beyond the limit of {self._limits[name]} (the"
                    f" server's {_FLAGS[name]}): retry later, call release_features for what is not needed, or capture"
                    " for a limited number of uses"
                )
        return None

    def _uses(self, tenant_id: str) -> Mapping[str, int]:
        return {_OWN: self._used[tenant_id], _SERVER: self._used.total()}
