"""Tests roles in separate groups: the same numbers as in one group, and crashes that affect one group only."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import FullConfig, LoraConfig, TrainingConfig
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardRequest
from trainhouse.tests.workers.recording_worker import RECORDING
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec, WorkerLost
from trainhouse.workers.protocol.parallel_spec import SINGLE, ParallelSpec
from trainhouse.workers.protocol.worker_config import (
    DispatchConfig,
    RoleGroup,
    SamplingConfig,
    ServedModel,
    WorkerConfig,
)
from trainhouse.workers.scheduler.supervision.pool_factory import groups_of, with_threads

from ..test_dispatch import operation, sample_job, write_header

TOLERANCE = 1e-5
NAME = "tiny"
ROLES = ("policy", "critic", "reference")
APART = (RoleGroup(("critic",)), RoleGroup(("reference",)))
TOGETHER_APART = (RoleGroup(("critic", "reference"), ParallelSpec(tp=2)),)


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 250))


@asynccontextmanager
async def dispatching(
    source: Path,
    role_groups: tuple[RoleGroup, ...],
    pool: Any = "local",
    page_directory: Path | None = None,
    **options: Any,
) -> AsyncIterator[WorkerDispatch]:
    pages = str(page_directory) if page_directory else None
    model = WorkerConfig(ServedModel(NAME, str(source)), device="cpu", threads=1, page_directory=pages)
    dispatch = WorkerDispatch(DispatchConfig((model,), pool=pool, role_groups=role_groups, **options))
    await dispatch.start(lambda _: None)
    try:
        yield dispatch
    finally:
        await dispatch.close()


async def create(
    dispatch: WorkerDispatch, roles: Sequence[str] = ROLES, training: TrainingConfig | None = None
) -> None:
    """Creates a run for each role, named after it."""
    for role in roles:
        spec = RunSpec(role, training or LoraConfig(rank=4, seed=1), role)
        await dispatch.create_run(NAME, spec, "tenant")


def request(run_id: str, loss_fn: str, forward_only: bool) -> ForwardBackwardRequest:
    data = []
    for seed, length in enumerate((9, 30, 4)):
        random = np.random.default_rng(seed)
        tokens = random.integers(3, 512, length + 1)
        targets = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
        returns = {"returns": random.normal(size=length).astype(np.float32)}
        given = returns if loss_fn == "value_mse" else targets
        data.append(Datum(tokens[:-1].astype(np.int32), given))
    return ForwardBackwardRequest(run_id, 0, tuple(data), loss_fn, forward_only=forward_only)


async def score(dispatch: WorkerDispatch, run_id: str, role: str | None = None) -> np.ndarray:
    """Returns values or log-probabilities; role: that of a run which is not named after it."""
    is_critic = (role or run_id) == "critic"
    output = await dispatch.forward_backward(request(run_id, "value_mse" if is_critic else "cross_entropy", True))
    return np.concatenate([each["values" if is_critic else "logprobs"] for each in output.loss_fn_outputs])


async def train(dispatch: WorkerDispatch, run_id: str, num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        output = await dispatch.forward_backward(
            request(run_id, "value_mse" if run_id == "critic" else "cross_entropy", False)
        )
        losses.append(output.metrics["loss:sum"])
        await dispatch.optim_step(OptimizerStep(run_id, AdamParams(learning_rate=1e-2)))
    return losses


async def save(dispatch: WorkerDispatch, run_id: str, directory: Path) -> Path:
    await asyncio.to_thread(directory.mkdir, parents=True)
    await dispatch.save_run(run_id, directory, optimizer=True)
    return directory


async def run_whole_loop(dispatch: WorkerDispatch, directory: Path, training: TrainingConfig) -> dict[str, np.ndarray]:
    """Trains, scores and loads checkpoints; returns losses, scores and the learned weights."""
    await create(dispatch, training=training)
    found: dict[str, np.ndarray] = {}
    for number in range(2):
        trained = await asyncio.gather(*(train(dispatch, run_id, 2) for run_id in ("policy", "critic")))
        found |= {f"{role} losses {number}": np.array(each) for role, each in zip(ROLES, trained, strict=False)}
        scores = await asyncio.gather(*(score(dispatch, role) for role in ROLES))
        found |= {f"{role} scores {number}": each for role, each in zip(ROLES, scores, strict=True)}
        checkpoint = await save(dispatch, "policy", directory / f"policy-{number}")
        await dispatch.load_run("reference", checkpoint, optimizer=False)
    await save(dispatch, "critic", directory / "critic-1")
    found["reference moved"] = await score(dispatch, "reference")
    for role in ("policy", "critic"):
        for file in sorted((directory / f"{role}-1").glob("*.safetensors")):
            found |= {f"{role} {file.name} {name}": value for name, value in load_file(file).items()}
    return found


def relative_differences(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the largest difference of each array, relative to its largest element."""
    assert found.keys() == wanted.keys()
    return {
        name: float(np.abs(found[name] - value).max() / max(np.abs(value).max(), 1e-30))
        for name, value in wanted.items()
    }


