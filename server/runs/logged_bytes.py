"""LoggedBytes: how many bytes of metrics each tenant has logged, without summing up their rows at each call."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

from ...schemas.errors import RequestError
from ...schemas.models import Limit
from ..store import Store
from ..store.database.tenant_queue import TenantQueue


class LoggedBytes:
    """Counts the bytes of each run, ended ones included.

    Each tenant logs one request at a time, so that its requests cannot fill the queue of the store's writer.
    """

    def __init__(self, store: Store, most_bytes: int) -> None:
        self._store = store
        self.most_bytes = most_bytes
        self._counting = asyncio.Lock()  # held while a run is counted, and while metrics are deleted and taken off
        self._turns = TenantQueue("log metrics", "send several steps in one request, or one request after another")
        self._of_tenants: dict[str, dict[str, int]] = {}  # tenant id -> run id -> bytes

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[dict[str, int]]:
        """Waits for the tenant's turn, then yields the bytes of each of its runs, which the caller updates.

        Raises:
            RequestError: 429 if too many requests of the tenant are waiting.
        """
        async with self._turns.turn(tenant_id):
            try:
                yield await self._by_run(tenant_id)
            except RequestError:
                raise
            except BaseException:  # the metrics may have been stored
                self._of_tenants.pop(tenant_id, None)
                raise

    async def limit(self, tenant_id: str) -> Limit:
        async with self.turn(tenant_id) as by_run:
            return Limit(limit=self.most_bytes, used=sum(by_run.values()))

    @asynccontextmanager
    async def deleting(self) -> AsyncIterator[None]:
        """Delete metrics, and call `subtract` or `forget_sessions`, in this block."""
        async with self._counting:
            try:
                yield
            except BaseException:  # some may have been deleted
                self._of_tenants.clear()
                raise

    def subtract(self, by_run: Mapping[str, int]) -> None:
        """Takes off what was deleted of these runs."""
        for counted in self._of_tenants.values():
            for run_id in by_run.keys() & counted.keys():
                counted[run_id] -= by_run[run_id]
                if not counted[run_id]:
                    del counted[run_id]
        for tenant_id in [one for one, counted in self._of_tenants.items() if not counted]:
            if self._turns.is_free(tenant_id):
                del self._of_tenants[tenant_id]

    def forget_sessions(self, session_ids: Iterable[str]) -> None:
        """Takes off the runs of deleted sessions."""
        ids = frozenset(session_ids)
        for counted in self._of_tenants.values() if ids else ():
            for run_id in [one for one in counted if one.partition(":")[0] in ids]:
                del counted[run_id]

    async def _by_run(self, tenant_id: str) -> dict[str, int]:
        if (counted := self._of_tenants.get(tenant_id)) is not None:
            return counted
        counted = self._of_tenants[tenant_id] = {}
        # Run by run: the rows of all together would keep one of the store's readers for seconds.
        for run_id in await self._store.runs.list_ids_of_tenant(tenant_id):
            async with self._counting:
                if num := await self._store.logged_metrics.num_bytes(run_id):
                    counted[run_id] = num
        return counted
