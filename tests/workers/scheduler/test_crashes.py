"""Tests what calls learn from a worker's crash: that work was lost, and whether it was alone in the fatal call."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.tests.workers.recording_worker import RECORDING, RecordingWorker
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.pools import local
from trainhouse.workers.pools.children import Child
from trainhouse.workers.protocol.calls import Failure, OptimizerStep, RunSpec, SampleJob, WorkerLost
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig

MAX_STRIKES = 3


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 200))


@asynccontextmanager
async def recording_dispatch(*runs: str, worker: str = RECORDING) -> AsyncIterator[WorkerDispatch]:
    """Starts a dispatch with passes of 800 tokens and a backoff so small that crashing often costs no time."""
    model = WorkerConfig(ServedModel("tiny", "tiny"), device="cpu")
    dispatch = WorkerDispatch(DispatchConfig((model,), worker=worker, slice_milliseconds=5, pass_tokens=800))
    dispatch.groups[0].supervisor.backoff.first = 0.01
    await dispatch.start(lambda _: None)
    try:
        for run_id in runs:
            await create(dispatch, run_id)
        yield dispatch
    finally:
        await dispatch.close()


async def create(dispatch: WorkerDispatch, run_id: str) -> None:
    await dispatch.create_run("tiny", RunSpec(run_id, LoraConfig(rank=4, seed=0)), "tenant")


def operation(
    run_id: str, seq_id: int = 1, loss_fn: str = "sleep", lengths: tuple[int, ...] = (8,), **config: float
) -> ForwardBackwardRequest:
    data = tuple(Datum(np.zeros(length, np.int32)) for length in lengths)
    return ForwardBackwardRequest(run_id, seq_id, data, loss_fn, {"seconds": 0.0} | config)


def step(run_id: str) -> OptimizerStep:
    return OptimizerStep(run_id, AdamParams(learning_rate=1e-2))


def job(job_id: str, num_slices: int) -> SampleJob:
    params = SamplingParams(max_tokens=num_slices, seed=0)
    return SampleJob(job_id, None, np.zeros(3, np.int32), params, (), ())


def kill(dispatch: WorkerDispatch) -> None:
    os.kill(dispatch.pids("tiny")[0], signal.SIGKILL)


async def wait_until_dead(dispatch: WorkerDispatch) -> None:
    while dispatch.status("tiny") is None:  # noqa: ASYNC110 (no event to wait for)
        await asyncio.sleep(0.001)


async def were_alone(*waiting: asyncio.Task[object]) -> list[bool]:
    """Returns for each lost call whether it was alone."""
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, WorkerLost) and each.category == "server" for each in errors), errors
    return [each.alone for each in errors if isinstance(each, WorkerLost)]


def test_the_running_operation_was_alone_and_waiting_calls_were_not() -> None:
    async def check() -> None:
        async with recording_dispatch("a", "b", "gone") as dispatch:
            running = asyncio.create_task(dispatch.forward_backward(operation("a", seconds=50)))
            await asyncio.sleep(0.1)
            waiting = [
                asyncio.create_task(dispatch.forward_backward(operation("b"))),
                asyncio.create_task(dispatch.optim_step(step("b"))),
                asyncio.create_task(dispatch.copy_adapter("a", "sampler")),
                asyncio.create_task(dispatch.sample("tiny", job("job", 1))),
            ]
            dropping = asyncio.create_task(dispatch.drop_run("gone"))
            await asyncio.sleep(0)
            killed_at = time.monotonic()
            kill(dispatch)
            assert await were_alone(running, *waiting) == [True, False, False, False, False]
            await dropping  # the run is gone with the worker
            assert time.monotonic() - killed_at < 30

    run(check())


def test_operations_that_share_the_fatal_pass_were_not_alone() -> None:
    async def check() -> None:
        async with recording_dispatch("a", "b") as dispatch:
            both = [asyncio.create_task(dispatch.forward_backward(operation(each, seconds=5))) for each in "ab"]
            await asyncio.sleep(0.2)
            kill(dispatch)
            assert await were_alone(*both) == [False, False]

    run(check())


def test_a_large_operation_with_a_part_in_the_fatal_pass_was_alone() -> None:
    async def check() -> None:
        async with recording_dispatch("a") as dispatch:
            large = operation("a", loss_fn="die", lengths=(100,) * 30, part=1)
            assert await were_alone(asyncio.create_task(dispatch.forward_backward(large))) == [True]

    run(check())


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_a_sampling_request_was_alone_unless_another_shared_its_slice(num_jobs: int) -> None:
    async def check() -> None:
        async with recording_dispatch("a") as dispatch:
            jobs = [asyncio.create_task(dispatch.sample("tiny", job(str(i), 10_000))) for i in range(num_jobs)]
            await asyncio.sleep(0.1)
            kill(dispatch)
            assert await were_alone(*jobs) == [num_jobs == 1] * num_jobs
            await dispatch.sample("tiny", job("next", 1))

    run(check())


def test_a_crash_between_calls_accuses_nothing_and_recreated_runs_work() -> None:
    async def check() -> None:
        async with recording_dispatch("a", "b") as dispatch:
            await dispatch.copy_adapter("a", "sampler")
            kill(dispatch)
            await wait_until_dead(dispatch)
            assert dispatch.status("tiny") == "the worker of tiny is restarting"
            recreating = asyncio.create_task(create(dispatch, "a"))
            await asyncio.sleep(0)
            lost = [
                asyncio.create_task(dispatch.forward_backward(operation("a"))),
                asyncio.create_task(dispatch.optim_step(step("b"))),
                asyncio.create_task(dispatch.copy_adapter("b", "sampler")),
                asyncio.create_task(dispatch.sample("tiny", with_adapter(job("job", 1), "sampler"))),
            ]
            assert await asyncio.wait_for(were_alone(*lost), 0.1) == [False] * 4
            assert dispatch.status("tiny") == "the worker of tiny is restarting" and not recreating.done()
            await recreating
            await dispatch.copy_adapter("a", "sampler")
            await dispatch.sample("tiny", with_adapter(job("job", 1), "sampler"))
            both = await asyncio.gather(*(dispatch.forward_backward(operation("a", seq)) for seq in (1, 2)))
            assert tokens_of_pass(both[0]) == tokens_of_pass(both[1]) == 16, (
                "nothing is suspected, so both share a pass"
            )
            with pytest.raises(WorkerLost):
                await dispatch.optim_step(step("b"))

    run(check())


def with_adapter(each: SampleJob, adapter_id: str) -> SampleJob:
    return SampleJob(each.job_id, adapter_id, each.prompt, each.params, (), ())


def tokens_of_pass(output: ForwardBackwardOutput) -> float:
    """Returns the tokens of the operation's pass: 8 for each operation in it."""
    return output.metrics["tokens:max"]