@pytest.mark.parametrize(
    ("role_groups", "pool", "training"),
    [
        (APART, "local", LoraConfig(rank=4, seed=1)),
        pytest.param(APART, "local", FullConfig(seed=1), marks=pytest.mark.full),
        pytest.param(TOGETHER_APART, "local", LoraConfig(rank=4, seed=1), marks=pytest.mark.full),
        pytest.param(APART, "ray", LoraConfig(rank=4, seed=1), marks=pytest.mark.full),
    ],
    ids=["each apart", "each apart, full models", "two of them apart by tp=2", "on Ray"],
)
def test_roles_apart_and_together_give_the_same_numbers(
    role_groups: tuple[RoleGroup, ...],
    pool: str,
    training: TrainingConfig,
    tiny_models: dict[str, Path],
    tmp_path: Path,
) -> None:
    async def check() -> None:
        async with dispatching(tiny_models["qwen3"], ()) as dispatch:
            wanted = await run_whole_loop(dispatch, tmp_path / "together", training)
            assert len(dispatch.pids(NAME)) == 1
        async with dispatching(tiny_models["qwen3"], role_groups, pool) as dispatch:
            found = await run_whole_loop(dispatch, tmp_path / "apart", training)
            assert len(set(dispatch.pids(NAME))) == 3
        # Adam divides small gradients by their own size, which enlarges the rounding of two ranks' sums.
        tolerance = TOLERANCE if role_groups == APART else 1e-4
        assert max(relative_differences(found, wanted).values()) < tolerance
        # The tolerance would notice the change of a few steps, and a reference that did not move.
        for role in ROLES:
            earlier = {"scores": wanted[f"{role} scores 0"]}
            assert relative_differences(earlier, {"scores": wanted[f"{role} scores 1"]})["scores"] > 10 * tolerance
        np.testing.assert_allclose(found["reference moved"], found["policy scores 1"], rtol=TOLERANCE)

    run(check())


