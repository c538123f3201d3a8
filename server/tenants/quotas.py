"""Quotas: how much a tenant may have waiting and send per minute, and what all together may hold in memory.

Who is beyond a limit is told when to come again (429); what was accepted is never dropped. So that this cannot hold up
for good what was accepted, the first missing operation of a run, where others wait behind it, is let past the limits of
its tenant; of a tenant's runs that stand still one at a time may have by itself what the limits allow for all; and of
the memory of all a part is kept for operations that can be done as things are.
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
from ..config.knobs import ServerConfig
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
"""Large results on their way may take this part of what queued operations may."""

_STOPPING_SECONDS = 2.0
_REMEMBERED_SECONDS = 60.0
_DRAIN_SECONDS = 30.0


@dataclass(frozen=True)
class Standing:
    """Of a request in the order of its run.

    ready: nothing that has not arrived comes before it. alone: nothing of its run is queued, and one operation of each
    run is accepted whatever else its tenant has queued. needed: its run may stand still until it has been accepted: it
    is what others wait for (ready), or clients may send that only after this one. num_operations, num_bytes: that wait
    in its run.
    """

    run_id: str = ""
    ready: bool = True
    alone: bool = False
    needed: bool = False
    num_operations: int = 0
    num_bytes: int = 0


UNORDERED = Standing()


@dataclass(frozen=True)
class PutOff:
    """Why a request was not accepted for now. knob: whose limit it is. at: by the clock of the quotas."""

    knob: str
    reason: str
    state: QueueState
    seconds: float
    at: float


@dataclass
class _Drain:
    """How much per second has been done of late: an average over about _DRAIN_SECONDS."""

    began_at: float
    at: float
    amount: float = 0.0

    def add(self, amount: float, now: float) -> None:
        self._decay(now)
        self.amount += amount

    def seconds_for(self, amount: float, now: float) -> float:
        """Until so much more is done, if it goes on like this."""
        self._decay(now)
        span = min(now - self.began_at, _DRAIN_SECONDS)
        return amount * span / self.amount if self.amount > 0 else _UNKNOWN_SECONDS

    def _decay(self, now: float) -> None:
        self.amount *= math.exp((self.at - now) / _DRAIN_SECONDS)
        self.at = now


@dataclass
class _Bucket:
    """Tokens that a tenant may send: a minute's worth at most. Below zero is a debt, which passes with time."""

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


class _StandingStill:
    """Runs that stand still for want of room: the first of them has precedence, until it moves or falls silent."""

    def __init__(self) -> None:
        self._asked_at: dict[str, float] = {}

    def is_first(self, run_id: str, now: float) -> bool:
        """Of a run that asks for room now."""
        self._asked_at[run_id] = now
        for other, asked_at in list(self._asked_at.items()):
            if asked_at + _REMEMBERED_SECONDS >= now:
                return other == run_id
            del self._asked_at[other]
        return False

    def moves(self, run_id: str) -> None:
        self._asked_at.pop(run_id, None)


@dataclass
class _Usage:
    """Of one tenant; uploads count from their beginning. arriving: of these, what is not accepted yet. leaving: large
    results on their way to clients."""

    bucket: _Bucket
    operations_drain: _Drain
    bytes_drain: _Drain
    num_operations: int = 0
    num_bytes: int = 0
    num_arriving: int = 0
    num_bytes_arriving: int = 0
    num_bytes_leaving: int = 0
    put_off: PutOff | None = None
    standing_still: _StandingStill = field(default_factory=_StandingStill)


