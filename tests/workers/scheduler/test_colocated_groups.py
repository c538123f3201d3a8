"""Tests that groups which take turns on a device give the same numbers, with one base model on it at a time."""

import asyncio
import os
import signal
from collections.abc import Awaitable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas.models import FullConfig, LoraConfig, TrainingConfig
from trainhouse.workers.dispatch import WorkerDispatch
from trainhouse.workers.protocol.calls import RunSpec, WorkerLost
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import RoleGroup, SamplingConfig
from trainhouse.workers.scheduler.supervision.pool_factory import with_threads

from ..jobs import job
from ..moving_worker import MOVING, device_intervals
from .test_roles_apart import (
    APART,
    NAME,
    ROLES,
    TOLERANCE,
    config_of,
    create,
    dispatching,
    relative_differences,
    run,
    run_whole_loop,
    score,
    train,
)

SHARDED = (RoleGroup(("critic",), ParallelSpec(fsdp=2)), RoleGroup(("reference",)))
NAMES = {"tiny", "tiny (critic)", "tiny (reference)"}


async def groups_on_device(dispatch: WorkerDispatch) -> set[str]:
    """Returns the groups that have anything on the device, as their ranks report."""
    memory = await dispatch.memory()
    assert set(memory) >= NAMES
    kinds = ("base_weights_on_device", "kv_cache_on_device", "num_adapters_on_device", "num_full_models_on_device")
    return {name for name, own in memory.items() if any(own[kind] for kind in kinds)}


def most_on_device(directory: Path) -> int:
    """Returns the most processes that were on the device at a time, by their own logs."""
    stays_by_process = [device_intervals(log) for log in directory.glob("*.log")]
    assert len(stays_by_process) >= 3 and all(stays_by_process)
    all_stays = [stay for stays in stays_by_process for stay in stays]
    changes = sorted([(arrived, 1) for arrived, _ in all_stays] + [(left, -1) for _, left in all_stays])
    return max(accumulate(change for _, change in changes))


async def wait_until_offloaded(dispatch: WorkerDispatch, *names: str) -> dict[str, dict[str, int]]:
    """Waits until these groups are off their devices; returns the memory of all groups."""
    for _ in range(200):
        memory = await dispatch.memory()
        if not any(memory[name]["base_weights_on_device"] for name in names):
            return memory
        await asyncio.sleep(0.05)
    raise AssertionError(f"{names} are still on their devices")


@pytest.mark.parametrize(
    ("role_groups", "training", "pool"),
    [
        (APART, LoraConfig(rank=4, seed=1), "local"),
        pytest.param(APART, FullConfig(seed=1), "local", marks=pytest.mark.full),
        pytest.param(SHARDED, LoraConfig(rank=4, seed=1), "local", marks=pytest.mark.full),
        pytest.param(APART, LoraConfig(rank=4, seed=1), "ray", marks=pytest.mark.full),
    ],
    ids=["LoRA", "full models", "critics by fsdp=2", "on Ray"],
)
def test_groups_that_take_turns_give_the_same_numbers(
    role_groups: tuple[RoleGroup, ...],
    training: TrainingConfig,
    pool: str,
    tiny_models: dict[str, Path],
    tmp_path: Path,
) -> None:
    async def check() -> None:
        async with dispatching(tiny_models["qwen3"], role_groups, pool) as dispatch:
            wanted = await run_whole_loop(dispatch, tmp_path / "staying", training)
            assert await groups_on_device(dispatch) == NAMES
        async with dispatching(tiny_models["qwen3"], role_groups, pool, shared_devices="turns") as dispatch:
            assert await groups_on_device(dispatch) == set()  # each left the device so that the next could load
            found = await run_whole_loop(dispatch, tmp_path / "moving", training)
            assert len(await groups_on_device(dispatch)) == 1
            memory = await dispatch.memory()
            assert all(own["offloads"] > 1 and own["offload_moved_bytes"] > 0 for own in memory.values())
        assert max(relative_differences(found, wanted).values()) < TOLERANCE

    run(check())


