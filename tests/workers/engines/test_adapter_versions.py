"""Full models on workers that only sample: a request keeps the weights that it began with, and new weights replace old
ones in place.
"""

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import FullConfig, LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.protocol.calls import AdapterWeights, RunSpec, SampledPart
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import SamplingConfig
from trainhouse.workers.worker.worker import Worker

from ...drawn import as_drawn
from ...tiny import tiny_model
from ..parallel.live_bytes import LiveBytes
from ..training.test_full import a_worker, sampled, trained
from .test_sampler_groups import assert_same, job, running, tiny, train, wait_until_all_are_up

LONG = 900

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def one_sampler(model: Path, parallel: str = "single", **options: Any) -> AsyncIterator[WorkerDispatch]:
    """Yields a dispatch with one sampler, on which the full run `run` is sampled as `moving`."""
    config = replace(tiny(model), **options)
    sampling = SamplingConfig(1, ParallelSpec.parse(parallel))
    async with running(DispatchConfig((config,), sampling=sampling, slice_milliseconds=5.0)) as dispatch:
        await dispatch.create_run("tiny", RunSpec("run", FullConfig(seed=0)), "tenant")
        await dispatch.copy_adapter("run", "moving")
        yield dispatch


async def step_and_push(dispatch: WorkerDispatch) -> None:
    await train(dispatch, "run", 1)
    await dispatch.copy_adapter("run", "moving")


async def drawn(dispatch: WorkerDispatch, number: int, max_tokens: int = LONG) -> SampleResponse:
    """Samples with the newest weights."""
    return await dispatch.sample("tiny", job(f"drawn-{number}", "moving", max_tokens))


@dataclass
class Begun:
    """A request that has some tokens and is still running."""

    answer: asyncio.Task[SampleResponse]
    streamed: list[SampledPart]


async def begin(dispatch: WorkerDispatch, name: str, adapter_id: str = "moving") -> Begun:
    streamed: list[SampledPart] = []
    request = job(name, adapter_id, LONG, streams=True)
    answer = asyncio.create_task(dispatch.sample("tiny", request, streamed.extend))
    while not streamed:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert not answer.done()
    return Begun(answer, streamed)


async def sampler_memory(dispatch: WorkerDispatch) -> dict[str, int]:
    return (await dispatch.memory())["tiny (sampler 1)"]


async def num_versions(dispatch: WorkerDispatch) -> int:
    return (await sampler_memory(dispatch))["num_full_models_on_device"]


async def wait_until_one_version_is_left(dispatch: WorkerDispatch) -> None:
    while await num_versions(dispatch) != 1:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def differ(one: SampleResponse, other: SampleResponse) -> bool:
    return not np.array_equal(one.sequences[0].tokens, other.sequences[0].tokens)


