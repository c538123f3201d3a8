"""Workers that only sample: the same samples as from the training workers, at the same time, and through crashes."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import SampleResponse, SamplingParams
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardRequest
from trainhouse.tests.workers.recording_worker import RECORDING
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec, SampledPart, SampleJob
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import SamplingConfig, ServedModel, WorkerConfig
from trainhouse.workers.scheduler.supervision.backoff import RestartBackoff

from ...drawn import assert_same_sample

LLAMA = Path(__file__).parents[1] / "configs" / "Llama-3.1-8B.json"
pytestmark = pytest.mark.anyio

TOKENS = np.array([1, 5, 9, 13, 17, 21, 25, 29], np.int32)


def job(job_id: str, adapter_id: str | None = None, max_tokens: int = 12, **options: Any) -> SampleJob:
    return SampleJob(job_id, adapter_id, TOKENS[:3], SamplingParams(max_tokens=max_tokens, seed=7), (), (), **options)


def tiny(source: Path) -> WorkerConfig:
    return WorkerConfig(ServedModel("tiny", str(source)), device="cpu", threads=1, max_lora_rank=8)


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.full)])
async def dispatch(
    request: pytest.FixtureRequest,
    tiny_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    anyio_backend: str,
) -> AsyncIterator[WorkerDispatch]:
    """Has two sampler groups."""
    sampling = SamplingConfig(workers=2, directory=str(tmp_path_factory.mktemp("copies")))
    config = DispatchConfig((tiny(tiny_models["qwen3"]),), pool=request.param, sampling=sampling)
    async with running(config) as dispatch:
        yield dispatch


async def trained_run(dispatch: WorkerDispatch, run_id: str) -> str:
    await dispatch.create_run("tiny", RunSpec(run_id, LoraConfig(rank=4, seed=0)), "tenant")
    await train(dispatch, run_id, 3)
    return run_id


async def train(dispatch: WorkerDispatch, run_id: str, num_steps: int) -> None:
    inputs = {"target_tokens": np.roll(TOKENS, -1).astype(np.int64), "weights": np.ones(len(TOKENS), np.float32)}
    for _ in range(num_steps):
        await dispatch.forward_backward(ForwardBackwardRequest(run_id, 0, (Datum(TOKENS, inputs),), "cross_entropy"))
        await dispatch.optim_step(OptimizerStep(run_id, AdamParams(learning_rate=1e-2)))


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Stops these workers during the block, so that what they sample does not end before it."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def assert_same(one: SampleResponse, other: SampleResponse) -> None:
    for ours, theirs in zip(one.sequences, other.sequences, strict=True):
        assert_same_sample(ours, theirs)


def differ(one: SampleResponse, other: SampleResponse) -> bool:
    return not np.allclose(one.sequences[0].logprobs[:1], other.sequences[0].logprobs[:1], atol=1e-4)


async def sample_together(dispatch: WorkerDispatch, jobs: Sequence[SampleJob]) -> list[SampleResponse]:
    return await asyncio.gather(*(dispatch.sample("tiny", each) for each in jobs))


async def test_samples_equal_those_of_the_training_workers(
    dispatch: WorkerDispatch, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Both groups sample the copy, the checkpoint and the base. Control: the base differs from the copy."""
    run_id = await trained_run(dispatch, "same")
    await dispatch.copy_adapter(run_id, "copied")
    await dispatch.save_run(run_id, tmp_path, optimizer=False)
    await dispatch.load_adapter("tiny", "loaded", tmp_path)
    adapters = ("copied", "loaded", None)
    jobs = [job(f"{each}-{number}", each, num_samples=3) for number in range(2) for each in adapters]
    copied, loaded, bare, *again = await sample_together(dispatch, jobs)
    async with running(DispatchConfig((tiny(tiny_models["qwen3"]),))) as native:
        await native.load_adapter("tiny", "loaded", tmp_path)
        trained, base = await sample_together(native, [jobs[1], jobs[2]])
    for ours, theirs in zip((copied, loaded, bare, *again), (trained, trained, base) * 2, strict=True):
        assert_same(ours, theirs)
    assert differ(copied, bare)
    for adapter_id in ("copied", "loaded"):
        await dispatch.drop_adapter(adapter_id)
    await dispatch.drop_run(run_id)
    assert dispatch.status("tiny") is None


