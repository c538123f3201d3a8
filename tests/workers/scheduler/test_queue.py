"""Tests the queue of a group's work: the order of each run, and what enters the next pass."""

import contextlib
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from itertools import accumulate
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardRequest
from trainhouse.workers.protocol.calls import OperationPart, OptimizerStep
from trainhouse.workers.protocol.methods import SAVE_RUN
from trainhouse.workers.scheduler.queue import GroupQueue, PassLimits
from trainhouse.workers.scheduler.work import MethodWork, PassWork, RunWork, StepWork

TOKENS = 1600
"""Tokens of a pass: turns are of 400, and operations of up to 100 are short."""


class Chunk(NamedTuple):
    """The data of an operation that one pass runs."""

    work: PassWork
    first_datum: int
    end: int
    part: OperationPart

    @property
    def last(self) -> bool:
        return self.end == len(self.work.lengths)


def take_pass(queue: GroupQueue) -> list[Chunk]:
    return [Chunk(work, work.chunk_start, work.num_taken, work.part) for work in queue.take_pass()]


def operation(run_id: str, *lengths: int) -> PassWork:
    """Returns an operation of the tenant named by the first letter of the run."""
    data = tuple(Datum(np.zeros(length, np.int32)) for length in lengths)
    return PassWork(run_id, run_id[0], ForwardBackwardRequest(run_id, 0, data, "cross_entropy"))


def step(run_id: str) -> StepWork:
    return StepWork(run_id, run_id[0], OptimizerStep(run_id, AdamParams()))


def call(run_id: str) -> MethodWork:
    return MethodWork(run_id, run_id[0], SAVE_RUN)


def queue_of(*works: RunWork[Any], runs: int = 64, suspects: Container[str] = (), **weights: float) -> GroupQueue:
    queue = GroupQueue(PassLimits(TOKENS, runs, weights), suspects)
    for work in works:
        queue.enqueue(work)
    return queue


def tokens_of(chunk: Chunk) -> int:
    return sum(chunk.work.lengths[chunk.first_datum : chunk.end])


def runs_of(chunks: Sequence[Chunk]) -> list[str]:
    return [chunk.work.key for chunk in chunks]


# --- order ---

Lengths = st.one_of(
    st.lists(st.integers(1, 60), max_size=4),
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
    st.lists(st.integers(700, 2500), min_size=1, max_size=4),
)
Events = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["a0", "a1", "b0", "b1", "c0"]), st.one_of(Lengths, st.sampled_from(["step", "call"]))
        ),
        st.sampled_from(["take", "cancel", "fail", "trust"]),
    ),
    max_size=60,
)


class CheckedConsumer:
    """Takes work from a queue like a rank group does, and checks the guarantees of each call."""

    def __init__(self, queue: GroupQueue, limits: PassLimits, suspects: Collection[str] = ()) -> None:
        self.queue = queue
        self.limits = limits
        self.suspects = suspects
        self.begun: dict[str, Chunk] = {}
        self.done: dict[str, list[RunWork[Any]]] = defaultdict(list)

    def take(self) -> bool:
        if self.queue.methods.tenants:
            self._finish([self.queue.remove(self.queue.methods.next())])
        elif steps := self.queue.take_steps():
            self._finish(steps)
        elif self.queue.has_training:
            self._run(take_pass(self.queue))
        else:
            return False
        return True

    def _finish(self, works: Sequence[RunWork[Any]]) -> None:
        assert works and not self.begun.keys() & {work.key for work in works}
        assert len(works) == 1 or not any(work.key in self.suspects for work in works)
        for work in works:
            self.done[work.key].append(work)

    def _run(self, chunks: Sequence[Chunk]) -> None:
        longest = max((length for chunk in chunks for length in chunk.work.lengths), default=0)
        tokens = sum(map(tokens_of, chunks))
        assert chunks and len(set(runs_of(chunks))) <= self.limits.max_runs
        assert len(chunks) == 1 or not any(run_id in self.suspects for run_id in runs_of(chunks))
        assert tokens <= max(self.limits.max_tokens, self.limits.max_tokens / 2 + longest)
        for chunk in chunks:
            before = self.begun.pop(chunk.work.key, None)
            assert chunk.first_datum == (before.end if before else 0)
            assert before is None or before.work is chunk.work
            assert chunk.part.request.data == chunk.work.request.data[chunk.first_datum : chunk.end]
            assert chunk.part.last == (chunk.end == len(chunk.work.request.data))
            if chunk.last:
                self.done[chunk.work.key].append(chunk.work)
            else:
                self.begun[chunk.work.key] = chunk


