"""Costly requests of a tenant run one after another, with a bound on how many wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ....schemas.errors import RequestError

MAX_WAITING = 32
_RETRY_SECONDS = 1.0


class TenantQueue:
    """A queue for each tenant."""

    def __init__(self, work: str, remedy: str) -> None:
        """work, remedy: for the error message: what the requests do, and what to do instead of sending so many."""
        self._work, self._remedy = work, remedy
        self._locks: dict[str, asyncio.Lock] = {}
        self._num_waiting: dict[str, int] = {}

    def is_free(self, tenant_id: str) -> bool:
        return tenant_id not in self._num_waiting

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Waits until no other request of the tenant has its turn. Raises RequestError 429 if MAX_WAITING wait."""
        num = self._num_waiting.get(tenant_id, 0)
        if num >= MAX_WAITING:
            raise RequestError(
                f"{num} of your requests to {self._work} are waiting: {self._remedy}", 429, _RETRY_SECONDS
            )
        self._num_waiting[tenant_id] = num + 1
        try:
            async with self._locks.setdefault(tenant_id, asyncio.Lock()):
                yield
        finally:
            self._num_waiting[tenant_id] -= 1
            if not self._num_waiting[tenant_id]:
                del self._num_waiting[tenant_id], self._locks[tenant_id]
