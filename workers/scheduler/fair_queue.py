"""Shares: whose operation goes next, of all runs that have one ready.

Deficit round robin (Shreedhar and Varghese, 1995) by tokens: tenants take turns, each turn brings its tenant a quantum
of tokens, and inside a tenant its runs take turns. What a tenant takes beyond its quantum is paid with its next turns.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from .work import Line, PassWork

_TURNS_PER_PASS = 4
_SHORT_PER_PASS = 16


@dataclass(frozen=True)
class PassLimits:
    """tokens, runs: the most of one pass. tenant_weights: as in DispatchConfig.

    Sequences are not cut: one that is longer than half of `tokens` may take a pass beyond them.
    """

    tokens: int
    runs: int
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    def quantum(self, tenant_id: str) -> float:
        """Tokens of a turn of the tenant: at most a quarter of a pass; more where a pass has room for few runs."""
        heaviest = max(1.0, *self.tenant_weights.values()) if self.tenant_weights else 1.0
        weight = self.tenant_weights.get(tenant_id, 1.0) / heaviest
        return weight * self.tokens / min(_TURNS_PER_PASS, self.runs)

    def is_cut(self, work: PassWork) -> bool:
        """Whether what is left of it may be split over passes. Less than that waits until it finds room as a whole."""
        return work.tokens > self.quarter

    def is_short(self, work: PassWork) -> bool:
        """Whether it is for the very next pass."""
        if work.begun:
            return False
        return work.tokens <= self._short_tokens or (len(work.lengths) == 1 and work.tokens <= self.half)

    def allows(self, short: PassWork, taken: int) -> bool:
        """Whether the tenant whose short operations have taken that much of the pass may have this one in it, too."""
        return taken + short.tokens <= self._short_tokens

    @property
    def half(self) -> float:
        return self.tokens / 2

    @property
    def quarter(self) -> float:
        return self.tokens / _TURNS_PER_PASS

    @property
    def _short_tokens(self) -> float:
        return self.tokens / _SHORT_PER_PASS


class Tenant:
    """credit: tokens that it may still take; what it owes, where negative. advance: those that its short operations may
    take before its turn has come.

    lines: its runs with an operation ready, the next one first. short: those of them whose operation is short.
    """

    def __init__(self, tenant_id: str, limits: PassLimits) -> None:
        self.tenant_id = tenant_id
        self._quantum = limits.quantum(tenant_id)
        self._most_advance = limits.tokens
        self.credit = self._quantum
        self.advance: float = self._most_advance
        self.lines: OrderedDict[str, Line] = OrderedDict()
        self.short: OrderedDict[str, Line] = OrderedDict()

    def end_turn(self) -> None:
        """With what it owes; credit that is left is lost."""
        self.credit = min(self.credit, 0.0) + self._quantum
        self.advance = min(self._most_advance, self.advance + self._quantum)

    def next_short(self) -> Line | None:
        return next(iter(self.short.values()), None)


class Shares:
    """Tenants in the order of their turns. One without work loses its credit, and stays for as long as it owes."""

    def __init__(self, limits: PassLimits) -> None:
        self._limits = limits
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()
        self._hurried: OrderedDict[str, Tenant] = OrderedDict()
        self._num_lines = 0

    def __bool__(self) -> bool:
        return self._num_lines > 0

    def add(self, line: Line) -> None:
        """A line whose head is an operation, behind the others of its tenant."""
        tenant = self._tenants.get(line.tenant_id)
        if tenant is None:
            tenant = self._tenants[line.tenant_id] = Tenant(line.tenant_id, self._limits)
        tenant.lines[line.key] = line
        self._num_lines += 1
        if self._limits.is_short(line.operation):
            tenant.short[line.key] = line
            self._hurried[line.tenant_id] = tenant

    def remove(self, line: Line) -> None:
        tenant = self._tenants[line.tenant_id]
        del tenant.lines[line.key]
        self._num_lines -= 1
        if tenant.short.pop(line.key, None) is not None and not tenant.short:
            del self._hurried[line.tenant_id]

    def next(self, awaited: Collection[str] = (), pass_may_end: bool = False) -> tuple[Tenant, Line] | None:
        """Whose turn it is, and which of its runs is next; None when no operation is ready.

        awaited: tenants who will have one for the next pass. They keep their places; if the pass may end, it does at
        their turn, or others would have what is theirs.
        """
        while self._num_lines:
            tenant = self._first()
            if tenant.credit <= 0:
                self.end_turn()
            elif tenant.lines:
                return tenant, next(iter(tenant.lines.values()))
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

    def _first(self) -> Tenant:
        return next(iter(self._tenants.values()))

    def hurried(self) -> Iterator[Tenant]:
        """Tenants with short operations and an advance left. One at which the caller stops is the first next time."""
        for _ in range(len(self._hurried)):
            tenant = next(iter(self._hurried.values()))
            if tenant.advance > 0:
                yield tenant
            if tenant.short:
                self._hurried.move_to_end(tenant.tenant_id)