async def test_copy_gets_new_weights_and_a_snapshot_stays(dispatch: WorkerDispatch) -> None:
    run_id = await trained_run(dispatch, "moving")
    for adapter_id in ("snapshot", "inflight"):
        await dispatch.copy_adapter(run_id, adapter_id)
    early = await sample_together(dispatch, [job(f"early-{number}", "inflight") for number in range(2)])
    await train(dispatch, run_id, 3)
    await dispatch.copy_adapter(run_id, "inflight")
    await dispatch.copy_adapter(run_id, "of-now")
    late = await sample_together(dispatch, [job(f"late-{number}", "inflight") for number in range(4)])
    of_now, kept = await sample_together(dispatch, [job("of-now", "of-now"), job("kept", "snapshot")])
    for each in late:
        assert_same(each, of_now)
    assert_same(kept, early[0])
    assert differ(kept, of_now)
    for adapter_id in ("snapshot", "inflight", "of-now"):
        await dispatch.drop_adapter(adapter_id)
    await dispatch.drop_run(run_id)


@pytest.mark.slow
async def test_running_request_continues_with_newer_weights(dispatch: WorkerDispatch) -> None:
    run_id = await trained_run(dispatch, "under-way")
    await dispatch.copy_adapter(run_id, "inflight")
    whole = await dispatch.sample("tiny", job("undisturbed", "inflight", 900))
    begun = asyncio.Event()
    long = job("long", "inflight", 900, streams=True)
    sampling = asyncio.create_task(dispatch.sample("tiny", long, lambda _: begun.set()))
    await begun.wait()
    with stopped(dispatch.pids("tiny")[1:]):
        await train(dispatch, run_id, 1)
    await dispatch.copy_adapter(run_id, "inflight")
    moved = (await sampling).sequences[0]
    assert np.allclose(moved.logprobs[:1], whole.sequences[0].logprobs[:1], atol=1e-4)
    assert not np.array_equal(moved.tokens, whole.sequences[0].tokens)
    await dispatch.drop_adapter("inflight")
    await dispatch.drop_run(run_id)


@pytest.mark.slow
async def test_requests_of_a_dead_sampler_worker_are_rerun(dispatch: WorkerDispatch) -> None:
    """The run is dropped, so the adapter is from the server's copy. No token is streamed twice."""
    run_id = await trained_run(dispatch, "survived")
    await dispatch.copy_adapter(run_id, "survivor")
    await dispatch.drop_run(run_id)
    expected = await dispatch.sample("tiny", job("undisturbed", "survivor", 900))
    streamed: list[list[SampledPart]] = [[], []]
    long = [job(f"long-{number}", "survivor", 900, streams=True) for number in range(2)]
    sampling = [
        asyncio.create_task(dispatch.sample("tiny", each, lambda parts, list_=list_: list_.extend(parts)))
        for each, list_ in zip(long, streamed, strict=True)
    ]
    while not all(streamed):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    training, *samplers = dispatch.pids("tiny")
    for pid in samplers:
        os.kill(pid, signal.SIGKILL)
    for response, parts in zip(await asyncio.gather(*sampling), streamed, strict=True):
        assert_same(response, expected)
        tokens = np.concatenate([part.tokens for part in parts])
        np.testing.assert_array_equal(tokens, expected.sequences[0].tokens[: len(tokens)])
    assert dispatch.pids("tiny")[0] == training and not set(dispatch.pids("tiny")) & set(samplers)
    await dispatch.drop_adapter("survivor")


async def test_stream_of_replaced_weights_fails_if_its_worker_dies(dispatch: WorkerDispatch) -> None:
    """A rerun would continue as another sample."""
    run_id = await trained_run(dispatch, "moved-on")
    await dispatch.copy_adapter(run_id, "moving-on")
    streamed: list[SampledPart] = []
    long = job("long", "moving-on", 900, streams=True)
    sampling = asyncio.create_task(dispatch.sample("tiny", long, streamed.extend))
    while sum(len(part.tokens) for part in streamed) < 20:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    samplers = dispatch.pids("tiny")[1:]
    with stopped(samplers):
        await train(dispatch, run_id, 3)
    await dispatch.copy_adapter(run_id, "moving-on")
    for pid in samplers:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(OperationError, match="tokens that differ from those already streamed") as failed:
        await sampling
    assert failed.value.category == "server"
    await wait_until_all_are_up(dispatch)
    await dispatch.drop_adapter("moving-on")
    await dispatch.drop_run(run_id)


