"""Limits what a tenant may queue and send per minute, and the memory that all tenants' queued operations may take.

Over a limit: 429 with Retry-After. Accepted operations are never dropped. Three rules keep the limits from blocking
accepted operations forever: the first missing operation of a run is exempt from its tenant's limits if others wait for
it; of a tenant's stalled runs, one at a time may use on its own what the limits allow for all runs; and half of the
memory of all tenants is reserved for operations that can run at once.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from ...schemas.errors import RequestError
from ...schemas.futures import Pending, QueueState
from ...schemas.models import Limit, Limits
from ...schemas.sampling import ALTERNATIVES
from ..config.server_config import ServerConfig
from ..http.bodies import LARGE_BYTES
from .auth import Tenant

logger = logging.getLogger(__name__)

_LEAST_SECONDS = 0.1
_MOST_SECONDS = 60.0
"""The SDK ignores a longer Retry-After."""

_UNKNOWN_SECONDS = 5.0
_RUN_SECONDS = 30.0
_SESSION_SECONDS = 10.0
_LEAVING_SECONDS = 1.0
_LEAVING_PART = 4
"""Large results that are being sent may take this fraction (one in so many) of what queued operations may take."""

_STOPPING_SECONDS = 2.0
_REMEMBERED_SECONDS = 60.0
_DRAIN_SECONDS = 30.0


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


@dataclass(frozen=True)
class ThrottleReason:
    """The reason why a request was throttled.

    knob: sets the limit that was reached.
    seconds: until a retry may succeed.
    at: time of the refusal, by the clock of Quotas.
    """

    knob: str
    reason: str
    state: QueueState
    seconds: float
    at: float


@dataclass
class _ThroughputEstimate:
    """Estimates throughput: an exponential average of work done over about the last _DRAIN_SECONDS."""

    began_at: float
    at: float
    amount: float = 0.0

    def add(self, amount: float, now: float) -> None:
        self._decay(now)
        self.amount += amount

    def seconds_for(self, amount: float, now: float) -> float:
        """Returns the seconds until `amount` more is done at the present rate."""
        self._decay(now)
        span = min(now - self.began_at, _DRAIN_SECONDS)
        return amount * span / self.amount if self.amount > 0 else _UNKNOWN_SECONDS

    def _decay(self, now: float) -> None:
        self.amount *= math.exp((self.at - now) / _DRAIN_SECONDS)
        self.at = now


@dataclass
class _TokenBudget:
    """A token bucket for a tenant's tokens per minute. A level below zero is a debt, which shrinks with time."""

    per_minute: int
    level: float
    at: float

    def seconds_in_debt(self, now: float) -> float:
        self._refill(now)
        return -self.level * 60 / self.per_minute if self.per_minute and self.level < 0 else 0.0

    def used(self, now: float) -> int:
        self._refill(now)
        return round(self.per_minute - self.level)

    def take(self, num_tokens: int) -> None:
        if self.per_minute:
            self.level -= num_tokens

    def _refill(self, now: float) -> None:
        self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now


class _StalledRuns:
    """Runs that are stalled for lack of room; the first has precedence until it advances or stops sending requests."""

    def __init__(self) -> None:
        self._asked_at: dict[str, float] = {}

    def is_first(self, run_id: str, now: float) -> bool:
        """Records that the run requests room; returns True if it has precedence."""
        self._asked_at[run_id] = now
        for other, asked_at in list(self._asked_at.items()):
            if asked_at + _REMEMBERED_SECONDS >= now:
                return other == run_id
            del self._asked_at[other]
        return False

    def remove(self, run_id: str) -> None:
        self._asked_at.pop(run_id, None)


@dataclass
class _TenantUsage:
    """The usage of one tenant; an upload counts from its beginning.

    num_arriving, num_bytes_arriving: the part that is not accepted yet.
    num_bytes_sending: large results that are being sent to clients.
    last_throttle: the last time a request was throttled.
    """

    bucket: _TokenBudget
    operations_throughput: _ThroughputEstimate
    bytes_throughput: _ThroughputEstimate
    num_operations: int = 0
    num_bytes: int = 0
    num_arriving: int = 0
    num_bytes_arriving: int = 0
    num_bytes_sending: int = 0
    last_throttle: ThrottleReason | None = None
    stalled_runs: _StalledRuns = field(default_factory=_StalledRuns)


