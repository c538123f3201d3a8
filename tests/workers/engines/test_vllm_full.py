"""Full models in a real vLLM: the trainer's numbers, numbered versions, turns with others' weights, and restarts."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import FullConfig
from trainhouse.schemas.sampling import SampledSequence, SampleResponse
from trainhouse.schemas.training import Datum, ForwardBackwardRequest
from trainhouse.tests.live import save_byte_tokenizer
from trainhouse.tests.tiny import tiny_model
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.protocol.calls import RunSpec, SampledPart
from trainhouse.workers.protocol.worker_config import SamplingConfig, ServedModel, VllmConfig, WorkerConfig

from .test_sampler_groups import TOKENS, running, train
from .test_vllm import LOGPROBS_WITHIN, assert_close, job, server_of, trained_run

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    """Has heads of 32 features, because vLLM's attention on CPUs does not support 16."""
    directory = tiny_model("qwen3", tmp_path_factory.mktemp("model"), head_dim=32)
    save_byte_tokenizer(directory)
    served = ServedModel("tiny", str(directory))
    return WorkerConfig(served, device="cpu", threads=1, max_lora_rank=8, adapter_slots=4, max_full_models=3)


@pytest.fixture(scope="module")
async def dispatch(
    vllm_python: str, model: WorkerConfig, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[WorkerDispatch]:
    sampling = SamplingConfig(vllm=VllmConfig(python=vllm_python), directory=str(tmp_path_factory.mktemp("vllm")))
    async with running(DispatchConfig((model,), sampling=sampling)) as dispatch:
        yield dispatch


@asynccontextmanager
async def full_run(dispatch: WorkerDispatch, run_id: str) -> AsyncIterator[str]:
    """Yields a full model that is sampled as `RUN-sampled`."""
    await dispatch.create_run("tiny", RunSpec(run_id, FullConfig(seed=0)), "tenant")
    await train(dispatch, run_id, 1)
    await dispatch.copy_adapter(run_id, f"{run_id}-sampled")
    try:
        yield f"{run_id}-sampled"
    finally:
        await dispatch.drop_adapter(f"{run_id}-sampled")
        await dispatch.drop_run(run_id)


async def of_trainer(dispatch: WorkerDispatch, run_id: str, sequence: SampledSequence) -> np.ndarray:
    """Returns the training forward's log-probabilities of a sample."""
    row = np.concatenate([TOKENS[:3], sequence.tokens]).astype(np.int32)
    data = (Datum(row[:-1], {"target_tokens": row[1:].astype(np.int64)}),)
    passed = await dispatch.forward_backward(
        ForwardBackwardRequest(run_id, 0, data, "cross_entropy", forward_only=True)
    )
    return np.asarray(passed.loss_fn_outputs[0]["logprobs"])[2:]


async def pushes(dispatch: WorkerDispatch) -> dict[str, int]:
    return (await dispatch.memory())["tiny (vLLM)"]


async def begin(dispatch: WorkerDispatch, name: str, adapter_id: str | None) -> "asyncio.Task[SampleResponse]":
    """Starts a long request, and returns when it has its first tokens."""
    streamed: list[SampledPart] = []
    asked = job(name, adapter_id, 400, streams=True)
    sampling = asyncio.create_task(dispatch.sample("tiny", asked, streamed.extend))
    while not streamed:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    return sampling


def first_logprob(response: SampleResponse) -> float:
    return float(response.sequences[0].logprobs[0])


async def test_logprobs_equal_the_trainers_after_every_update(
    dispatch: WorkerDispatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Controls: before an update the new weights' log-probabilities differ, and the base model's always do."""
    caplog.set_level(logging.INFO, "trainhouse.workers.engines")
    before = await pushes(dispatch)
    async with full_run(dispatch, "exact") as sampled:
        base = await dispatch.sample("tiny", job("base", None, 30))
        for number in range(3):
            drawn = await dispatch.sample("tiny", job(f"exact-{number}", sampled, 30, num_samples=2))
            for sequence in drawn.sequences:
                ours = await of_trainer(dispatch, "exact", sequence)
                np.testing.assert_allclose(sequence.logprobs, ours, atol=LOGPROBS_WITHIN)
            await train(dispatch, "exact", 1)
            newer = await of_trainer(dispatch, "exact", drawn.sequences[0])
            assert not np.allclose(drawn.sequences[0].logprobs, newer, atol=10 * LOGPROBS_WITHIN)
            await dispatch.copy_adapter("exact", sampled)
        assert_close(await dispatch.sample("tiny", job("base-again", None, 30)), base)
        assert abs(first_logprob(drawn) - first_logprob(base)) > 10 * LOGPROBS_WITHIN
    after = await pushes(dispatch)
    num_bytes = (after["pushed_weights_bytes"] - before["pushed_weights_bytes"]) / 3
    assert after["num_pushes"] - before["num_pushes"] == 3 and num_bytes > 100_000
    assert after["pushed_weights_milliseconds"] > before["pushed_weights_milliseconds"]
    lines = [each for each in caplog.messages if "of the weights of exact-sampled" in each]
    assert len(lines) == 3 and all(f": {num_bytes:.0f} bytes in " in line for line in lines)


async def test_a_request_ends_with_the_version_it_began_with(dispatch: WorkerDispatch) -> None:
    """New requests wait for those of the older version, and versions that no request waited for are skipped."""
    async with full_run(dispatch, "moving") as sampled:
        whole = await dispatch.sample("tiny", job("whole", sampled, 400))
        num_pushes = (await pushes(dispatch))["num_pushes"]
        old = await begin(dispatch, "old", sampled)
        for _ in range(3):
            await train(dispatch, "moving", 1)
            await dispatch.copy_adapter("moving", sampled)
        waiting = asyncio.create_task(dispatch.sample("tiny", job("waiting", sampled, 12)))
        await asyncio.sleep(0.05)
        assert not old.done() and not waiting.done()
        assert_close(await old, whole)
        new = (await waiting).sequences[0]
        ours = await of_trainer(dispatch, "moving", new)
        np.testing.assert_allclose(new.logprobs, ours, atol=LOGPROBS_WITHIN)
        assert (await pushes(dispatch))["num_pushes"] == num_pushes + 1


async def test_full_models_adapters_and_the_base_take_turns(dispatch: WorkerDispatch) -> None:
    """Each gives the same samples together with the others as alone, also from the prefix cache."""
    run_id = await trained_run(dispatch, "lora")
    await dispatch.copy_adapter(run_id, "lora")
    async with full_run(dispatch, "one") as one, full_run(dispatch, "two") as two:
        await train(dispatch, "two", 4)
        await dispatch.copy_adapter("two", two)
        # Longer than a block of the prefix cache.
        prompt = np.resize(TOKENS, 300).astype(np.int32)
        jobs = [job(f"{name}-{n}", name, 20, prompt=prompt) for n in range(3) for name in (one, "lora", two, None)]
        alone = [await dispatch.sample("tiny", each) for each in jobs[:4]]
        assert len({round(first_logprob(each), 2) for each in alone}) == 4
        together = await asyncio.gather(*(dispatch.sample("tiny", each) for each in jobs))
        for number, response in enumerate(together):
            assert_close(response, alone[number % 4])
    await dispatch.drop_adapter("lora")
    await dispatch.drop_run(run_id)


async def test_prompts_are_scored_with_the_same_version(dispatch: WorkerDispatch) -> None:
    async with full_run(dispatch, "scores") as sampled:
        drawn = (await dispatch.sample("tiny", job("drawn", sampled, 20))).sequences[0]
        whole = np.concatenate([TOKENS[:3], drawn.tokens]).astype(np.int32)
        scored = await dispatch.sample("tiny", job("scored", sampled, 1, prompt=whole, prompt_logprobs=True))
        assert scored.prompt_logprobs is not None
        np.testing.assert_allclose(scored.prompt_logprobs[3:], drawn.logprobs, atol=LOGPROBS_WITHIN)


async def test_a_killed_vllm_loads_the_version_again(dispatch: WorkerDispatch) -> None:
    """A request in flight continues with the version it began with, and new ones use the newest."""
    async with full_run(dispatch, "killed") as sampled:
        whole = await dispatch.sample("tiny", job("whole", sampled, 400))
        old = await begin(dispatch, "old", sampled)
        await train(dispatch, "killed", 2)
        await dispatch.copy_adapter("killed", sampled)
        os.kill(server_of(dispatch).pids[0], signal.SIGKILL)
        assert_close(await old, whole)
        new = (await dispatch.sample("tiny", job("new", sampled, 30))).sequences[0]
        np.testing.assert_allclose(new.logprobs, await of_trainer(dispatch, "killed", new), atol=LOGPROBS_WITHIN)


async def test_checkpoints_with_optimizer_states_are_sampled(dispatch: WorkerDispatch, tmp_path: Path) -> None:
    async with full_run(dispatch, "saved") as sampled:
        await dispatch.save_run("saved", tmp_path, optimizer=True)
        await dispatch.load_adapter("tiny", "loaded", tmp_path)
        asked = job("asked", "loaded", 20)
        assert_close(
            await dispatch.sample("tiny", asked), await dispatch.sample("tiny", replace(asked, adapter_id=sampled))
        )
        await dispatch.drop_adapter("loaded")


async def test_weights_that_vllm_cannot_read_fail_alone(dispatch: WorkerDispatch) -> None:
    """vLLM restarts once, since its weights are undefined then."""
    engine: Any = dispatch._own["tiny"].engine
    async with full_run(dispatch, "broken") as broken, full_run(dispatch, "whole") as whole:
        [file] = engine._adapters.get(broken).directory.glob("model*.safetensors")
        file.write_bytes(file.read_bytes()[:-1000])
        num_starts = server_of(dispatch).num_starts
        for _ in range(2):
            with pytest.raises(OperationError, match=r"vLLM cannot load the weights of broken-sampled: .* native"):
                await dispatch.sample("tiny", job("asked", broken))
        new = (await dispatch.sample("tiny", job("whole", whole))).sequences[0]
        np.testing.assert_allclose(new.logprobs, await of_trainer(dispatch, "whole", new), atol=LOGPROBS_WITHIN)
        assert server_of(dispatch).num_starts == num_starts + 1


async def test_as_many_full_models_are_sampled_as_may_exist(dispatch: WorkerDispatch) -> None:
    async with full_run(dispatch, "limited") as sampled:
        for name in ("second", "third"):
            await dispatch.copy_adapter("limited", name)
        with pytest.raises(OperationError, match=r"there are 3 samplers of full models, .* --max-full-models"):
            await dispatch.copy_adapter("limited", "fourth")
        await dispatch.copy_adapter("limited", sampled)
        for name in ("second", "third"):
            await dispatch.drop_adapter(name)


async def test_critics_are_refused(dispatch: WorkerDispatch) -> None:
    await dispatch.create_run("tiny", RunSpec("critic", FullConfig(seed=0), "critic"), "tenant")
    with pytest.raises(OperationError, match="samples no critics"):
        await dispatch.copy_adapter("critic", "critic-sampled")
    await dispatch.drop_run("critic")


async def test_a_vllm_at_a_url_takes_no_full_models(
    dispatch: WorkerDispatch, model: WorkerConfig, tmp_path: Path
) -> None:
    server = server_of(dispatch)
    there = VllmConfig(urls=(server.url,), api_key=server.api_key)
    async with running(DispatchConfig((model,), sampling=SamplingConfig(vllm=there, directory=str(tmp_path)))) as other:
        await other.create_run("tiny", RunSpec("run", FullConfig(seed=0)), "tenant")
        with pytest.raises(OperationError, match=r"may be used by others, .* --vllm-python"):
            await other.copy_adapter("run", "sampled")
        assert "tiny (vLLM)" not in await other.memory()


@pytest.mark.parametrize("key", ["", "Bearer wrong"])
async def test_weights_are_replaced_only_with_the_key(dispatch: WorkerDispatch, key: str, tmp_path: Path) -> None:
    import httpx

    url = f"{server_of(dispatch).url}/v1/trainhouse/weights"
    async with httpx.AsyncClient(headers={"Authorization": key} if key else {}) as client:
        assert (await client.post(url, json={"path": str(tmp_path)})).status_code == 401