def test_a_run_dropped_while_it_is_recreated_leaves_nothing_behind() -> None:
    async def check() -> None:
        async with recording_dispatch("a") as dispatch:
            kill(dispatch)
            await wait_until_dead(dispatch)
            recreating = asyncio.create_task(create(dispatch, "a"))
            await asyncio.sleep(0)
            await dispatch.drop_run("a")
            await recreating
            assert "a" not in dispatch.groups[0].scheduler.held

    run(check())


def test_workers_that_cannot_start_for_lack_of_threads_or_memory_start_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with recording_dispatch() as dispatch:
            errors, start_child = [RuntimeError("can't start new thread"), MemoryError()], local.start_child

            async def start(*arguments: Any) -> Child:
                if errors:
                    raise errors.pop(0)
                return await start_child(*arguments)

            monkeypatch.setattr(local, "start_child", start)
            kill(dispatch)
            await wait_until_dead(dispatch)
            await create(dispatch, "a")

    run(check())
    assert "base model tiny does not restart: can't start new thread" in caplog.text
    assert "base model tiny does not restart: MemoryError" in caplog.text


def test_a_shutdown_is_not_a_crash() -> None:
    async def check() -> None:
        async with recording_dispatch("a") as dispatch:
            running = asyncio.create_task(dispatch.forward_backward(operation("a", seconds=50)))
            await asyncio.sleep(0.1)
        with pytest.raises(OperationError, match="shutting down") as failed:
            await running
        assert not isinstance(failed.value, WorkerLost)

    run(check())