LAYOUTS = ["single", pytest.param("tp=2", marks=pytest.mark.full)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", LAYOUTS)
async def test_request_ends_with_the_weights_it_began_with(parallel: str, tiny_models: dict[str, Path]) -> None:
    async with one_sampler(tiny_models["qwen3"], parallel) as dispatch:
        first = await drawn(dispatch, 1)
        alone = await sampler_memory(dispatch)
        old = await begin(dispatch, "old")
        await step_and_push(dispatch)
        assert not old.answer.done() and await num_versions(dispatch) == 2
        meanwhile = await drawn(dispatch, 2, 12)
        assert not old.answer.done(), "the new one did not wait for it"
        assert_same(await old.answer, first)
        await wait_until_one_version_is_left(dispatch)
        second = await drawn(dispatch, 3)
        assert differ(first, second), "otherwise this test shows nothing"
        assert as_drawn(meanwhile.sequences[0]) == as_drawn(second.sequences[0])[:12]
        assert not np.allclose(meanwhile.sequences[0].logprobs, first.sequences[0].logprobs[:12], atol=1e-4)
        assert (await sampler_memory(dispatch))["full_models"] == alone["full_models"]


async def test_new_weights_replace_unused_ones_in_place(
    tiny_models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainhouse.workers.engines")
    async with one_sampler(tiny_models["qwen3"], max_full_models=2) as dispatch:
        await dispatch.copy_adapter("run", "other")
        found = []
        for number in range(3):
            found.append((await drawn(dispatch, number, 12), await sampler_memory(dispatch)))
            await step_and_push(dispatch)
        answers, memory = zip(*found, strict=True)
        assert differ(answers[0], answers[1]) and differ(answers[1], answers[2])
        one = memory[0]["full_models"]
        assert {each["num_full_models_on_device"] for each in memory} == {1}
        assert {each["full_models"] for each in memory} == {one}
        assert [each["num_pushes"] for each in memory] == [1, 2, 3]
        assert [each["pushed_weights_bytes"] for each in memory] == [one, 2 * one, 3 * one]
        assert 0 < memory[0]["pushed_weights_milliseconds"] < memory[2]["pushed_weights_milliseconds"]
        assert "num_pushes" not in (await dispatch.memory())["tiny"]
    logs = [record.getMessage() for record in caplog.records if record.name.endswith("adapter_versions")]
    assert len(logs) == 4 and all(f"tiny (sampler 1) has version {n}" in logs[i] for i, n in enumerate((1, 3, 4, 5)))
    assert all("of the weights of moving" in line and " bytes in " in line for line in logs)


@pytest.mark.slow
async def test_at_most_two_versions_are_held_and_those_between_are_skipped(tiny_models: dict[str, Path]) -> None:
    async with one_sampler(tiny_models["qwen3"]) as dispatch:
        first = await drawn(dispatch, 1)
        old = await begin(dispatch, "old")
        await step_and_push(dispatch)
        second = await begin(dispatch, "second")
        for _ in range(2):
            await step_and_push(dispatch)  # no request waits for these
        assert not old.answer.done() and await num_versions(dispatch) == 2
        behind = await drawn(dispatch, 2, 12)
        # Both are as long, and take turns.
        assert (old.answer.done() or second.answer.done()) and await num_versions(dispatch) <= 2
        assert_same(await old.answer, first)
        between = await second.answer
        await wait_until_one_version_is_left(dispatch)
        newest = await drawn(dispatch, 3)
        assert (await sampler_memory(dispatch))["num_pushes"] == 3, "the third of four was left out"
        assert differ(first, between) and differ(between, newest)
        assert as_drawn(behind.sequences[0]) == as_drawn(newest.sequences[0])[:12]
        assert not np.array_equal(behind.sequences[0].tokens, between.sequences[0].tokens[:12])


@pytest.mark.full
async def test_without_room_for_two_versions_new_requests_wait_for_old_ones(
    tiny_models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with one_sampler(tiny_models["qwen3"], max_full_models=1) as dispatch:
        first = await drawn(dispatch, 1)
        old = await begin(dispatch, "old")
        await step_and_push(dispatch)
        behind = await drawn(dispatch, 2)
        assert old.answer.done() and await num_versions(dispatch) == 1
        assert_same(await old.answer, first)
        assert differ(behind, first)
        assert_same(await drawn(dispatch, 3), behind)
    assert "has no room for version 2 of the weights of moving next to the versions in use" in caplog.text


async def test_cancelled_request_releases_its_version(tiny_models: dict[str, Path]) -> None:
    async with one_sampler(tiny_models["qwen3"]) as dispatch:
        old = await begin(dispatch, "old")
        await step_and_push(dispatch)
        new = await begin(dispatch, "new")
        await step_and_push(dispatch)
        waiting = asyncio.create_task(drawn(dispatch, 1))
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in (old.answer, new.answer, waiting))
        for name in ("drawn-1", "old"):
            dispatch.cancel(name)
        for each in (waiting, old.answer):
            with pytest.raises(OperationError, match="was cancelled"):
                await each
        await new.answer
        await wait_until_one_version_is_left(dispatch)
        assert (await sampler_memory(dispatch))["num_pushes"] == 3


async def test_dropped_model_leaves_the_worker_in_all_versions(tiny_models: dict[str, Path]) -> None:
    async with one_sampler(tiny_models["qwen3"]) as dispatch:
        begun = []
        for number in range(2):
            begun.append(await begin(dispatch, f"old-{number}"))
            await step_and_push(dispatch)
        waiting = asyncio.create_task(drawn(dispatch, 1))
        await asyncio.sleep(0.01)
        await dispatch.drop_adapter("moving")
        for answer in (*(each.answer for each in begun), waiting):
            with pytest.raises(OperationError, match="is gone"):
                await answer
        assert (await sampler_memory(dispatch))["full_models"] == 0


@pytest.mark.slow
async def test_requests_of_a_dead_worker_are_rerun_with_the_newest_weights(
    tiny_models: dict[str, Path],
) -> None:
    """A stream of the old weights fails instead."""
    async with one_sampler(tiny_models["qwen3"]) as dispatch:
        first = await drawn(dispatch, 1)
        stream = await begin(dispatch, "stream")
        whole = asyncio.create_task(dispatch.sample("tiny", job("whole", "moving", LONG)))
        await asyncio.sleep(0.05)
        await step_and_push(dispatch)
        of_new = await begin(dispatch, "stream of the new ones")
        assert await num_versions(dispatch) == 2
        os.kill(dispatch.pids("tiny")[1], signal.SIGKILL)
        with pytest.raises(OperationError, match=r"began with weights that .* send the request again") as failed:
            await stream.answer
        assert failed.value.category == "server"
        again, continued = await whole, await of_new.answer
        await wait_until_all_are_up(dispatch)
        assert differ(again, first) and await num_versions(dispatch) == 1
        for each in (again, continued):
            assert_same(each, await drawn(dispatch, 2))
        streamed = np.concatenate([part.tokens for part in of_new.streamed])
        np.testing.assert_array_equal(streamed, continued.sequences[0].tokens[: len(streamed)])


@pytest.mark.slow
async def test_running_request_continues_with_a_newer_adapter(tiny_models: dict[str, Path]) -> None:
    async with one_sampler(tiny_models["qwen3"]) as dispatch:
        await dispatch.create_run("tiny", RunSpec("lora", LoraConfig(rank=4, seed=0)), "tenant")
        await dispatch.copy_adapter("lora", "adapter")
        whole = await dispatch.sample("tiny", job("whole", "adapter", LONG))
        pushed = (await sampler_memory(dispatch))["num_pushes"]
        under_way = await begin(dispatch, "under-way", "adapter")
        await train(dispatch, "lora", 3)
        await dispatch.copy_adapter("lora", "adapter")
        memory = await sampler_memory(dispatch)
        assert not under_way.answer.done() and memory["num_adapters_on_device"] == 1
        assert differ(await under_way.answer, whole) and memory["num_pushes"] == pushed


@pytest.mark.full
@pytest.mark.parametrize("num_deaths", [0, 2])
async def test_every_request_is_of_one_version_despite_deaths(num_deaths: int, tiny_models: dict[str, Path]) -> None:
    """The version is at least the newest one at submission. Control: versions differ."""
    random = np.random.default_rng(num_deaths)
    found: list[tuple[int, SampleResponse]] = []

    async def ask(dispatch: WorkerDispatch, number: int, newest: int) -> None:
        max_tokens = int(random.integers(5, LONG // 3))
        found.append((newest, await dispatch.sample("tiny", job(f"asked-{number}", "moving", max_tokens))))

    async with one_sampler(tiny_models["qwen3"]) as dispatch:
        await dispatch.copy_adapter("run", "version-0")
        asked, cancelled, kills = [], [], sorted(random.choice(range(1, 7), num_deaths, replace=False).tolist())
        for newest in range(8):
            for _ in range(5):
                asked.append(asyncio.create_task(ask(dispatch, len(asked), newest)))
                await asyncio.sleep(random.uniform(0, 0.1))
            dispatch.cancel(f"asked-{len(asked) - 2}")
            cancelled.append(asked[-2])
            if newest in kills:
                os.kill(dispatch.pids("tiny")[1], signal.SIGKILL)
            await step_and_push(dispatch)
            await dispatch.copy_adapter("run", f"version-{newest + 1}")
            assert newest in kills or await num_versions(dispatch) <= 2
        ended = await asyncio.gather(*asked, return_exceptions=True)
        failed = [task for task, error in zip(asked, ended, strict=True) if error is not None]
        assert all(task in cancelled for task in failed) and len(found) >= len(asked) - len(cancelled)
        await wait_until_one_version_is_left(dispatch)
        versions = [await dispatch.sample("tiny", job(f"version-{n}", f"version-{n}", LONG)) for n in range(newest + 2)]
    assert all(differ(one, other) for one, other in itertools.pairwise(versions))
    drawn = [_version_of(response, versions) for _, response in found]
    assert all(version >= newest for version, (newest, _) in zip(drawn, found, strict=True))
    assert len(set(drawn)) > 2


def _version_of(response: SampleResponse, versions: list[SampleResponse]) -> int:
    """Returns the only version that has all of the response's log-probabilities."""
    ours = response.sequences[0].logprobs
    [number] = [
        n for n, each in enumerate(versions) if np.allclose(each.sequences[0].logprobs[: len(ours)], ours, atol=1e-4)
    ]
    return number


# --- in a worker ---


@pytest.fixture(params=["float32", "bfloat16"])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Worker:
    worker = a_worker(tiny_model("qwen3", tmp_path), dtype=request.param)
    worker.create_run(RunSpec("full", FullConfig()))
    return worker


def test_replacing_weights_makes_no_second_copy(worker: Worker) -> None:
    weights = [_whole(worker)]
    trained(worker, "full", 3)
    weights.append(_whole(worker))
    worker.import_adapter("sampler", weights[0])
    before, live, peaks = sampled(worker, "sampler")[0], LiveBytes(), []
    for adapter_id in ("sampler", "other"):
        with live:
            live.restart()
            worker.import_adapter(adapter_id, weights[1])
            peaks.append(live.peak)
    after = sampled(worker, "sampler", "other")
    num_bytes = weights[0].weights.nbytes
    assert peaks[0] < 0.1 * num_bytes and peaks[1] >= num_bytes
    assert differ(before, after[0]) and not differ(after[0], after[1])


def _whole(worker: Worker) -> AdapterWeights:
    exported = worker.export_adapter("full")
    assert exported is not None
    return replace(exported, weights=exported.weights.copy())
