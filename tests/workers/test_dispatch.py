"""The dispatch: how it batches the work of many runs, and what callers see when a worker dies."""

import asyncio
import json
import os
import shutil
import signal
import struct
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.tests.workers.recording_worker import RECORDING
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec, SampleJob, WorkerLost
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig

TOKENS = np.array([1, 5, 9, 13, 17, 21, 25, 29], np.int32)


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 200))


def spec(run_id: str, rank: int = 4) -> RunSpec:
    return RunSpec(run_id, LoraConfig(rank=rank, seed=0))


def step(run_id: str) -> OptimizerStep:
    return OptimizerStep(run_id, AdamParams(learning_rate=1e-2))


def operation(
    run_id: str, loss_fn: str = "sleep", lengths: Sequence[int] = (), seconds: float = 0.0, **config: float
) -> ForwardBackwardRequest:
    """Returns a request with data of these lengths; every token of datum i is i."""
    data = tuple(Datum(np.full(length, i, np.int32)) for i, length in enumerate(lengths))
    return ForwardBackwardRequest(run_id, 0, data, loss_fn, {"seconds": seconds, **config})


def sample_job(job_id: str, max_tokens: int = 1, adapter_id: str | None = None) -> SampleJob:
    """Returns a job that takes max_tokens slices on the recording worker."""
    return SampleJob(job_id, adapter_id, TOKENS[:3], SamplingParams(max_tokens=max_tokens, seed=0), (), ())


# --- with the real worker, on both pools ---


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.full)])
def dispatch(
    request: pytest.FixtureRequest, runner: asyncio.Runner, tiny_models: dict[str, Path]
) -> Iterator[WorkerDispatch]:
    models = (WorkerConfig(ServedModel("tiny", str(tiny_models["qwen3"])), device="cpu", threads=1, max_lora_rank=8),)
    dispatch = WorkerDispatch(DispatchConfig(models, pool=request.param, pass_tokens=64))
    runner.run(dispatch.start(lambda _: None))
    yield dispatch
    runner.run(dispatch.close())


def cross_entropy(run_id: str) -> ForwardBackwardRequest:
    inputs = {"target_tokens": np.roll(TOKENS, -1).astype(np.int64), "weights": np.ones(len(TOKENS), np.float32)}
    return ForwardBackwardRequest(run_id, 0, (Datum(TOKENS, inputs),), "cross_entropy")


