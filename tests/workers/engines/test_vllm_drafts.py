"""Drafts in a real vLLM: the tokens stay the same, a published draft takes effect, and a restart loads it again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainhouse.schemas.errors import OperationError
from trainhouse.schemas.models import Algorithm, DraftConfig, FullConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardRequest
from trainhouse.tests.live import save_byte_tokenizer
from trainhouse.tests.tiny import tiny_model
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.protocol.calls import OptimizerStep, RunSpec, SampledPart
from trainhouse.workers.protocol.worker_config import SamplingConfig, ServedModel, VllmConfig, WorkerConfig

from .test_sampler_groups import TOKENS, running, train
from .test_vllm import LOGPROBS_WITHIN, assert_close, job, server_of, trained_run
from .test_vllm_full import of_trainer

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(600)]

LOSSES: dict[Algorithm, dict[str, float]] = {"eagle3": {"ttt_length": 4}, "dflash": {"seed": 0}}
SHAPES: dict[Algorithm, dict[str, Any]] = {"eagle3": {}, "dflash": {"num_layers": 2, "block_size": 4}}
# Greedy jobs of as many tokens: the drafts are trained on these tokens.
NUM_TOKENS = 60


@dataclass(frozen=True)
class Served:
    """A dispatch with a vLLM for drafts of the algorithm. plain: the greedy tokens of the base model after TOKENS[:3].

    drafts: directories of an untrained draft, and of one that was trained on `plain`.
    """

    dispatch: WorkerDispatch
    algorithm: Algorithm
    plain: np.ndarray
    drafts: Mapping[str, Path]

    async def sample(self, name: str, draft_id: str | None, **options: Any) -> SampleResponse:
        asked = job(name, options.pop("adapter_id", None), **({"max_tokens": NUM_TOKENS, "temperature": 0.0} | options))
        return await self.dispatch.sample("tiny", replace(asked, draft_id=draft_id))

    async def load(self, draft: str, draft_id: str) -> None:
        await self.dispatch.load_draft("tiny", draft_id, self.drafts[draft])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    """Has heads of 32 features, because vLLM's attention on CPUs does not support 16."""
    directory = tiny_model(
        "qwen3", tmp_path_factory.mktemp("model"), head_dim=32, num_hidden_layers=4, initializer_range=0.2
    )
    save_byte_tokenizer(directory)
    return WorkerConfig(ServedModel("tiny", str(directory)), device="cpu", threads=1, max_lora_rank=8, adapter_slots=4)


@pytest.fixture(scope="module", params=["eagle3", "dflash"])
async def served(
    request: pytest.FixtureRequest,
    vllm_python: str,
    model: WorkerConfig,
    tmp_path_factory: pytest.TempPathFactory,
    anyio_backend: str,
) -> AsyncIterator[Served]:
    algorithm, directory = request.param, tmp_path_factory.mktemp("vllm")
    shape = DraftConfig(algorithm=algorithm, **SHAPES[algorithm])
    sampling = SamplingConfig(vllm=VllmConfig(python=vllm_python, draft=shape), directory=str(directory))
    async with running(DispatchConfig((model,), sampling=sampling)) as dispatch:
        async with running(DispatchConfig((model,))) as native:
            greedy = await native.sample("tiny", job("plain", None, NUM_TOKENS, temperature=0.0))
        plain = greedy.sequences[0].tokens
        text = np.concatenate([TOKENS[:3], plain]).astype(np.int32)
        drafts = {
            name: await saved_draft(dispatch, shape, text, num_steps, directory / name)
            for name, num_steps in (("untrained", 0), ("trained", 60))
        }
        yield Served(dispatch, algorithm, plain, drafts)


# ruff: noqa: ASYNC240
async def saved_draft(
    dispatch: WorkerDispatch, shape: DraftConfig, text: np.ndarray, num_steps: int, directory: Path
) -> Path:
    await dispatch.create_run("tiny", RunSpec("draft", shape.model_copy(update={"seed": 3}), "draft"), "tenant")
    for _ in range(num_steps):
        loss, config = shape.algorithm, LOSSES[shape.algorithm]
        await dispatch.forward_backward(ForwardBackwardRequest("draft", 0, (Datum(text, {}),), loss, config))
        await dispatch.optim_step(OptimizerStep("draft", AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)))
    directory.mkdir()
    await dispatch.save_run("draft", directory, optimizer=False)
    await dispatch.drop_run("draft")
    return directory