async def test_dropped_adapter_leaves_all_workers(dispatch: WorkerDispatch, tmp_path: Path) -> None:
    run_id = await trained_run(dispatch, "dropped")
    await dispatch.copy_adapter(run_id, "drop-me")
    await sample_together(dispatch, [job(f"drop-me-{number}", "drop-me") for number in range(4)])
    assert sum(await num_adapters(dispatch)) == 3, "the run and a copy in each sampler"
    await dispatch.drop_adapter("drop-me")
    await dispatch.drop_run(run_id)
    assert sum(await num_adapters(dispatch)) == 0
    with pytest.raises(OperationError, match="drop-me is gone: its sampler was closed"):
        await dispatch.sample("tiny", job("late", "drop-me"))


async def num_adapters(dispatch: WorkerDispatch) -> list[int]:
    memory = await dispatch.memory()
    assert list(memory) == ["tiny", "tiny (sampler 1)", "tiny (sampler 2)"]
    return [each["num_adapters_on_device"] for each in memory.values()]


async def test_samplers_outlive_the_training_worker(dispatch: WorkerDispatch) -> None:
    run_id = await trained_run(dispatch, "victim")
    await dispatch.copy_adapter(run_id, "outlives")
    before = await dispatch.sample("tiny", job("before", "outlives"))
    os.kill(dispatch.pids("tiny")[0], signal.SIGKILL)
    with pytest.raises(OperationError, match=r"worker died|was lost"):
        await train(dispatch, run_id, 1000)
    assert_same(await dispatch.sample("tiny", job("after", "outlives")), before)
    with pytest.raises(OperationError, match="victim was lost"):
        await dispatch.copy_adapter(run_id, "outlives")
    await dispatch.drop_adapter("outlives")
    await dispatch.drop_run(run_id)


# --- samplers of several ranks ---

# (layout of training, layout of samplers, model)
LAYOUTS = [
    ("single", "tp=2", "qwen3"),
    *(
        pytest.param(*each, marks=pytest.mark.full)
        for each in (
            ("fsdp=2", "tp=2", "qwen3_moe"),
            ("fsdp=2", "ep=2", "qwen3_moe"),
            ("ep=2,sp=2", "ep=2,tp=2", "qwen3_moe"),
        )
    ),
]


