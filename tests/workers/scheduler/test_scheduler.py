"""Tests which call a group's ranks make next, and what its answer means, without ranks or an event loop."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardRequest
from trainhouse.workers.pools.base import WorkerDied
from trainhouse.workers.protocol.calls import Failure, OptimizerStep, SampleJob, SliceResult, WorkerLost
from trainhouse.workers.protocol.methods import CLEAR_GRADIENTS, CREATE_RUN, DROP_RUN, LOAD_RUN, MEMORY
from trainhouse.workers.scheduler.calls import PassCall, RankCall, SliceCall
from trainhouse.workers.scheduler.quarantine import Suspects
from trainhouse.workers.scheduler.queue import PassLimits
from trainhouse.workers.scheduler.scheduler import Scheduler
from trainhouse.workers.scheduler.work import MethodWork, PassWork, RunWork, SamplingWork, SnapshotWork, StepWork


class Group:
    """A scheduler with its work, and a clock that the test sets."""

    def __init__(self, suspect_jobs: Suspects | None = None) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(PassLimits(100, 8), 50.0, suspect_jobs, lambda: self.now)

    def add(self, work: Any) -> Any:
        work.answer = Future()
        if isinstance(work, RunWork):
            self.scheduler.queue.enqueue(work)
        else:
            self.scheduler.cohorts.enqueue_job(work)
        return work

    def next_call(self, on_device: bool = True) -> RankCall[Any]:
        call = self.scheduler.next_call(on_device)
        assert call is not None
        return call

    def do(self, answer: Any, seconds: float = 1.0) -> RankCall[Any]:
        """Makes the next call, answered so."""
        call = self.next_call()
        self.now += seconds
        self.scheduler.finish(call, answer, seconds)
        return call


def operation(run_id: str, *lengths: int, seq_id: int = 1) -> PassWork:
    data = tuple(Datum(np.zeros(length, np.int32)) for length in lengths)
    return PassWork(run_id, "alice", ForwardBackwardRequest(run_id, seq_id, data, "cross_entropy"))


def step(run_id: str, seq_id: int = 2) -> StepWork:
    return StepWork(run_id, "alice", OptimizerStep(run_id, AdamParams(), seq_id=seq_id))


def sampling(job_id: str) -> SamplingWork:
    return SamplingWork(SampleJob(job_id, None, np.zeros(3, np.int32), SamplingParams(max_tokens=1, seed=0), (), ()))


def test_a_pass_answers_each_operation_by_itself() -> None:
    group = Group()
    good, bad = group.add(operation("a", 10)), group.add(operation("b", 10))
    call = group.do(["output", Failure("NaN", "user")])
    assert isinstance(call, PassCall) and list(call.works) == [good, bad]
    assert good.answer.result() == "output"
    with pytest.raises(OperationError, match="NaN"):
        bad.answer.result()
    assert not group.scheduler.ready()


def test_an_operation_in_chunks_is_answered_by_its_last_one() -> None:
    group = Group()
    work = group.add(operation("a", *[60] * 3))
    for part in range(3):
        assert not work.answer.done()
        group.do(["output" if part == 2 else None])
    assert work.answer.result() == "output"


def test_a_failed_chunk_ends_its_operation() -> None:
    group = Group()
    work = group.add(operation("a", *[60] * 3))
    group.do([Failure("out of memory", "server")])
    with pytest.raises(OperationError, match="out of memory"):
        work.answer.result()
    assert not group.scheduler.ready()


def test_a_step_is_refused_if_a_whole_pass_failed() -> None:
    """The ranks may not know of it. A call that clears the run's gradients ends that."""
    group = Group()
    group.add(operation("a", 10))
    group.do(Failure("the worker failed", "server"))
    assert group.scheduler.held.with_refusal(step("a").step).refusal_reason == "the worker failed"
    assert group.scheduler.held.with_refusal(step("b").step).refusal_reason is None
    group.add(MethodWork("a", "alice", CLEAR_GRADIENTS, ("a",)))
    group.do(None)
    assert group.scheduler.held.with_refusal(step("a").step).refusal_reason is None


def test_a_step_is_refused_if_gradients_could_not_be_cleared() -> None:
    group = Group()
    group.add(MethodWork("a", "alice", CLEAR_GRADIENTS, ("a",)))
    group.do(Failure("no memory", "server"))
    assert group.scheduler.held.with_refusal(step("a").step).refusal_reason == "no memory"


