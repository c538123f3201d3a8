"""Tests snapshots of a run: what they hold, their order among operations, and that nothing waits for their files."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import FullConfig, LoraConfig
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.protocol.calls import Failure, OperationPart, OptimizerStep, RunSpec, WorkerLost
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.worker.worker import Worker

NUM_RUNS = 6


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def dispatch(
    runner: asyncio.Runner, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerDispatch]:
    """Starts a dispatch with so little room for adapters that some are on disk."""
    room = {"adapter_slots": 2, "host_adapter_bytes": 1, "page_directory": str(tmp_path_factory.mktemp("pages"))}
    with started(runner, tiny_models["qwen3"], **room) as dispatch:
        yield dispatch


@contextmanager
def started(runner: asyncio.Runner, model: Path, **options: Any) -> Iterator[WorkerDispatch]:
    config = WorkerConfig(ServedModel("tiny", str(model)), device="cpu", threads=1, **options)
    dispatch = WorkerDispatch(DispatchConfig((config,)))
    runner.run(dispatch.start(lambda _: None))
    try:
        yield dispatch
    finally:
        runner.run(dispatch.close())


def run(runner: asyncio.Runner, test: Coroutine[object, object, None]) -> None:
    runner.run(asyncio.wait_for(test, 200))


def spec(run_id: str, seed: int = 0) -> RunSpec:
    return RunSpec(run_id, LoraConfig(rank=4, seed=seed))


def step(run_id: str) -> OptimizerStep:
    return OptimizerStep(run_id, AdamParams(learning_rate=1e-2))


def batch(run_id: str, number: int) -> ForwardBackwardRequest:
    tokens = np.random.default_rng(number).integers(1, 500, 12).astype(np.int32)
    inputs = {"target_tokens": np.roll(tokens, -1).astype(np.int64), "weights": np.ones(len(tokens), np.float32)}
    return ForwardBackwardRequest(run_id, number, (Datum(tokens, inputs),), "cross_entropy")


async def train(dispatch: WorkerDispatch, run_id: str, numbers: range) -> None:
    for number in numbers:
        await dispatch.forward_backward(batch(run_id, number))
        await dispatch.optim_step(step(run_id))


async def save_and_read(dispatch: WorkerDispatch, run_id: str, directory: Path) -> dict[str, np.ndarray]:
    """Saves the run and returns its weights and moments."""
    os.mkdir(directory)
    await dispatch.save_run(run_id, directory, optimizer=True)
    return read(directory)


def read(directory: Path) -> dict[str, np.ndarray]:
    return {name: each for file in directory.glob("*.safetensors") for name, each in load_file(file).items()}


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    assert first.keys() == second.keys()
    return all(np.array_equal(first[name], second[name]) for name in first)


def test_a_restored_run_continues_like_an_undisturbed_one(
    dispatch: WorkerDispatch, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def check() -> None:
        for run_id in ("undisturbed", "restored", "without"):
            await dispatch.create_run("tiny", spec(run_id, seed=len(run_id)), "tenant")
        await train(dispatch, "undisturbed", range(3))
        (tmp_path / "snapshot").mkdir()
        # Further work of the run follows immediately.
        last, _, _, _ = await asyncio.gather(
            dispatch.forward_backward(batch("undisturbed", 3)),
            dispatch.optim_step(step("undisturbed")),
            dispatch.snapshot_run("undisturbed", tmp_path / "snapshot"),
            train(dispatch, "undisturbed", range(4, 7)),
        )
        assert last.metrics["loss:sum"] > 0
        await dispatch.load_run("restored", tmp_path / "snapshot", optimizer=True)
        await dispatch.load_run("without", tmp_path / "snapshot", optimizer=False)
        for run_id in ("restored", "without"):
            await train(dispatch, run_id, range(4, 7))
        undisturbed, restored, without = [
            await save_and_read(dispatch, run_id, tmp_path / run_id)
            for run_id in ("undisturbed", "restored", "without")
        ]
        assert same(restored, undisturbed)
        assert not same(without, undisturbed)
        assert not same(read(tmp_path / "snapshot"), undisturbed)
        for run_id in ("undisturbed", "restored", "without"):
            await dispatch.drop_run(run_id)

    run(runner, check())


def test_a_snapshot_holds_pending_gradients(dispatch: WorkerDispatch, runner: asyncio.Runner, tmp_path: Path) -> None:
    async def check() -> None:
        for run_id in ("undisturbed", "restored", "without"):
            await dispatch.create_run("tiny", spec(run_id), "tenant")
        await train(dispatch, "undisturbed", range(2))
        await dispatch.forward_backward(batch("undisturbed", 2))
        for name in ("snapshot", "saved"):
            (tmp_path / name).mkdir()
        await dispatch.snapshot_run("undisturbed", tmp_path / "snapshot")
        await dispatch.save_run("undisturbed", tmp_path / "saved", optimizer=True)
        # Loading must discard these gradients.
        await dispatch.forward_backward(batch("restored", 7))
        await dispatch.load_run("restored", tmp_path / "snapshot", optimizer=True)
        await dispatch.load_run("without", tmp_path / "saved", optimizer=True)
        ends = []
        for run_id in ("undisturbed", "restored", "without"):
            await dispatch.forward_backward(batch(run_id, 3))
            ends.append(await dispatch.optim_step(step(run_id)))
        undisturbed, restored, without = [
            await save_and_read(dispatch, run_id, tmp_path / run_id)
            for run_id in ("undisturbed", "restored", "without")
        ]
        assert same(restored, undisturbed) and ends[1] == ends[0]
        assert not same(without, undisturbed)
        assert ends[2]["window_tokens:sum"] < ends[0]["window_tokens:sum"]
        for run_id in ("undisturbed", "restored", "without"):
            await dispatch.drop_run(run_id)

    run(runner, check())


def test_a_window_that_lost_an_operation_stays_refused_in_a_snapshot(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = WorkerConfig(ServedModel("tiny", str(tiny_models["qwen3"])), device="cpu", threads=1)
    worker = Worker(config)
    worker.create_run(spec("a"))
    good, bad = batch("a", 0), batch("a", 1)
    bad.data[0].loss_fn_inputs["weights"][0] = np.nan
    answers = worker.run_pass(tuple(OperationPart(number, one) for number, one in enumerate((good, bad))))
    assert isinstance(answers[1], Failure)
    (tmp_path / "snapshot").mkdir()
    worker.begin_snapshot(0, "a", str(tmp_path / "snapshot"))
    while not (ended := worker.ended_snapshots()):
        pass
    assert ended == {0: None}
    worker.create_run(spec("b"))
    worker.load_run("b", str(tmp_path / "snapshot"), optimizer=True)
    (answer,) = worker.apply_steps((step("b"),))
    assert isinstance(answer, Failure) and "refused" in answer.message


def test_a_run_recovered_after_a_crash_equals_an_undisturbed_one(
    dispatch: WorkerDispatch, runner: asyncio.Runner, tmp_path: Path
) -> None:
    assert_recovers(dispatch, runner, tmp_path)


# One for each kind of mixer, and of experts.
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["gpt_oss", "gemma4_moe", "qwen3_5_moe", "deepseek_v3", "glm_moe_dsa", "falcon_h1", "nemotron_h_latent"]
)
def test_a_run_of_any_kind_of_layers_is_recovered_after_a_crash(
    kind: str, tiny_models: dict[str, Path], runner: asyncio.Runner, tmp_path: Path
) -> None:
    with started(runner, tiny_models[kind]) as dispatch:
        assert_recovers(dispatch, runner, tmp_path)


def assert_recovers(dispatch: WorkerDispatch, runner: asyncio.Runner, tmp_path: Path) -> None:
    """Asserts that a run restored after a crash of its worker ends with the state of an undisturbed one."""

    async def check() -> None:
        for run_id in ("undisturbed", "killed"):
            await dispatch.create_run("tiny", spec(run_id), "tenant")
        await train(dispatch, "undisturbed", range(6))
        undisturbed = await save_and_read(dispatch, "undisturbed", tmp_path / "undisturbed")
        await train(dispatch, "killed", range(3))
        (tmp_path / "snapshot").mkdir()
        await dispatch.snapshot_run("killed", tmp_path / "snapshot")
        training = asyncio.create_task(train(dispatch, "killed", range(3, 1000)))
        await asyncio.sleep(0.1)
        os.kill(dispatch.pids("tiny")[0], signal.SIGKILL)
        with pytest.raises(WorkerLost):
            await training
        await dispatch.create_run("tiny", spec("killed", seed=5), "tenant")
        await dispatch.load_run("killed", tmp_path / "snapshot", optimizer=True)
        await train(dispatch, "killed", range(3, 5))
        assert not same(await save_and_read(dispatch, "killed", tmp_path / "a step before"), undisturbed)
        await train(dispatch, "killed", range(5, 6))
        assert same(await save_and_read(dispatch, "killed", tmp_path / "killed"), undisturbed)
        for run_id in ("undisturbed", "killed"):
            await dispatch.drop_run(run_id)

    run(runner, check())


def test_a_snapshot_holds_the_step_before_it_and_not_the_one_after_it(
    dispatch: WorkerDispatch, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def check() -> None:
        await dispatch.create_run("tiny", spec("run"), "tenant")
        (tmp_path / "snapshot").mkdir()
        (tmp_path / "plain").mkdir()
        await asyncio.gather(
            dispatch.forward_backward(batch("run", 0)),
            dispatch.optim_step(step("run")),
            dispatch.save_run("run", tmp_path / "plain", optimizer=True),
            dispatch.snapshot_run("run", tmp_path / "snapshot"),
            dispatch.forward_backward(batch("run", 1)),
            dispatch.optim_step(step("run")),
        )
        assert sorted(os.listdir(tmp_path / "snapshot")) == sorted(os.listdir(tmp_path / "plain"))
        assert same(read(tmp_path / "snapshot"), read(tmp_path / "plain"))
        assert not same(await save_and_read(dispatch, "run", tmp_path / "later"), read(tmp_path / "snapshot"))
        await dispatch.drop_run("run")

    run(runner, check())


def test_many_runs_are_snapshotted_at_once_even_from_disk(
    dispatch: WorkerDispatch, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def check() -> None:
        runs = [f"run-{number}" for number in range(NUM_RUNS)]
        for number, run_id in enumerate(runs):
            await dispatch.create_run("tiny", spec(run_id, seed=number), "tenant")
            (tmp_path / run_id).mkdir()
        await train(dispatch, runs[0], range(1))
        assert (await dispatch.memory())["tiny"]["num_adapters_on_disk"] >= NUM_RUNS - 3
        await asyncio.gather(*(dispatch.snapshot_run(run_id, tmp_path / run_id) for run_id in runs))
        for run_id in runs:
            assert same(read(tmp_path / run_id), await save_and_read(dispatch, run_id, tmp_path / f"{run_id}-saved"))
            await dispatch.drop_run(run_id)
        assert dispatch.status("tiny") is None

    run(runner, check())


def test_a_failed_snapshot_reports_its_error_and_the_run_continues(
    dispatch: WorkerDispatch, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def check() -> None:
        await dispatch.create_run("tiny", spec("run"), "tenant")
        with pytest.raises(OperationError, match="the run cannot be saved") as failed:
            await dispatch.snapshot_run("run", tmp_path / "nowhere")
        assert failed.value.category == "server" and not isinstance(failed.value, WorkerLost)
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "trainhouse.json").symlink_to("/dev/full")
        with pytest.raises(OperationError, match="No space left"):
            await dispatch.snapshot_run("run", tmp_path / "full")
        await train(dispatch, "run", range(1))
        await dispatch.drop_run("run")
        with pytest.raises(OperationError, match="run is not live"):
            await dispatch.snapshot_run("run", tmp_path)

    run(runner, check())


def test_a_snapshot_whose_worker_dies_is_lost(dispatch: WorkerDispatch, runner: asyncio.Runner, tmp_path: Path) -> None:
    async def check() -> None:
        await dispatch.create_run("tiny", spec("run"), "tenant")
        os.mkfifo(tmp_path / "trainhouse.json")  # its writer waits, because no one reads it
        snapshot = asyncio.create_task(dispatch.snapshot_run("run", tmp_path))
        await train(dispatch, "run", range(3))
        assert not snapshot.done() and dispatch.status("tiny") == "1 operation waits or runs on tiny"
        os.kill(dispatch.pids("tiny")[0], signal.SIGKILL)
        with pytest.raises(WorkerLost) as lost:
            await snapshot
        assert lost.value.alone, "nothing else ran when the worker died"
        await dispatch.create_run("tiny", spec("run"), "tenant")
        (tmp_path / "again").mkdir()
        await dispatch.snapshot_run("run", tmp_path / "again")
        await dispatch.drop_run("run")

    run(runner, check())


@pytest.mark.parametrize("optimizer", [True, False], ids=["state", "weights"])
def test_others_do_not_wait_while_a_full_model_is_saved(
    optimizer: bool, dispatch: WorkerDispatch, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def check() -> None:
        await dispatch.create_run("tiny", RunSpec("full", FullConfig(seed=1)), "tenant")
        await dispatch.create_run("tiny", spec("other"), "tenant")
        await train(dispatch, "full", range(2))
        for name in ("undisturbed", "waits"):
            (tmp_path / name).mkdir()
        await dispatch.save_run("full", tmp_path / "undisturbed", optimizer=optimizer)
        await dispatch.forward_backward(batch("full", 2))  # its gradients are not saved
        os.mkfifo(tmp_path / "waits" / "trainhouse.json")
        saving = asyncio.create_task(dispatch.save_run("full", tmp_path / "waits", optimizer=optimizer))
        await train(dispatch, "other", range(3))
        await dispatch.optim_step(step("full"))  # the run itself does not wait either
        assert not saving.done()
        description = await asyncio.to_thread((tmp_path / "waits" / "trainhouse.json").read_bytes)
        await saving
        assert description == (tmp_path / "undisturbed" / "trainhouse.json").read_bytes()
        (tmp_path / "waits" / "trainhouse.json").unlink()
        (tmp_path / "waits" / "trainhouse.json").write_bytes(description)
        assert same(read(tmp_path / "waits"), read(tmp_path / "undisturbed"))
        assert any(name.startswith("optimizer") for name in os.listdir(tmp_path / "waits")) == optimizer
        (tmp_path / "later").mkdir()
        await dispatch.save_run("full", tmp_path / "later", optimizer=optimizer)
        assert not same(read(tmp_path / "later"), read(tmp_path / "undisturbed"))
        for run_id in ("full", "other"):
            await dispatch.drop_run(run_id)

    run(runner, check())


def test_only_further_snapshots_wait_for_those_being_written(
    dispatch: WorkerDispatch, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def check() -> None:
        runs = [f"run-{number}" for number in range(NUM_RUNS)]
        for run_id in (*runs, "other"):
            await dispatch.create_run("tiny", spec(run_id), "tenant")
            (tmp_path / run_id).mkdir()
        for run_id in runs[:4]:
            os.mkfifo(tmp_path / run_id / "trainhouse.json")
        snapshots = [asyncio.create_task(dispatch.snapshot_run(run_id, tmp_path / run_id)) for run_id in runs]
        await train(dispatch, "other", range(4))
        await asyncio.sleep(0.3)
        assert not any(snapshot.done() for snapshot in snapshots)
        assert not os.listdir(tmp_path / runs[4]), "the worker holds a fifth copy in memory"
        for run_id in runs[:4]:
            await asyncio.to_thread((tmp_path / run_id / "trainhouse.json").read_bytes)
        await asyncio.gather(*snapshots)
        for run_id in (*runs, "other"):
            await dispatch.drop_run(run_id)

    run(runner, check())


def test_a_worker_reports_each_snapshot_once_and_computes_meanwhile(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    worker = Worker(WorkerConfig(ServedModel("tiny", str(tiny_models["qwen3"])), device="cpu", threads=1))
    worker.create_run(spec("run"))
    for name in ("waits", "goes"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "waits" / "trainhouse.json")
    worker.begin_snapshot(1, "run", str(tmp_path / "waits"))
    worker.begin_snapshot(2, "run", str(tmp_path / "goes"))
    (output,) = worker.run_pass((OperationPart(0, batch("run", 0)),))
    assert isinstance(output, ForwardBackwardOutput)
    ended: dict[int, Failure | None] = {}
    while not ended:
        ended = worker.ended_snapshots()
    assert ended == {2: None} and worker.ended_snapshots() == {}
    assert (tmp_path / "waits" / "trainhouse.json").read_text()
    while 1 not in ended:
        ended |= worker.ended_snapshots()
    assert ended[1] is None
    with pytest.raises(OperationError, match="not on this worker"):
        worker.begin_snapshot(3, "unknown", str(tmp_path))
