"""Queues the work of a group's ranks: keeps each run's order and forms calls from the work of all runs."""

from collections import OrderedDict
from collections.abc import Container, Iterator
from itertools import count
from typing import Any

from .fair_queue import FairQueue, PassLimits, TenantShare
from .work import MethodWork, PassWork, RunQueue, SnapshotWork, StepWork, WorkItem


class GroupQueue:
    """Holds waiting work. Work that is taken goes to the ranks in one call, and is answered before anything else is
    taken.

    num_works, num_tokens: of the waiting work, without what is taken.
    suspects: runs whose operations and optimizer steps each run alone.
    numbers: of the work, which outlive the queue.
    """

    def __init__(self, limits: PassLimits, suspects: Container[str] = (), numbers: Iterator[int] | None = None) -> None:
        self.num_works = 0
        self.num_tokens = 0
        self._limits = limits
        self._suspects = suspects
        self._numbers = numbers or count()
        self._runs: dict[str, RunQueue] = {}
        # Each run is in one of these, by the type of its head.
        self._operations, self._suspect_operations = FairQueue(limits), _TenantRoundRobin()
        self._steps, self._methods, self._snapshots = _TenantRoundRobin(), _TenantRoundRobin(), _TenantRoundRobin()
        self._by_head = {StepWork: self._steps, MethodWork: self._methods, SnapshotWork: self._snapshots}
        self._waits_in: dict[str, FairQueue | _TenantRoundRobin] = {}
        self._steps_went_last = False
        self._suspect_stepped_last = self._suspect_passed_last = False

    def __contains__(self, key: str) -> bool:
        return key in self._runs

    @property
    def wants_snapshot(self) -> bool:
        return bool(self._snapshots)

    @property
    def wants_method(self) -> bool:
        return bool(self._methods)

    @property
    def wants_training(self) -> bool:
        return bool(self._steps) or self._wants_pass

    @property
    def _wants_pass(self) -> bool:
        return bool(self._operations or self._suspect_operations)

    def works(self) -> list[WorkItem]:
        return [work for run in self._runs.values() for work in run.works]

    def add(self, work: WorkItem) -> None:
        work.number = next(self._numbers)
        run = self._runs.setdefault(work.key, RunQueue(work.key, work.tenant_id))
        run.works.append(work)
        self.num_works += 1
        self.num_tokens += work.tokens
        if len(run.works) == 1:
            self._enqueue(run)

    def cancel(self, work: WorkItem) -> None:
        """Drops work that no caller waits for any more, unless the ranks have begun it."""
        run = self._runs.get(work.key)
        if run is not None and work in run.works and not work.has_begun:
            self.drop(work)

    def drop(self, work: WorkItem) -> None:
        """Removes the rest of this work from the queue."""
        run = self._runs[work.key]
        if work is run.head:
            self._dequeue(run)
            self._end(run)
        else:
            run.works.remove(work)
            self._forget(work)

    def next_method(self) -> MethodWork:
        """Returns the next method, which stays in the queue."""
        head = self._methods.next().head
        assert isinstance(head, MethodWork)
        return head

    def take_method(self) -> MethodWork:
        """Takes the next method: tenants take turns, and a tenant's runs take turns."""
        return self._pop(self._methods.next())

    def take_snapshot(self) -> SnapshotWork:
        """Takes the next snapshot, by the same turns as methods; until then only its run is blocked by it."""
        return self._pop(self._snapshots.next())

    def steps_are_next(self) -> bool:
        """True if optimizer steps run next. They go first, because they unblock passes, but alternate with passes that
        wait.
        """
        return bool(self._steps) and not (self._steps_went_last and self._wants_pass)

    def take_steps(self) -> list[StepWork]:
        """Takes the optimizer steps of all runs that are ready, or the step of one suspect; the two alternate."""
        self._steps_went_last = True
        suspects = [run for run in self._steps if run.key in self._suspects]
        others = [run for run in self._steps if run.key not in self._suspects]
        self._suspect_stepped_last = bool(suspects) and not (others and self._suspect_stepped_last)
        return [self._pop(run) for run in (suspects[:1] if self._suspect_stepped_last else others)]

    def take_pass(self) -> list[PassWork]:
        """Takes a part of one suspect's operation, or a pass formed from all other runs; the two alternate."""
        self._steps_went_last = False
        self._suspect_passed_last = bool(self._suspect_operations) and not (
            self._operations and self._suspect_passed_last
        )
        builder = _PassBuilder(self._limits)
        if self._suspect_passed_last:
            run = self._suspect_operations.next()
            self._take(run, builder, self._limits.quantum(run.tenant_id), self._limits.half)
        else:
            self._fill(builder)
        return list(builder.works.values())

    def _fill(self, builder: "_PassBuilder") -> None:
        """Fills a pass: first the run whose turn it is, so that it always progresses; then short operations, which wait
        for one pass at most; then other runs by turns until the pass is full.
        """
        first = self._operations.next()
        assert first is not None, "taken only while operations are ready"
        self._move(*first, builder, self._limits.half)
        self._move_short_operations(builder)
        while (turn := self._operations.next(builder.awaited, builder.may_end)) and builder.admits(
            turn[1].operation, builder.room
        ):
            self._move(*turn, builder, builder.room)
        if turn and turn[0] is first[0] and not builder.has_slot(turn[1].key):
            # A run with few tokens would otherwise keep the first place for very many passes.
            self._operations.end_turn()

    def _move_short_operations(self, builder: "_PassBuilder") -> None:
        """Moves short operations into the pass; they may use half a pass even if the first sequence left less room."""
        room = max(builder.room, self._limits.half)
        for tenant in self._operations.tenants_with_short_work():
            taken = self._move_short_ones_of(tenant, builder, room)
            if not taken:
                return
            room -= taken

    def _move_short_ones_of(self, tenant: TenantShare, builder: "_PassBuilder", room: float) -> int:
        taken = 0
        while (run := tenant.next_short()) and builder.admits(run.operation, room - taken):
            if taken and not self._limits.allows_short(run.operation, taken):
                break
            taken += self._move(tenant, run, builder, room)
        tenant.advance -= taken
        return taken

    def _move(self, tenant: TenantShare, run: RunQueue, builder: "_PassBuilder", room: float) -> int:
        tokens = self._take(run, builder, tenant.credit, room)
        tenant.credit -= tokens
        if run.awaits_step_only:
            builder.awaited.add(run.tenant_id)
        return tokens

    def _take(self, run: RunQueue, builder: "_PassBuilder", credit: float, room: float) -> int:
        operation = run.operation
        self._dequeue(run)
        tokens = builder.take(operation, credit, room)
        self.num_tokens -= tokens
        if operation.is_taken:
            self._end(run)
        else:
            self._enqueue(run)
        return tokens

    def _pop(self, run: RunQueue) -> Any:
        work = run.head
        self._dequeue(run)
        self._end(run)
        return work

    def _end(self, run: RunQueue) -> None:
        """Removes the head of a run that was dequeued, and enqueues the run for its next head."""
        self._forget(run.works.popleft())
        if run.works:
            self._enqueue(run)
        else:
            del self._runs[run.key]

    def _forget(self, work: WorkItem) -> None:
        self.num_works -= 1
        self.num_tokens -= work.tokens

    def _enqueue(self, run: RunQueue) -> None:
        operations = self._suspect_operations if run.key in self._suspects else self._operations
        waits_in = self._waits_in[run.key] = self._by_head.get(type(run.head), operations)
        waits_in.add(run)

    def _dequeue(self, run: RunQueue) -> None:
        self._waits_in.pop(run.key).remove(run)