@settings(max_examples=300, deadline=None)
@given(events=Events, runs=st.integers(1, 4), suspects=st.sets(st.sampled_from(["a0", "b0", "b1"])))
def test_each_run_keeps_its_order_and_all_work_is_done_once(events: list[Any], runs: int, suspects: set[str]) -> None:
    limits = PassLimits(TOKENS, runs, {"a": 3.0, "b": 0.5})
    consumer = CheckedConsumer(GroupQueue(limits, suspects), limits, suspects)
    expected: dict[str, list[RunWork[Any]]] = defaultdict(list)
    for event in events:
        waiting = consumer.queue.works()
        if event == "take":
            consumer.take()
        elif event == "trust":
            suspects.clear()
        elif event == "fail" and consumer.begun:
            failed = consumer.begun.pop(next(iter(consumer.begun))).work
            consumer.queue.remove(failed)
            expected[failed.key].remove(failed)
        elif event == "cancel" and waiting:
            consumer.queue.cancel(waiting[-1])
            if not waiting[-1].has_begun:
                expected[waiting[-1].key].remove(waiting[-1])
        elif isinstance(event, tuple):
            run_id, what = event
            work = {"step": step, "call": call}[what](run_id) if isinstance(what, str) else operation(run_id, *what)
            expected[run_id].append(work)
            consumer.queue.enqueue(work)
    while consumer.take():
        pass
    assert {key: works for key, works in consumer.done.items() if works} == {k: v for k, v in expected.items() if v}
    assert not consumer.begun and consumer.queue.num_works == 0 and consumer.queue.num_tokens == 0


def test_operations_wait_for_the_step_before_them() -> None:
    queue = queue_of(operation("a", 10), operation("a", 10), step("a"), operation("a", 10), operation("b", 10))
    assert runs_of(take_pass(queue)) == ["a", "b", "a"]
    assert runs_of_works(queue.take_steps()) == ["a"]
    assert runs_of(take_pass(queue)) == ["a"]


def runs_of_works(works: Sequence[RunWork[Any]]) -> list[str]:
    return [work.key for work in works]


def test_ready_steps_run_together_before_the_next_pass_without_starving_passes() -> None:
    steps = [step(run_id) for run_id in ("a", "a", "b", "c")]
    queue = queue_of(*steps, operation("d", 10))
    assert runs_of_works(queue.take_steps()) == ["a", "b", "c"]
    assert not queue.take_steps() and runs_of(take_pass(queue)) == ["d"]
    assert runs_of_works(queue.take_steps()) == ["a"]


def test_suspects_do_not_hold_up_others() -> None:
    operations = [operation(run_id, 50) for run_id in ("a0", "a1", "b0", "c0", "c1", "d0")]
    queue = queue_of(operation("d1", 1000), *operations, suspects=("a0", "b0", "c0"))
    passes = [runs_of(take_pass(queue)) for _ in range(4)]
    assert sorted(map(sorted, passes)) == [["a0"], ["a1", "c1", "d0", "d1"], ["b0"], ["c0"]]
    assert ["a1", "c1", "d0", "d1"] in map(sorted, passes[:2])


def test_a_suspects_large_operation_alternates_with_those_of_others() -> None:
    queue = queue_of(operation("a", *[100] * 12), *[operation(f"b{number}", 1500) for number in range(3)], suspects="a")
    assert [runs_of(take_pass(queue)) for _ in range(6)] == [["a"], ["b0"], ["a"], ["b1"], ["a"], ["b2"]]


