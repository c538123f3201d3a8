"""Sampling by a real vLLM server against our own forward: numbers, versions of adapters, refusals and crashes."""

import asyncio
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
from trainhouse.schemas.models import LoraConfig
from trainhouse.schemas.sampling import Constraint, SampleResponse, SamplingParams
from trainhouse.tests.live import save_byte_tokenizer
from trainhouse.tests.tiny import tiny_model
from trainhouse.workers.dispatch import DispatchConfig, WorkerDispatch
from trainhouse.workers.engines.vllm import requests
from trainhouse.workers.engines.vllm.server import VllmProcess
from trainhouse.workers.protocol.calls import RunSpec, SampledPart, SampleJob
from trainhouse.workers.protocol.worker_config import SamplingConfig, ServedModel, VllmConfig, WorkerConfig

from ...drawn import as_drawn, assert_same_sample
from .test_sampler_groups import TOKENS, running, train

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(600)]

LOGPROBS_WITHIN = 1e-3


def job(job_id: str, adapter_id: str | None = None, max_tokens: int | None = 12, **options: Any) -> SampleJob:
    """Returns a job. options: fields of the job or of its SamplingParams."""
    params = {name: options.pop(name) for name in SamplingParams.model_fields if name in options}
    options = {"stop_token_ids": (), "stop_strings": (), "prompt": TOKENS[:3]} | options
    sampling = SamplingParams(**({"max_tokens": max_tokens, "seed": 7} | params))
    return SampleJob(job_id=job_id, adapter_id=adapter_id, params=sampling, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    """Has heads of 32 features, because vLLM's attention on CPUs does not support 16."""
    directory = tiny_model("qwen3", tmp_path_factory.mktemp("model"), head_dim=32)
    save_byte_tokenizer(directory)
    return WorkerConfig(ServedModel("tiny", str(directory)), device="cpu", threads=1, max_lora_rank=8, adapter_slots=4)


@pytest.fixture(scope="module")
async def dispatch(
    vllm_python: str, model: WorkerConfig, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[WorkerDispatch]:
    sampling = SamplingConfig(vllm=VllmConfig(python=vllm_python), directory=str(tmp_path_factory.mktemp("vllm")))
    async with running(DispatchConfig((model,), sampling=sampling)) as dispatch:
        yield dispatch


@pytest.fixture(scope="module")
async def native(model: WorkerConfig, anyio_backend: str) -> AsyncIterator[WorkerDispatch]:
    async with running(DispatchConfig((model,))) as dispatch:
        yield dispatch


async def trained_run(dispatch: WorkerDispatch, run_id: str, unembed: bool = True) -> str:
    await dispatch.create_run("tiny", RunSpec(run_id, LoraConfig(rank=4, seed=0, train_unembed=unembed)), "tenant")
    await train(dispatch, run_id, 3)
    return run_id


async def scored(
    dispatch: WorkerDispatch, adapter_id: str | None, prompt: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Returns our forward's log-probabilities of the tokens after the prompt."""
    whole = np.concatenate([prompt, tokens]).astype(np.int32)
    response = await dispatch.sample("tiny", job("scored", adapter_id, 1, prompt=whole, prompt_logprobs=True))
    assert response.prompt_logprobs is not None
    return response.prompt_logprobs[len(prompt) :]


@asynccontextmanager
async def trained(
    dispatch: WorkerDispatch, native: WorkerDispatch, directory: Path, name: str, unembed: bool = True
) -> AsyncIterator[str]:
    """Yields an adapter that both sides have."""
    run_id = await trained_run(dispatch, name, unembed)
    await dispatch.copy_adapter(run_id, f"{name}-adapter")
    await dispatch.save_run(run_id, directory, optimizer=False)
    await native.load_adapter("tiny", f"{name}-adapter", directory)
    try:
        yield f"{name}-adapter"
    finally:
        for each in (dispatch, native):
            await each.drop_adapter(f"{name}-adapter")
        await dispatch.drop_run(run_id)


@pytest.mark.parametrize("unembed", [True, False])
async def test_logprobs_equal_our_forward(
    dispatch: WorkerDispatch, native: WorkerDispatch, tmp_path: Path, unembed: bool
) -> None:
    """Log-probabilities are at temperature 1 for any sampling temperature. Control: the base is far away."""
    async with trained(dispatch, native, tmp_path, f"exact-{unembed}", unembed) as adapter_id:
        for number, options in enumerate(({}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.8, "min_p": 0.1})):
            drawn = await dispatch.sample("tiny", job(f"exact-{number}", adapter_id, 40, num_samples=3, **options))
            assert len(drawn.sequences) == 3
            for sequence in drawn.sequences:
                assert sequence.stop_reason == "length" and len(sequence.tokens) == 40
                ours = await scored(native, adapter_id, TOKENS[:3], sequence.tokens)
                np.testing.assert_allclose(sequence.logprobs, ours, atol=LOGPROBS_WITHIN)
                base = await scored(native, None, TOKENS[:3], sequence.tokens)
                assert not np.allclose(sequence.logprobs, base, atol=10 * LOGPROBS_WITHIN)


async def test_greedy_samples_equal_the_native_sampler(
    dispatch: WorkerDispatch, native: WorkerDispatch, tmp_path: Path
) -> None:
    async with trained(dispatch, native, tmp_path, "greedy") as adapter_id:
        for each in (adapter_id, None):
            greedy = job(f"greedy-{each}", each, 60, temperature=0.0, num_samples=2, topk_sample_logprobs=4)
            theirs, ours = await asyncio.gather(dispatch.sample("tiny", greedy), native.sample("tiny", greedy))
            assert len(theirs.sequences) == 2
            for one, other in zip(theirs.sequences, ours.sequences, strict=True):
                assert as_drawn(one) == as_drawn(other)
                assert one.topk_logprobs is not None and other.topk_logprobs is not None
                np.testing.assert_allclose(
                    one.topk_logprobs.logprobs, other.topk_logprobs.logprobs, atol=LOGPROBS_WITHIN
                )
                np.testing.assert_array_equal(one.topk_logprobs.token_ids[:, 0], one.tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 4.0},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {40: 3.0, 17: -6.0}},
        {"min_tokens": 9, "stop_token_ids": (13, 17)},
    ],
)
async def test_penalties_and_biases_act_like_in_the_native_sampler(
    dispatch: WorkerDispatch, native: WorkerDispatch, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Greedy, so that tokens are comparable. Log-probabilities stay the model's. Control: the option left out."""
    async with trained(dispatch, native, tmp_path, "changed") as adapter_id:
        changed = job("changed", adapter_id, 30, temperature=0.0, **options)
        theirs, ours = await asyncio.gather(dispatch.sample("tiny", changed), native.sample("tiny", changed))
        assert_close(theirs, ours)
        stops = options.get("stop_token_ids", ())
        plain = await dispatch.sample("tiny", job("plain", adapter_id, 30, temperature=0.0, stop_token_ids=stops))
        assert not np.array_equal(plain.sequences[0].tokens, theirs.sequences[0].tokens)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("last_n", [None, 2])
async def test_prompt_scores_equal_the_native_sampler(
    dispatch: WorkerDispatch,
    native: WorkerDispatch,
    tmp_path: Path,
    streams: bool,
    last_n: int | None,
) -> None:
    """Scores with an adapter, its output head included, and with the base, while others sample."""
    async with trained(dispatch, native, tmp_path, f"scores-{streams}-{last_n}") as adapter_id:
        scores = {
            "prompt": TOKENS,
            "prompt_logprobs": True,
            "prompt_logprobs_last_n": last_n,
            "topk_prompt_logprobs": 3,
            "target_prompt_tokens": TOKENS[1:, None].astype(np.int64),
            "prompt_alt_tokens_k": 2,
        }
        asked = [job(f"of-{each}", each, 4, num_samples=2, streams=streams, **scores) for each in (adapter_id, None)]
        others = [job(f"other-{i}", adapter_id if i % 2 else None, 30) for i in range(6)]
        *theirs, _ = await asyncio.gather(
            *(dispatch.sample("tiny", each) for each in asked),
            asyncio.gather(*(dispatch.sample("tiny", each) for each in others)),
        )
        for one, request in zip(theirs, asked, strict=True):
            other = await native.sample("tiny", request)
            assert [len(sequence.tokens) for sequence in one.sequences] == [4, 4]
            assert one.prompt_logprobs is not None and one.topk_prompt_logprobs is not None
            assert np.isnan(one.prompt_logprobs).sum() == len(TOKENS) - (last_n or len(TOKENS) - 1)
            np.testing.assert_allclose(one.prompt_logprobs, other.prompt_logprobs, atol=1e-5)
            np.testing.assert_allclose(one.target_prompt_logprobs, other.target_prompt_logprobs, atol=1e-5)
            np.testing.assert_array_equal(one.prompt_alt_tokens, other.prompt_alt_tokens)
        assert not np.allclose(theirs[0].target_prompt_logprobs, theirs[1].target_prompt_logprobs, atol=0.1)


async def test_samples_depend_on_the_seed_and_their_index(dispatch: WorkerDispatch) -> None:
    """Drawing more samples or scoring the prompt changes none; no sample of seed 7 is one of seed 8."""
    asked = job("seeded", None, 20, num_samples=4)
    first = await dispatch.sample("tiny", asked)
    more = await dispatch.sample("tiny", replace(asked, num_samples=70, prompt_logprobs=True))
    other = await dispatch.sample("tiny", job("other", None, 20, num_samples=4, seed=8))
    texts = [tuple(sequence.tokens) for sequence in more.sequences]
    assert [tuple(sequence.tokens) for sequence in first.sequences] == texts[:4]
    assert len(set(texts)) == 70
    assert not {tuple(sequence.tokens) for sequence in other.sequences} & set(texts)


async def test_samples_end_like_in_the_native_sampler(
    dispatch: WorkerDispatch, native: WorkerDispatch, model: WorkerConfig, tmp_path: Path
) -> None:
    """Samples end at a token, at a string, at max_tokens without a match, and at the end of the context."""
    async with trained(dispatch, native, tmp_path, "ends") as adapter_id:
        free = job("free", adapter_id, 40, temperature=0.0)
        tokens = (await dispatch.sample("tiny", free)).sequences[0].tokens
        jobs = [
            replace(free, stop_token_ids=(int(tokens[5]),)),
            replace(free, stop_strings=(printable(model, tokens[2:]),)),
            replace(free, stop_strings=("never to be seen",)),
            replace(free, params=SamplingParams(max_tokens=1021, temperature=0.0, seed=7), fills_context=True),
        ]
        reasons, lengths = [], []
        for asked in jobs:
            theirs, ours = [(await each.sample("tiny", asked)).sequences[0] for each in (dispatch, native)]
            assert theirs.stop_reason == ours.stop_reason
            assert as_drawn(theirs) == as_drawn(ours)
            reasons.append(theirs.stop_reason)
            lengths.append(len(theirs.tokens))
        assert reasons == ["stop", "stop", "length", "length"]
        assert lengths[0] <= 6 and lengths[1] < 40 and lengths[2:] == [40, 1021]


def printable(model: WorkerConfig, tokens: np.ndarray) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.model.source)
    texts = [tokenizer.decode([token]) for token in tokens.tolist()]
    return next(text for text in texts if text and text.isascii())


