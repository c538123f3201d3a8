"""Shares: whose operation goes next, of all runs that have one ready.

Deficit round robin (Shreedhar and Varghese, 1995) by tokens: tenants take turns, each turn brings its tenant a quantum
of tokens, and inside a tenant its runs take turns. What a tenant takes beyond its quantum is paid with its next turns.
"""

from collections import OrderedDict
from collections.abc import Mapping
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
        return work.tokens > self.tokens / _TURNS_PER_PASS

    def is_short(self, work: PassWork) -> bool:
        """Whether it is for the very next pass."""
        if work.begun:
            return False
        return work.tokens <= self.short_tokens or (len(work.lengths) == 1 and work.tokens <= self.tokens / 2)

    @property
    def short_tokens(self) -> float:
        """Of a tenant's short operations in one pass, unless it is one longer sequence."""
        return self.tokens / _SHORT_PER_PASS


class Tenant:
    """credit: tokens that it may still take; what it owes, where negative.

    lines: its runs with an operation ready, the next one first. short: those of them whose operation is short.
    """

    def __init__(self, tenant_id: str, quantum: float) -> None:
        self.tenant_id = tenant_id
        self.quantum = quantum
        self.credit = quantum
        self.lines: OrderedDict[str, Line] = OrderedDict()
        self.short: OrderedDict[str, Line] = OrderedDict()

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
            tenant = Tenant(line.tenant_id, self._limits.quantum(line.tenant_id))
            self._tenants[line.tenant_id] = tenant
        tenant.lines[line.key] = line
        self._num_lines += 1
        if self._limits.is_short(line.operation):
            tenant.short[line.key] = line
            self._hurried[line.tenant_id] = tenant

    def remove(self, line: Line) -> None:
        tenant = self._tenants[line.tenant_id]
        del tenant.lines[line.key]
        self._num_lines -= 1
        if tenant.short.pop(line.key, None) is not None:
            self._hurried.move_to_end(line.tenant_id)
            if not tenant.short:
                del self._hurried[line.tenant_id]

    def next(self) -> tuple[Tenant, Line] | None:
        """Whose turn it is, and which of its runs is next; None when no operation is ready."""
        while self._num_lines:
            tenant = next(iter(self._tenants.values()))
            if tenant.credit <= 0:
                tenant.credit += tenant.quantum
                self._tenants.move_to_end(tenant.tenant_id)
            elif tenant.lines:
                return tenant, next(iter(tenant.lines.values()))
            else:
                del self._tenants[tenant.tenant_id]
        return None

    def hurried(self) -> list[Tenant]:
        """The tenants with short operations, the one served longest ago first; not those that owe a whole pass."""
        return [tenant for tenant in self._hurried.values() if tenant.credit > -self._limits.tokens]