class FailingSteps(RecordingWorker):
    """Fails in the middle of optimizer steps, as of those in a later chunk."""

    def apply_steps(self, steps: tuple[OptimizerStep, ...]) -> tuple[dict[str, float] | Failure, ...]:
        for step in steps:
            if step.run_id.startswith("fails"):
                raise {"fails with a key": KeyError, "fails with a value": ValueError}[step.run_id]("unforeseen")
        return super().apply_steps(steps)


@pytest.mark.parametrize("fails", ["fails with a key", "fails with a value"])
def test_runs_are_lost_if_their_steps_fail_unexpectedly(fails: str) -> None:
    """Steps cannot be answered if it is unknown whether they were taken."""

    async def check() -> None:
        async with recording_dispatch(
            "a", fails, worker="trainhouse.tests.workers.scheduler.test_crashes:FailingSteps"
        ) as dispatch:
            async with busy(dispatch, "a"):
                steps = [asyncio.create_task(dispatch.optim_step(step(run_id))) for run_id in ("a", fails)]
            assert await were_alone(*steps) == [False, False]
            await recreate(dispatch, "a")
            await dispatch.optim_step(step("a"))

    run(check())


# --- suspects: clients retry, as the server does for them ---


async def retry_operation(
    dispatch: WorkerDispatch, request: ForwardBackwardRequest, alone: list[bool]
) -> ForwardBackwardOutput:
    """Recreates the run after each crash, until the operation is done or was alone in three of them."""
    while True:
        try:
            return await dispatch.forward_backward(request)
        except WorkerLost as lost:
            alone.append(lost.alone)
            if sum(alone) == MAX_STRIKES:
                raise
            await recreate(dispatch, request.model_id)


async def recreate(dispatch: WorkerDispatch, run_id: str) -> None:
    """Creates the run again as a rebuild does."""
    while True:
        try:
            await dispatch.drop_run(run_id, keeps_suspicion=True)
            return await create(dispatch, run_id)
        except WorkerLost:
            continue


def test_only_the_operation_that_kills_its_worker_is_found_alone() -> None:
    innocents = [f"run-{number}" for number in range(8)]

    async def check() -> None:
        async with recording_dispatch(*innocents, "poisoned", "before") as dispatch:
            before = asyncio.create_task(dispatch.forward_backward(operation("before", seconds=0.1)))
            await asyncio.sleep(0.02)
            alone: dict[str, list[bool]] = {run_id: [] for run_id in (*innocents, "poisoned")}

            async def work(run_id: str) -> None:
                for seq_id in range(1, 4):
                    await retry_operation(dispatch, operation(run_id, seq_id), alone[run_id])

            works = [asyncio.create_task(work(run_id)) for run_id in innocents]
            fatal = operation("poisoned", loss_fn="die")
            with pytest.raises(WorkerLost):
                await retry_operation(dispatch, fatal, alone["poisoned"])
            await asyncio.gather(before, *works)
            assert alone["poisoned"] == [False] + [True] * MAX_STRIKES
            assert not any(any(alone[run_id]) for run_id in innocents) and all(alone[run_id] for run_id in innocents)
            assert dispatch.groups[0].supervisor.num_deaths == 1 + MAX_STRIKES
            await dispatch.drop_run("poisoned")
            for run_id in innocents:
                await recreate(dispatch, run_id)
            async with busy(dispatch, innocents[0]):
                requests = [dispatch.forward_backward(operation(run_id, 9)) for run_id in innocents]
                batch = asyncio.gather(*requests)
                await asyncio.sleep(0)
            assert {output.metrics["runs:max"] for output in await batch} == {len(innocents)}

    run(check())


@asynccontextmanager
async def busy(dispatch: WorkerDispatch, run_id: str) -> AsyncIterator[None]:
    """Keeps the worker busy with a pass of this run, so that all calls submitted inside are queued together."""
    running = asyncio.create_task(dispatch.forward_backward(operation(run_id, 8, seconds=0.1)))
    await asyncio.sleep(0.02)
    yield
    await running