def acceptance_length(response: SampleResponse) -> float:
    assert response.guesses is not None
    return response.guesses.acceptance_length


async def test_a_published_draft_takes_effect_and_changes_no_token(served: Served) -> None:
    """An untrained draft is the control: it has hardly any token accepted. Then the trained one has its place back."""
    lengths = []
    for number, draft in enumerate(("untrained", "trained", "untrained", "trained")):
        draft_id = f"published-{number}"
        assert not served.dispatch.has_weights("tiny", draft_id)
        await served.load(draft, draft_id)
        assert served.dispatch.has_weights("tiny", draft_id)
        drawn = await served.sample(draft_id, draft_id)
        np.testing.assert_array_equal(drawn.sequences[0].tokens, served.plain)
        lengths.append(acceptance_length(drawn))
        guesses = drawn.guesses
        assert guesses is not None and sum(guesses.by_accepted) == guesses.passes
        assert guesses.accepted == sum(count * number for number, count in enumerate(guesses.by_accepted))
        assert guesses.passes + guesses.accepted == pytest.approx(NUM_TOKENS, abs=len(guesses.by_accepted))
    assert lengths[0] == lengths[2] < 1.3 and lengths[1] == lengths[3] > 2, lengths
    for number in range(4):
        await served.dispatch.drop_draft("tiny", f"published-{number}")
        assert not served.dispatch.has_weights("tiny", f"published-{number}")


async def test_requests_without_a_draft_give_the_same_tokens(served: Served) -> None:
    drawn = await served.sample("without", None)
    np.testing.assert_array_equal(drawn.sequences[0].tokens, served.plain)
    assert drawn.guesses is None


async def test_every_sample_of_a_request_is_counted(served: Served) -> None:
    await served.load("trained", "counted")
    drawn = await served.sample("counted", "counted", temperature=0.8, num_samples=3, max_tokens=20)
    assert len(drawn.sequences) == 3 and drawn.guesses is not None
    assert drawn.guesses.passes + drawn.guesses.accepted > 40
    assert len({tuple(sequence.tokens) for sequence in drawn.sequences}) == 3
    streamed: list[SampledPart] = []
    asked = job("streamed", None, NUM_TOKENS, temperature=0.0, streams=True)
    drawn = await served.dispatch.sample("tiny", replace(asked, draft_id="counted"), streamed.extend)
    np.testing.assert_array_equal(np.concatenate([part.tokens for part in streamed]), served.plain)
    assert acceptance_length(drawn) > 2
    await served.dispatch.drop_draft("tiny", "counted")


async def test_adapters_and_full_models_sample_with_a_draft(served: Served) -> None:
    """Their log-probabilities are the trainer's."""
    dispatch = served.dispatch
    await served.load("trained", "shared")
    await trained_run(dispatch, "lora")
    await dispatch.create_run("tiny", RunSpec("full", FullConfig(seed=0)), "tenant")
    await train(dispatch, "full", 1)
    for run_id in ("lora", "full"):
        await dispatch.copy_adapter(run_id, f"{run_id}-sampled")
        for number, draft_id in enumerate(("shared", None)):
            drawn = await served.sample(f"{run_id}-{number}", draft_id, adapter_id=f"{run_id}-sampled", temperature=0.7)
            [sequence] = drawn.sequences
            ours = await of_trainer(dispatch, run_id, sequence)
            np.testing.assert_allclose(sequence.logprobs, ours, atol=LOGPROBS_WITHIN)
            assert not np.array_equal(sequence.tokens, served.plain)
            assert (drawn.guesses is None) == (draft_id is None)
    back = await served.sample("back", "shared")
    np.testing.assert_array_equal(back.sequences[0].tokens, served.plain)
    assert acceptance_length(back) > 2
    for run_id in ("lora", "full"):
        await dispatch.drop_adapter(f"{run_id}-sampled")
        await dispatch.drop_run(run_id)
    await dispatch.drop_draft("tiny", "shared")