def test_suspects_steps_do_not_hold_up_those_of_others() -> None:
    queue = queue_of(*(step(run_id) for run_id in ("a", "b", "c", "d", "e")), suspects="abc")
    taken = [runs_of_works(queue.take_steps()) for _ in range(4)]
    assert taken == [["a"], ["d", "e"], ["b"], ["c"]]


def test_tenants_take_turns_with_their_calls() -> None:
    queue = queue_of(*(call(run_id) for run_id in ("a0", "a0", "a1", "a2", "b0", "b1")))
    taken = []
    while queue.methods.tenants:
        taken.append(queue.remove(queue.methods.next()).key)
    assert taken == ["a0", "b0", "a1", "b1", "a2", "a0"]


# --- splitting ---


def test_a_large_operation_is_split_between_data_and_a_small_one_is_not() -> None:
    queue = queue_of(operation("a", *[100] * 40), operation("b", *[100] * 3))
    chunks = [take_pass(queue) for _ in range(3)]
    assert [sum(map(tokens_of, each)) for each in chunks] == [1600, 1600, 1100]
    assert [(each.first_datum, each.end, each.last) for each in chunks[0] if each.work.key == "a"] == [(0, 13, False)]
    assert [runs_of(each) for each in chunks] == [["a", "b"], ["a"], ["a"]]


def test_a_sequence_longer_than_a_pass_is_a_chunk_by_itself() -> None:
    queue = queue_of(operation("a", 10, 5000, 10))
    parts = [[(chunk.first_datum, chunk.end) for chunk in take_pass(queue)] for _ in range(3)]
    assert parts == [[(0, 1)], [(1, 2)], [(2, 3)]]


# --- fairness ---


class Backlog:
    """Keeps `ahead` operations of these lengths waiting for each of its runs."""

    def __init__(self, runs: Sequence[str], *lengths: int, ahead: int = 1) -> None:
        self._runs = runs
        self._lengths = lengths
        self._ahead = ahead

    def missing(self, queue: GroupQueue) -> list[RunWork[Any]]:
        waiting = Counter(work.key for work in queue.works())
        return [
            operation(run_id, *self._lengths) for run_id in self._runs for _ in range(self._ahead - waiting[run_id])
        ]


def serve(queue: GroupQueue, num_passes: int, *backlogs: Backlog) -> list[Counter[str]]:
    """Returns the tokens of each tenant by pass."""
    served = []
    for _ in range(num_passes):
        for backlog in backlogs:
            for work in backlog.missing(queue):
                queue.enqueue(work)
        tokens: Counter[str] = Counter()
        for chunk in take_pass(queue):
            tokens[chunk.work.tenant_id] += tokens_of(chunk)
        served.append(tokens)
    return served


def most_ahead(served: Sequence[Counter[str]], one: str, other: str, weight: float = 1.0) -> float:
    """Returns the largest lead of `one` over `other` in any window of passes; weight: of `one`, relative to `other`."""
    leads = [0.0, *accumulate(tokens[one] / weight - tokens[other] for tokens in served)]
    lowest = accumulate(leads, min)
    return max(lead - low for lead, low in zip(leads, lowest, strict=True))


ONE_RUN = Backlog(["b0"], *[90] * 50, ahead=2)
TEN_RUNS = [
    pytest.param(Backlog([f"a{i}" for i in range(10)], *lengths, ahead=3), id=name)
    for name, lengths in {
        "large": [90] * 50,
        "medium": [90] * 4,
        "short": [90],
        "mixed": [10, 700, 30, 250] * 9,
    }.items()
]


@pytest.mark.parametrize("ten_runs", TEN_RUNS)
def test_a_tenant_with_ten_runs_gets_no_more_than_a_tenant_with_one(ten_runs: Backlog) -> None:
    served = serve(queue_of(), 200, ten_runs, ONE_RUN)
    bound = 2 * TOKENS
    assert most_ahead(served, "a", "b") <= bound and most_ahead(served, "b", "a") <= bound
    assert all(sum(tokens.values()) > 0.5 * TOKENS for tokens in served)


