"""Counts the bytes that each tenant's results take on disk."""

import time
from collections import Counter
from collections.abc import Callable, Iterable

from ..store import Store

_RECORD_BYTES = 512
"""Approximate disk space of a kept result without its body: its header, and its row in the store."""
_SUM_SHARE = 0.02
"""Maximum share of time that summing up kept results may occupy the database."""


class KeptBytes:
    """Adds new results at once; `recount` takes expired ones off."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_tenant: Counter[str] = Counter()
        self._sum_again_at = 0.0

    def of(self, tenant_id: str) -> int:
        """Returns about how many bytes the tenant's results take on disk."""
        return self._by_tenant[tenant_id]

    def add(self, tenant_id: str, body_bytes: int) -> None:
        self._by_tenant[tenant_id] += body_bytes + _RECORD_BYTES

    async def recount(self, not_stored: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """Sums up all results, unless that would occupy the database too often.

        Args:
            not_stored: returns tenant and size of the body of each result that the store lacks.
        """
        began_at = time.monotonic()
        if began_at < self._sum_again_at:
            return
        sums = await self._store.results.sum_by_tenant()
        self._by_tenant = Counter({tenant_id: num * _RECORD_BYTES + size for tenant_id, (num, size) in sums.items()})
        for tenant_id, body_bytes in not_stored():
            self.add(tenant_id, body_bytes)
        now = time.monotonic()
        self._sum_again_at = now + (now - began_at) / _SUM_SHARE