def test_kinds_of_calls_share_the_time() -> None:
    group = Group()
    group.add(sampling("job"))
    for number in range(40):
        group.add(operation(f"run{number}", 90))
    kinds = [group.do(SliceResult({}, 1) if number % 2 else ["output"], 1.0).kind for number in range(8)]
    assert kinds == ["training", "sampling"] * 4


def test_the_kind_with_the_least_time_runs_next_and_idle_time_earns_no_credit() -> None:
    group = Group()

    def do_next(seconds_of_pass: float) -> str:
        if "training" not in group.scheduler.ready():
            group.add(operation("run", 10))
        call = group.next_call()
        if call.kind == "training":
            group.scheduler.finish(call, ["output"], seconds_of_pass)
        else:
            group.scheduler.finish(call, SliceResult({}, 1), 0.1)
        return call.kind

    for _ in range(10):
        assert do_next(1.0) == "training"
    group.add(sampling("job"))
    order = [do_next(0.5) for _ in range(60)]
    # Sampling has credit for one pass, during which it may have waited, not for all ten.
    assert 9 <= order.index("training") <= 11
    assert 5 <= order[12:].count("sampling") / order[12:].count("training") <= 6


def test_the_first_slices_after_a_pause_are_short() -> None:
    group = Group()
    group.add(sampling("job"))
    calls = [group.do(SliceResult({}, 1)) for _ in range(4)]
    assert [call._slice.budget_milliseconds for call in calls if isinstance(call, SliceCall)] == [
        50 / 16,
        50 / 4,
        50,
        50,
    ]


def test_snapshots_are_polled_at_growing_intervals_and_few_are_written_at_once() -> None:
    group = Group()
    works = [group.add(SnapshotWork(f"run{number}", "alice", f"/snapshots/{number}")) for number in range(5)]
    for _ in range(4):
        group.do(None, seconds=0.0)
    assert not group.scheduler.ready(), "a fifth waits until one is written"
    assert group.scheduler.snapshots.due_at - group.now == pytest.approx(0.01)
    group.now += 0.01
    assert group.scheduler.ready(on_device=False) == ["snapshots"], "a poll needs no device"
    group.do({0: None, 1: Failure("disk full", "server")}, seconds=0.0)
    assert works[0].answer.result() is None
    with pytest.raises(OperationError, match="disk full"):
        works[1].answer.result()
    assert group.scheduler.snapshots.due_at - group.now == pytest.approx(0.02)
    assert group.scheduler.ready() == ["snapshots"]


def test_only_some_methods_run_while_the_group_is_offloaded() -> None:
    group = Group()
    group.add(operation("a", 10))
    group.add(MethodWork("b", "alice", MEMORY))
    assert group.scheduler.ready() == ["training", "methods"]
    assert group.scheduler.ready(on_device=False) == ["methods"]
    group.add(MethodWork("c", "alice", LOAD_RUN))
    group.scheduler.finish(group.next_call(on_device=False), {}, 0.0)
    assert group.scheduler.ready(on_device=False) == []


def test_a_death_fails_all_work_and_makes_what_was_in_the_call_suspect() -> None:
    group = Group()
    create = group.add(MethodWork("a", "alice", CREATE_RUN, creates="a"))
    group.do("info")
    assert create.answer.result() == "info" and "a" in group.scheduler.held
    works = [group.add(operation("a", 10)), group.add(operation("b", 10))]
    waiting, dropped = group.add(sampling("job")), group.add(MethodWork("c", "alice", DROP_RUN, drops="c"))
    call = group.next_call()
    consequences = group.scheduler.worker_died("tiny", WorkerDied("killed by SIGKILL"), call.works)
    assert "2 runs were in the call" in consequences
    for work in (*works, waiting):
        with pytest.raises(WorkerLost) as lost:
            work.answer.result()
        assert not lost.value.alone
    assert dropped.answer.result() is None, "the death dropped everything"
    assert "a" in group.scheduler.suspect_runs and "b" in group.scheduler.suspect_runs
    assert "a" not in group.scheduler.held and not group.scheduler.ready()
    with pytest.raises(WorkerLost, match="a was lost when the worker of tiny died"):
        group.scheduler.held.check_available("a")
    assert group.scheduler.held.forget_lost("a") and not group.scheduler.held.forget_lost("a")


def test_a_suspect_runs_alone_until_it_is_past_the_point_of_the_death() -> None:
    group = Group()
    for run_id in ("a", "b"):
        group.add(operation(run_id, 10, seq_id=5))
    group.scheduler.worker_died("tiny", WorkerDied("killed"), group.next_call().works)
    for run_id in ("a", "b"):
        group.add(operation(run_id, 10, seq_id=5))
    assert [len(group.do(["output"]).works) for _ in range(2)] == [1, 1]
    for run_id in ("a", "b"):
        group.add(operation(run_id, 10, seq_id=6))
    assert len(group.do(["output", "output"]).works) == 2


