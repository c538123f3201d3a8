"""Queues the work on a group's runs: keeps each run's order, and forms calls from the work of all runs.

What goes into a pass is decided by deficit round robin (Shreedhar and Varghese, 1995) over tokens: tenants take turns,
each turn adds a quantum of tokens to the tenant's credit, and inside a tenant its runs take turns. Tokens taken beyond
the credit are paid back by later turns.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, Generic, Literal, TypeVar

from .work import MethodWork, PassWork, RunWork, SnapshotWork, StepWork

Kind = Literal["training", "methods", "snapshots", "sampling"]
"""Kinds of calls, between which the ranks' time is shared."""

Queued = TypeVar("Queued", bound=RunWork[Any])

_TURNS_PER_PASS = 4
_SHORT_PER_PASS = 16


@dataclass(frozen=True)
class PassLimits:
    """The limits of one pass."""

    max_tokens: int
    """Sequences are not cut: one longer than half of this may exceed it. 0 until the ranks have loaded if they decide
    it."""
    max_runs: int
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """See DispatchConfig."""

    def quantum(self, tenant_id: str) -> float:
        """Returns the tokens of one turn of the tenant: at most a quarter of a pass, or more if a pass holds fewer than
        4 runs.
        """
        heaviest = max(1.0, *self.tenant_weights.values()) if self.tenant_weights else 1.0
        weight = self.tenant_weights.get(tenant_id, 1.0) / heaviest
        return weight * self.max_tokens / min(_TURNS_PER_PASS, self.max_runs)

    @cached_property
    def half(self) -> float:
        return self.max_tokens / 2

    @cached_property
    def quarter(self) -> float:
        """Returns the size up to which the rest of an operation is not split, but waits until it fits as a whole."""
        return self.max_tokens / _TURNS_PER_PASS

    @cached_property
    def short(self) -> float:
        """Returns the size up to which an operation is short, as those of one tenant in a pass are together."""
        return self.max_tokens / _SHORT_PER_PASS


