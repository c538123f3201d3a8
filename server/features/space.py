"""Disk space for captured features: limits per tenant and in total; captures reserve it, and may wait for it."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from ...schemas.errors import RequestError
from ...schemas.models import Limit
from ..config.server_config import ServerConfig

_RETRY_SECONDS = 5.0
_OWN = "of yours"


class FeatureLimitExceeded(RequestError):
    """The features to be captured exceed a limit."""


@dataclass(frozen=True)
class _SpaceLimit:
    """A limit in bytes; `used` includes the reservations of captures in progress."""

    knob: str
    whose: str
    limit: int
    used: int

    def __str__(self) -> str:
        return f"the limit of {self.limit} (the server's --{self.knob.replace('_', '-')})"


class FeatureSpace:
    """Counts the bytes of stored features, and reserves space for captures.

    expire: deletes features that can no longer be used. num_waiting: captures that wait for space. num_put_off:
    captures that were refused after waiting.
    """

    def __init__(self, config: ServerConfig, expire: Callable[[], Awaitable[None]]) -> None:
        self._config = config
        self._expire = expire
        # Bytes by tenant: stored, and reserved for captures in progress.
        self._stored: Counter[str] = Counter()
        self._claimed: Counter[str] = Counter()
        self._freed = asyncio.Event()
        self.num_waiting = self.num_put_off = 0

    @property
    def num_bytes(self) -> int:
        """Returns the bytes stored for all tenants."""
        return self._stored.total()

    def fill(self, tenant_id: str, num_bytes: int) -> None:
        self._stored[tenant_id] += num_bytes

    def free(self, tenant_id: str, num_bytes: int) -> None:
        self._stored[tenant_id] -= num_bytes
        self._freed.set()

    def limits(self, tenant_id: str) -> Mapping[str, Limit]:
        names = {"tenant_feature_bytes": "feature_bytes", "feature_bytes": "server_feature_bytes"}
        return {names[each.knob]: Limit(limit=each.limit, used=each.used) for each in self._budgets(tenant_id)}

    async def reserve(self, tenant_id: str, num_bytes: int) -> Callable[[], None]:
        """Reserves space for a capture, waiting for it if necessary. Returns a function that releases the reservation.

        Raises:
            FeatureLimitExceeded: 413 if the capture exceeds a limit by itself, 429 if no space was freed in time.
        """
        for budget in self._budgets(tenant_id):
            if num_bytes > budget.limit:
                raise FeatureLimitExceeded(
                    f"the features of these data have {num_bytes} bytes, more than {budget}: capture fewer at a time",
                    413,
                )
        if (reason := self._limit_exceeded(tenant_id, num_bytes)) is not None:
            await self._wait(tenant_id, num_bytes, reason)
        return self.reserve_unchecked(tenant_id, num_bytes)

    def reserve_unchecked(self, tenant_id: str, num_bytes: int) -> Callable[[], None]:
        """Reserves space for a capture that was accepted before, even beyond the limits."""
        self._claimed[tenant_id] += num_bytes

        def release() -> None:
            self._claimed[tenant_id] -= num_bytes
            self._freed.set()

        return release

    async def _wait(self, tenant_id: str, num_bytes: int, reason: str | None) -> None:
        """Waits for space. Raises FeatureLimitExceeded 429."""
        until = time.monotonic() + self._config.features.feature_wait_seconds
        self.num_waiting += 1
        try:
            while reason is not None:
                await self._expire()
                self._freed.clear()
                if (reason := self._limit_exceeded(tenant_id, num_bytes)) is None:
                    return
                seconds = min(until, time.monotonic() + _RETRY_SECONDS) - time.monotonic()
                if seconds <= 0:
                    self.num_put_off += 1
                    raise FeatureLimitExceeded(reason, 429, retry_after_seconds=_RETRY_SECONDS)
                try:
                    await asyncio.wait_for(self._freed.wait(), seconds)
                except TimeoutError:
                    continue
        finally:
            self.num_waiting -= 1

    def _limit_exceeded(self, tenant_id: str, num_bytes: int) -> str | None:
        for budget in self._budgets(tenant_id):
            if budget.used + num_bytes > budget.limit:
                # A tenant must not learn how much others use.
                held = f"have {budget.used} bytes" if budget.whose == _OWN else "leave no room"
                return (
                    f"captured features {budget.whose} {held}, these have {num_bytes}, beyond"
                    f" {budget}: retry later, call release_features for what is not needed, or capture for a limited"
                    " number of uses"
                )
        return None

    def _budgets(self, tenant_id: str) -> Sequence[_SpaceLimit]:
        own = self._stored[tenant_id] + self._claimed[tenant_id]
        of_all = self._stored.total() + self._claimed.total()
        return (
            _SpaceLimit("tenant_feature_bytes", _OWN, self._config.limits.tenant_feature_bytes, own),
            _SpaceLimit("feature_bytes", "of all tenants", self._config.features.feature_bytes, of_all),
        )