def test_work_that_was_alone_in_the_call_is_said_to_be() -> None:
    group = Group()
    work = group.add(operation("a", 10))
    group.scheduler.worker_died("tiny", WorkerDied("killed"), group.next_call().works)
    with pytest.raises(WorkerLost) as lost:
        work.answer.result()
    assert lost.value.alone


def were_alone(*works: Any) -> list[bool]:
    errors = [work.answer.exception() for work in works]
    assert all(isinstance(error, WorkerLost) for error in errors)
    return [error.alone for error in errors]


def test_a_suspect_sampling_job_waits_until_no_snapshot_is_written_and_is_found_alone() -> None:
    group = Group()

    def begin_snapshot() -> None:
        group.add(SnapshotWork("a", "alice", "/snapshots/0"))
        group.do(None, seconds=0.0)

    def die(call: RankCall[Any]) -> None:
        group.scheduler.worker_died("tiny", WorkerDied("killed"), call.works)

    begin_snapshot()
    job = group.add(sampling("fatal"))
    die(group.next_call())
    assert were_alone(job) == [False]

    group.scheduler.suspect_snapshots.clear()
    begin_snapshot()
    job = group.add(sampling("fatal"))
    assert not group.scheduler.ready(), "the suspect waits until no snapshot is written"
    group.now += 1.0
    group.do({0: None}, seconds=0.0)
    die(group.next_call())
    assert were_alone(job) == [True]


def test_a_method_is_alone_in_its_call_whatever_is_written() -> None:
    """Methods are no suspects that wait until snapshots are written, so their strikes would never be counted."""
    group = Group()
    group.add(SnapshotWork("a", "alice", "/snapshots/0"))
    group.do(None, seconds=0.0)
    load = group.add(MethodWork("b", "alice", LOAD_RUN, ("b",)))
    group.scheduler.worker_died("tiny", WorkerDied("killed"), group.next_call().works)
    assert were_alone(load) == [True]


def test_an_operation_beside_a_snapshot_is_not_alone_and_both_are_retried_apart() -> None:
    group = Group()

    def begin_snapshot(run_id: str) -> SnapshotWork:
        snapshot = group.add(SnapshotWork(run_id, "alice", "/snapshots/0"))
        assert group.do(None, seconds=0.0).works == [snapshot]
        return snapshot

    def die(in_call: Any = ()) -> None:
        group.scheduler.worker_died("tiny", WorkerDied("killed"), in_call)

    snapshot, work = begin_snapshot("a"), group.add(operation("b", 10))
    die(group.next_call().works)
    assert were_alone(snapshot, work) == [False, False]

    snapshot = begin_snapshot("a")
    group.add(operation("c", 10))
    assert not group.scheduler.ready(), "nothing runs while the snapshot is written, which may have been the cause"
    die()
    assert were_alone(snapshot) == [True]

    begin_snapshot("d")
    work = group.add(operation("b", 10))
    assert not group.scheduler.ready(), "the suspect waits until no snapshot is written"
    group.now += 1.0
    group.do({0: None}, seconds=0.0)
    die(group.next_call().works)
    assert were_alone(work) == [True]

    begin_snapshot("d")
    snapshot = group.add(SnapshotWork("a", "alice", "/snapshots/0"))
    assert not group.scheduler.ready(), "a lost snapshot begins while no other one is written"
    group.now += 1.0
    group.do({0: None}, seconds=0.0)
    group.do(None, seconds=0.0)
    group.now += 1.0
    group.do({1: Failure("disk full", "server")}, seconds=0.0)
    begin_snapshot("a")
    group.add(operation("c", 10))
    assert group.scheduler.ready() == ["training"], "the ranks outlived it, so it is no longer suspect"


def test_groups_may_share_their_suspect_jobs() -> None:
    """A job that killed one sampler runs apart on another one too."""
    suspects = Suspects(4)
    first, second = Group(suspects), Group(suspects)
    for job_id in ("a", "b"):
        first.add(sampling(job_id))
    first.scheduler.worker_died("tiny", WorkerDied("killed"), first.next_call().works)
    for job_id in ("a", "b", "c"):
        second.add(sampling(job_id))
    assert second.scheduler.cohorts.num_apart == 2