class GroupQueue:
    """Holds waiting work. Work that is taken goes to the ranks in one call, and is answered before anything else is
    taken.

    Only the first work of a run can run: an optimizer step or a method blocks what follows until it is answered.
    """

    def __init__(self, limits: PassLimits, suspects: Container[str] = (), numbers: Iterator[int] | None = None) -> None:
        """Makes an empty queue.

        Args:
            suspects: runs whose operations and optimizer steps each run alone.
            numbers: of the work, which outlive the queue.
        """
        self.num_works = self.num_tokens = 0
        """Counts of the waiting work, without what is taken."""
        # The first work of each run is ready, and waits in one of these, by its type.
        self.methods, self.snapshots = TurnQueue[MethodWork[Any]](), TurnQueue[SnapshotWork]()
        self._operations, self._suspect_operations = FairQueue(limits), TurnQueue[PassWork]()
        self._steps = TurnQueue[StepWork]()
        self._by_type = {StepWork: self._steps, MethodWork: self.methods, SnapshotWork: self.snapshots}
        self._waits_in: dict[str, FairQueue | TurnQueue[Any]] = {}
        self._limits = limits
        self._suspects = suspects
        self._numbers = numbers or count()
        self._runs: dict[str, deque[RunWork[Any]]] = {}
        self._steps_went_last = False
        self._suspect_stepped_last = self._suspect_passed_last = False

    def __contains__(self, key: str) -> bool:
        return key in self._runs

    def works(self) -> list[RunWork[Any]]:
        return [work for run in self._runs.values() for work in run]

    def enqueue(self, work: RunWork[Any]) -> None:
        work.number = next(self._numbers)
        run = self._runs.setdefault(work.key, deque())
        run.append(work)
        self.num_works += 1
        self.num_tokens += work.tokens
        if len(run) == 1:
            self._make_ready(work)

    def cancel(self, work: RunWork[Any]) -> None:
        """Drops work that no caller waits for any more, unless the ranks have begun it."""
        if work in self._runs.get(work.key, ()) and not work.has_begun:
            self.remove(work)

    def remove(self, work: Queued) -> Queued:
        """Removes and returns the work, or the rest of it. The next work of its run may be ready then."""
        run = self._runs[work.key]
        if run[0] is work:
            self._waits_in.pop(work.key).remove(work)
        run.remove(work)
        self.num_works -= 1
        self.num_tokens -= work.tokens
        if not run:
            del self._runs[work.key]
        elif work.key not in self._waits_in:
            self._make_ready(run[0])
        return work

    @property
    def has_training(self) -> bool:
        """True if an operation or optimizer step is ready."""
        return bool(self._operations.num_runs or self._steps.tenants or self._suspect_operations.tenants)

    @property
    def has_suspects(self) -> bool:
        """True if an operation or optimizer step of a suspect is ready."""
        return bool(self._suspect_operations.tenants) or any(step.key in self._suspects for step in self._steps.works())

    def take_steps(self) -> list[StepWork]:
        """Takes the optimizer steps of all runs that are ready, or the step of one suspect; the two alternate.

        Steps go first, because they unblock passes, but alternate with passes that wait: none are taken in their turn.
        """
        pass_waits = self._operations.num_runs or self._suspect_operations.tenants
        if not self._steps.tenants or (self._steps_went_last and pass_waits):
            return []
        self._steps_went_last = True
        ready = self._steps.works()
        suspects = [step for step in ready if step.key in self._suspects]
        others = [step for step in ready if step.key not in self._suspects]
        self._suspect_stepped_last = bool(suspects) and not (others and self._suspect_stepped_last)
        return [self.remove(step) for step in (suspects[:1] if self._suspect_stepped_last else others)]

    def take_pass(self) -> list[PassWork]:
        """Takes a part of one suspect's operation, or a pass formed from all other runs; the two alternate."""
        self._steps_went_last = False
        others_wait = self._operations.num_runs > 0 and self._suspect_passed_last
        self._suspect_passed_last = bool(self._suspect_operations.tenants) and not others_wait
        queue, limits = self._operations, self._limits
        builder = _PassBuilder(limits, limits.max_tokens)
        if self._suspect_passed_last:
            operation = self._suspect_operations.next()
            self._move(operation, builder, limits.quantum(operation.tenant_id), limits.half)
            return [operation]
        # First the run whose turn it is, so that it always progresses; then short operations, which wait for one pass
        # at most; then other runs by turns until the pass is full.
        turn = queue.next()
        assert turn is not None, "taken only while operations are ready"
        first, operation = turn
        first.credit -= self._move(operation, builder, first.credit, limits.half)
        if queue.short:
            self._move_short_operations(builder)
        while turn := queue.next(builder.awaited, pass_may_end=builder.room <= limits.max_tokens - limits.quarter):
            tenant, operation = turn
            if not builder.admits(operation, builder.room):
                if tenant is first and not builder.has_slot(operation.key):
                    # A run with few tokens would otherwise keep the first place for very many passes.
                    queue.end_turn()
                break
            tenant.credit -= self._move(operation, builder, tenant.credit, builder.room)
        return list(builder.works.values())

    def _move_short_operations(self, builder: "_PassBuilder") -> None:
        """Moves short operations into the pass; they may use half a pass even if the first sequence left less room."""
        room = max(builder.room, self._limits.half)
        for tenant in self._operations.tenants_with_short_work():
            taken = 0
            while (short := next(iter(tenant.short.values()), None)) and builder.admits(short, room - taken):
                if taken and taken + short.tokens > self._limits.short:
                    break
                tokens = self._move(short, builder, tenant.credit, room)
                tenant.credit -= tokens
                taken += tokens
            tenant.advance -= taken
            if not taken:
                return
            room -= taken

    def _move(self, operation: PassWork, builder: "_PassBuilder", credit: float, room: float) -> int:
        """Moves data of the operation into the pass and returns their tokens.

        An operation that may be cut contributes about `credit` tokens while there is room, but always one datum.
        """
        if operation.number not in builder.works:
            builder.works[operation.number] = operation
            builder.run_ids.add(operation.key)
            operation.chunk_start = operation.num_taken
        if operation.tokens > self._limits.quarter:
            tokens = operation.take(credit, room)
        else:
            tokens, operation.tokens, operation.num_taken = operation.tokens, 0, len(operation.lengths)
        builder.room -= tokens
        self.num_tokens -= tokens
        if not operation.is_taken:
            self._waits_in.pop(operation.key).remove(operation)
            self._make_ready(operation)
            return tokens
        self.remove(operation)
        run = self._runs.get(operation.key, ())
        if len(run) > 1 and isinstance(run[0], StepWork) and isinstance(run[1], PassWork):
            builder.awaited.add(operation.tenant_id)
        return tokens

    def _make_ready(self, work: RunWork[Any]) -> None:
        """Puts the first work of a run where it waits for its turn."""
        operations = self._suspect_operations if work.key in self._suspects else self._operations
        waits_in = self._waits_in[work.key] = self._by_type.get(type(work), operations)
        waits_in.enqueue(work)


@dataclass
class _PassBuilder:
    """A pass that is being filled."""

    limits: PassLimits
    room: float
    """Tokens left; negative after a sequence longer than a pass."""
    works: dict[int, PassWork] = field(default_factory=dict)
    """Operations in the pass, by number."""
    run_ids: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    """Tenants whose operation ends in this pass, with only an optimizer step before their next one."""

    def admits(self, work: PassWork, room: float) -> bool:
        tokens = work.lengths[work.num_taken] if work.tokens > self.limits.quarter else work.tokens
        return tokens <= room and self.has_slot(work.key)

    def has_slot(self, run_id: str) -> bool:
        return run_id in self.run_ids or len(self.run_ids) < self.limits.max_runs