class _PassBuilder:
    """A pass that is being filled.

    room: tokens left; negative after a sequence longer than a pass.
    awaited: tenants whose operation ends in this pass, with only an optimizer step before their next one.
    """

    def __init__(self, limits: PassLimits) -> None:
        self.works: dict[int, PassWork] = {}
        self.awaited: set[str] = set()
        self.room: float = limits.max_tokens
        self._limits = limits
        self._runs: set[str] = set()

    @property
    def may_end(self) -> bool:
        return self.room <= self._limits.max_tokens - self._limits.quarter

    def admits(self, work: PassWork, room: float) -> bool:
        tokens = work.lengths[work.num_taken] if self._limits.may_be_split(work) else work.tokens
        return tokens <= room and self.has_slot(work.key)

    def has_slot(self, run_id: str) -> bool:
        return run_id in self._runs or len(self._runs) < self._limits.max_runs

    def take(self, work: PassWork, credit: float, room: float) -> int:
        """Puts data of the operation into the pass and returns their tokens.

        An operation that may be cut contributes about `credit` tokens while there is room, but always one datum.
        """
        if work.number not in self.works:
            self.works[work.number] = work
            work.chunk_start = work.num_taken
        tokens = work.take(credit, room) if self._limits.may_be_split(work) else work.take_all()
        self.room -= tokens
        self._runs.add(work.key)
        return tokens


class _TenantRoundRobin:
    """Runs ordered by turns of tenants, and inside a tenant by turns of its runs."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, RunQueue]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __iter__(self) -> Iterator[RunQueue]:
        return (run for runs in self._tenants.values() for run in runs.values())

    def add(self, run: RunQueue) -> None:
        self._tenants.setdefault(run.tenant_id, OrderedDict())[run.key] = run

    def next(self) -> RunQueue:
        return next(iter(next(iter(self._tenants.values())).values()))

    def remove(self, run: RunQueue) -> None:
        runs = self._tenants[run.tenant_id]
        del runs[run.key]
        self._tenants.move_to_end(run.tenant_id)
        if not runs:
            del self._tenants[run.tenant_id]