@pytest.mark.full
@pytest.mark.parametrize("take_turns", [True, False])
def test_roles_that_all_have_work_make_progress_together(
    take_turns: bool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """No role waits until another has finished all its work."""

    async def check() -> None:
        shared = "turns" if take_turns else "together"
        options = {"shared_devices": shared, "worker": MOVING, "page_directory": tmp_path}
        async with dispatching(tiny_models["qwen3"], APART, **options) as dispatch:
            await create(dispatch)
            order: list[str] = []

            async def work(role: str, call: Awaitable[Any]) -> None:
                await call
                order.append(role)

            async def keep_busy(role: str) -> None:
                for _ in range(60):
                    await work(role, train(dispatch, role, 1))

            await asyncio.gather(
                keep_busy("policy"),
                keep_busy("critic"),
                *(work("sample", sample_tokens(dispatch, n)) for n in range(4)),
            )
            await score(dispatch, "reference")
            num_changes = sum(one != other for one, other in pairwise(order))
            assert num_changes > 4, order

    run(check())
    assert (most_on_device(tmp_path) == 1) == take_turns


async def sample_tokens(dispatch: WorkerDispatch, number: int, adapter_id: str | None = None) -> list[int]:
    response = await dispatch.sample(NAME, job(f"job {number}", [3, 4, 5, number], adapter_id, max_tokens=60))
    return response.sequences[0].tokens.tolist()


@pytest.mark.full
def test_workers_that_only_sample_take_turns_with_training(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    async def check() -> None:
        results: list[Any] = []
        for take_turns in (False, True):
            directory = tmp_path / str(take_turns)
            directory.mkdir()
            shared = "turns" if take_turns else "together"
            options = {"shared_devices": shared, "worker": MOVING, "page_directory": directory}
            async with dispatching(tiny_models["qwen3"], APART, sampling=SamplingConfig(1), **options) as dispatch:
                await create(dispatch)
                found: list[Any] = []
                for number in range(3):
                    found.append(await train(dispatch, "policy", 2))
                    await dispatch.copy_adapter("policy", "sampler")
                    found.append(await sample_tokens(dispatch, number, "sampler"))
                    found.append((await score(dispatch, "reference")).tolist())
                results.append(found)
            assert (most_on_device(directory) == 1) == take_turns
        staying, moving = results
        assert staying == moving

    run(check())


@pytest.mark.full
def test_a_crash_releases_the_device_to_others(tiny_models: dict[str, Path]) -> None:
    async def check() -> None:
        async with dispatching(tiny_models["qwen3"], APART, shared_devices="turns") as dispatch:
            await create(dispatch)
            wanted = await score(dispatch, "reference")
            for role, number in (("reference", 2), ("policy", 0)):
                await score(dispatch, role)
                training = asyncio.create_task(train(dispatch, "critic", 10))
                os.kill(dispatch.pids(NAME)[number], signal.SIGKILL)
                with pytest.raises(WorkerLost):
                    while True:
                        await score(dispatch, role)
                assert len(await training) == 10
                await create(dispatch, [role])
                await score(dispatch, role)
                assert await groups_on_device(dispatch) == {"tiny (reference)" if role == "reference" else "tiny"}
            np.testing.assert_allclose(await score(dispatch, "reference"), wanted, rtol=TOLERANCE)

    run(check())


def test_an_idle_group_leaves_its_device(tiny_models: dict[str, Path]) -> None:
    async def check() -> None:
        async with dispatching(tiny_models["qwen3"], (RoleGroup(("critic",)),), idle_device_seconds=0.3) as dispatch:
            await create(dispatch, ("policy", "critic"))
            before = await score(dispatch, "critic")
            policy_memory = (await wait_until_offloaded(dispatch, "tiny"))["tiny"]
            for _ in range(2):
                await wait_until_offloaded(dispatch, "tiny", "tiny (critic)")
                np.testing.assert_array_equal(await score(dispatch, "critic"), before)
                memory = await dispatch.memory()
                assert memory["tiny"]["base_weights_on_device"] == 0 < memory["tiny (critic)"]["base_weights_on_device"]
                assert memory["tiny"]["offloads"] == policy_memory["offloads"]  # other groups' work does not wake it
            losses = await train(dispatch, "policy", 2)
            assert losses[1] < losses[0]
        async with dispatching(tiny_models["qwen3"], ()) as dispatch:
            await create(dispatch, ROLES)
            await asyncio.sleep(0.5)
            assert (await dispatch.memory())["tiny"]["offloads"] == 0

    run(check())


@pytest.mark.full
def test_the_status_names_the_group_that_has_the_device(tiny_models: dict[str, Path]) -> None:
    async def check() -> None:
        async with dispatching(tiny_models["qwen3"], APART, shared_devices="turns") as dispatch:
            await create(dispatch)
            statuses: set[str | None] = set()

            async def ask() -> None:
                while True:
                    statuses.update(dispatch.status(NAME, role) for role in ("policy", "reference"))
                    await asyncio.sleep(0)

            asking = asyncio.create_task(ask())
            await asyncio.gather(train(dispatch, "policy", 20), score(dispatch, "reference"))
            asking.cancel()
            assert statuses & {
                "tiny (reference) waits: tiny has the device",
                "tiny waits: tiny (reference) has the device",
            }

    run(check())


def test_ranks_that_take_turns_have_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainhouse.workers.scheduler.supervision.pool_factory.num_cores", lambda: 24)
    critics = RoleGroup(("critic",), ParallelSpec(tp=3))
    for shared_devices, threads in (("together", 24 // 8), ("turns", 24 // 3)):
        config = config_of(critics, shared_devices=shared_devices)
        assert [each.threads for each in with_threads(config)] == [threads] * 2


def test_a_run_can_end_while_its_group_is_offloaded(tiny_models: dict[str, Path]) -> None:
    async def check() -> None:
        async with dispatching(tiny_models["qwen3"], APART, shared_devices="turns") as dispatch:
            await create(dispatch)
            await train(dispatch, "critic", 1)
            assert await groups_on_device(dispatch) == {"tiny (critic)"}
            await dispatch.drop_run("policy")
            assert await groups_on_device(dispatch) == {"tiny (critic)"}
            await dispatch.create_run(NAME, RunSpec("policy", LoraConfig(rank=4, seed=1)), "tenant")
            assert len(await train(dispatch, "policy", 2)) == 2

    run(check())