def test_shares_by_run_would_break_the_bound() -> None:
    by_run = [Backlog([f"{tenant}0"], *[90] * 50, ahead=2) for tenant in "acdefghij"]
    served = serve(queue_of(), 200, *by_run, ONE_RUN)
    flooding = [Counter(a=sum(tokens.values()) - tokens["b"], b=tokens["b"]) for tokens in served]
    assert most_ahead(flooding, "a", "b") > 100 * TOKENS


@pytest.mark.parametrize("weight", [2.0, 0.25])
def test_tenants_are_served_in_proportion_to_their_weights(weight: float) -> None:
    served = serve(queue_of(a=weight), 300, Backlog(["a0", "a1"], *[90] * 50, ahead=2), ONE_RUN)
    total = sum(served, Counter())
    assert total["a"] / total["b"] == pytest.approx(weight, rel=0.03)
    assert max(most_ahead(served, "a", "b", weight), most_ahead(served, "b", "a", 1 / weight)) <= 4 * TOKENS


def train(queue: GroupQueue, num_passes: int, **lengths: Sequence[int]) -> list[Counter[str]]:
    """Returns the tokens of each tenant by pass; each run has three pairs waiting of an operation and a step."""
    served: list[Counter[str]] = []
    while len(served) < num_passes:
        waiting = Counter(work.key for work in queue.works())
        for run_id in lengths:
            for _ in range(6 - waiting[run_id], 0, -2):
                queue.enqueue(operation(run_id, *lengths[run_id]))
                queue.enqueue(step(run_id))
        if queue.take_steps():
            continue
        served.append(Counter())
        for chunk in take_pass(queue):
            served[-1][chunk.work.tenant_id] += tokens_of(chunk)
    return served


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("num_data", [1, 5, 20, 50])
def test_a_run_that_waits_for_its_steps_keeps_its_share(weight: float, num_data: int) -> None:
    """Covers a run whose operations are much smaller than the other's, and end early in a pass."""
    served = train(queue_of(a=weight), 300, a0=[80] * 20, b0=[80] * num_data)
    total = sum(served, Counter())
    assert total["a"] / total["b"] >= 0.9 * weight
    if num_data >= 5:
        assert total["a"] / total["b"] == pytest.approx(weight, rel=0.1)
    assert all(sum(tokens.values()) >= TOKENS / 4 for tokens in served)


def test_idle_time_earns_no_credit() -> None:
    queue = queue_of()
    both = (Backlog(["a0"], *[90] * 50, ahead=2), ONE_RUN)
    serve(queue, 5, *both)
    while any(work.tenant_id == "b" for work in queue.works()):
        serve(queue, 1, both[0])
    serve(queue, 100, both[0])
    assert most_ahead(serve(queue, 50, *both), "b", "a") <= 2 * TOKENS


def test_runs_of_a_tenant_take_turns() -> None:
    queue = queue_of(*(operation(run_id, *[20] * 800) for run_id in ("a0", "a1", "a2", "a3")))
    served: Counter[str] = Counter()
    for _ in range(10):
        for chunk in take_pass(queue):
            served[chunk.work.key] += tokens_of(chunk)
    assert max(served.values()) - min(served.values()) <= 400 and len(served) == 4


# --- short operations ---

LINES = [
    pytest.param([Backlog([f"{tenant}0"], *lengths, ahead=2) for tenant in tenants], id=name)
    for name, tenants, lengths in [
        ("one tenant", "a", [20] * 1000),
        ("eight tenants", "abcdefgh", [20] * 1000),
        ("long sequences", "abc", [900] * 100),
        ("sequences longer than a pass", "abc", [2000] * 100),
    ]
]


@pytest.mark.parametrize("tokens", [8, 100, 700])
@pytest.mark.parametrize("tenant", ["a", "z"])
@pytest.mark.parametrize("line", LINES)
def test_a_short_operation_is_in_the_very_next_pass(line: list[Backlog], tenant: str, tokens: int) -> None:
    queue = queue_of()
    for _ in range(40):
        serve(queue, 3, *line)
        short = operation(f"{tenant}-short", tokens)
        queue.enqueue(short)
        assert short in [chunk.work for chunk in take_pass(queue)]


