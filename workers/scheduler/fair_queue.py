"""Decides which run's operation goes into a pass next.

Deficit round robin (Shreedhar and Varghese, 1995) over tokens: tenants take turns, each turn adds a quantum of tokens
to the tenant's credit, and inside a tenant its runs take turns. Tokens taken beyond the credit are paid back by later
turns.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .work import PassWork, RunQueue

_TURNS_PER_PASS = 4
_SHORT_PER_PASS = 16


@dataclass(frozen=True)
class PassLimits:
    """The limits of one pass.

    max_tokens, max_runs: the most of one pass. Sequences are not cut: one longer than half of `max_tokens` may exceed
    it. max_tokens is 0 until the ranks have loaded if they decide it.
    tenant_weights: as in DispatchConfig.
    """

    max_tokens: int
    max_runs: int
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    def quantum(self, tenant_id: str) -> float:
        """Returns the tokens of one turn of the tenant: at most a quarter of a pass, or more if a pass holds fewer than
        4 runs.
        """
        heaviest = max(1.0, *self.tenant_weights.values()) if self.tenant_weights else 1.0
        weight = self.tenant_weights.get(tenant_id, 1.0) / heaviest
        return weight * self.max_tokens / min(_TURNS_PER_PASS, self.max_runs)

    def may_be_split(self, work: PassWork) -> bool:
        """True if the rest of the operation may be split over passes; a smaller rest waits until it fits as a whole."""
        return work.tokens > self.quarter

    def is_short(self, work: PassWork) -> bool:
        """True if the operation should run in the very next pass."""
        if work.has_begun:
            return False
        return work.tokens <= self._short_tokens or (len(work.lengths) == 1 and work.tokens <= self.half)

    def allows_short(self, short: PassWork, taken: int) -> bool:
        """True if a tenant whose short operations already took `taken` tokens of the pass may add this one."""
        return taken + short.tokens <= self._short_tokens

    @cached_property
    def half(self) -> float:
        return self.max_tokens / 2

    @cached_property
    def quarter(self) -> float:
        return self.max_tokens / _TURNS_PER_PASS

    @cached_property
    def _short_tokens(self) -> float:
        return self.max_tokens / _SHORT_PER_PASS


class TenantShare:
    """A tenant's place in the round robin.

    credit: tokens that it may still take; negative if it owes some.
    advance: tokens that its short operations may take before its turn.
    runs: its runs with an operation ready, the next one first.
    short: those of them whose operation is short.
    """

    def __init__(self, tenant_id: str, limits: PassLimits) -> None:
        self.tenant_id = tenant_id
        self._quantum = limits.quantum(tenant_id)
        self._max_advance = limits.max_tokens
        self.credit = self._quantum
        self.advance: float = self._max_advance
        self.runs: OrderedDict[str, RunQueue] = OrderedDict()
        self.short: OrderedDict[str, RunQueue] = OrderedDict()

    def end_turn(self) -> None:
        """Starts the next turn: debt is kept, unused credit is lost."""
        self.credit = min(self.credit, 0.0) + self._quantum
        self.advance = min(self._max_advance, self.advance + self._quantum)

    def next_short(self) -> RunQueue | None:
        return next(iter(self.short.values()), None)


class FairQueue:
    """Tenants in the order of their turns. A tenant without work loses its credit, and is kept as long as it owes
    tokens.
    """

    def __init__(self, limits: PassLimits) -> None:
        self._limits = limits
        self._tenants: OrderedDict[str, TenantShare] = OrderedDict()
        self._with_short_work: OrderedDict[str, TenantShare] = OrderedDict()
        self._num_runs = 0

    def __bool__(self) -> bool:
        return self._num_runs > 0

    def add(self, run: RunQueue) -> None:
        """Adds a run whose head is an operation, behind the tenant's other runs."""
        tenant = self._tenants.get(run.tenant_id)
        if tenant is None:
            tenant = self._tenants[run.tenant_id] = TenantShare(run.tenant_id, self._limits)
        tenant.runs[run.key] = run
        self._num_runs += 1
        if self._limits.is_short(run.operation):
            tenant.short[run.key] = run
            self._with_short_work[run.tenant_id] = tenant

    def remove(self, run: RunQueue) -> None:
        tenant = self._tenants[run.tenant_id]
        del tenant.runs[run.key]
        self._num_runs -= 1
        if tenant.short.pop(run.key, None) is not None and not tenant.short:
            del self._with_short_work[run.tenant_id]

    def next(self, awaited: Collection[str] = (), pass_may_end: bool = False) -> tuple[TenantShare, RunQueue] | None:
        """Returns the tenant whose turn it is and its next run; None if no operation is ready.

        Args:
            awaited: tenants that will have an operation for the next pass. They keep their places; if the pass may end,
                it ends at their turn, because otherwise other tenants would take their tokens.
        """
        while self._num_runs:
            tenant = self._first()
            if tenant.credit <= 0:
                self.end_turn()
            elif tenant.runs:
                return tenant, next(iter(tenant.runs.values()))
            elif tenant.tenant_id not in awaited:
                del self._tenants[tenant.tenant_id]
            elif pass_may_end:
                return None
            else:
                self._tenants.move_to_end(tenant.tenant_id)
        return None

    def end_turn(self) -> None:
        tenant = self._first()
        tenant.end_turn()
        self._tenants.move_to_end(tenant.tenant_id)

    def _first(self) -> TenantShare:
        return next(iter(self._tenants.values()))

    def tenants_with_short_work(self) -> Iterator[TenantShare]:
        """Yields tenants with short operations and an advance left. A tenant at which the caller stops is first next
        time.
        """
        for _ in range(len(self._with_short_work)):
            tenant = next(iter(self._with_short_work.values()))
            if tenant.advance > 0:
                yield tenant
            if tenant.short:
                self._with_short_work.move_to_end(tenant.tenant_id)