def test_a_suspect_stays_alone_until_it_is_past_the_fatal_operation() -> None:
    """Operations that it repeats before the fatal one do not clear it."""

    async def check() -> None:
        async with recording_dispatch("a", "b", "c") as dispatch:
            for seq_id in (1, 2):
                await dispatch.forward_backward(operation("a", seq_id))
            both = [
                asyncio.create_task(dispatch.forward_backward(operation("a", 3, seconds=5))),
                asyncio.create_task(dispatch.forward_backward(operation("b", 1, seconds=5))),
            ]
            await asyncio.sleep(0.1)
            kill(dispatch)
            assert await were_alone(*both) == [False, False]
            for run_id in "abc":
                await recreate(dispatch, run_id)
            for seq_id in (1, 2, 3, 4):
                async with busy(dispatch, "c"):
                    requests = [operation(run_id, 10) for run_id in "cc"] + [operation("a", seq_id)]
                    waiting = asyncio.gather(*map(dispatch.forward_backward, requests))
                    await asyncio.sleep(0)
                assert tokens_of_pass((await waiting)[-1]) == (8 if seq_id < 4 else 24)
            await dispatch.drop_run("b")
            assert not dispatch.groups[0].scheduler.suspect_runs

    run(check())


def test_optimizer_steps_of_suspects_run_alone() -> None:
    async def check() -> None:
        async with recording_dispatch("a", "b", "c") as dispatch:
            both = [asyncio.create_task(dispatch.forward_backward(operation(each, 7, seconds=5))) for each in "ab"]
            await asyncio.sleep(0.1)
            kill(dispatch)
            await were_alone(*both)
            for run_id in "abc":
                await recreate(dispatch, run_id)
            for num_together in ([1, 1, 1], [3, 3, 3]):
                async with busy(dispatch, "c"):
                    waiting = asyncio.gather(*(dispatch.optim_step(step(run_id)) for run_id in "abc"))
                    await asyncio.sleep(0)
                steps = await waiting
                assert [each["steps:last"] for each in steps] == num_together
                for run_id in "ab":
                    await dispatch.forward_backward(operation(run_id, 7))

    run(check())


@pytest.mark.parametrize("num_others", [3, 20])
def test_only_the_sampling_request_that_kills_its_worker_is_found_alone(num_others: int) -> None:
    async def check() -> None:
        async with recording_dispatch() as dispatch:
            alone: dict[str, list[bool]] = {str(number): [] for number in range(num_others)} | {"dies": []}

            async def sample(job_id: str) -> None:
                while sum(alone[job_id]) < MAX_STRIKES:
                    try:
                        await dispatch.sample("tiny", job(job_id, 30))
                        return
                    except WorkerLost as lost:
                        alone[job_id].append(lost.alone)

            await asyncio.gather(*map(sample, alone))
            fatal = alone.pop("dies")
            assert fatal[-MAX_STRIKES:] == [True] * MAX_STRIKES and len(fatal) <= MAX_STRIKES + 3
            assert not any(map(any, alone.values()))
            assert not any(job_id in dispatch.groups[0].scheduler.suspect_jobs for job_id in alone)

    run(check())


# --- suspects and others ---


async def retry_sample(dispatch: WorkerDispatch, each: SampleJob, alone: list[bool]) -> None:
    """Retries after each crash as a server does, until the job is done or was alone in three of them."""
    while True:
        try:
            await dispatch.sample("tiny", each)
            return
        except WorkerLost as lost:
            alone.append(lost.alone)
            if sum(alone) == MAX_STRIKES:
                raise