class Quotas:
    """Counts every tenant's usage and throttles requests that exceed a limit.

    clock: monotonic seconds.
    is_closed: the server is stopping and accepts nothing more.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._usages: dict[str, _TenantUsage] = {}
        self._num_bytes = 0
        self._num_bytes_leaving = 0
        self._throughput = _ThroughputEstimate(clock(), clock())
        self._stalled_runs = _StalledRuns()
        self.is_closed = False

    def close(self) -> None:
        """Refuses all requests from now on, with 503."""
        self.is_closed = True

    def reservation(self, tenant_id: str) -> "Reservation":
        return Reservation(self, tenant_id)

    def check_sessions(self, tenant_id: str, num_sessions: int) -> None:
        """Raises RequestError 429 if the tenant cannot have one more."""
        limit = self._config.limits.tenant_sessions
        if num_sessions >= limit:
            reason = (
                f"you have {num_sessions} open sessions, and {_limit_words('tenant_sessions', limit)}: close those "
                "you no longer need, or stop their heartbeats for "
                f"{self._config.sessions.session_expiry_seconds:g} s to end them"
            )
            put_off = ThrottleReason("tenant_sessions", reason, "paused_capacity", _SESSION_SECONDS, self._clock())
            self._refuse(tenant_id, put_off)

    def check_runs(self, tenant_id: str, num_runs: int) -> None:
        """Raises RequestError 429 if the tenant cannot have one more."""
        limit = self._config.limits.tenant_runs
        if num_runs >= limit:
            reason = (
                f"you have {num_runs} live runs, and {_limit_words('tenant_runs', limit)}: close sessions you no "
                "longer "
                f"need, or stop their heartbeats for {self._config.sessions.session_expiry_seconds:g} s to end them"
            )
            self._refuse(
                tenant_id, ThrottleReason("tenant_runs", reason, "paused_capacity", _RUN_SECONDS, self._clock())
            )

    @property
    def max_logprobs(self) -> int:
        """Most alternatives per token that a sample may request."""
        return self._config.limits.max_logprobs

    @property
    def max_request_bytes(self) -> int:
        """The size in bytes beyond which a request could never be accepted."""
        return min(self._config.limits.tenant_queued_bytes, self._config.limits.queued_bytes // 2)

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
                "num_samples, "
                f"max_tokens, {', '.join(ALTERNATIVES)}, or send several requests"
            )
        limit = self._config.limits.tenant_result_bytes
        if kept_bytes and kept_bytes + result_bytes > limit:
            reason = (
                f"your results take {kept_bytes} bytes, that of this request may take {result_bytes}, and "
                f"{_limit_words('tenant_result_bytes', limit)}: a result is deleted "
                f"{self._config.journal.result_ttl_seconds:g} s "
                "after it is ready (--result-ttl-seconds)"
            )
            put_off = ThrottleReason("tenant_result_bytes", reason, "paused_rate_limit", _MOST_SECONDS, self._clock())
            self._refuse(tenant_id, put_off)

    def limits(self, tenant: Tenant, num_runs: int, num_sessions: int = 0, result_bytes: int = 0) -> Limits:
        """Returns the tenant's limits and its usage of them."""
        config, usage = self._config, self._usage(tenant.id)
        tokens = config.limits.tenant_tokens_per_minute
        return Limits(
            tenant=tenant.name,
            sessions=Limit(limit=config.limits.tenant_sessions, used=num_sessions),
            runs=Limit(limit=config.limits.tenant_runs, used=num_runs),
            queued_operations=Limit(limit=config.limits.tenant_queued_operations, used=usage.num_operations),
            queued_bytes=Limit(limit=config.limits.tenant_queued_bytes, used=usage.num_bytes),
            tokens_per_minute=Limit(limit=tokens or None, used=usage.bucket.used(self._clock()) if tokens else 0),
            server_queued_bytes=Limit(limit=config.limits.queued_bytes, used=self._num_bytes),
            result_bytes=Limit(limit=config.limits.tenant_result_bytes, used=result_bytes),
        )

    def pending(self, tenant_id: str) -> Pending | None:
        """Returns why the tenant's requests were throttled lately, for its waiting polls; None if they were not."""
        usage = self._usages.get(tenant_id)
        put_off = usage and usage.last_throttle
        if not put_off or put_off.at + put_off.seconds + _REMEMBERED_SECONDS < self._clock():
            return None
        return Pending(queue_state=put_off.state, queue_state_reason=put_off.reason)

    def forget_idle(self) -> None:
        """Drops the records of tenants that have nothing queued, no debt and no recent refusal."""
        now = self._clock()
        for tenant_id, usage in list(self._usages.items()):
            is_idle = not usage.num_operations and not usage.num_bytes_sending
            if is_idle and not usage.bucket.used(now) and self.pending(tenant_id) is None:
                del self._usages[tenant_id]

    def result_reservation(self, tenant_id: str) -> "ResultReservation":
        return ResultReservation(self, tenant_id)

    # For ResultReservation

    def check_sending(self, tenant_id: str, num_bytes: int) -> None:
        """Raises RequestError 429 if the result exceeds a limit; one at a time per tenant is always allowed."""
        of_tenant, of_all = (
            self._config.limits.tenant_queued_bytes // _LEAVING_PART,
            self._config.limits.queued_bytes // _LEAVING_PART,
        )
        own = self._usage(tenant_id).num_bytes_sending
        if own and (own + num_bytes > of_tenant or self._num_bytes_leaving + num_bytes > of_all):
            reason = (
                f"results with {own} bytes are being sent to you, this one takes {num_bytes}, and the limits are "
                f"{of_tenant} for a tenant and {of_all} for all tenants (a quarter of --tenant-queued-bytes and "
                "of --queued-bytes): "
                "retrieve fewer at a time, or read responses faster"
            )
            put_off = ThrottleReason("tenant_queued_bytes", reason, "paused_capacity", _LEAVING_SECONDS, self._clock())
            self._refuse(tenant_id, put_off)

    def add_sending(self, tenant_id: str, num_bytes: int) -> None:
        """Adds bytes that are being sent; negative after they have been sent."""
        self._usage(tenant_id).num_bytes_sending += num_bytes
        self._num_bytes_leaving += num_bytes

    # For Reservation

    def fits(self, tenant_id: str, num_bytes: int) -> bool:
        """True if a request of this size is accepted regardless of its position in the order of its run."""
        within = self._tenant_throttle(self._usage(tenant_id), num_bytes, UNORDERED) is None
        return within and not self.is_closed and self._num_bytes + num_bytes <= self._config.limits.queued_bytes // 2

    def check(self, tenant_id: str, num_bytes: int, position: QueuePosition) -> None:
        """Raises RequestError 429 if the request exceeds a limit, 503 if the server is stopping."""
        if self.is_closed:
            raise RequestError("the server is stopping: send it again when it is back", 503, _STOPPING_SECONDS)
        put_off = self._tenant_throttle(self._usage(tenant_id), num_bytes, position) or self._server_throttle(
            num_bytes, position
        )
        if put_off is not None:
            self._refuse(tenant_id, put_off)

    def add(self, tenant_id: str, num_operations: int, num_bytes: int) -> None:
        usage = self._usage(tenant_id)
        usage.num_operations += num_operations
        usage.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def add_arriving(self, tenant_id: str, num_operations: int, num_bytes: int) -> None:
        """Adds uploads in progress; negative after they have arrived."""
        usage = self._usage(tenant_id)
        usage.num_arriving += num_operations
        usage.num_bytes_arriving += num_bytes

    def subtract(self, tenant_id: str, num_bytes: int, done: bool) -> None:
        self.add(tenant_id, -1, -num_bytes)
        if done:
            now, usage = self._clock(), self._usage(tenant_id)
            usage.operations_throughput.add(1, now)
            usage.bytes_throughput.add(num_bytes, now)
            self._throughput.add(num_bytes, now)

    def charge(self, tenant_id: str, num_tokens: int) -> None:
        self._usage(tenant_id).bucket.take(num_tokens)

    def _usage(self, tenant_id: str) -> _TenantUsage:
        usage = self._usages.get(tenant_id)
        if usage is None:
            now, per_minute = self._clock(), self._config.limits.tenant_tokens_per_minute
            bucket = _TokenBudget(per_minute, per_minute, now)
            usage = self._usages[tenant_id] = _TenantUsage(
                bucket, _ThroughputEstimate(now, now), _ThroughputEstimate(now, now)
            )
        return usage

    def _tenant_throttle(self, usage: _TenantUsage, num_bytes: int, standing: QueuePosition) -> ThrottleReason | None:
        """Returns why the request exceeds a limit of the tenant, or None."""
        if standing.may_unblock and standing.is_ready:
            return None
        if seconds := usage.bucket.seconds_in_debt(self._clock()):
            return self._too_many_tokens(usage, seconds)
        if standing.is_alone or not usage.num_operations:
            return None
        put_off = self._queue_throttle(usage, num_bytes)
        return None if put_off and self._has_precedence(usage, num_bytes, standing) else put_off

    def _queue_throttle(self, usage: _TenantUsage, num_bytes: int) -> ThrottleReason | None:
        if usage.num_operations >= self._config.limits.tenant_queued_operations:
            return self._too_many_operations(usage)
        if usage.num_bytes + num_bytes > self._config.limits.tenant_queued_bytes:
            return self._too_many_bytes(usage, num_bytes)
        return None

    def _has_precedence(self, usage: _TenantUsage, num_bytes: int, standing: QueuePosition) -> bool:
        """True if the request may exceed its tenant's limits because its run is stalled and has precedence.

        Otherwise stalled runs of a tenant, each of which misses an operation, could fill its limits forever. So one of
        them at a time may use on its own what the limits allow for all, and all together twice that.
        """
        most, most_bytes = self._config.limits.tenant_queued_operations, self._config.limits.tenant_queued_bytes
        fits = (
            standing.num_operations + usage.num_arriving < most
            and standing.num_bytes + usage.num_bytes_arriving + num_bytes <= most_bytes
            and usage.num_operations < 2 * most
            and usage.num_bytes + num_bytes <= 2 * most_bytes
        )
        return standing.may_unblock and fits and usage.stalled_runs.is_first(standing.run_id, self._clock())

    def _too_many_tokens(self, usage: _TenantUsage, seconds: float) -> ThrottleReason:
        limit = self._config.limits.tenant_tokens_per_minute
        reason = (
            f"you have used {usage.bucket.used(self._clock())} tokens recently, and "
            f"{_limit_words('tenant_tokens_per_minute', limit)}: more are accepted in {math.ceil(seconds)} s"
        )
        return ThrottleReason("tenant_tokens_per_minute", reason, "paused_rate_limit", seconds, self._clock())

    def _too_many_operations(self, usage: _TenantUsage) -> ThrottleReason:
        limit, now = self._config.limits.tenant_queued_operations, self._clock()
        reason = (
            f"{usage.num_operations} of your operations are queued, and "
            f"{_limit_words('tenant_queued_operations', limit)}: "
            "more are accepted as those finish"
        )
        seconds = usage.operations_throughput.seconds_for(1, now)
        return ThrottleReason("tenant_queued_operations", reason, "paused_rate_limit", seconds, now)

    def _too_many_bytes(self, usage: _TenantUsage, num_bytes: int) -> ThrottleReason:
        limit, now = self._config.limits.tenant_queued_bytes, self._clock()
        reason = (
            f"your queued operations have {usage.num_bytes} bytes, this one has {num_bytes}, and "
            f"{_limit_words('tenant_queued_bytes', limit)}: more are accepted as those finish"
        )
        seconds = usage.bytes_throughput.seconds_for(usage.num_bytes + num_bytes - limit, now)
        return ThrottleReason("tenant_queued_bytes", reason, "paused_rate_limit", seconds, now)

    def _server_throttle(self, num_bytes: int, standing: QueuePosition) -> ThrottleReason | None:
        """Returns why the request exceeds the limit of all tenants together, or None.

        Any operation may use half of the limit. The other half is for operations that can run at once, so it empties by
        itself, and for the run that has been stalled longest, which must leave room for the largest such operation.
        """
        limit, now = self._config.limits.queued_bytes, self._clock()
        missing = self._num_bytes + num_bytes - self._most_bytes(num_bytes, standing, now)
        if missing <= 0:
            return None
        reason = (
            f"the server's memory for queued operations of all tenants is full, this one has {num_bytes} bytes, "
            f"and {_limit_words('queued_bytes', limit)}: more are accepted as those finish"
        )
        seconds = self._throughput.seconds_for(missing, now)
        return ThrottleReason("queued_bytes", reason, "paused_capacity", seconds, now)

    def _most_bytes(self, num_bytes: int, standing: QueuePosition, now: float) -> int:
        limit = self._config.limits.queued_bytes
        if standing.is_ready:
            return limit
        beyond = standing.may_unblock and self._num_bytes + num_bytes > limit // 2
        if beyond and self._stalled_runs.is_first(standing.run_id, now):
            return limit - self._config.limits.max_body_bytes
        return limit // 2

    def mark_unstalled(self, tenant_id: str, run_id: str) -> None:
        """Records that the run is no longer stalled."""
        self._stalled_runs.remove(run_id)
        if usage := self._usages.get(tenant_id):
            usage.stalled_runs.remove(run_id)

    def _refuse(self, tenant_id: str, put_off: ThrottleReason) -> None:
        usage = self._usage(tenant_id)
        if self.pending(tenant_id) is None or (usage.last_throttle and usage.last_throttle.knob != put_off.knob):
            logger.info("requests of tenant %s are throttled: %s", tenant_id, put_off.reason)
        usage.last_throttle = put_off
        seconds = min(max(_LEAST_SECONDS, put_off.seconds), _MOST_SECONDS)
        raise RequestError(put_off.reason, 429, retry_after_seconds=seconds)