class Quotas:
    """`clock`: monotonic seconds. is_closed: nothing is accepted any more."""

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._usages: dict[str, _Usage] = {}
        self._num_bytes = 0
        self._num_bytes_leaving = 0
        self._drain = _Drain(clock(), clock())
        self._standing_still = _StandingStill()
        self.is_closed = False

    def close(self) -> None:
        """From now on nothing is accepted."""
        self.is_closed = True

    def admission(self, tenant_id: str) -> "Admission":
        return Admission(self, tenant_id)

    def check_sessions(self, tenant_id: str, num_sessions: int) -> None:
        """Before one more. Raises RequestError 429."""
        limit = self._config.tenant_sessions
        if num_sessions >= limit:
            reason = (
                f"you have {num_sessions} open sessions, and {_words('tenant_sessions', limit)}: close those that are "
                f"over, or let {self._config.session_expiry_seconds:g} s of silence do it"
            )
            put_off = PutOff("tenant_sessions", reason, "paused_capacity", _SESSION_SECONDS, self._clock())
            self._refuse(tenant_id, put_off)

    def check_runs(self, tenant_id: str, num_runs: int) -> None:
        """Before one more. Raises RequestError 429."""
        limit = self._config.tenant_runs
        if num_runs >= limit:
            reason = (
                f"you have {num_runs} live runs, and {_words('tenant_runs', limit)}: close sessions that are over, or "
                f"let {self._config.session_expiry_seconds:g} s of silence do it"
            )
            self._refuse(tenant_id, PutOff("tenant_runs", reason, "paused_capacity", _RUN_SECONDS, self._clock()))

    @property
    def max_logprobs(self) -> int:
        """Most alternatives to a token that a sample may ask for."""
        return self._config.max_logprobs

    @property
    def most_bytes(self) -> int:
        """Returns the size beyond which nothing would ever be accepted."""
        return min(self._config.tenant_queued_bytes, self._config.queued_bytes // 2)

    def check_results(self, tenant_id: str, kept_bytes: int, result_bytes: int) -> None:
        """Raises RequestError 400 or 429 where one more result has no room. kept_bytes: of the tenant's results."""
        if result_bytes > self.most_bytes:
            raise RequestError(
                f"the result may take {result_bytes} bytes, and {self.most_bytes} are the most: lower num_samples, "
                f"max_tokens, {', '.join(ALTERNATIVES)}, or send several requests"
            )
        limit = self._config.tenant_result_bytes
        if kept_bytes and kept_bytes + result_bytes > limit:
            reason = (
                f"results of yours take {kept_bytes} bytes, that of this request may take {result_bytes}, and "
                f"{_words('tenant_result_bytes', limit)}: a result goes {self._config.result_ttl_seconds:g} s after it "
                "came (--result-ttl-seconds)"
            )
            put_off = PutOff("tenant_result_bytes", reason, "paused_rate_limit", _MOST_SECONDS, self._clock())
            self._refuse(tenant_id, put_off)

    def limits(self, tenant: Tenant, num_runs: int, num_sessions: int = 0, result_bytes: int = 0) -> Limits:
        """The tenant's, and their use."""
        config, usage = self._config, self._usage(tenant.id)
        tokens = config.tenant_tokens_per_minute
        return Limits(
            tenant=tenant.name,
            sessions=Limit(limit=config.tenant_sessions, used=num_sessions),
            runs=Limit(limit=config.tenant_runs, used=num_runs),
            queued_operations=Limit(limit=config.tenant_queued_operations, used=usage.num_operations),
            queued_bytes=Limit(limit=config.tenant_queued_bytes, used=usage.num_bytes),
            tokens_per_minute=Limit(limit=tokens or None, used=usage.bucket.used(self._clock()) if tokens else 0),
            server_queued_bytes=Limit(limit=config.queued_bytes, used=self._num_bytes),
            result_bytes=Limit(limit=config.tenant_result_bytes, used=result_bytes),
        )

    def pending(self, tenant_id: str) -> Pending | None:
        """Why requests of the tenant were put off of late, for who waits for one of them."""
        usage = self._usages.get(tenant_id)
        put_off = usage and usage.put_off
        if not put_off or put_off.at + put_off.seconds + _REMEMBERED_SECONDS < self._clock():
            return None
        return Pending(queue_state=put_off.state, queue_state_reason=put_off.reason)

    def forget_idle(self) -> None:
        """Tenants without anything queued and without a debt need no record."""
        now = self._clock()
        for tenant_id, usage in list(self._usages.items()):
            is_idle = not usage.num_operations and not usage.num_bytes_leaving
            if is_idle and not usage.bucket.used(now) and self.pending(tenant_id) is None:
                del self._usages[tenant_id]

    def leaving(self, tenant_id: str) -> "Leaving":
        return Leaving(self, tenant_id)

    # For Leaving

    def check_leaving(self, tenant_id: str, num_bytes: int) -> None:
        """Raises RequestError 429, but lets a tenant have one at any time."""
        of_tenant, of_all = (
            self._config.tenant_queued_bytes // _LEAVING_PART,
            self._config.queued_bytes // _LEAVING_PART,
        )
        own = self._usage(tenant_id).num_bytes_leaving
        if own and (own + num_bytes > of_tenant or self._num_bytes_leaving + num_bytes > of_all):
            reason = (
                f"results of yours with {own} bytes are being sent to you, this one takes {num_bytes}, and at most "
                f"{of_tenant} of a tenant and {of_all} of all may be (a quarter of --tenant-queued-bytes and "
                "of --queued-bytes): "
                "retrieve fewer at a time, or take what is sent faster"
            )
            put_off = PutOff("tenant_queued_bytes", reason, "paused_capacity", _LEAVING_SECONDS, self._clock())
            self._refuse(tenant_id, put_off)

    def leaves(self, tenant_id: str, num_bytes: int) -> None:
        """Counts what is on its way; negative: what has left."""
        self._usage(tenant_id).num_bytes_leaving += num_bytes
        self._num_bytes_leaving += num_bytes

    # For Admission

    def fits(self, tenant_id: str, num_bytes: int) -> bool:
        """Whether it may come in wherever it stands in the order of its run."""
        within = self._put_off(self._usage(tenant_id), num_bytes, UNORDERED) is None
        return within and not self.is_closed and self._num_bytes + num_bytes <= self._config.queued_bytes // 2

    def check(self, tenant_id: str, num_bytes: int, standing: Standing) -> None:
        """Raises RequestError 429, and 503 once it is closed."""
        if self.is_closed:
            raise RequestError("the server is stopping: send it again when it is back", 503, _STOPPING_SECONDS)
        put_off = self._put_off(self._usage(tenant_id), num_bytes, standing) or self._no_memory(num_bytes, standing)
        if put_off is not None:
            self._refuse(tenant_id, put_off)

    def add(self, tenant_id: str, num_operations: int, num_bytes: int) -> None:
        usage = self._usage(tenant_id)
        usage.num_operations += num_operations
        usage.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def arrives(self, tenant_id: str, num_operations: int, num_bytes: int) -> None:
        """Or, where they are negative, has arrived."""
        usage = self._usage(tenant_id)
        usage.num_arriving += num_operations
        usage.num_bytes_arriving += num_bytes

    def subtract(self, tenant_id: str, num_bytes: int, done: bool) -> None:
        self.add(tenant_id, -1, -num_bytes)
        if done:
            now, usage = self._clock(), self._usage(tenant_id)
            usage.operations_drain.add(1, now)
            usage.bytes_drain.add(num_bytes, now)
            self._drain.add(num_bytes, now)

    def charge(self, tenant_id: str, num_tokens: int) -> None:
        self._usage(tenant_id).bucket.take(num_tokens)

    def _usage(self, tenant_id: str) -> _Usage:
        usage = self._usages.get(tenant_id)
        if usage is None:
            now, per_minute = self._clock(), self._config.tenant_tokens_per_minute
            bucket = _Bucket(per_minute, per_minute, now)
            usage = self._usages[tenant_id] = _Usage(bucket, _Drain(now, now), _Drain(now, now))
        return usage

    def _put_off(self, usage: _Usage, num_bytes: int, standing: Standing) -> PutOff | None:
        """By a limit of the tenant."""
        if standing.needed and standing.ready:
            return None
        if seconds := usage.bucket.seconds_in_debt(self._clock()):
            return self._too_many_tokens(usage, seconds)
        if standing.alone or not usage.num_operations:
            return None
        put_off = self._beyond(usage, num_bytes)
        return None if put_off and self._has_precedence(usage, num_bytes, standing) else put_off

    def _beyond(self, usage: _Usage, num_bytes: int) -> PutOff | None:
        if usage.num_operations >= self._config.tenant_queued_operations:
            return self._too_many_operations(usage)
        if usage.num_bytes + num_bytes > self._config.tenant_queued_bytes:
            return self._too_many_bytes(usage, num_bytes)
        return None

    def _has_precedence(self, usage: _Usage, num_bytes: int, standing: Standing) -> bool:
        """Runs of one tenant, none of which has all that it needs to move, would fill its limits for good.

        So one of them at a time may have by itself what the limits allow for all, and all together twice that.
        """
        most, most_bytes = self._config.tenant_queued_operations, self._config.tenant_queued_bytes
        fits = (
            standing.num_operations + usage.num_arriving < most
            and standing.num_bytes + usage.num_bytes_arriving + num_bytes <= most_bytes
            and usage.num_operations < 2 * most
            and usage.num_bytes + num_bytes <= 2 * most_bytes
        )
        return standing.needed and fits and usage.standing_still.is_first(standing.run_id, self._clock())

    def _too_many_tokens(self, usage: _Usage, seconds: float) -> PutOff:
        limit = self._config.tenant_tokens_per_minute
        reason = (
            f"you have used {usage.bucket.used(self._clock())} tokens of late, and "
            f"{_words('tenant_tokens_per_minute', limit)}: more are accepted in {math.ceil(seconds)} s"
        )
        return PutOff("tenant_tokens_per_minute", reason, "paused_rate_limit", seconds, self._clock())

    def _too_many_operations(self, usage: _Usage) -> PutOff:
        limit, now = self._config.tenant_queued_operations, self._clock()
        reason = (
            f"{usage.num_operations} operations of yours are queued, and {_words('tenant_queued_operations', limit)}: "
            "more are accepted as those are done"
        )
        seconds = usage.operations_drain.seconds_for(1, now)
        return PutOff("tenant_queued_operations", reason, "paused_rate_limit", seconds, now)

    def _too_many_bytes(self, usage: _Usage, num_bytes: int) -> PutOff:
        limit, now = self._config.tenant_queued_bytes, self._clock()
        reason = (
            f"operations of yours with {usage.num_bytes} bytes are queued, this one has {num_bytes}, and "
            f"{_words('tenant_queued_bytes', limit)}: more are accepted as those are done"
        )
        seconds = usage.bytes_drain.seconds_for(usage.num_bytes + num_bytes - limit, now)
        return PutOff("tenant_queued_bytes", reason, "paused_rate_limit", seconds, now)

    def _no_memory(self, num_bytes: int, standing: Standing) -> PutOff | None:
        """By the limit of all tenants.

        Half of it is for any operation. The other half is for those that can be done as things are, so it empties by
        itself; and, except for room for the largest of these, for that run which has stood still longest.
        """
        limit, now = self._config.queued_bytes, self._clock()
        missing = self._num_bytes + num_bytes - self._most_bytes(num_bytes, standing, now)
        if missing <= 0:
            return None
        reason = (
            f"the server's memory for queued operations of all tenants has no room, this one has {num_bytes} bytes, "
            f"and {_words('queued_bytes', limit)}: more are accepted as those are done"
        )
        seconds = self._drain.seconds_for(missing, now)
        return PutOff("queued_bytes", reason, "paused_capacity", seconds, now)

    def _most_bytes(self, num_bytes: int, standing: Standing, now: float) -> int:
        limit = self._config.queued_bytes
        if standing.ready:
            return limit
        beyond = standing.needed and self._num_bytes + num_bytes > limit // 2
        if beyond and self._standing_still.is_first(standing.run_id, now):
            return limit - self._config.max_body_bytes
        return limit // 2

    def moves(self, tenant_id: str, run_id: str) -> None:
        """The run stands still no longer."""
        self._standing_still.moves(run_id)
        if usage := self._usages.get(tenant_id):
            usage.standing_still.moves(run_id)

    def _refuse(self, tenant_id: str, put_off: PutOff) -> None:
        usage = self._usage(tenant_id)
        if self.pending(tenant_id) is None or (usage.put_off and usage.put_off.knob != put_off.knob):
            logger.info("requests of tenant %s are put off: %s", tenant_id, put_off.reason)
        usage.put_off = put_off
        seconds = min(max(_LEAST_SECONDS, put_off.seconds), _MOST_SECONDS)
        raise RequestError(put_off.reason, 429, retry_after_seconds=seconds)


def _words(knob: str, limit: int) -> str:
    return f"the limit is {limit} (the server's --{knob.replace('_', '-')})"


class Leaving:
    """The claim of one large result, from before it is read until the client has it, or is gone."""

    def __init__(self, quotas: Quotas, tenant_id: str) -> None:
        self._quotas = quotas
        self._tenant_id = tenant_id
        self._num_bytes = 0

    def claim(self, num_bytes: int) -> None:
        """Raises RequestError 429."""
        if num_bytes >= LARGE_BYTES:
            self._quotas.check_leaving(self._tenant_id, num_bytes)
            self._quotas.leaves(self._tenant_id, num_bytes)
            self._num_bytes += num_bytes

    def release(self) -> None:
        """Again: no-op."""
        self._quotas.leaves(self._tenant_id, -self._num_bytes)
        self._num_bytes = 0


class Admission:
    """The claim of one request, from before its body is read until its operation is answered.

    Leaving the `with` gives it back, unless it was kept for an accepted operation; then `release` does, once.
    """

    def __init__(self, quotas: Quotas, tenant_id: str) -> None:
        self.num_bytes = 0
        self.feature_bytes = 0
        self._quotas = quotas
        self._tenant_id = tenant_id
        self._claimed = False
        self._kept = False
        self._others: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._kept:
            self._give_back(done=False)

    def try_claim(self, num_bytes: int) -> bool:
        """Whether it was granted, whatever the request may be."""
        fits = self._quotas.fits(self._tenant_id, num_bytes)
        if fits:
            self._claim(num_bytes)
        return fits

    def claim(self, num_bytes: int, standing: Standing) -> None:
        """Raises RequestError 429, 503."""
        self._quotas.check(self._tenant_id, num_bytes, standing)
        self._claim(num_bytes)

    def grow(self, num_bytes: int, standing: Standing) -> None:
        """To what the body has once decompressed. Raises RequestError 429, 503."""
        if num_bytes > self.num_bytes:
            self._give_back(done=False)
            self.claim(num_bytes, standing)

    def keep(self, num_bytes: int, num_tokens: int) -> None:
        """For an operation that is accepted: the bytes that it holds now it is decoded, and its tokens."""
        if not self._claimed:
            self._claim(0)
        self._kept = True
        self._quotas.arrives(self._tenant_id, -1, -self.num_bytes)
        self._quotas.add(self._tenant_id, 0, num_bytes - self.num_bytes)
        self.num_bytes = num_bytes
        self._quotas.charge(self._tenant_id, num_tokens)

    def also(self, feature_bytes: int, release: Callable[[], None]) -> None:
        """Room for what is captured, which is given back with it."""
        self.feature_bytes += feature_bytes
        self._others.append(release)

    def charge(self, num_tokens: int) -> None:
        """For tokens that were not known before."""
        self._quotas.charge(self._tenant_id, num_tokens)

    def release(self) -> None:
        """Its operation is answered. Again: no-op."""
        self._give_back(done=True)

    def _claim(self, num_bytes: int) -> None:
        assert not self._claimed
        self._claimed = True
        self.num_bytes = num_bytes
        self._quotas.add(self._tenant_id, 1, num_bytes)
        self._quotas.arrives(self._tenant_id, 1, num_bytes)

    def _give_back(self, done: bool) -> None:
        while self._others:
            self._others.pop()()
        if self._claimed:
            self._claimed = False
            if not self._kept:
                self._quotas.arrives(self._tenant_id, -1, -self.num_bytes)
            self._quotas.subtract(self._tenant_id, self.num_bytes, done)