async def test_end_token_stops_only_requests_that_name_it(dispatch: WorkerDispatch) -> None:
    free = job("free", None, 200, temperature=2.0, num_samples=16)
    sequences = (await dispatch.sample("tiny", free)).sequences
    assert {len(sequence.tokens) for sequence in sequences} == {200}
    assert any(2 in sequence.tokens for sequence in sequences)
    stopped = (await dispatch.sample("tiny", replace(free, stop_token_ids=(2,)))).sequences
    for one, other in zip(sequences, stopped, strict=True):
        ends = np.flatnonzero(one.tokens == 2)
        assert len(other.tokens) == (ends[0] + 1 if len(ends) else 200)


async def test_vllm_reads_an_adapter_once(dispatch: WorkerDispatch) -> None:
    """The adapter's files are moved away after the first token."""
    run_id = await trained_run(dispatch, "read-once")
    await dispatch.copy_adapter(run_id, "once")
    engine: Any = dispatch._own["tiny"].engine
    files = engine._adapters.get("once").directory
    asked = job("long", "once", 200, streams=True)
    begun = asyncio.Event()
    sampling = asyncio.create_task(dispatch.sample("tiny", asked, lambda _: begun.set()))
    await begun.wait()
    files.rename(files.with_name("elsewhere"))
    _, pid = dispatch.pids("tiny")
    assert len((await sampling).sequences[0].tokens) == 200
    assert_close(await dispatch.sample("tiny", replace(asked, streams=False)), await sampling)
    assert dispatch.pids("tiny") == [dispatch.pids("tiny")[0], pid]
    files.with_name("elsewhere").rename(files)
    await dispatch.drop_adapter("once")
    await dispatch.drop_run(run_id)


