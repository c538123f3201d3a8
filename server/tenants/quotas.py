"""Limits what a tenant may queue and send per minute, and the memory that all tenants' queued operations may take.

Over a limit: 429 with Retry-After. Accepted operations are never dropped. Three rules keep the limits from blocking
accepted operations forever: the first missing operation of a run is exempt from its tenant's limits if others wait for
it; of a tenant's stalled runs, one at a time may use on its own what the limits allow for all runs; and half of the
memory of all tenants is reserved for operations that can run at once.

Quotas decides, and a Reservation is the room that one request has.
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NoReturn

from ...schemas.errors import RequestError
from ...schemas.futures import Pending, QueueState
from ...schemas.models import Limit, Limits
from ...schemas.sampling import ALTERNATIVES
from ..config.server_config import ServerConfig
from ..http.bodies import LARGE_BYTES
from .auth import Tenant
from .rate_limits import TokenBucket

logger = logging.getLogger(__name__)

_LEAST_SECONDS = 0.1
_MAX_SECONDS = 60.0
"""The SDK ignores a longer Retry-After."""

_RUN_SECONDS = 30.0
_SESSION_SECONDS = 10.0
_OPERATION_SECONDS = 5.0
_SENDING_SECONDS = 1.0
_STOPPING_SECONDS = 2.0
_REMEMBERED_SECONDS = 60.0
_SENDING_DIVISOR = 4
"""Results that are being sent may take this part of what queued operations may take."""


@dataclass(frozen=True)
class QueuePosition:
    """The position of a request in the order of its run, which decides its priority.

    is_ready: all earlier operations of the run have arrived.
    is_alone: no operation of the run is queued; one per run is accepted, however much else its tenant has queued.
    may_unblock: the run may be stalled until this request is accepted, because queued operations wait for it (if
        ready), or because clients may send the missing operation only after it.
    num_operations, num_bytes: operations that wait in the run, and their size.
    """

    run_id: str = ""
    is_ready: bool = True
    is_alone: bool = False
    may_unblock: bool = False
    num_operations: int = 0
    num_bytes: int = 0


UNORDERED = QueuePosition()
_UNKNOWN = QueuePosition(is_ready=False)
"""The position with the least priority: a request that has room there has room at any position."""


@dataclass(frozen=True)
class ThrottleReason:
    """The reason why a request is throttled.

    option: sets the limit that was reached.
    seconds: until a retry may succeed.
    """

    option: str
    text: str
    state: QueueState
    seconds: float


@dataclass
class QueueUsage:
    """The usage of all tenants together, or of one; an upload counts from its beginning.

    done_at: when an operation last ended. seconds_per_operation: mean time between the ends of operations.
    num_arriving, num_bytes_arriving: the part that is not accepted yet.
    num_bytes_sending: large results that are being sent to clients.
    stalled_runs: the last time that each run asked for room for lack of which it is stalled, longest stalled first.
    """

    done_at: float
    num_operations: int = 0
    num_bytes: int = 0
    num_arriving: int = 0
    num_bytes_arriving: int = 0
    num_bytes_sending: int = 0
    seconds_per_operation: float = _OPERATION_SECONDS
    stalled_runs: dict[str, float] = field(default_factory=dict)

    def has_precedence(self, run_id: str, now: float) -> bool:
        """True if no run that still asks for room has been stalled longer than this one, which asks now."""
        self.stalled_runs[run_id] = now
        recent = {run: at for run, at in self.stalled_runs.items() if at + _REMEMBERED_SECONDS >= now}
        self.stalled_runs = recent
        return next(iter(recent)) == run_id


@dataclass
class TenantUsage(QueueUsage):
    """The usage of one tenant.

    bucket: None if the tokens per minute are unlimited.
    throttle, throttled_at: the last time a request was throttled.
    """

    bucket: TokenBucket | None = None
    throttle: ThrottleReason | None = None
    throttled_at: float = 0.0


class Quotas:
    """Knows every tenant's usage and throttles requests that exceed a limit; each Reservation counts itself.

    clock: monotonic seconds.
    server_usage: the usage of all tenants.
    is_closed: the server is stopping and accepts nothing more.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.server_usage = QueueUsage(clock())
        self.is_closed = False
        self._limits = config.limits
        self._session_expiry_seconds = config.sessions.session_expiry_seconds
        self._result_ttl_seconds = config.journal.result_ttl_seconds
        self._usages: dict[str, TenantUsage] = {}

    def close(self) -> None:
        """Refuses all requests from now on, with 503."""
        self.is_closed = True

    def usage(self, tenant_id: str) -> TenantUsage:
        """Returns the tenant's usage; `forget_idle` keeps it while the tenant has a claim."""
        usage = self._usages.get(tenant_id)
        if usage is None:
            now, per_minute = self.clock(), self._limits.tenant_tokens_per_minute
            bucket = TokenBucket.full(per_minute, now) if per_minute else None
            usage = self._usages[tenant_id] = TenantUsage(now, bucket=bucket)
        return usage

    def forget_idle(self) -> None:
        """Drops the records of tenants that have nothing queued, no debt and no recent refusal."""
        now = self.clock()
        for tenant_id, usage in list(self._usages.items()):
            is_idle = not usage.num_operations and not usage.num_bytes_sending
            has_debt = usage.bucket is not None and round(usage.bucket.used(now)) > 0
            if is_idle and not has_debt and self.pending(tenant_id) is None:
                del self._usages[tenant_id]

    def limits(self, tenant: Tenant, num_runs: int, num_sessions: int = 0, result_bytes: int = 0) -> Limits:
        """Returns the tenant's limits and its usage of them."""
        limits, usage = self._limits, self.usage(tenant.id)
        num_tokens = round(usage.bucket.used(self.clock())) if usage.bucket else 0
        return Limits(
            tenant=tenant.name,
            sessions=Limit(limit=limits.tenant_sessions, used=num_sessions),
            runs=Limit(limit=limits.tenant_runs, used=num_runs),
            queued_operations=Limit(limit=limits.tenant_queued_operations, used=usage.num_operations),
            queued_bytes=Limit(limit=limits.tenant_queued_bytes, used=usage.num_bytes),
            tokens_per_minute=Limit(limit=limits.tenant_tokens_per_minute or None, used=num_tokens),
            server_queued_bytes=Limit(limit=limits.queued_bytes, used=self.server_usage.num_bytes),
            result_bytes=Limit(limit=limits.tenant_result_bytes, used=result_bytes),
        )

    def pending(self, tenant_id: str) -> Pending | None:
        """Returns why the tenant's requests were throttled lately, for its waiting polls; None if they were not."""
        usage = self._usages.get(tenant_id)
        if usage is None or (last := usage.throttle) is None:
            return None
        if usage.throttled_at + last.seconds + _REMEMBERED_SECONDS < self.clock():
            return None
        return Pending(queue_state=last.state, queue_state_reason=last.text)

    @property
    def max_logprobs(self) -> int:
        """Most alternatives per token that a sample may request."""
        return self._limits.max_logprobs

    @property
    def max_request_bytes(self) -> int:
        """The size in bytes beyond which a request could never be accepted."""
        return min(self._limits.tenant_queued_bytes, self._limits.queued_bytes // 2)

    def check_sessions(self, tenant_id: str, num_sessions: int) -> None:
        """Raises RequestError 429 if the tenant cannot have one more."""
        limit = self._limits.tenant_sessions
        if num_sessions >= limit:
            text = (
                f"you have {num_sessions} open sessions, and {_limit_words('tenant_sessions', limit)}: close those you "
                f"no longer need, or stop their heartbeats for {self._session_expiry_seconds:g} s to end them"
            )
            self._refuse(tenant_id, ThrottleReason("tenant_sessions", text, "paused_capacity", _SESSION_SECONDS))

    def check_runs(self, tenant_id: str, num_runs: int) -> None:
        """Raises RequestError 429 if the tenant cannot have one more."""
        limit = self._limits.tenant_runs
        if num_runs >= limit:
            text = (
                f"you have {num_runs} live runs, and {_limit_words('tenant_runs', limit)}: close sessions you no "
                f"longer need, or stop their heartbeats for {self._session_expiry_seconds:g} s to end them"
            )
            self._refuse(tenant_id, ThrottleReason("tenant_runs", text, "paused_capacity", _RUN_SECONDS))

    def check_results(self, tenant_id: str, kept_bytes: int, result_bytes: int) -> None:
        """Checks that one more result has room.

        Args:
            kept_bytes: size of the tenant's kept results.
            result_bytes: upper bound of the new result.
        Raises:
            RequestError: 400 if the result could never fit, 429 if it does not fit now.
        """
        if result_bytes > self.max_request_bytes:
            raise RequestError(
                f"the result may take {result_bytes} bytes, and the limit is {self.max_request_bytes}: lower "
                f"num_samples, max_tokens, {', '.join(ALTERNATIVES)}, or send several requests"
            )
        limit = self._limits.tenant_result_bytes
        if kept_bytes and kept_bytes + result_bytes > limit:
            text = (
                f"your results take {kept_bytes} bytes, that of this request may take {result_bytes}, and "
                f"{_limit_words('tenant_result_bytes', limit)}: a result is deleted "
                f"{self._result_ttl_seconds:g} s after it is ready (--result-ttl-seconds)"
            )
            self._refuse(tenant_id, ThrottleReason("tenant_result_bytes", text, "paused_rate_limit", _MAX_SECONDS))

    def check_sending(self, tenant_id: str, num_bytes: int) -> None:
        """Raises RequestError 429 if a result exceeds a limit; one at a time per tenant is always allowed."""
        limit, server_limit = self._limits.tenant_queued_bytes, self._limits.queued_bytes
        limit, server_limit = limit // _SENDING_DIVISOR, server_limit // _SENDING_DIVISOR
        own, of_all = self.usage(tenant_id).num_bytes_sending, self.server_usage.num_bytes_sending
        if own and (own + num_bytes > limit or of_all + num_bytes > server_limit):
            text = (
                f"results with {own} bytes are being sent to you, this one takes {num_bytes}, and the limits are "
                f"{limit} for a tenant and {server_limit} for all tenants (a quarter of --tenant-queued-bytes and "
                "of --queued-bytes): retrieve fewer at a time, or read responses faster"
            )
            self._refuse(tenant_id, ThrottleReason("tenant_queued_bytes", text, "paused_capacity", _SENDING_SECONDS))

    def check(self, tenant_id: str, num_bytes: int, position: QueuePosition) -> None:
        """Raises RequestError 429 if the request exceeds a limit, 503 if the server is stopping."""
        if self.is_closed:
            raise RequestError("the server is stopping: send it again when it is back", 503, _STOPPING_SECONDS)
        if throttle := self.throttle(tenant_id, num_bytes, position):
            self._refuse(tenant_id, throttle)

    def throttle(self, tenant_id: str, num_bytes: int, position: QueuePosition) -> ThrottleReason | None:
        """Returns why the request exceeds a limit of its tenant, or of all tenants; None if it does not."""
        usage = self.usage(tenant_id)
        if not (position.may_unblock and position.is_ready):
            if usage.bucket and (seconds := usage.bucket.seconds_until(0, self.clock())):
                return self._too_many_tokens(usage.bucket, seconds)
            throttle = (
                self._queue_throttle(usage, num_bytes) if usage.num_operations and not position.is_alone else None
            )
            if throttle is not None and not self._may_exceed(usage, num_bytes, position):
                return throttle
        return self._server_throttle(num_bytes, position)

    def mark_unstalled(self, tenant_id: str, run_id: str) -> None:
        """Records that the run is no longer stalled."""
        for usage in (self.server_usage, self._usages.get(tenant_id)):
            if usage is not None:
                usage.stalled_runs.pop(run_id, None)

    def _queue_throttle(self, usage: TenantUsage, num_bytes: int) -> ThrottleReason | None:
        most, most_bytes = self._limits.tenant_queued_operations, self._limits.tenant_queued_bytes
        if usage.num_operations >= most:
            option, found = "tenant_queued_operations", f"{usage.num_operations} of your operations are queued"
        elif usage.num_bytes + num_bytes > most_bytes:
            found = f"your queued operations have {usage.num_bytes} bytes, this one has {num_bytes}"
            option, most = "tenant_queued_bytes", most_bytes
        else:
            return None
        text = f"{found}, and {_limit_words(option, most)}: more are accepted as those finish"
        return ThrottleReason(option, text, "paused_rate_limit", usage.seconds_per_operation)

    def _may_exceed(self, usage: TenantUsage, num_bytes: int, position: QueuePosition) -> bool:
        """True if the request may exceed its tenant's limits because its run is stalled and has precedence.

        Otherwise stalled runs of a tenant, each of which misses an operation, could fill its limits forever. So one of
        them at a time may use on its own what the limits allow for all, and all together twice that.
        """
        most, most_bytes = self._limits.tenant_queued_operations, self._limits.tenant_queued_bytes
        fits = (
            position.num_operations + usage.num_arriving < most
            and position.num_bytes + usage.num_bytes_arriving + num_bytes <= most_bytes
            and usage.num_operations < 2 * most
            and usage.num_bytes + num_bytes <= 2 * most_bytes
        )
        return position.may_unblock and fits and usage.has_precedence(position.run_id, self.clock())

    def _too_many_tokens(self, bucket: TokenBucket, seconds: float) -> ThrottleReason:
        text = (
            f"you have used {round(bucket.used(self.clock()))} tokens recently, and "
            f"{_limit_words('tenant_tokens_per_minute', bucket.per_minute)}: more are accepted in "
            f"{math.ceil(seconds)} s"
        )
        return ThrottleReason("tenant_tokens_per_minute", text, "paused_rate_limit", seconds)

    def _server_throttle(self, num_bytes: int, position: QueuePosition) -> ThrottleReason | None:
        """Returns why the request exceeds the limit of all tenants together, or None.

        Any operation may use half of the limit. The other half is for operations that can run at once, so it empties by
        itself, and for the run that has been stalled longest, which must leave room for the largest such operation.
        """
        limit, usage = self._limits.queued_bytes, self.server_usage
        total, most = usage.num_bytes + num_bytes, limit // 2
        if position.is_ready:
            most = limit
        elif position.may_unblock and total > most and usage.has_precedence(position.run_id, self.clock()):
            most = limit - self._limits.max_body_bytes
        if total <= most:
            return None
        text = (
            f"the server's memory for queued operations of all tenants is full, this one has {num_bytes} bytes, "
            f"and {_limit_words('queued_bytes', limit)}: more are accepted as those finish"
        )
        return ThrottleReason("queued_bytes", text, "paused_capacity", usage.seconds_per_operation)

    def _refuse(self, tenant_id: str, throttle: ThrottleReason) -> NoReturn:
        usage = self.usage(tenant_id)
        if self.pending(tenant_id) is None or (usage.throttle and usage.throttle.option != throttle.option):
            logger.info("requests of tenant %s are throttled: %s", tenant_id, throttle.text)
        usage.throttle, usage.throttled_at = throttle, self.clock()
        seconds = min(max(_LEAST_SECONDS, throttle.seconds), _MAX_SECONDS)
        raise RequestError(throttle.text, 429, retry_after_seconds=seconds)


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

    def try_claim(self, num_bytes: int, position: QueuePosition = _UNKNOWN) -> bool:
        """Reserves room unless the quotas throttle a request at this position; returns whether it did."""
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
        """Like `try_claim`, but raises RequestError 429 or 503 if there is no room."""
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
                    seconds = min(now - usage.done_at, _OPERATION_SECONDS)
                    usage.seconds_per_operation, usage.done_at = (usage.seconds_per_operation + seconds) / 2, now
                else:
                    usage.num_arriving -= 1
                    usage.num_bytes_arriving -= self.num_bytes
        if self._num_bytes_sending:
            for usage in self._usages:
                usage.num_bytes_sending -= self._num_bytes_sending
            self._num_bytes_sending = 0


def _limit_words(option: str, limit: int) -> str:
    return f"the limit is {limit} (the server's --{option.replace('_', '-')})"