async def train(dispatch: WorkerDispatch, run_id: str, num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        losses.append((await dispatch.forward_backward(cross_entropy(run_id))).metrics["loss:sum"])
        await dispatch.optim_step(step(run_id))
    return losses


def test_two_runs_train_and_sample(dispatch: WorkerDispatch, runner: asyncio.Runner, tmp_path: Path) -> None:
    async def check() -> None:
        assert dispatch.models["tiny"].vocab_size == 512
        for run_id in ("first", "second"):
            assert (await dispatch.create_run("tiny", spec(run_id), "tenant")).num_parameters > 0
        first, second = await asyncio.gather(train(dispatch, "first", 5), train(dispatch, "second", 5))
        assert first == pytest.approx(second, rel=1e-5) and first[-1] < first[0]
        await dispatch.copy_adapter("first", "sampler")
        await dispatch.save_run("first", tmp_path, optimizer=True)
        await dispatch.load_run("second", tmp_path, optimizer=True)
        await dispatch.load_adapter("tiny", "loaded", tmp_path)
        jobs = [sample_job(str(adapter_id), 4, adapter_id) for adapter_id in ("sampler", "loaded", None)]
        trained, loaded, bare = await asyncio.gather(*(dispatch.sample("tiny", job) for job in jobs))
        np.testing.assert_array_equal(trained.sequences[0].logprobs, loaded.sequences[0].logprobs)
        assert not np.array_equal(trained.sequences[0].logprobs, bare.sequences[0].logprobs)
        assert (await dispatch.memory())["tiny"]["base_weights"] > 0
        for adapter_id in ("sampler", "loaded"):
            await dispatch.drop_adapter(adapter_id)
        for run_id in ("first", "second"):
            await dispatch.drop_run(run_id)
        assert dispatch.status("tiny") is None

    runner.run(check())


def test_operation_split_over_passes_trains_like_a_whole_one(dispatch: WorkerDispatch, runner: asyncio.Runner) -> None:
    async def check() -> None:
        for run_id in ("split", "whole"):
            await dispatch.create_run("tiny", spec(run_id), "tenant")
        data = cross_entropy("split").data * 12
        large = await dispatch.forward_backward(replace(cross_entropy("split"), data=data))
        losses = [(await dispatch.forward_backward(cross_entropy("whole"))).metrics["loss:sum"] for _ in data]
        assert large.metrics["loss:sum"] == pytest.approx(sum(losses), rel=1e-5) and len(large.loss_fn_outputs) == 12
        assert large.metrics["loss:sum"] != pytest.approx(sum(losses[1:]), rel=1e-5)
        norms = [(await dispatch.optim_step(step(run_id)))["unclipped_grad_l2:mean"] for run_id in ("split", "whole")]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        for run_id in ("split", "whole"):
            await dispatch.drop_run(run_id)

    runner.run(check())


def test_wrong_requests_are_refused_with_the_reason(dispatch: WorkerDispatch, runner: asyncio.Runner) -> None:
    async def check() -> None:
        with pytest.raises(OperationError, match="base model huge is not served here; served are: tiny") as refused:
            await dispatch.create_run("huge", spec("run"), "tenant")
        assert refused.value.category == "user"
        with pytest.raises(OperationError, match="256") as refused:
            await dispatch.create_run("tiny", spec("run", rank=256), "tenant")
        assert refused.value.category == "user"
        with pytest.raises(OperationError, match="run missing is not live"):
            await dispatch.optim_step(step("missing"))

    runner.run(check())


def test_worker_death_fails_its_runs_and_new_runs_work(dispatch: WorkerDispatch, runner: asyncio.Runner) -> None:
    async def check() -> None:
        await dispatch.create_run("tiny", spec("victim"), "tenant")
        await dispatch.copy_adapter("victim", "victim-sampler")
        [pid] = dispatch.pids("tiny")
        os.kill(pid, signal.SIGSTOP)  # so that it cannot answer before it dies
        sampling = asyncio.create_task(dispatch.sample("tiny", sample_job("long", 900)))
        training = asyncio.create_task(train(dispatch, "victim", 1000))
        await asyncio.sleep(0.03)
        os.kill(pid, signal.SIGKILL)
        for pending in (sampling, training):
            with pytest.raises(WorkerLost, match=r"worker died.*what only the worker had is lost") as failed:
                await pending
            assert failed.value.category == "server"
        with pytest.raises(WorkerLost, match=r"victim was lost when the worker of tiny died"):
            await dispatch.forward_backward(cross_entropy("victim"))
        with pytest.raises(WorkerLost, match=r"victim-sampler was lost"):
            await dispatch.sample("tiny", sample_job("adapted", 1, "victim-sampler"))
        assert dispatch.status("tiny") == "the worker of tiny is restarting"
        sampled = await dispatch.sample("tiny", sample_job("bare", 2))
        assert len(sampled.sequences[0].tokens) == 2
        await dispatch.create_run("tiny", spec("successor"), "tenant")
        losses = await train(dispatch, "successor", 2)
        assert losses[1] < losses[0]
        await dispatch.drop_run("victim")
        await dispatch.drop_adapter("victim-sampler")

    runner.run(check())


# --- how waiting work is scheduled ---


@asynccontextmanager
async def recording(
    *runs: str,
    slice_milliseconds: float = 5.0,
    names: tuple[str, ...] = ("tiny",),
    slots: int = 64,
) -> AsyncIterator[WorkerDispatch]:
    """Starts a dispatch with the recording worker and passes of 800 tokens. A run's tenant is its first letter."""
    models = tuple(
        WorkerConfig(ServedModel(name, name), device="cpu", max_lora_rank=8, adapter_slots=slots) for name in names
    )
    config = DispatchConfig(models, worker=RECORDING, slice_milliseconds=slice_milliseconds, pass_tokens=800)
    dispatch = WorkerDispatch(config)
    await dispatch.start(lambda _: None)
    try:
        for run_id in runs:
            await dispatch.create_run(names[0], spec(run_id), run_id[0])
        yield dispatch
    finally:
        await dispatch.close()


@asynccontextmanager
async def occupied(dispatch: WorkerDispatch, run_id: str) -> AsyncIterator[None]:
    """Keeps the worker in a pass of this run; all that is submitted inside waits and is ready together afterwards."""
    running = asyncio.create_task(dispatch.forward_backward(operation(run_id, seconds=0.1)))
    await asyncio.sleep(0.02)
    yield
    await running


def call_of(output: ForwardBackwardOutput) -> float:
    return output.metrics["call:last"]


@pytest.mark.parametrize(("worker", "num_parts"), [("RecordingWorker", 2), ("RecordingGpuWorker", 1)])
def test_a_pass_gives_each_gpu_a_micro_batch_by_default(worker: str, num_parts: int) -> None:
    async def check() -> None:
        model = WorkerConfig(ServedModel("tiny", "tiny"), device="cpu")
        dispatch = WorkerDispatch(DispatchConfig((model,), worker=RECORDING.replace("RecordingWorker", worker)))
        await dispatch.start(lambda _: None)
        try:
            await dispatch.create_run("tiny", spec("a"), "a")
            output = await dispatch.forward_backward(operation("a", lengths=[100] * 119))
            assert output.metrics["parts:sum"] == num_parts
        finally:
            await dispatch.close()

    run(check())


def test_operations_ready_together_share_a_pass() -> None:
    async def check() -> None:
        async with recording("a", "b", "c") as dispatch:
            async with occupied(dispatch, "c"):
                requests = [operation(run_id, lengths=[20]) for run_id in ("a", "a", "b", "c")]
                waiting = asyncio.gather(*map(dispatch.forward_backward, requests))
                await asyncio.sleep(0)
            outputs = await waiting
            assert {call_of(output) for output in outputs} == {call_of(outputs[0])}
            assert outputs[0].metrics["runs:max"] == 3 and outputs[0].metrics["tokens:max"] == 80

    run(check())


def test_a_large_operation_is_split_and_answers_as_one() -> None:
    async def check() -> None:
        async with recording("a", "b") as dispatch:
            lengths = [40] * 30 + [900] + [7] * 20
            large, other = await asyncio.gather(
                dispatch.forward_backward(operation("a", lengths=lengths)),
                dispatch.forward_backward(operation("b", lengths=[30] * 40)),
            )
            assert [int(each["first"][0]) for each in large.loss_fn_outputs] == list(range(51))
            assert [int(each["first"][0]) for each in other.loss_fn_outputs] == list(range(40))
            assert large.metrics["parts:sum"] >= 4 and other.metrics["parts:sum"] >= 2

    run(check())


@pytest.mark.parametrize("fault", ["refuse", "fail"])
def test_failed_part_ends_its_operation_but_not_the_run(fault: str) -> None:
    async def check() -> None:
        async with recording("a") as dispatch:
            with pytest.raises(OperationError, match="refused" if fault == "refuse" else "KeyError"):
                await dispatch.forward_backward(operation("a", fault, lengths=[100] * 100, part=1))
            output = await dispatch.forward_backward(operation("a", lengths=[1]))
            assert call_of(output) == 4 and dispatch.status("tiny") is None

    run(check())


@pytest.mark.parametrize("clearing", [None, "gradients", "vocabulary"])
def test_optim_step_after_a_failed_call_is_refused_once(clearing: str | None) -> None:
    async def check() -> None:
        async with recording("a", "b") as dispatch:
            await dispatch.forward_backward(operation("a", lengths=[8]))
            with pytest.raises(OperationError, match="KeyError"):
                await dispatch.forward_backward(operation("a", "fail", lengths=[64]))
            if clearing == "gradients":
                await dispatch.clear_gradients("a")
            elif clearing == "vocabulary":
                await dispatch.set_vocabulary("a", np.arange(3))
            else:
                with pytest.raises(OperationError, match="KeyError"):
                    await dispatch.optim_step(step("a"))
            await dispatch.optim_step(step("b"))
            await dispatch.optim_step(step("a"))

    run(check())


def test_a_short_operation_waits_for_one_pass_while_large_ones_are_split() -> None:
    async def check() -> None:
        async with recording("a", "b", "b2", "c") as dispatch:
            bulk = asyncio.gather(
                *(
                    dispatch.forward_backward(operation(run_id, lengths=[20] * 300, seconds=0.02))
                    for run_id in ("a", "b")
                )
            )
            await asyncio.sleep(0.01)
            calls = []
            for run_id in ("c", "b2", "c", "b2"):
                short = await dispatch.forward_backward(operation(run_id, lengths=[50]))
                assert short.metrics["runs:max"] == 3 and short.metrics["tokens:max"] <= 800
                calls.append(call_of(short))
            # Two at most: the pass formed while its predecessor was answered, then its own.
            assert all(after - before <= 2 for before, after in pairwise(calls))
            assert all(call_of(output) > calls[-1] for output in await bulk)

    run(check())


def test_large_operation_of_a_cancelled_caller_runs_to_its_end() -> None:
    async def check() -> None:
        async with recording("a", slice_milliseconds=1) as dispatch:
            large = asyncio.create_task(dispatch.forward_backward(operation("a", lengths=[100] * 24, seconds=0.05)))
            await asyncio.sleep(0.02)
            large.cancel()
            after = await dispatch.forward_backward(operation("a", lengths=[100]))
            # The worker asserts that nothing of the large one is left.
            assert call_of(after) == 5 and after.metrics["parts:sum"] == 1

    run(check())


def test_worker_death_between_parts_discards_the_operations() -> None:
    async def check() -> None:
        async with recording("a", "b") as dispatch:
            requests = [operation("a", "die", lengths=[100] * 100, part=2), operation("b", lengths=[100] * 100)]
            failed = await asyncio.gather(*map(dispatch.forward_backward, requests), return_exceptions=True)
            assert all("worker died" in str(error) for error in failed)
            await dispatch.create_run("tiny", spec("a"), "a")
            assert call_of(await dispatch.forward_backward(operation("a", lengths=[100]))) == 2
            assert dispatch.status("tiny") is None

    run(check())


def test_pass_has_no_more_runs_than_adapter_slots() -> None:
    async def check() -> None:
        runs = [f"{tenant}{number}" for tenant in "abc" for number in range(4)]
        async with recording(*runs, slots=3) as dispatch:
            async with occupied(dispatch, runs[0]):
                waiting = asyncio.gather(
                    *(dispatch.forward_backward(operation(run_id, lengths=[5])) for run_id in runs)
                )
                await asyncio.sleep(0)
            assert {output.metrics["runs:max"] for output in await waiting} == {3}

    run(check())


def test_other_calls_take_turns_with_passes() -> None:
    async def check() -> None:
        async with recording("a", "b") as dispatch:
            bulk = asyncio.create_task(dispatch.forward_backward(operation("a", lengths=[100] * 80, seconds=0.02)))
            copies = [dispatch.copy_adapter("b", f"sampler-{number}") for number in range(20)]
            await asyncio.gather(*copies)
            assert not bulk.done()
            assert (await bulk).metrics["parts:sum"] == 10

    run(check())


def test_status_describes_waiting_work() -> None:
    async def check() -> None:
        async with recording("a", "b") as dispatch:
            assert dispatch.status("tiny") is None
            async with occupied(dispatch, "a"):
                assert dispatch.status("tiny") == "1 operation waits or runs on tiny"
                large = asyncio.create_task(dispatch.forward_backward(operation("b", lengths=[100] * 24)))
                await asyncio.sleep(0)
                assert dispatch.status("tiny") == "2 operations wait or run on tiny; 2400 tokens wait for 3 passes"
            await large

    run(check())


def test_ready_optim_steps_share_a_call_behind_operations_of_their_runs() -> None:
    async def check() -> None:
        async with recording("a", "b", "c") as dispatch:
            async with occupied(dispatch, "a"):
                operations = [dispatch.forward_backward(operation(run_id)) for run_id in ("c", "c")]
                waiting = asyncio.gather(*operations)
                steps = asyncio.gather(*(dispatch.optim_step(step(run_id)) for run_id in ("a", "b", "c")))
                await asyncio.sleep(0)
            metrics = await steps
            # a and b share a call at once, because it may unblock passes; c's follows its operations.
            assert [each["steps:last"] for each in metrics] == [2, 2, 1]
            calls = [metrics[0]["call:last"], *map(call_of, await waiting), metrics[2]["call:last"]]
            assert calls == [calls[0], calls[0] + 1, calls[0] + 1, calls[0] + 2]

    run(check())


def test_the_next_forward_backward_starts_after_the_step_has_been_answered() -> None:
    async def check() -> None:
        async with recording("a", "b") as dispatch:
            async with occupied(dispatch, "b"):
                first = asyncio.create_task(dispatch.forward_backward(operation("a", lengths=[40])))
                stepped = asyncio.create_task(dispatch.optim_step(step("a")))
                second = asyncio.create_task(dispatch.forward_backward(operation("a", lengths=[40])))
                other = asyncio.create_task(dispatch.forward_backward(operation("b", lengths=[40])))
                await asyncio.sleep(0)
            calls = [call_of(await first), (await stepped)["call:last"], call_of(await second)]
            assert calls == [calls[0], calls[0] + 1, calls[0] + 2]
            assert call_of(await other) == calls[0]

    run(check())


def test_long_passes_and_sampling_get_equal_time() -> None:
    async def check() -> None:
        async with recording("run") as dispatch:
            sampling = asyncio.create_task(dispatch.sample("tiny", sample_job("endless", 10_000)))
            passes = (dispatch.forward_backward(operation("run", lengths=[800], seconds=0.1)) for _ in range(5))
            outputs = await asyncio.gather(*passes)
            slices = [output.metrics["slices:last"] for output in outputs]
            # Between two passes of 100 ms: 100 ms of slices of at least 5 ms.
            assert 2 < (slices[-1] - slices[0]) / 4 <= 21
            sampling.cancel()

    run(check())


def test_unexpected_failure_is_a_server_error_and_affects_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with recording("run", "other") as dispatch:
            with pytest.raises(OperationError, match="the worker failed: KeyError: 'unforeseen'") as failed:
                await dispatch.forward_backward(operation("run", "fail"))
            assert failed.value.category == "server"
            with pytest.raises(OperationError, match="refused") as failed:
                await dispatch.forward_backward(operation("run", "refuse"))
            assert failed.value.category == "user"
            with pytest.raises(OperationError, match="the worker failed: KeyError"):
                await dispatch.sample("tiny", sample_job("job", 3, "fails"))
            await dispatch.sample("tiny", sample_job("job", 3))
            await dispatch.optim_step(step("other"))

    run(check())


@pytest.mark.parametrize("joined", [False, True])
def test_cancelled_sample_fails_and_leaves_the_worker(joined: bool) -> None:
    async def check() -> None:
        async with recording("run", slice_milliseconds=1) as dispatch:
            running = asyncio.create_task(asyncio.sleep(0))
            if not joined:
                running = asyncio.create_task(dispatch.forward_backward(operation("run", "sleep", seconds=0.2)))
                await asyncio.sleep(0.05)
            sampling = asyncio.create_task(dispatch.sample("tiny", sample_job("job", 10_000)))
            await asyncio.sleep(0.05)
            dispatch.cancel("job")
            with pytest.raises(OperationError, match="job was cancelled"):
                await sampling
            await wait_until_nothing_samples(dispatch)
            assert bool((await dispatch.memory())["tiny"]["slices"]) == joined
            dispatch.cancel("job")
            await running

    run(check())


def test_sampling_continues_for_any_number_of_slices() -> None:
    async def check() -> None:
        async with recording(slice_milliseconds=0.1) as dispatch:
            assert await dispatch.sample("tiny", sample_job("job", 1500)) is not None
            assert (await dispatch.memory())["tiny"]["slices"] >= 1500

    run(check())


def test_sample_of_a_cancelled_caller_leaves_the_worker() -> None:
    async def check() -> None:
        async with recording(slice_milliseconds=1) as dispatch:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(dispatch.sample("tiny", sample_job("job", 10_000)), 0.05)
            await wait_until_nothing_samples(dispatch)

    run(check())


async def wait_until_nothing_samples(dispatch: WorkerDispatch) -> None:
    for _ in range(100):
        if dispatch.status("tiny") is None and (await dispatch.memory())["tiny"]["sampling"] == 0:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the worker still samples")


def test_waiting_work_of_a_cancelled_caller_does_not_start() -> None:
    async def check() -> None:
        async with recording("run") as dispatch:
            running = asyncio.create_task(dispatch.forward_backward(operation("run", "sleep", seconds=0.1)))
            await asyncio.sleep(0.02)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(dispatch.forward_backward(operation("run", "die")), 0.01)
            assert dispatch.status("tiny") == "1 operation waits or runs on tiny"
            await running
            await dispatch.optim_step(step("run"))

    run(check())


def test_worker_death_does_not_affect_other_base_models() -> None:
    async def check() -> None:
        async with recording("run", names=("tiny", "other")) as dispatch:
            await dispatch.create_run("other", spec("elsewhere"), "tenant")
            with pytest.raises(OperationError, match="exit code 1"):
                await dispatch.forward_backward(operation("run", "die"))
            await dispatch.optim_step(step("elsewhere"))
            await dispatch.create_run("tiny", spec("new"), "tenant")

    run(check())


def test_close_fails_waiting_work() -> None:
    async def check() -> None:
        async with recording("run") as dispatch:
            waiting = [
                asyncio.create_task(dispatch.forward_backward(operation("run", "sleep", seconds=30))),
                asyncio.create_task(dispatch.optim_step(step("run"))),
                asyncio.create_task(dispatch.sample("tiny", sample_job("job", 10_000))),
            ]
            await asyncio.sleep(0.05)
        for each in waiting:
            with pytest.raises(OperationError, match="shutting down"):
                await each
        with pytest.raises(OperationError, match="shutting down"):
            await dispatch.optim_step(step("run"))

    run(check())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_worker_that_dies_during_restart_leaks_no_files(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent / "configs" / "Llama-3.1-8B.json", tmp_path / "config.json")

    async def check() -> None:
        async with recording("run", names=(str(tmp_path),)) as dispatch:
            files = len(os.listdir("/proc/self/fd"))
            (tmp_path / "dies-once").touch()
            with pytest.raises(OperationError, match="worker died"):
                await dispatch.forward_backward(operation("run", "die"))
            await dispatch.create_run(str(tmp_path), spec("run"), "tenant")
            assert not (tmp_path / "dies-once").exists()
            assert len(os.listdir("/proc/self/fd")) == files

    run(check())


# --- start ---


def test_start_reports_what_it_loads_and_how_long_it_took(tmp_path: Path) -> None:
    async def check() -> None:
        write_header(tmp_path, shape=(1000, 250))
        model = WorkerConfig(ServedModel("tiny", str(tmp_path)), device="cpu")
        dispatch = WorkerDispatch(DispatchConfig((model,), worker=RECORDING))
        lines: list[str] = []
        await dispatch.start(lines.append)
        await dispatch.close()
        assert lines[0] == f"loading tiny from {tmp_path} (1 MB) ..."
        assert lines[1].startswith("tiny ready in ") and len(lines) == 2

    run(check())


def test_models_that_do_not_fit_are_refused_with_their_sizes(tmp_path: Path) -> None:
    write_header(tmp_path, shape=(1 << 20, 1 << 22))
    models = tuple(WorkerConfig(ServedModel(name, str(tmp_path)), device="cpu") for name in ("first", "second"))
    dispatch = WorkerDispatch(DispatchConfig(models, worker=RECORDING))
    with pytest.raises(ValueError, match=r"need 35184\.4 GB .*first 17592\.2 GB.*second.* is available.*bfloat16"):
        asyncio.run(dispatch.start(lambda _: None))


def write_header(directory: Path, shape: tuple[int, int]) -> None:
    header = json.dumps({"weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    shutil.copy(Path(__file__).parent / "configs" / "Llama-3.1-8B.json", directory / "config.json")


def test_start_fails_with_the_reason_if_a_model_does_not_load() -> None:
    async def check() -> None:
        models = tuple(WorkerConfig(ServedModel(name, name), device="cpu") for name in ("tiny", "broken"))
        with pytest.raises(ValueError, match="broken: no weights in this directory"):
            await WorkerDispatch(DispatchConfig(models, worker=RECORDING)).start(lambda _: None)

    run(check())


def test_impossible_layout_is_refused_before_loading(tiny_models: dict[str, Path]) -> None:
    async def check() -> None:
        model = WorkerConfig(ServedModel("M", str(tiny_models["qwen3"])), parallel=ParallelSpec(tp=3))
        dispatch, lines = WorkerDispatch(DispatchConfig((model,))), []
        with pytest.raises(ValueError, match="tp=3 does not divide 4 query heads of M; valid tp: 1, 2"):
            await dispatch.start(lines.append)
        assert not lines

    asyncio.run(check())


def test_model_name_given_twice_is_refused() -> None:
    model = WorkerConfig(ServedModel("tiny", "tiny"))
    with pytest.raises(ValueError, match="base model tiny is given twice"):
        WorkerDispatch(DispatchConfig((model, model)))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_tenant_weight_must_be_positive_and_finite(weight: float) -> None:
    with pytest.raises(ValueError, match=rf"the weight {weight} of tenant alice must be positive and finite"):
        WorkerDispatch(DispatchConfig((), tenant_weights={"alice": weight}))


@pytest.mark.parametrize("weights", [{"alice": 1001.0}, {"alice": 1e-6}, {"alice": 0.02, "bob": 30.0}])
def test_tenant_weights_too_far_apart_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="1000 times the lightest"):
        WorkerDispatch(DispatchConfig((), tenant_weights=weights))
    WorkerDispatch(DispatchConfig((), tenant_weights={"alice": 30.0, "bob": 0.05}))