def _limit_words(knob: str, limit: int) -> str:
    return f"the limit is {limit} (the server's --{knob.replace('_', '-')})"


class ResultReservation:
    """The reservation of one large result, from before it is read until the client has received it or disconnected."""

    def __init__(self, quotas: Quotas, tenant_id: str) -> None:
        self._quotas = quotas
        self._tenant_id = tenant_id
        self._num_bytes = 0

    def claim(self, num_bytes: int) -> None:
        """Reserves room for the result if it is large. Raises RequestError 429."""
        if num_bytes >= LARGE_BYTES:
            self._quotas.check_sending(self._tenant_id, num_bytes)
            self._quotas.add_sending(self._tenant_id, num_bytes)
            self._num_bytes += num_bytes

    def release(self) -> None:
        """Releases the reservation; a repeated call does nothing."""
        self._quotas.add_sending(self._tenant_id, -self._num_bytes)
        self._num_bytes = 0


class Reservation:
    """The reservation of one request, from before its body is read until its operation is answered.

    The end of the `with` block releases it, unless `keep` was called for an accepted operation; then `release` does.
    """

    def __init__(self, quotas: Quotas, tenant_id: str) -> None:
        self.num_bytes = 0
        self.feature_bytes = 0
        self._quotas = quotas
        self._tenant_id = tenant_id
        self._claimed = False
        self._kept = False
        self._release_features: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._kept:
            self._release(done=False)

    def try_claim(self, num_bytes: int) -> bool:
        """Reserves room if a request of this size is accepted regardless of its run; returns whether it did."""
        fits = self._quotas.fits(self._tenant_id, num_bytes)
        if fits:
            self._claim(num_bytes)
        return fits

    def claim(self, num_bytes: int, position: QueuePosition) -> None:
        """Reserves room for the request. Raises RequestError 429, 503."""
        self._quotas.check(self._tenant_id, num_bytes, position)
        self._claim(num_bytes)

    def grow(self, num_bytes: int, position: QueuePosition) -> None:
        """Raises the reservation to the body's decompressed size. Raises RequestError 429, 503."""
        if num_bytes > self.num_bytes:
            self._release(done=False)
            self.claim(num_bytes, position)

    def keep(self, num_bytes: int, num_tokens: int) -> None:
        """Keeps the reservation for an accepted operation, with its decoded size, and charges its tokens."""
        if not self._claimed:
            self._claim(0)
        self._kept = True
        self._quotas.add_arriving(self._tenant_id, -1, -self.num_bytes)
        self._quotas.add(self._tenant_id, 0, num_bytes - self.num_bytes)
        self.num_bytes = num_bytes
        self._quotas.charge(self._tenant_id, num_tokens)

    def add_features(self, feature_bytes: int, release: Callable[[], None]) -> None:
        """Adds a reservation of captured features, which is released together with this one."""
        self.feature_bytes += feature_bytes
        self._release_features.append(release)

    def charge(self, num_tokens: int) -> None:
        """Charges tokens that were not known when the operation was accepted."""
        self._quotas.charge(self._tenant_id, num_tokens)

    def release(self) -> None:
        """Releases the reservation, as the operation is answered; a repeated call does nothing."""
        self._release(done=True)

    def _claim(self, num_bytes: int) -> None:
        assert not self._claimed
        self._claimed = True
        self.num_bytes = num_bytes
        self._quotas.add(self._tenant_id, 1, num_bytes)
        self._quotas.add_arriving(self._tenant_id, 1, num_bytes)

    def _release(self, done: bool) -> None:
        while self._release_features:
            self._release_features.pop()()
        if self._claimed:
            self._claimed = False
            if not self._kept:
                self._quotas.add_arriving(self._tenant_id, -1, -self.num_bytes)
            self._quotas.subtract(self._tenant_id, self.num_bytes, done)