async def wait_for_crashes(alone: Iterable[list[bool]], number: int = 1) -> None:
    while any(len(each) < number for each in alone):  # noqa: ASYNC110 (no event to wait for)
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("num_long", [2, 8])
def test_a_short_sample_does_not_wait_for_long_suspects(num_long: int) -> None:
    async def check() -> None:
        async with recording_dispatch() as dispatch:
            alone: dict[str, list[bool]] = {f"long {number}": [] for number in range(num_long)}
            works = [asyncio.create_task(retry_sample(dispatch, job(each, 20_000), alone[each])) for each in alone]
            await asyncio.sleep(0.3)
            kill(dispatch)
            await wait_for_crashes(alone.values())
            for number in range(3):
                await dispatch.sample("tiny", job(f"short {number}", 3))
            assert not any(each.done() for each in works)
            status = dispatch.status("tiny")
            assert status is not None
            assert status.endswith(f"; {num_long} sampling requests of a worker that died take turns with the others")
            await cancel_all(works)

    run(check())


async def cancel_all(works: list[asyncio.Task[None]]) -> None:
    for each in works:
        each.cancel()
    await asyncio.wait(works)


def test_long_suspects_do_not_hold_up_other_suspects() -> None:
    """One of twelve requests is long; the others do not wait for its end."""

    async def check() -> None:
        async with recording_dispatch() as dispatch:
            alone: dict[str, list[bool]] = {f"short {number}": [] for number in range(11)} | {"long": []}
            lengths = dict.fromkeys(alone, 100) | {"long": 20_000}
            works = {
                each: asyncio.create_task(retry_sample(dispatch, job(each, lengths[each]), alone[each]))
                for each in alone
            }
            await asyncio.sleep(0.2)
            kill(dispatch)
            await wait_for_crashes(alone.values())
            long = works.pop("long")
            await asyncio.gather(*works.values())
            assert not long.done()
            await cancel_all([long])

    run(check())


def test_later_requests_are_never_suspected() -> None:
    """Later requests are not held up either, and do not add crashes before the poison request is found."""

    async def check() -> None:
        async with recording_dispatch() as dispatch:
            alone: dict[str, list[bool]] = {name: [] for name in ("one", "two", "three", "dies later")}
            works = {name: asyncio.create_task(retry_sample(dispatch, job(name, 200), alone[name])) for name in alone}
            later: dict[str, list[bool]] = {}

            async def submit_more() -> None:
                for number in count():
                    flags = later[f"later {number}"] = []
                    await retry_sample(dispatch, job(f"later {number}", 3), flags)

            await wait_for_crashes(alone.values())
            submitting = asyncio.create_task(submit_more())
            with pytest.raises(WorkerLost):
                await works.pop("dies later")
            await asyncio.gather(*works.values())
            assert alone.pop("dies later") == [False, *[True] * MAX_STRIKES]
            assert not any(any(each) for each in [*alone.values(), *later.values()])
            assert dispatch.groups[0].supervisor.num_deaths == 1 + MAX_STRIKES and len(later) > 3
            await cancel_all([submitting])

    run(check())


def test_each_of_several_poison_requests_is_found() -> None:
    async def check() -> None:
        async with recording_dispatch() as dispatch:
            culprits, num = {f"dies {number}" for number in range(2)}, 8
            alone: dict[str, list[bool]] = {name: [] for name in culprits | {f"job {number}" for number in range(num)}}

            async def sample(name: str) -> None:
                with suppress(WorkerLost):
                    await retry_sample(dispatch, job(name, 30), alone[name])

            await asyncio.gather(*map(sample, alone))
            assert {name for name, flags in alone.items() if sum(flags)} == culprits
            assert dispatch.groups[0].supervisor.num_deaths <= len(culprits) * (MAX_STRIKES + 3)

    run(check())


def test_the_log_says_that_suspects_run_apart(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with recording_dispatch() as dispatch:
            alone: list[list[bool]] = [[] for _ in range(8)]
            works = [
                asyncio.create_task(retry_sample(dispatch, job(str(number), 20_000), each))
                for number, each in enumerate(alone)
            ]
            await asyncio.sleep(0.2)
            kill(dispatch)
            await wait_for_crashes(alone)
            await dispatch.sample("tiny", job("short", 1))
            await cancel_all(works)

    run(check())
    assert (
        "8 requests were in the call: until they get past that point they run apart from all others, 2 at a time"
        in caplog.text
    )