async def begin(served: Served, name: str, draft_id: str) -> "asyncio.Task[SampleResponse]":
    """Starts a long request, and returns when it has its first tokens."""
    streamed: list[SampledPart] = []
    asked = job(name, None, 400, temperature=0.0, streams=True)
    sampling = asyncio.create_task(served.dispatch.sample("tiny", replace(asked, draft_id=draft_id), streamed.extend))
    while not streamed:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    return sampling


async def test_the_slot_stays_with_requests_that_use_it(served: Served) -> None:
    """Others do not wait for it; they say nothing about their draft, which has proposed nothing."""
    await served.load("untrained", "first")
    await served.load("trained", "second")
    long = await begin(served, "long", "first")
    during = await served.sample("during", "second", max_tokens=10)
    assert not long.done()
    assert during.guesses is None
    np.testing.assert_array_equal(during.sequences[0].tokens, served.plain[:10])
    assert acceptance_length(await long) < 1.3
    after = await served.sample("after", "second")
    assert acceptance_length(after) > 2
    for name in ("first", "second"):
        await served.dispatch.drop_draft("tiny", name)


async def test_running_requests_continue_when_the_draft_changes(served: Served) -> None:
    await served.load("trained", "changed")
    await served.load("untrained", "before")
    alone = await served.sample("alone", "before", max_tokens=400)
    streamed: list[SampledPart] = []
    asked = job("running", None, 400, temperature=0.0, streams=True)
    sampling = asyncio.create_task(served.dispatch.sample("tiny", asked, streamed.extend))
    while not streamed:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    assert acceptance_length(await served.sample("new", "changed")) > 2
    assert not sampling.done()
    assert_close(await sampling, alone)
    for name in ("changed", "before"):
        await served.dispatch.drop_draft("tiny", name)


async def test_a_killed_vllm_has_the_draft_again(served: Served) -> None:
    """The requests that were running continue with it."""
    await served.load("trained", "kept")
    whole = await served.sample("whole", "kept", max_tokens=400)
    running = await begin(served, "running", "kept")
    os.kill(server_of(served.dispatch).pids[0], signal.SIGKILL)
    assert_close(await running, whole)
    assert acceptance_length(await served.sample("again", "kept")) > 2
    assert served.dispatch.has_weights("tiny", "kept")
    await served.dispatch.drop_draft("tiny", "kept")


async def test_drafts_that_vllm_cannot_read_fail_alone(served: Served, tmp_path: Path) -> None:
    """vLLM restarts once, since the weights of its draft are undefined then."""
    await served.load("trained", "whole")
    await served.load("trained", "broken")
    engine: Any = served.dispatch._own["tiny"].engine
    file = engine._draft_slot.get("broken").directory / "model.safetensors"
    content = file.read_bytes()[:-1000]
    file.unlink()  # a link to the checkpoint's
    file.write_bytes(content)
    num_starts = server_of(served.dispatch).num_starts
    for _ in range(2):
        with pytest.raises(OperationError, match=r"vLLM cannot load the weights of broken: .* native"):
            await served.sample("asked", "broken")
    assert acceptance_length(await served.sample("after", "whole")) > 2
    assert server_of(served.dispatch).num_starts == num_starts + 1
    for name in ("whole", "broken"):
        await served.dispatch.drop_draft("tiny", name)


async def test_drafts_of_another_shape_are_refused(served: Served, tmp_path: Path) -> None:
    other = DraftConfig(algorithm=served.algorithm, intermediate_size=40, **SHAPES[served.algorithm])
    directory = await saved_draft(served.dispatch, other, TOKENS, 0, tmp_path / "other")
    with pytest.raises(OperationError, match=r"has intermediate_size 40, .* for drafts with 128: .*--vllm-draft"):
        await served.dispatch.load_draft("tiny", "other", directory)
    assert not served.dispatch.has_weights("tiny", "other")


@pytest.mark.parametrize("options", [{"min_p": 0.1}, {"logit_bias": {5: 1.0}}], ids=str)
async def test_values_that_vllm_takes_only_without_a_draft_are_refused(served: Served, options: dict[str, Any]) -> None:
    with pytest.raises(OperationError, match=f"{next(iter(options))} is not supported by a vLLM with drafts"):
        await served.sample("refused", None, temperature=1.0, **options)