@pytest.mark.parametrize(("training", "sampling", "kind"), LAYOUTS)
async def test_a_sampler_of_several_ranks_samples_as_one_rank(
    training: str, sampling: str, kind: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Samples what another layout trained, from memory and from a checkpoint. Control: another adapter differs."""
    spec = ParallelSpec.parse(sampling)
    samplers = SamplingConfig(1, spec, directory=str(tmp_path / "copies"))
    model = replace(tiny(tiny_models[kind]), parallel=ParallelSpec.parse(training))
    async with running(DispatchConfig((model,), sampling=samplers)) as dispatch:
        for run_id, num_steps in (("early", 1), ("late", 3)):
            await dispatch.create_run("tiny", RunSpec(run_id, LoraConfig(rank=4, seed=0)), "tenant")
            await train(dispatch, run_id, num_steps)
            await dispatch.copy_adapter(run_id, f"{run_id}-copied")
            (tmp_path / run_id).mkdir()
            await dispatch.save_run(run_id, tmp_path / run_id, optimizer=False)
            await dispatch.load_adapter("tiny", f"{run_id}-loaded", tmp_path / run_id)
        asked = [*ask("early-copied"), *ask("early-loaded"), *ask("late-copied"), *ask(None)]
        answers = await sample_together(dispatch, asked)
        assert len(dispatch.pids("tiny")) == model.parallel.num_ranks + spec.num_ranks
        memory = await dispatch.memory()
        assert list(memory) == ["tiny", "tiny (sampler 1)"]
    async with running(DispatchConfig((tiny(tiny_models[kind]),))) as dispatch:
        for run_id in ("early", "late"):
            await dispatch.load_adapter("tiny", run_id, tmp_path / run_id)
        early, late, bare = [await sample_together(dispatch, ask(each)) for each in ("early", "late", None)]
        whole = (await dispatch.memory())["tiny"]
    for ours, theirs in zip(answers, (*early, *early, *late, *bare), strict=True):
        assert_same(ours, theirs)
    for one, other in ((early, late), (early, bare), (late, bare)):
        assert differ(one[0], other[0])
    assert memory["tiny (sampler 1)"]["base_weights"] < 0.9 * whole["base_weights"], "each has a part of them"


def ask(adapter_id: str | None) -> list[SampleJob]:
    """Returns a greedy job and a random one."""
    greedy = SamplingParams(max_tokens=24, temperature=0.0, seed=7)
    drawn = job(f"drawn-{adapter_id}", adapter_id, 24, num_samples=3)
    return [replace(drawn, job_id=f"greedy-{adapter_id}", params=greedy, num_samples=1), drawn]


@pytest.mark.full
@pytest.mark.timeout(900)  # where other work has the cores, Ray takes minutes to start five ranks
@pytest.mark.parametrize("pool", ["local", "ray"])
async def test_death_of_one_rank_restarts_its_sampler(
    pool: Literal["local", "ray"], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """All ranks of the sampler restart, with its adapters. Requests end as they would have without the death."""
    samplers = SamplingConfig(2, ParallelSpec(tp=2), directory=str(tmp_path))
    config = DispatchConfig((tiny(tiny_models["qwen3"]),), pool=pool, ray_cpus_per_rank=0.1, sampling=samplers)
    async with running(config) as dispatch:
        await dispatch.copy_adapter(await trained_run(dispatch, "run"), "copied")
        expected = await dispatch.sample("tiny", job("undisturbed", "copied", 900))
        streamed: list[list[SampledPart]] = [[], [], []]
        sampling = [
            asyncio.create_task(dispatch.sample("tiny", job(f"long-{n}", "copied", 900, streams=True), each.extend))
            for n, each in enumerate(streamed)
        ]
        while not all(streamed):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not any(each.done() for each in sampling), "each sampler has some of them"
        training, *before = dispatch.pids("tiny")
        os.kill(before[1], signal.SIGKILL)
        for response in await asyncio.gather(*sampling):
            assert_same(response, expected)
        await wait_until_all_are_up(dispatch)
        after = dispatch.pids("tiny")
        assert after[0] == training and after[3:] == before[2:] and not set(after[1:3]) & set(before)
        again = await sample_together(dispatch, [job(f"again-{n}", "copied", 900) for n in range(2)])
        for response in again:
            assert_same(response, expected)


# --- with a worker that computes nothing ---


@asynccontextmanager
async def running(config: DispatchConfig) -> AsyncIterator[WorkerDispatch]:
    dispatch = WorkerDispatch(config)
    await dispatch.start(lambda _: None)
    try:
        yield dispatch
    finally:
        await dispatch.close()


def recording(workers: int = 2, slice_milliseconds: float = 5.0) -> DispatchConfig:
    model = WorkerConfig(ServedModel("tiny", "tiny"), device="cpu", max_lora_rank=8)
    sampling = SamplingConfig(workers=workers)
    return DispatchConfig((model,), worker=RECORDING, slice_milliseconds=slice_milliseconds, sampling=sampling)


async def test_passes_and_sampling_run_at_the_same_time() -> None:
    async with running(recording()) as dispatch:
        await dispatch.create_run("tiny", RunSpec("run", LoraConfig(rank=4, seed=0)), "tenant")
        request = ForwardBackwardRequest("run", 0, (), "sleep", {"seconds": 2.0})
        passing = asyncio.create_task(dispatch.forward_backward(request))
        await asyncio.sleep(0.05)
        await dispatch.sample("tiny", job("meanwhile", max_tokens=20))
        assert not passing.done(), "the slices had to wait for the pass"
        assert (await passing).metrics["slices:last"] == 0


async def test_requests_go_to_the_group_with_the_fewest_tokens_in_flight() -> None:
    async with running(recording()) as dispatch:
        large = asyncio.create_task(dispatch.sample("tiny", job("large", max_tokens=50)))
        await asyncio.sleep(0)
        for number in range(10):
            await dispatch.sample("tiny", job(str(number), max_tokens=1))
        assert not large.done()
        memory = await dispatch.memory()
        assert memory["tiny"]["slices"] == 0
        assert memory["tiny (sampler 1)"]["sampling"] == 1 and memory["tiny (sampler 2)"]["slices"] >= 10
        dispatch.cancel("large")
        with pytest.raises(OperationError, match="sampling request large was cancelled"):
            await large
        while (await dispatch.memory())["tiny (sampler 1)"]["sampling"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def wait_until_all_are_up(dispatch: WorkerDispatch) -> None:
    while dispatch.status("tiny") is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def test_server_can_close_while_a_dead_worker_restarts() -> None:
    async with running(recording(workers=1)) as dispatch:
        dying = asyncio.create_task(dispatch.sample("tiny", job("dies")))
        while dispatch.status("tiny") is None or "restarting" not in str(dispatch.status("tiny")):  # noqa: ASYNC110
            await asyncio.sleep(0)
    with pytest.raises(OperationError, match="shutting down"):
        await dying


async def test_request_that_kills_every_worker_fails_and_others_continue() -> None:
    async with running(recording()) as dispatch:
        innocent = asyncio.create_task(dispatch.sample("tiny", job("innocent", max_tokens=100)))
        with pytest.raises(
            OperationError, match="3 sampler workers crashed during sampling request dies with"
        ) as failed:
            await dispatch.sample("tiny", job("dies"))
        assert failed.value.category == "server"
        await innocent
        await wait_until_all_are_up(dispatch)


async def test_requests_next_to_one_that_kills_the_worker_continue() -> None:
    """The number of deaths does not count: the worker died of none of them alone."""
    async with running(recording(workers=1)) as dispatch:
        engine: Any = dispatch._own["tiny"].engine
        [worker] = engine._workers
        worker.group.supervisor.backoff = RestartBackoff(first=0.05)
        innocent = [asyncio.create_task(dispatch.sample("tiny", job(f"job-{i}", max_tokens=30))) for i in range(6)]
        with pytest.raises(OperationError, match="3 sampler workers crashed during sampling request dies"):
            await dispatch.sample("tiny", job("dies"))
        await asyncio.gather(*innocent)
        assert 3 <= worker.group.supervisor.num_deaths <= 1 + 3 and worker.num_tokens == 0
        await wait_until_all_are_up(dispatch)


async def test_close_fails_waiting_requests() -> None:
    async with running(recording()) as dispatch:
        waiting = asyncio.create_task(dispatch.sample("tiny", job("job", max_tokens=10_000)))
        await asyncio.sleep(0.05)
    with pytest.raises(OperationError, match="shutting down"):
        await waiting


async def test_job_of_a_cancelled_caller_leaves_the_worker() -> None:
    async with running(recording(workers=1)) as dispatch:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(dispatch.sample("tiny", job("job", max_tokens=10_000)), 0.05)
        while (await dispatch.memory())["tiny (sampler 1)"]["sampling"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_every_worker_counts_when_memory_is_checked(tmp_path: Path) -> None:
    from trainhouse.tests.workers.test_dispatch import write_header

    write_header(tmp_path, shape=(1 << 20, 1 << 21))
    config = replace(recording(), models=(replace(recording().models[0], model=ServedModel("tiny", str(tmp_path))),))
    with pytest.raises(ValueError, match=r"need 26388\.3 GB of memory \(tiny 26388\.3 GB\)"):
        asyncio.run(WorkerDispatch(config).start(lambda _: None))


def test_memory_check_counts_the_share_of_each_sampler_rank(tmp_path: Path) -> None:
    from trainhouse.tests.workers.test_dispatch import write_header

    write_header(tmp_path, shape=(1 << 20, 1 << 21))
    shutil.copy(LLAMA, tmp_path / "config.json")
    model, one = WorkerConfig(ServedModel("tiny", str(tmp_path)), device="cpu"), 8796.1
    needed = []
    for layout in ("single", "tp=2"):
        sampling = SamplingConfig(1, ParallelSpec.parse(layout))
        with pytest.raises(ValueError, match=r"of memory \(tiny ") as refused:
            asyncio.run(WorkerDispatch(DispatchConfig((model,), sampling=sampling)).start(lambda _: None))
        needed.append(float(str(refused.value).partition("(tiny ")[2].partition(" GB")[0]))
    assert needed[0] == pytest.approx(2 * one, rel=1e-4)
    assert 2 * one < needed[1] < 2.3 * one, "embedding and head are whole on both"
