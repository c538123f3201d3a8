"""The room that one request takes within its tenant's limits."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from ..http.bodies import LARGE_BYTES
from .quotas import OPERATION_SECONDS, UNKNOWN, QueuePosition, QueueUsage, Quotas


class Reservation(AbstractContextManager["Reservation"]):
    """The room of one request, from before its body is read until its operation is answered, or of a result that is
    being sent.

    The end of the `with` block releases it, unless `keep` was called for an accepted operation; then `release` does.
    """

    def __init__(self, quotas: Quotas, tenant_id: str) -> None:
        self.num_bytes = 0
        self.feature_bytes = 0
        self._quotas = quotas
        self._tenant_id = tenant_id
        self._is_claimed = False
        self._is_kept = False
        self._num_bytes_sending = 0
        # Of the tenant and of all tenants together, from the first claim on; Quotas keeps them as long as one is held.
        self._usages: tuple[QueueUsage, ...] = ()
        self._release_features: list[Callable[[], None]] = []

    def __exit__(self, *error: object) -> None:
        if not self._is_kept:
            self.release()

    def try_claim(self, num_bytes: int, position: QueuePosition = UNKNOWN) -> bool:
        """Reserves room if the request is accepted at this position; returns whether it did."""
        assert not self._is_claimed
        if self._quotas.is_closed or self._quotas.throttle(self._tenant_id, num_bytes, position) is not None:
            return False
        self._is_claimed, self.num_bytes = True, num_bytes
        self._usages = self._quotas.usage(self._tenant_id), self._quotas.server_usage
        for usage in self._usages:
            usage.num_operations += 1
            usage.num_bytes += num_bytes
            usage.num_arriving += 1
            usage.num_bytes_arriving += num_bytes
        return True

    def claim(self, num_bytes: int, position: QueuePosition) -> None:
        """Reserves room for the request. Raises RequestError 429, 503."""
        self._quotas.check(self._tenant_id, num_bytes, position)
        self.try_claim(num_bytes, position)

    def grow(self, num_bytes: int, position: QueuePosition) -> None:
        """Raises the reservation to the body's decompressed size. Raises RequestError 429, 503."""
        if num_bytes > self.num_bytes:
            self.release()
            self.claim(num_bytes, position)

    def claim_result(self, num_bytes: int) -> None:
        """Reserves room to send a result, if it is large. Raises RequestError 429."""
        if num_bytes >= LARGE_BYTES:
            self._quotas.check_sending(self._tenant_id, num_bytes)
            self._num_bytes_sending += num_bytes
            self._usages = self._quotas.usage(self._tenant_id), self._quotas.server_usage
            for usage in self._usages:
                usage.num_bytes_sending += num_bytes

    def keep(self, num_bytes: int, num_tokens: int) -> None:
        """Keeps the reservation for an accepted operation, with its decoded size, and charges its tokens."""
        assert self._is_claimed
        self._is_kept = True
        for usage in self._usages:
            usage.num_arriving -= 1
            usage.num_bytes_arriving -= self.num_bytes
            usage.num_bytes += num_bytes - self.num_bytes
        self.num_bytes = num_bytes
        self.charge(num_tokens)

    def charge(self, num_tokens: int) -> None:
        """Charges tokens, also those that were not known when the operation was accepted."""
        if bucket := self._quotas.usage(self._tenant_id).bucket:
            bucket.level -= num_tokens

    def add_features(self, feature_bytes: int, release: Callable[[], None]) -> None:
        """Adds a reservation of captured features, which is released together with this one."""
        self.feature_bytes += feature_bytes
        self._release_features.append(release)

    def release(self) -> None:
        """Releases the room, as the operation is answered or the result is sent; a repeated call does nothing."""
        while self._release_features:
            self._release_features.pop()()
        if self._is_claimed:
            self._is_claimed, now = False, self._quotas.clock()
            for usage in self._usages:
                usage.num_operations -= 1
                usage.num_bytes -= self.num_bytes
                if self._is_kept:
                    # A mean that halves the weight of earlier operations.
                    seconds = min(now - usage.done_at, OPERATION_SECONDS)
                    usage.seconds_per_operation, usage.done_at = (usage.seconds_per_operation + seconds) / 2, now
                else:
                    usage.num_arriving -= 1
                    usage.num_bytes_arriving -= self.num_bytes
        if self._num_bytes_sending:
            for usage in self._usages:
                usage.num_bytes_sending -= self._num_bytes_sending
            self._num_bytes_sending = 0