def test_a_reference_loads_checkpoints_of_a_policy_in_another_group(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    async def check() -> None:
        async with dispatching(tiny_models["qwen3"], APART) as dispatch:
            await create(dispatch, ("policy", "reference"))
            checkpoints = []
            for number in range(2):
                await train(dispatch, "policy", 2)
                checkpoints.append(await save(dispatch, "policy", tmp_path / str(number)))
                spec = RunSpec(f"policy then {number}", LoraConfig(rank=4, seed=0))
                await dispatch.create_run(NAME, spec, "tenant")
                await dispatch.load_run(spec.run_id, checkpoints[-1], optimizer=False)
            now, earlier = [await score(dispatch, f"policy then {number}", "policy") for number in (1, 0)]

            async def divergence() -> float:
                return float(np.mean(await score(dispatch, "policy") - await score(dispatch, "reference")))

            from_base = await divergence()
            await dispatch.load_run("reference", checkpoints[0], optimizer=False)
            by_hand = float(np.mean(now - earlier))
            assert await divergence() == pytest.approx(by_hand, rel=TOLERANCE)
            assert from_base != pytest.approx(by_hand, rel=100 * TOLERANCE)
            await dispatch.load_run("reference", checkpoints[1], optimizer=False)
            assert abs(await divergence()) < TOLERANCE < abs(by_hand)

    run(check())


def test_a_crash_affects_only_the_runs_of_its_group(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    async def check() -> None:
        async with dispatching(tiny_models["qwen3"], APART) as dispatch:
            await create(dispatch)
            before = await score(dispatch, "reference")
            undisturbed = [await train(dispatch, role, 1) for role in ("policy", "critic")]
            policy_pid, critic_pid, reference_pid = dispatch.pids(NAME)
            training = asyncio.gather(*(train(dispatch, role, 30) for role in ("policy", "critic")))
            await asyncio.sleep(0.1)
            os.kill(reference_pid, signal.SIGKILL)
            with pytest.raises(WorkerLost, match=r"base model tiny \(reference\): the worker died"):
                while True:
                    await score(dispatch, "reference")
            assert not dispatch.is_up(NAME)
            assert dispatch.status(NAME, "reference") == "the worker of tiny (reference) is restarting"
            assert "restarting" not in (dispatch.status(NAME, "policy") or "")
            assert "restarting" not in (dispatch.status(NAME) or "")
            assert set(await dispatch.memory()) == {"tiny", "tiny (critic)"}
            for losses, (first,) in zip(await training, undisturbed, strict=True):
                assert len(losses) == 30 and losses[-1] < first
            await create(dispatch, ["reference"])
            np.testing.assert_allclose(await score(dispatch, "reference"), before, rtol=TOLERANCE)
            assert dispatch.is_up(NAME)
            assert dispatch.pids(NAME)[:2] == [policy_pid, critic_pid] and reference_pid not in dispatch.pids(NAME)
            memory = await dispatch.memory()
            assert set(memory) == {"tiny", "tiny (critic)", "tiny (reference)"}
            assert len({each["base_weights"] for each in memory.values()}) == 1

    run(check())


@pytest.mark.parametrize(("role_groups", "waits"), [((), True), (APART, False)], ids=["in one group", "apart"])
def test_a_reference_waits_only_for_passes_of_its_own_group(role_groups: tuple[RoleGroup, ...], waits: bool) -> None:
    async def check() -> None:
        async with dispatching(Path("tiny"), role_groups, worker=RECORDING) as dispatch:
            await create(dispatch, ("policy", "reference"))
            training = asyncio.create_task(dispatch.forward_backward(operation("policy", seconds=2)))
            await asyncio.sleep(0.1)
            await dispatch.forward_backward(operation("reference"))
            assert training.done() == waits
            await training

    run(check())


def test_only_the_policy_group_samples(tiny_models: dict[str, Path]) -> None:
    async def check() -> None:
        async with dispatching(tiny_models["qwen3"], APART) as dispatch:
            await create(dispatch)
            await dispatch.copy_adapter("policy", "sampler")
            assert len((await dispatch.sample(NAME, sample_job("job", 3, "sampler"))).sequences[0].tokens) == 3
            for role in ("critic", "reference"):
                with pytest.raises(OperationError, match=rf"run {role} is in tiny \({role}\), which does not sample"):
                    await dispatch.copy_adapter(role, "another")
            for role in ROLES:
                await dispatch.drop_run(role)
                with pytest.raises(OperationError, match=f"run {role} is not live"):
                    await score(dispatch, role)

    run(check())


def config_of(*role_groups: RoleGroup, sampling: SamplingConfig | None = None, **options: Any) -> DispatchConfig:
    models = tuple(WorkerConfig(ServedModel(name, "M"), device=f"cuda:{n}") for n, name in enumerate("ab"))
    return DispatchConfig(models, role_groups=role_groups, sampling=sampling or SamplingConfig(), **options)


def test_each_base_model_has_its_groups_and_all_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainhouse.workers.scheduler.supervision.pool_factory.num_cores", lambda: 24)
    references = RoleGroup(("reference",), SINGLE, ("cpu",))
    critics = RoleGroup(("critic",), ParallelSpec(tp=2), ("cuda:2", "cuda:4"))
    config = config_of(references, critics, sampling=SamplingConfig(1))
    assert [(name, str(each.parallel), each.device) for name, each in groups_of(config)] == [
        ("a", "single", "cuda:0"),
        ("a (reference)", "single", "cpu"),
        ("a (critic)", "tp=2", "cuda:2"),
        ("a (sampler 1)", "single", "cuda:0"),
        ("b", "single", "cuda:1"),
        ("b (reference)", "single", "cpu"),
        ("b (critic)", "tp=2", "cuda:4"),
        ("b (sampler 1)", "single", "cuda:1"),
    ]
    assert {each.threads for _, each in groups_of(config)} == {24 // 10}
    assert [each.threads for each in with_threads(config_of())] == [12, 12]


@pytest.mark.parametrize(
    ("role_groups", "reason"),
    [
        (
            (RoleGroup(("critic", "reference"), ParallelSpec(tp=2), ("cuda:1",)),),
            "a (critic and reference) takes cuda:1 to cuda:2, and a cuda:0 to cuda:1, which overlap in "
            "part: name another device with --role-group",
        ),
        (
            (RoleGroup(("critic",), ParallelSpec(tp=2), ("cuda:3",)),),
            "a (critic) takes cuda:3 to cuda:4, one for each rank of --role-group tp=2, but the machine has "
            "cuda:0 to cuda:3: name an earlier one with --role-group, or use fewer ranks",
        ),
    ],
    ids=["half of them", "beyond the last"],
)
def test_missing_and_partly_overlapping_devices_are_refused(
    role_groups: tuple[RoleGroup, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr("trainhouse.workers.scheduler.supervision.pool_factory.check_cuda", lambda device: None)
    models = (WorkerConfig(ServedModel("a", "M"), device="cuda", parallel=ParallelSpec(tp=2)),)
    dispatch = WorkerDispatch(DispatchConfig(models, role_groups=role_groups))
    with pytest.raises(ValueError) as refused:
        run(dispatch.start(lambda _: None))
    assert reason in str(refused.value)


def test_an_impossible_layout_is_refused_before_loading(tiny_models: dict[str, Path]) -> None:
    async def check() -> None:
        model, messages = WorkerConfig(ServedModel("M", str(tiny_models["qwen3"])), device="cpu"), []
        group = RoleGroup(("critic",), ParallelSpec(tp=3))
        with pytest.raises(ValueError, match="--role-group: tp=3 does not divide 4 query heads of M; valid tp: 1, 2"):
            await WorkerDispatch(DispatchConfig((model,), role_groups=(group,))).start(messages.append)
        assert not messages

    run(check())


def test_memory_is_counted_for_each_group(tmp_path: Path) -> None:
    write_header(tmp_path, shape=(1 << 20, 1 << 22))
    model = WorkerConfig(ServedModel("M", str(tmp_path)), device="cpu")
    for role_groups, size in (((), "17592.2 GB"), (APART, "52776.6 GB")):
        dispatch = WorkerDispatch(DispatchConfig((model,), worker=RECORDING, role_groups=role_groups))
        with pytest.raises(ValueError, match=f"the base models need {size} of memory"):
            run(dispatch.start(lambda _: None))