class TenantWork:
    """A tenant's place in the round robin."""

    def __init__(self, tenant_id: str, limits: PassLimits) -> None:
        self.tenant_id = tenant_id
        self._quantum = limits.quantum(tenant_id)
        self._max_advance = limits.max_tokens
        self.credit = self._quantum
        """Tokens that it may still take; negative if it owes some."""
        self.advance: float = self._max_advance
        """Tokens that its short operations may take before its turn."""
        self.operations: OrderedDict[str, PassWork] = OrderedDict()
        """Operations that are ready, by run, the next one first."""
        self.short: OrderedDict[str, PassWork] = OrderedDict()
        """Operations that are ready and short, by run."""

    def end_turn(self) -> None:
        """Starts the next turn: debt is kept, unused credit is lost."""
        self.credit = min(self.credit, 0.0) + self._quantum
        self.advance = min(self._max_advance, self.advance + self._quantum)


class FairQueue:
    """Operations of runs, with tenants in the order of their turns. A tenant without work loses its credit, and is kept
    as long as it owes tokens.
    """

    def __init__(self, limits: PassLimits) -> None:
        self.num_runs = 0
        self.short: OrderedDict[str, TenantWork] = OrderedDict()
        """Tenants with short operations."""
        self._limits = limits
        self._tenants: OrderedDict[str, TenantWork] = OrderedDict()

    def enqueue(self, operation: PassWork) -> None:
        """Adds the run's next operation, behind those of the tenant's other runs."""
        tenant = self._tenants.get(operation.tenant_id)
        if tenant is None:
            tenant = self._tenants[operation.tenant_id] = TenantWork(operation.tenant_id, self._limits)
        tenant.operations[operation.key] = operation
        self.num_runs += 1
        # It should run in the very next pass, unless a part of it has run already.
        longest = self._limits.half if len(operation.lengths) == 1 else self._limits.short
        if not operation.num_taken and operation.tokens <= longest:
            tenant.short[operation.key] = operation
            self.short[operation.tenant_id] = tenant

    def remove(self, operation: RunWork[Any]) -> None:
        tenant = self._tenants[operation.tenant_id]
        del tenant.operations[operation.key]
        self.num_runs -= 1
        if tenant.short.pop(operation.key, None) is not None and not tenant.short:
            del self.short[operation.tenant_id]

    def next(self, awaited: Collection[str] = (), pass_may_end: bool = False) -> tuple[TenantWork, PassWork] | None:
        """Returns the tenant whose turn it is and its next operation; None if none is ready.

        Args:
            awaited: tenants that will have an operation for the next pass. They keep their places; if the pass may end,
                it ends at their turn, because otherwise other tenants would take their tokens.
        """
        while self.num_runs:
            tenant = next(iter(self._tenants.values()))
            if tenant.credit <= 0:
                self.end_turn()
            elif tenant.operations:
                return tenant, next(iter(tenant.operations.values()))
            elif tenant.tenant_id not in awaited:
                del self._tenants[tenant.tenant_id]
            elif pass_may_end:
                return None
            else:
                self._tenants.move_to_end(tenant.tenant_id)
        return None

    def end_turn(self) -> None:
        tenant = next(iter(self._tenants.values()))
        tenant.end_turn()
        self._tenants.move_to_end(tenant.tenant_id)

    def tenants_with_short_work(self) -> Iterator[TenantWork]:
        """Yields tenants with short operations and an advance left. A tenant at which the caller stops is first next
        time.
        """
        for _ in range(len(self.short)):
            tenant = next(iter(self.short.values()))
            if tenant.advance > 0:
                yield tenant
            if tenant.short:
                self.short.move_to_end(tenant.tenant_id)


class TurnQueue(Generic[Queued]):
    """Work of runs ordered by turns of tenants, and inside a tenant by turns of its runs."""

    def __init__(self) -> None:
        self.tenants: OrderedDict[str, OrderedDict[str, Queued]] = OrderedDict()
        """The work by tenant and run, the next one first."""

    def works(self) -> list[Queued]:
        return [work for works in self.tenants.values() for work in works.values()]

    def enqueue(self, work: Queued) -> None:
        self.tenants.setdefault(work.tenant_id, OrderedDict())[work.key] = work

    def next(self) -> Queued:
        """Returns the next one, which stays."""
        return next(iter(next(iter(self.tenants.values())).values()))

    def remove(self, work: Queued) -> None:
        works = self.tenants[work.tenant_id]
        del works[work.key]
        self.tenants.move_to_end(work.tenant_id)
        if not works:
            del self.tenants[work.tenant_id]