def test_an_operation_that_is_not_short_waits_for_its_turn() -> None:
    queue = queue_of()
    serve(queue, 1, *(Backlog([f"{tenant}0"], *[20] * 1000, ahead=2) for tenant in "abcdefgh"))
    queue.enqueue(operation("z", 60, 60))
    assert "z" not in runs_of(take_pass(queue))


@pytest.mark.parametrize("num_runs", [1, 50])
def test_a_flood_of_short_operations_takes_no_more_than_its_share(num_runs: int) -> None:
    bulk = [Backlog([f"{tenant}0"], *[20] * 1000, ahead=2) for tenant in "abcdefghijklmnopqrstuvwxy"]
    served = serve(queue_of(), 200, *bulk, Backlog([f"z{i}" for i in range(num_runs)], 100))
    # One of them in every pass would be a lead of five passes.
    assert most_ahead(served, "z", "a") <= 2 * TOKENS


def test_short_operations_of_many_tenants_do_not_starve_one_with_large_ones() -> None:
    short = [Backlog([f"{tenant}{i}" for i in range(5)], 100) for tenant in "abcdefghijklmnopqrstuvwxyz"]
    served = serve(queue_of(), 300, *short, Backlog(["0"], *[20] * 1000, ahead=2))
    assert most_ahead(served, "a", "0") <= 2 * TOKENS


def test_short_operations_that_fill_all_slots_do_not_starve_large_ones() -> None:
    short = [Backlog([f"{tenant}{i}" for i in range(20)], 5) for tenant in "abcdefgh"]
    served = serve(queue_of(runs=2), 200, *short, Backlog(["0"], *[20] * 1000, ahead=2))
    # It has turns like all tenants: one of nine.
    assert sum(tokens["0"] > 0 for tokens in served) >= 20
    assert most_ahead(served, "a", "0") <= 2 * TOKENS


# --- cost ---


@contextlib.contextmanager
def counted_lines() -> Iterator[Counter[str]]:
    """Counts this thread's trace events: calls, returns and lines, which count again in each iteration of a loop.

    Garbage collection is off meanwhile, because callbacks and finalizers would be counted at random moments.
    """
    events: Counter[str] = Counter()

    def counted(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        events[event] += 1
        return counted

    before = sys.gettrace()
    gc.disable()
    sys.settrace(counted)
    try:
        yield events
    finally:
        sys.settrace(before)
        gc.enable()


class ListingQueue(GroupQueue):
    def take_pass(self) -> list[PassWork]:
        self.works()
        return super().take_pass()


class OrderingQueue(GroupQueue):
    def take_pass(self) -> list[PassWork]:
        self._runs = dict(sorted(self._runs.items(), key=lambda run: run[0]))
        return super().take_pass()


def events_of_a_pass(kind: type[GroupQueue], num_runs: int, num_tenants: int) -> int:
    """Returns the trace events of forming one pass while each of the runs waits with an operation and a step."""
    runs = [f"{chr(0x100 + i % num_tenants)}{i}" for i in range(num_runs)]
    queue = kind(PassLimits(TOKENS, 64))
    for work in (*(operation(run_id, 40, 40) for run_id in runs), *map(step, runs)):
        queue.enqueue(work)
    with counted_lines() as events:
        chunks = take_pass(queue)
    assert len(chunks) == 20
    return events.total()


def costs_of_a_pass(kind: type[GroupQueue], of_one_tenant: bool) -> list[int]:
    return [events_of_a_pass(kind, num_runs, 1 if of_one_tenant else num_runs) for num_runs in (100, 2000)]


@pytest.mark.parametrize("of_one_tenant", [True, False])
def test_waiting_work_does_not_slow_down_forming_a_pass(of_one_tenant: bool) -> None:
    few, many = costs_of_a_pass(GroupQueue, of_one_tenant)
    assert many == few < 4000


@pytest.mark.parametrize("kind", [ListingQueue, OrderingQueue])
@pytest.mark.parametrize("of_one_tenant", [True, False])
def test_scanning_all_waiting_work_would_be_detected(kind: type[GroupQueue], of_one_tenant: bool) -> None:
    few, many = costs_of_a_pass(kind, of_one_tenant)
    assert many - few >= 1900
