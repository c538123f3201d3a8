"""Room for captured features: the bytes of each tenant and of all, which captures claim, and may have to wait for."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from ...schemas.errors import RequestError
from ...schemas.models import Limit
from ..config.knobs import ServerConfig

_RETRY_SECONDS = 5.0
_OWN = "of yours"


class NoRoom(RequestError):
    """For what is to be captured."""


@dataclass(frozen=True)
class _Budget:
    """Bytes. used: also by captures under way."""

    knob: str
    whose: str
    limit: int
    used: int

    def __str__(self) -> str:
        return f"the limit of {self.limit} (the server's --{self.knob.replace('_', '-')})"


class FeatureRoom:
    """expire: deletes what nobody may use any more. num_waiting, num_put_off: of captures."""

    def __init__(self, config: ServerConfig, expire: Callable[[], Awaitable[None]]) -> None:
        self._config = config
        self._expire = expire
        # Bytes, by tenant: of what is there, and at most of captures under way.
        self._stored: Counter[str] = Counter()
        self._claimed: Counter[str] = Counter()
        self._freed = asyncio.Event()
        self.num_waiting = self.num_put_off = 0

    @property
    def num_bytes(self) -> int:
        """Of all that is there."""
        return self._stored.total()

    def fill(self, tenant_id: str, num_bytes: int) -> None:
        self._stored[tenant_id] += num_bytes

    def free(self, tenant_id: str, num_bytes: int) -> None:
        self._stored[tenant_id] -= num_bytes
        self._freed.set()

    def limits(self, tenant_id: str) -> Mapping[str, Limit]:
        names = {"tenant_feature_bytes": "feature_bytes", "feature_bytes": "server_feature_bytes"}
        return {names[each.knob]: Limit(limit=each.limit, used=each.used) for each in self._budgets(tenant_id)}

    async def claim(self, tenant_id: str, num_bytes: int) -> Callable[[], None]:
        """Room for a capture, which may have to wait for it; what is returned gives it back, once it is done. Raises
        NoRoom: 413 for more than there can ever be, 429 where there is none in time."""
        for budget in self._budgets(tenant_id):
            if num_bytes > budget.limit:
                raise NoRoom(
                    f"the features of these data have {num_bytes} bytes, more than {budget}: capture fewer at a time",
                    413,
                )
        if (reason := self._lack(tenant_id, num_bytes)) is not None:
            await self._wait(tenant_id, num_bytes, reason)
        return self.claim_again(tenant_id, num_bytes)

    def claim_again(self, tenant_id: str, num_bytes: int) -> Callable[[], None]:
        """For a capture that has been given room, be there any left or not."""
        self._claimed[tenant_id] += num_bytes

        def release() -> None:
            self._claimed[tenant_id] -= num_bytes
            self._freed.set()

        return release

    async def _wait(self, tenant_id: str, num_bytes: int, reason: str | None) -> None:
        """Raises NoRoom 429."""
        until = time.monotonic() + self._config.feature_wait_seconds
        self.num_waiting += 1
        try:
            while reason is not None:
                await self._expire()
                self._freed.clear()
                if (reason := self._lack(tenant_id, num_bytes)) is None:
                    return
                seconds = min(until, time.monotonic() + _RETRY_SECONDS) - time.monotonic()
                if seconds <= 0:
                    self.num_put_off += 1
                    raise NoRoom(reason, 429, retry_after_seconds=_RETRY_SECONDS)
                try:
                    await asyncio.wait_for(self._freed.wait(), seconds)
                except TimeoutError:
                    continue
        finally:
            self.num_waiting -= 1

    def _lack(self, tenant_id: str, num_bytes: int) -> str | None:
        for budget in self._budgets(tenant_id):
            if budget.used + num_bytes > budget.limit:
                # How much others have is not for a tenant to know.
                held = f"have {budget.used} bytes" if budget.whose == _OWN else "leave no room"
                return (
                    f"captured features {budget.whose} {held}, these have {num_bytes}, beyond"
                    f" {budget}: more is captured when there is room; release_features of what is not needed, or"
                    " capture for a number of uses"
                )
        return None

    def _budgets(self, tenant_id: str) -> Sequence[_Budget]:
        own = self._stored[tenant_id] + self._claimed[tenant_id]
        of_all = self._stored.total() + self._claimed.total()
        return (
            _Budget("tenant_feature_bytes", _OWN, self._config.tenant_feature_bytes, own),
            _Budget("feature_bytes", "of all tenants", self._config.feature_bytes, of_all),
        )