async def test_prompt_cache_hits_are_reported_only_to_the_same_owner(dispatch: WorkerDispatch) -> None:
    run_id = await trained_run(dispatch, "cached")
    await dispatch.copy_adapter(run_id, "cached")
    prompt = np.resize(TOKENS, 600).astype(np.int32)
    for number, (adapter_id, streams) in enumerate((("cached", False), ("cached", True), (None, False))):
        first = job("first", adapter_id, 4, prompt=prompt, streams=streams, tenant_id=f"tenant-{number}")
        jobs = [first, replace(first, num_samples=2), replace(first, tenant_id=f"other-{number}")]
        hits = [(await dispatch.sample("tiny", each)).prompt_cache_hit_tokens for each in jobs]
        assert hits[0] == hits[2] == 0 and hits[1] >= 512
    await dispatch.drop_adapter("cached")
    await dispatch.drop_run(run_id)


async def test_top_logprobs_fetched_in_pieces_are_the_same(
    dispatch: WorkerDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job("top", None, 30, num_samples=3, topk_sample_logprobs=7)
    whole = await dispatch.sample("tiny", asked)
    monkeypatch.setattr(requests, "_MAX_CELLS_AT_ONCE", 100)
    pieces = await dispatch.sample("tiny", asked)
    assert_close(whole, pieces)
    for one, other in zip(whole.sequences, pieces.sequences, strict=True):
        assert one.topk_logprobs is not None and other.topk_logprobs is not None
        assert one.topk_logprobs.token_ids.shape == other.topk_logprobs.token_ids.shape == (30, 7)
        np.testing.assert_allclose(one.topk_logprobs.logprobs, other.topk_logprobs.logprobs, atol=LOGPROBS_WITHIN)


async def test_adapter_gets_new_weights_and_old_versions_are_unloaded(
    dispatch: WorkerDispatch, native: WorkerDispatch, tmp_path: Path
) -> None:
    run_id = await trained_run(dispatch, "moving")
    for adapter_id in ("snapshot", "inflight"):
        await dispatch.copy_adapter(run_id, adapter_id)
    asked = job("asked", "inflight", temperature=0.0)
    early = await dispatch.sample("tiny", asked)
    [name] = await listed_adapters(dispatch)
    assert name.startswith("inflight-v")
    await train(dispatch, run_id, 3)
    await dispatch.copy_adapter(run_id, "inflight")
    await dispatch.save_run(run_id, tmp_path, optimizer=False)
    await native.load_adapter("tiny", "now", tmp_path)
    late = await dispatch.sample("tiny", asked)
    of_now = await native.sample("tiny", replace(asked, adapter_id="now"))
    assert_close(late, of_now)
    assert not np.allclose(early.sequences[0].logprobs[:1], late.sequences[0].logprobs[:1], atol=LOGPROBS_WITHIN)
    assert_close(await dispatch.sample("tiny", replace(asked, adapter_id="snapshot")), early)
    await wait_until_num_adapters(dispatch, 2)
    for adapter_id in ("snapshot", "inflight"):
        await dispatch.drop_adapter(adapter_id)
    await wait_until_num_adapters(dispatch, 0)
    with pytest.raises(OperationError, match="inflight is gone: its sampler was closed"):
        await dispatch.sample("tiny", asked)
    await native.drop_adapter("now")
    await dispatch.drop_run(run_id)


async def test_more_adapters_than_vllm_holds_on_its_device(
    dispatch: WorkerDispatch,
    native: WorkerDispatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run_id = await trained_run(dispatch, "many")
    expected = []
    for number in range(7):
        await dispatch.copy_adapter(run_id, f"many-{number}")
        directory = tmp_path_factory.mktemp("adapter")
        await dispatch.save_run(run_id, directory, optimizer=False)
        await native.load_adapter("tiny", "current", directory)
        expected.append(await native.sample("tiny", job("greedy", "current", temperature=0.0)))
        await train(dispatch, run_id, 1)
    expected.append(await native.sample("tiny", job("greedy", None, temperature=0.0)))
    jobs = [job(f"many-{number}", f"many-{number}", temperature=0.0) for number in range(7)]
    jobs.append(job("many-base", None, temperature=0.0))
    for responses in (
        await asyncio.gather(*(dispatch.sample("tiny", each) for each in jobs)),
        [await dispatch.sample("tiny", each) for each in jobs],
    ):
        for response, wanted in zip(responses, expected, strict=True):
            assert_close(response, wanted)
    for number in range(7):
        await dispatch.drop_adapter(f"many-{number}")
    await native.drop_adapter("current")
    await dispatch.drop_run(run_id)


def assert_close(one: SampleResponse, other: SampleResponse) -> None:
    for theirs, ours in zip(one.sequences, other.sequences, strict=True):
        assert_same_sample(theirs, ours, LOGPROBS_WITHIN)


def server_of(dispatch: WorkerDispatch) -> VllmProcess:
    server: Any = dispatch._own["tiny"].engine
    return server._server


async def listed_adapters(dispatch: WorkerDispatch) -> list[str]:
    """Returns the adapters that vLLM lists, except the one that represents the base."""
    import httpx

    server = server_of(dispatch)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {server.api_key}"}) as client:
        cards = (await client.get(f"{server.url}/v1/models")).json()["data"]
        return [card["id"] for card in cards if card["parent"] and "bare-base" not in card["id"]]


async def wait_until_num_adapters(dispatch: WorkerDispatch, number: int) -> None:
    for _ in range(100):
        if len(await listed_adapters(dispatch)) == number:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"vLLM still has {await listed_adapters(dispatch)}")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"constraint": Constraint(regex="a+")},
            r"constraint is not supported by vLLM: leave it out, or start the server with --sampler native",
        ),
        ({"prompt": np.array([600], np.int32)}, "vLLM refuses the request: Token id 600 is out of vocabulary"),
        ({"prompt": np.ones(1024, np.int32)}, "the prompt has 1024 tokens, and vLLM's context of 1024"),
        ({"temperature": 2.5}, r"temperature 2\.5 exceeds vLLM's 2: lower it, or"),
        ({"presence_penalty": 2.5}, r"presence_penalty must be in \[-2, 2\], got 2\.5"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens must be less than or equal to"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 tokens"),
        ({"adapter_id": "missing"}, "adapter missing is gone"),
    ],
)
async def test_unsupported_requests_are_refused_with_the_reason(
    dispatch: WorkerDispatch, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(OperationError, match=reason) as refused:
        await dispatch.sample("tiny", job("refused", **options))
    assert refused.value.category == "user"


async def test_streaming_job_sends_every_token_once(dispatch: WorkerDispatch) -> None:
    for number, options in enumerate(({}, {"temperature": 0.0}, {"topk_sample_logprobs": 2})):
        streamed: list[SampledPart] = []
        asked = job(f"stream-{number}", None, 50, num_samples=3, streams=True, **options)
        response = await dispatch.sample("tiny", asked, streamed.extend)
        assert len(streamed) > 10
        for sample, sequence in enumerate(response.sequences):
            parts = [part for part in streamed if part.sample == sample]
            np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), sequence.tokens)
            np.testing.assert_array_equal(np.concatenate([part.logprobs for part in parts]), sequence.logprobs)
            assert [part.stop_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        whole = await dispatch.sample("tiny", replace(asked, streams=False))
        assert_close(whole, response)


async def test_a_cancelled_job_leaves_vllm(dispatch: WorkerDispatch) -> None:
    begun = asyncio.Event()
    asked = job("cancelled", None, 1000, num_samples=8, streams=True)
    sampling = asyncio.create_task(dispatch.sample("tiny", asked, lambda _: begun.set()))
    await begun.wait()
    assert "1 sampling request waits or runs on vLLM of tiny" in str(dispatch.status("tiny"))
    dispatch.cancel("cancelled")
    with pytest.raises(OperationError, match="sampling request cancelled was cancelled"):
        await sampling
    for _ in range(100):
        if await num_running(dispatch) == 0:
            return
        await asyncio.sleep(0.05)
    pytest.fail("vLLM still works on it")


async def num_running(dispatch: WorkerDispatch) -> float:
    import httpx

    server = server_of(dispatch)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {server.api_key}"}) as client:
        lines = (await client.get(f"{server.url}/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running"))


async def test_dead_vllm_restarts_with_its_adapters_and_requests_continue(dispatch: WorkerDispatch) -> None:
    run_id = await trained_run(dispatch, "survived")
    await dispatch.copy_adapter(run_id, "survivor")
    await dispatch.drop_run(run_id)
    asked = job("long", "survivor", 900, num_samples=2)
    expected = await dispatch.sample("tiny", asked)
    streamed: list[SampledPart] = []
    sampling = asyncio.create_task(dispatch.sample("tiny", replace(asked, streams=True), streamed.extend))
    while len(streamed) < 20:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    _, pid = dispatch.pids("tiny")
    os.kill(pid, signal.SIGKILL)
    response = await sampling
    assert_close(response, expected)
    for sample, sequence in enumerate(response.sequences):
        tokens = np.concatenate([part.tokens for part in streamed if part.sample == sample])
        np.testing.assert_array_equal(tokens, sequence.tokens)
    assert dispatch.pids("tiny")[1] != pid
    await dispatch.drop_adapter("survivor")


async def test_adapters_are_reloaded_at_a_url_that_lost_them(
    dispatch: WorkerDispatch, model: WorkerConfig, tmp_path: Path
) -> None:
    """Unloads an adapter, which looks to us like a restart."""
    import httpx

    server = server_of(dispatch)
    there = VllmConfig(urls=(server.url,), api_key=server.api_key)
    config = DispatchConfig((model,), sampling=SamplingConfig(vllm=there, directory=str(tmp_path)))
    other = WorkerDispatch(config)
    await other.start(lambda _: None)
    try:
        run_id = await trained_run(other, "elsewhere")
        await other.copy_adapter(run_id, "forgotten")
        asked = job("asked", "forgotten", temperature=0.0)
        expected = await other.sample("tiny", asked)
        [name] = [name for name in await listed_adapters(dispatch) if name.startswith("forgotten")]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {server.api_key}"}) as client:
            done = await client.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": name})
            assert done.is_success
        assert_close(await other.sample("tiny", asked), expected)
        await other.drop_adapter("forgotten")
        await wait_until_num_adapters(dispatch, 0)
    finally:
        await other.close()


async def test_adapter_that_vllm_cannot_hold_is_refused_with_the_remedy(
    dispatch: WorkerDispatch, model: WorkerConfig, tmp_path: Path
) -> None:
    server = server_of(dispatch)
    there = VllmConfig(urls=(server.url,), api_key=server.api_key)
    sampling = SamplingConfig(vllm=there, directory=str(tmp_path))
    other = WorkerDispatch(DispatchConfig((replace(model, max_lora_rank=16),), sampling=sampling))
    await other.start(lambda _: None)
    try:
        await other.create_run("tiny", RunSpec("wide", LoraConfig(rank=16, seed=0)), "tenant")
        await other.copy_adapter("wide", "wide")
        with pytest.raises(OperationError, match=r"vLLM cannot load adapter wide-v1-.*16.*--max-lora-rank"):
            await other.sample("tiny", job("asked", "wide"))
    finally:
        await other.close()
