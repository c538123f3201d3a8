"""Tests the native sampler's tokens and log-probabilities against plain forward passes, under any concurrent load."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from trainhouse.schemas.sampling import SampledSequence, SampleResponse, SamplingParams
from trainhouse.schemas.training import Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.batch.validated import ModelLimits
from trainhouse.workers.ops.kernels import new_step_tape
from trainhouse.workers.protocol.calls import Failure, OperationPart, SampleJob, SamplingSlice
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.sampler import shared_state
from trainhouse.workers.sampler.engine import SamplingEngine
from trainhouse.workers.sampler.requests.text import StopStrings
from trainhouse.workers.sampler.requests.token_choice import (
    SamplingSettings,
    SamplingTensors,
    choose,
    noise_key,
    uniforms,
)
from trainhouse.workers.sampler.shared_state import SharedState
from trainhouse.workers.training.pass_runner import PassRunner
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ...drawn import Drawn, all_drawn, as_drawn
from ...tiny import tiny_model
from ..adapted import SIZES, Adapted, copy_adapter

VOCAB, CONTEXT, EOS = 512, 1024, 2
# One token's bytes in the tiny models: 2 layers, 2 key/value heads of 16 float32 numbers, keys and values.
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
BLOCK = 64

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

PARAMS = {"max_tokens", "seed", "temperature", "top_k", "top_p"}


@pytest.fixture(scope="module")
def adapted(tiny_models: dict[str, Path]) -> Adapted:
    """Returns a tiny Qwen3 with two adapters of different shapes."""
    adapted = Adapted(tiny_models["qwen3"])
    adapted.create("one")
    adapted.create("other", rank=8, train_unembed=False)
    return adapted


@pytest.fixture(scope="module")
def bpe_adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """Returns a tiny Llama with a byte-level BPE tokenizer whose merges have two and more letters."""
    directory = tiny_model("llama", tmp_path_factory.mktemp("bpe_adapted"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    # The licence is a text that never changes, so that no edit of the tests changes their tokens.
    tokenizer.train([str(Path(__file__).parents[3] / "LICENSE")], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return Adapted(directory)


def new_sampler(adapted: Adapted, context: int = CONTEXT, **config: object) -> SamplingEngine:
    served = WorkerConfig(ServedModel("tiny", str(adapted.directory)), device="cpu", **(SIZES | config))
    return SamplingEngine(SharedState(adapted.base, adapted.models, ModelLimits(VOCAB, context), served))


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + 100 * length).integers(3, VOCAB, size=length).astype(np.int32)


def job(job_id: str, tokens: np.ndarray, adapter_id: str | None = None, **options: object) -> SampleJob:
    """Returns a job that only `max_tokens` ends unless `stop_token_ids` or `stop_strings` are given; None = the rest of
    the context.
    """
    if options.get("max_tokens", 12) is None:
        options |= {"max_tokens": CONTEXT - len(tokens), "fills_context": True}
    params = {"seed": 1, "max_tokens": 12} | {name: options.pop(name) for name in PARAMS & options.keys()}
    stops = {"stop_token_ids": (), "stop_strings": ()} | options
    return SampleJob(job_id, adapter_id, tokens, SamplingParams.model_validate(params), **stops)


def finish(sampler: SamplingEngine, *jobs: SampleJob, budget_milliseconds: float = 1e6) -> dict:
    """Returns all answers, from slices of the given budget."""
    result = sampler.slice(SamplingSlice(jobs, (), budget_milliseconds))
    finished = dict(result.finished)
    for _ in range(2000):
        if not result.num_active:
            return finished
        result = sampler.slice(SamplingSlice((), (), budget_milliseconds))
        finished |= result.finished
    raise AssertionError(f"{result.num_active} jobs are still active after 2000 slices")


def answer(sampler: SamplingEngine, one: SampleJob) -> SampleResponse:
    response = finish(sampler, one)[one.job_id]
    assert isinstance(response, SampleResponse), response
    return response


def sample(sampler: SamplingEngine, one: SampleJob) -> SampledSequence:
    return answer(sampler, one).sequences[0]


def failure(sampler: SamplingEngine, one: SampleJob) -> str:
    """Returns the message of a job that fails as a user error, and asserts that the sampler still works."""
    failed = finish(sampler, one)[one.job_id]
    assert isinstance(failed, Failure) and failed.category == "user"
    assert len(sample(sampler, job("next", prompt(4))).tokens) == 12
    return failed.message


def reference_logprobs(adapted: Adapted, tokens: np.ndarray, adapter_id: str | None = None) -> Tensor:
    """Returns the log-softmax of one plain forward: row i is the distribution of token i + 1."""
    adapter = None if adapter_id is None else adapted.models.get(adapter_id)
    with torch.no_grad():
        return adapted.logits([torch.from_numpy(tokens.astype(np.int64))], adapter).log_softmax(-1)


def reference_of_sample(adapted: Adapted, tokens: np.ndarray, new: np.ndarray, adapter_id: str | None) -> np.ndarray:
    rows = reference_logprobs(adapted, np.concatenate([tokens, new]), adapter_id)
    return rows[len(tokens) - 1 : -1].gather(1, torch.from_numpy(new.astype(np.int64))[:, None])[:, 0].numpy()


def tokens_of(response: SampleResponse) -> list[Drawn]:
    return all_drawn(response)


# --- tokens and log-probabilities ---


@pytest.mark.parametrize("adapter_id", [None, "one", "other"])
def test_logprobs_equal_those_of_a_plain_forward_at_temperature_one(adapted: Adapted, adapter_id: str | None) -> None:
    tokens = prompt(7)
    one = sample(new_sampler(adapted), job("a", tokens, adapter_id, temperature=0.5, top_k=20, max_tokens=40))
    assert len(one.tokens) == 40 and one.stop_reason == "length"
    wanted = reference_of_sample(adapted, tokens, one.tokens, adapter_id)
    np.testing.assert_allclose(one.logprobs, wanted, atol=1e-4)
    without = reference_of_sample(adapted, tokens, one.tokens, "one" if adapter_id is None else None)
    assert abs(one.logprobs - without).max() > 0.1


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_logprobs_equal_those_of_the_trainers_forward(
    tiny_models: dict[str, Path], dtype: Literal["float32", "bfloat16"], tolerance: float
) -> None:
    adapted = Adapted(tiny_models["qwen3"], dtype=dtype)
    adapted.create("one")
    tokens = prompt(7)
    one = sample(new_sampler(adapted, dtype=dtype), job("a", tokens, "one", max_tokens=40))
    np.testing.assert_allclose(one.logprobs, trained_logprobs(adapted, tokens, one.tokens), atol=tolerance)
    adapted.models.get("one").weights.mul_(1.2)
    assert abs(one.logprobs - trained_logprobs(adapted, tokens, one.tokens)).max() > 2 * tolerance


def trained_logprobs(adapted: Adapted, tokens: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns the sampled tokens' log-probabilities by a forward of the run."""
    config = WorkerConfig(ServedModel("tiny", str(adapted.directory)), device="cpu", **SIZES)
    pass_runner = PassRunner(adapted.base, adapted.models, ModelLimits(VOCAB, CONTEXT), config)
    whole = np.concatenate([tokens, new])
    targets = {"target_tokens": whole[1:].astype(np.int64), "weights": np.ones(len(whole) - 1, np.float32)}
    forward = ForwardBackwardRequest("one", 1, (Datum(whole[:-1], targets),), "cross_entropy", forward_only=True)
    (output,) = pass_runner.run_pass((OperationPart(0, forward),))
    assert isinstance(output, ForwardBackwardOutput)
    return output.loss_fn_outputs[0]["logprobs"][len(tokens) - 1 :]


def test_samples_of_one_prompt_differ_and_share_its_prefill(adapted: Adapted) -> None:
    sampler, run_tokens = new_sampler(adapted), []
    hidden_states = adapted.base.hidden_states

    def counted(tokens: Tensor, *rest: Any, **more: Any) -> Tensor:
        run_tokens.append(len(tokens))
        return hidden_states(tokens, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapted.base, "hidden_states", counted)
        response = answer(sampler, job("a", prompt(30), "one", num_samples=4, max_tokens=3))
    assert run_tokens == [30, 4, 4]
    assert len({tuple(tokens) for tokens in tokens_of(response)}) == 4
    for one in response.sequences:
        wanted = reference_of_sample(adapted, prompt(30), one.tokens, "one")
        np.testing.assert_allclose(one.logprobs, wanted, atol=1e-4)


def test_top_sample_logprobs_equal_those_of_a_plain_forward(adapted: Adapted) -> None:
    jobs = [job(str(k), prompt(6), "one", topk_sample_logprobs=k, seed=k) for k in (0, 3, 5)]
    responses = finish(new_sampler(adapted), *jobs)
    assert responses["0"].sequences[0].topk_logprobs is None
    for k in (3, 5):
        one = responses[str(k)].sequences[0]
        rows = reference_logprobs(adapted, np.concatenate([prompt(6), one.tokens]), "one")[5:-1]
        wanted = rows.topk(k)
        assert one.topk_logprobs.token_ids.tolist() == wanted.indices.tolist()
        np.testing.assert_allclose(one.topk_logprobs.logprobs, wanted.values, atol=1e-4)


def test_different_adapters_in_one_batch_sample_as_each_alone(adapted: Adapted) -> None:
    ids = ["other", None, "one", "other", None, "one"]
    jobs = [job(str(i), prompt(5 + i), adapter_id, num_samples=2) for i, adapter_id in enumerate(ids)]
    together = finish(new_sampler(adapted), *jobs)
    for one in jobs:
        assert tokens_of(together[one.job_id]) == tokens_of(answer(new_sampler(adapted), one))


def test_an_overwritten_adapter_is_used_from_the_next_slice(adapted: Adapted) -> None:
    def run(overwrite: Callable[[], object]) -> SampledSequence:
        copy_adapter(adapted.models, "one", "inflight")
        sampler = new_sampler(adapted)
        sampler.slice(SamplingSlice((job("a", prompt(8), "inflight", temperature=0),), (), 0))
        overwrite()
        return finish(sampler)["a"].sequences[0]

    kept = run(lambda: None)
    moved = run(lambda: copy_adapter(adapted.models, "other", "inflight"))
    alone = sample(new_sampler(adapted), job("a", prompt(8), "one", temperature=0))
    assert as_drawn(kept) == as_drawn(alone)
    assert as_drawn(moved)[:1] == as_drawn(kept)[:1]
    assert moved.tokens.tolist() != kept.tokens.tolist()


def test_a_sampler_without_drafts_samples_as_with_them(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may name a draft that is gone."""
    jobs = [job("a", prompt(9), "one", num_samples=2, draft_id="draft"), job("b", prompt(9), max_tokens=1)]
    wanted = finish(new_sampler(adapted), *jobs)
    monkeypatch.setattr(shared_state, "plugin_rows", lambda module, table: {})
    sampler = new_sampler(adapted)
    assert sampler._proposer is None
    found = finish(sampler, *jobs)
    assert {i: tokens_of(found[i]) for i in wanted} == {i: tokens_of(wanted[i]) for i in wanted}


# --- seeds, slices and the cache ---


def test_a_seed_gives_the_same_tokens_in_any_batch_and_slice_length(adapted: Adapted) -> None:
    one = job("one", prompt(11), "one", seed=7, num_samples=3, max_tokens=20)
    alone = tokens_of(answer(new_sampler(adapted), one))
    crowd = [job(f"crowd{i}", prompt(3 + i), None if i % 2 else "one", seed=i) for i in range(12)]
    sampler = new_sampler(adapted)
    early = sampler.slice(SamplingSlice(tuple(crowd[:6]), (), 0)).finished
    assert not early
    assert tokens_of(finish(sampler, *crowd[6:], one, budget_milliseconds=0)["one"]) == alone
    assert tokens_of(finish(sampler, *crowd, one, budget_milliseconds=5)["one"]) == alone
    another_seed = job("one", prompt(11), "one", seed=8, num_samples=3, max_tokens=20)
    assert not {*map(tuple, alone)} & {*map(tuple, tokens_of(answer(sampler, another_seed)))}


def test_jobs_beyond_the_cache_wait_and_finish_with_the_same_tokens(adapted: Adapted) -> None:
    jobs = [job(str(i), prompt(20 + i), "one", seed=i, num_samples=2, max_tokens=30) for i in range(6)]
    wanted = finish(new_sampler(adapted), *jobs)
    budget_bytes = 3 * 2 * BLOCK * BYTES_PER_TOKEN
    sampler = new_sampler(adapted, kv_cache_bytes=budget_bytes)
    largest, result = 0, sampler.slice(SamplingSlice(tuple(jobs), (), 0))
    finished = dict(result.finished)
    while result.num_active:
        result = sampler.slice(SamplingSlice((), (), 0))
        finished |= result.finished
        largest = max(largest, sampler.cache_bytes())
    assert {i: tokens_of(finished[i]) for i in wanted} == {i: tokens_of(wanted[i]) for i in wanted}
    assert 0 < largest <= budget_bytes


def test_preempted_samples_resume_with_the_same_tokens(adapted: Adapted) -> None:
    jobs = [job(str(i), prompt(10), None, seed=i, max_tokens=150) for i in range(4)]
    wanted = finish(new_sampler(adapted), *jobs)
    sampler = new_sampler(adapted, kv_cache_bytes=4 * 2 * BLOCK * BYTES_PER_TOKEN)
    sampler.slice(SamplingSlice(tuple(jobs), (), 0))
    assert sampler.held_bytes() == 4 * 2 * BLOCK * BYTES_PER_TOKEN, "all four run at first, and each will need 4 blocks"
    finished = finish(sampler)
    assert {i: tokens_of(finished[i]) for i in wanted} == {i: tokens_of(wanted[i]) for i in wanted}


def test_a_job_that_does_not_fit_the_cache_fails_naming_the_limit(adapted: Adapted) -> None:
    sampler = new_sampler(adapted, kv_cache_bytes=2 * BLOCK * BYTES_PER_TOKEN)
    assert "kv_cache_bytes 65536" in failure(sampler, job("explicit", prompt(100), max_tokens=30))
    assert "kv_cache_bytes 65536" in failure(sampler, job("unbounded", prompt(100), max_tokens=None))
    assert "kv_cache_bytes 65536" in failure(sampler, job("prompt", prompt(129), max_tokens=None))
    assert len(sample(sampler, job("fits", prompt(100), max_tokens=29)).tokens) == 29
    assert len(sample(sampler, job("scored", prompt(500), max_tokens=1)).tokens) == 1


def test_without_max_tokens_a_stop_token_can_end_a_sample(adapted: Adapted) -> None:
    sampler = new_sampler(adapted, kv_cache_bytes=2 * BLOCK * BYTES_PER_TOKEN)
    stops = tuple(range(0, VOCAB, 8))
    assert sample(sampler, job("a", prompt(60), max_tokens=None, stop_token_ids=stops)).stop_reason == "stop"


def test_cancelled_and_dropped_jobs_free_everything(adapted: Adapted) -> None:
    copy_adapter(adapted.models, "one", "closing")
    sampler = new_sampler(adapted, kv_cache_bytes=4 * BLOCK * BYTES_PER_TOKEN)
    jobs = [job(str(i), prompt(10), "closing" if i == 2 else "one", num_samples=2, max_tokens=40) for i in range(4)]
    assert sampler.slice(SamplingSlice(tuple(jobs), (), 0)).num_active == 4
    result = sampler.slice(SamplingSlice((), ("0", "1", "unknown"), 0))
    assert result.num_active == 2 and not result.finished
    adapted.models.drop("closing")
    result = sampler.slice(SamplingSlice((), ("3",), 0))
    assert result.num_active == 0 and result.finished.keys() == {"2"}
    assert "adapter closing is gone" in result.finished["2"].message
    assert sampler.held_bytes() == 0
    # All slots are free again: four samples run together and take two iterations for two tokens.
    sampler.slice(SamplingSlice((job("next", prompt(10), num_samples=4, max_tokens=2),), (), 0))
    assert sampler.slice(SamplingSlice((), (), 0)).finished.keys() == {"next"}


def test_weights_that_become_nan_fail_their_job_and_leave_its_slot_clean(adapted: Adapted) -> None:
    copy_adapter(adapted.models, "one", "broken")
    sampler = new_sampler(adapted)
    other = job("other", prompt(9), "one", max_tokens=20)
    sampler.slice(SamplingSlice((job("a", prompt(8), "broken"), other), (), 0))
    adapted.models.get("broken").weights.fill_(math.nan)
    result = sampler.slice(SamplingSlice((), (), 0))
    assert "not finite: check that the weights of adapter broken are finite" in result.finished["a"].message
    after = job("after", prompt(4), "one", max_tokens=20)
    finished = finish(sampler, after)
    for one in (other, after):
        assert tokens_of(finished[one.job_id]) == tokens_of(answer(new_sampler(adapted), one))


def test_the_sampler_serves_new_jobs_after_an_error(adapted: Adapted) -> None:
    sampler = new_sampler(adapted)
    sampler.slice(SamplingSlice((job("a", prompt(8), num_samples=3),), (), 0))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(adapted.base, "hidden_states", None)
        sampler.slice(SamplingSlice((job("b", prompt(8)),), (), 0))
    finished = finish(sampler, job("c", prompt(8)))
    assert finished.keys() == {"c"}
    assert tokens_of(finished["c"]) == tokens_of(answer(new_sampler(adapted), job("c", prompt(8))))


# --- temperature, top_k and top_p ---

NUM_DRAWS = 20_000


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Returns the exact distribution, enumerated in order of falling probability."""
    weights = (logits.double() / temperature).softmax(-1).numpy()
    kept = np.argsort(-weights)[: top_k if top_k > 0 else None]
    before = np.concatenate([[0], (weights[kept] / weights[kept].sum()).cumsum()[:-1]])
    kept = kept[before < top_p]
    exact = np.zeros_like(weights)
    exact[kept] = weights[kept] / weights[kept].sum()
    return exact


def chi_square(tokens: np.ndarray, exact: np.ndarray) -> float:
    """Returns the statistic in standard deviations from its mean.

    Bins have at least 20 expected draws; the rest is one bin.
    """
    assert exact[tokens].min() > 0, "a token was drawn that is filtered out"
    counts, expected = np.bincount(tokens, minlength=len(exact)), exact * len(tokens)
    large = expected >= 20
    counts = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


def settings(params: list[SamplingParams]) -> SamplingSettings:
    return SamplingSettings(
        temperature=np.array([each.temperature for each in params], np.float32),
        min_p=np.array([each.min_p for each in params], np.float32),
        top_k=np.array([each.top_k for each in params]),
        top_p=np.array([each.top_p for each in params], np.float32),
    )


FILTERS = [(1.0, -1, 1.0), (0.5, -1, 1.0), (1.7, 12, 1.0), (1.0, -1, 0.7), (0.8, 30, 0.9), (1.0, 5, 1.0)]


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), FILTERS)
def test_draws_follow_the_filtered_distribution(temperature: float, top_k: int, top_p: float) -> None:
    logits = (torch.randn(400, generator=torch.Generator().manual_seed(3)) * 2).log_softmax(-1)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    keys = np.array([noise_key(5, 0, i) for i in range(100)], dtype=np.uint64)
    noise = torch.from_numpy(uniforms(keys[:, None], np.arange(NUM_DRAWS // 100)).ravel()).float()
    # Rows with other parameters, as in a real batch.
    others = [SamplingParams(temperature=0), SamplingParams(temperature=1e-44), SamplingParams(top_k=1)]
    choice = SamplingTensors.of(settings([params] * NUM_DRAWS + others), 400, torch.device("cpu"))
    chosen = choose(logits.expand(NUM_DRAWS + 3, -1), choice, torch.cat([noise, torch.tensor([0.99] * 3)]))
    tokens = chosen.tokens
    torch.testing.assert_close(chosen.logprobs, logits.log_softmax(-1)[tokens])
    assert tokens[-3:].tolist() == [int(logits.argmax())] * 3
    assert abs(chi_square(tokens[:-3].numpy(), filtered(logits, temperature, top_k, top_p))) < 4
    assert chi_square(tokens[:-3].numpy(), filtered(logits, 2 * temperature, top_k, 1.0)) > 8


def test_top_p_finds_a_nucleus_of_many_tokens(adapted: Adapted) -> None:
    logits = (torch.randn(1, 2000, generator=torch.Generator().manual_seed(4)) * 0.1).log_softmax(-1)
    choice = SamplingTensors.of(settings([SamplingParams(top_p=0.9)]), 2000, torch.device("cpu"))
    exact = filtered(logits[0], 1.0, -1, 0.9)
    likely, unlikely = exact > 0, exact == 0
    tokens = {int(choose(logits, choice, torch.tensor([u])).tokens) for u in torch.linspace(0, 0.99999, 4000).tolist()}
    assert not tokens & set(np.flatnonzero(unlikely)) and len(tokens) > 0.9 * likely.sum() > 1000


def test_equally_likely_tokens_are_cut_to_the_requested_number() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, 2.0, 1.0, 0.0]]).log_softmax(-1)

    def drawn(**params: float) -> set[int]:
        choice = SamplingTensors.of(settings([SamplingParams.model_validate(params)]), 8, torch.device("cpu"))
        return {int(choose(logits, choice, torch.tensor([u])).tokens) for u in torch.linspace(0, 0.9999, 200).tolist()}

    assert [drawn(top_k=k) for k in (1, 2, 3, 5)] == [{1}, {1, 5}, {1, 5, 2}, {1, 5, 2, 3, 4}]
    masses = np.cumsum(np.sort(logits[0].double().exp().numpy())[::-1])
    for num_kept, kept in ((1, {1}), (2, {1, 5}), (4, {1, 5, 2, 3}), (7, {0, 1, 2, 3, 4, 5, 6})):
        assert drawn(top_p=masses[num_kept - 1] - 1e-3) == kept
    assert drawn(temperature=0.0) == drawn(top_k=1)


def test_samples_follow_the_models_distribution_at_the_requests_temperature(adapted: Adapted) -> None:
    tokens = prompt(9)
    sampler = new_sampler(adapted)
    many = job("a", tokens, "one", temperature=0.7, top_k=40, num_samples=4000, max_tokens=1)
    drawn = np.concatenate([one.tokens for one in answer(sampler, many).sequences])
    row = reference_logprobs(adapted, tokens, "one")[-1]
    assert abs(chi_square(drawn, filtered(row, 0.7, 40, 1.0))) < 4
    assert chi_square(drawn, filtered(row, 1.4, 40, 1.0)) > 8


def test_noise_is_uniform_and_independent_over_seeds_samples_and_positions() -> None:
    keys = np.array([[noise_key(seed, 0, i) for i in range(30)] for seed in (-1, 0, 1, 2**64 + 5)], dtype=np.uint64)
    noise = uniforms(keys[:, :, None], np.arange(500))
    assert noise.min() >= 0 and noise.max() < 1 and len(np.unique(noise)) == noise.size
    for axis in range(3):
        neighbours = np.corrcoef(np.delete(noise, 0, axis).ravel(), np.delete(noise, -1, axis).ravel())[0, 1]
        assert abs(neighbours) < 0.02
    assert abs(chi_square((noise.ravel() * 100).astype(int), np.full(100, 0.01))) < 4
    assert abs(chi_square((noise.ravel() * 100).astype(int), np.linspace(0.009, 0.011, 100))) > 8


# --- stopping ---


def test_a_sample_ends_with_its_stop_token(adapted: Adapted) -> None:
    sampler = new_sampler(adapted)
    free = sample(sampler, job("a", prompt(6)))
    stop = int(free.tokens[5])
    first = free.tokens.tolist().index(stop)
    stopped = sample(sampler, job("a", prompt(6), stop_token_ids=(stop, 511)))
    assert as_drawn(stopped) == as_drawn(free)[: first + 1] and stopped.stop_reason == "stop"
    assert free.stop_reason == "length" and len(free.tokens) == 12


def test_without_stops_the_end_token_does_not_end_a_sample(adapted: Adapted) -> None:
    tokens = prompt(6)
    likes_eos = adapted.create("eos", train_attn=False, train_mlp=False).unembed
    assert likes_eos is not None
    likes_eos.a[:] = adapted.hidden([torch.from_numpy(tokens.astype(np.int64))], [])[-1].detach()
    likes_eos.b[:] = 0
    likes_eos.b[EOS] = 1
    sampler = new_sampler(adapted)
    free = sample(sampler, job("a", tokens, "eos", temperature=0))
    assert free.tokens[0] == EOS and len(free.tokens) == 12 and free.stop_reason == "length"
    stopped = sample(sampler, job("a", tokens, "eos", temperature=0, stop_token_ids=(EOS,)))
    assert stopped.tokens.tolist() == [EOS] and stopped.stop_reason == "stop"


def test_a_stop_string_across_tokens_ends_the_sample(bpe_adapted: Adapted) -> None:
    sampler, tokenizer = new_sampler(bpe_adapted), AutoTokenizer.from_pretrained(bpe_adapted.directory)
    num_over_borders = 0
    for seed in range(12):
        free = sample(sampler, job("a", prompt(6), seed=seed, max_tokens=20)).tokens.tolist()
        texts = [tokenizer.decode(free[: n + 1]) for n in range(20)]
        stop = texts[-1][len(texts[9]) - 1 : len(texts[9]) + 1]
        if INCOMPLETE in stop:
            continue
        num_over_borders += 1
        end = next(n for n in range(20) if stop in texts[n])
        one = sample(sampler, job("a", prompt(6), seed=seed, max_tokens=20, stop_strings=("never so", stop)))
        assert (one.tokens.tolist(), one.stop_reason) == (free[: end + 1], "stop")
    assert num_over_borders >= 3


@pytest.mark.parametrize("text", ["the stop is 'wörter 😀 of € x' here", "now 😀😀 and so on 日本語 テキスト"])
def test_a_stop_string_is_found_with_the_first_token_that_completes_it(bpe_adapted: Adapted, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bpe_adapted.directory)
    tokens = tokenizer.encode(text)
    for start in range(len(text)):
        for length in (1, 2, 5):
            stop = text[start : start + length]
            follower = StopStrings(tokenizer, ("never", stop), tokenizer.encode("a prompt with " + stop))
            found = next(n for n, token in enumerate(tokens) if follower.found_after(token))
            assert found == next(n for n in range(len(tokens)) if stop in tokenizer.decode(tokens[: n + 1]))


def test_the_next_stop_string_is_found_after_the_first(bpe_adapted: Adapted) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bpe_adapted.directory)
    tokens = tokenizer.encode("stop, and on, stop, and on")
    follower = StopStrings(tokenizer, ("stop",), [])
    found = [number for number, token in enumerate(tokens) if follower.found_after(token)]
    first = next(n for n in range(len(tokens)) if tokenizer.decode(tokens[: n + 1]).count("stop") == 1)
    second = next(n for n in range(len(tokens)) if tokenizer.decode(tokens[: n + 1]).count("stop") == 2)
    assert found == [first, second]


def test_text_after_a_stop_string_can_begin_the_next(bpe_adapted: Adapted) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bpe_adapted.directory)
    tokens = tokenizer.encode("the") + tokenizer.encode("re")
    follower = StopStrings(tokenizer, ("t", "here"), [])
    assert [number for number, token in enumerate(tokens) if follower.found_after(token)][-1] == len(tokens) - 1


class Letters:
    """A detokenizer of characters."""

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return "".join(map(chr, token_ids))


def test_stop_strings_end_where_a_plain_search_finds_them() -> None:
    random, num_found = np.random.default_rng(0), 0
    for _ in range(300):
        text = "".join(random.choice(["a", "b"], 40, p=[0.8, 0.2]))
        stops = tuple("".join(random.choice(["a", "b"], random.integers(1, 9))) for _ in range(random.integers(1, 5)))
        follower = StopStrings(Letters(), stops, [])
        found = next((n for n, letter in enumerate(text) if follower.found_after(ord(letter))), None)
        assert found == next((n for n in range(40) if any(stop in text[: n + 1] for stop in stops)), None)
        num_found += found is not None
    assert 100 < num_found < 300


def test_byte_fallback_characters_are_decoded_whole() -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    tokens = list("\N{GRINNING FACE}\N{ROCKET}\N{CHERRIES}\N{SNOWMAN}!".encode())
    for stop, end in [("\N{ROCKET}", 7), ("\N{CHERRIES}", 11), ("\N{SNOWMAN}!", 15)]:
        follower = StopStrings(fast, (stop,), [])
        assert next(n for n, token in enumerate(tokens) if follower.found_after(token)) == end


def test_stop_strings_without_a_tokenizer_are_refused(adapted: Adapted) -> None:
    assert "stop strings and constraints need the model's tokenizer" in failure(
        new_sampler(adapted), job("a", prompt(4), stop_strings=("x",))
    )


# --- the end of the context, and bad requests ---


def test_a_sample_ends_with_the_context(adapted: Adapted) -> None:
    sampler = new_sampler(adapted, context=32)
    for length, max_tokens in ((20, 12), (20, 5), (31, 1)):
        one = sample(sampler, job("a", prompt(length), max_tokens=max_tokens))
        assert (len(one.tokens), one.stop_reason) == (max_tokens, "length")


def test_a_job_of_an_unknown_adapter_fails_with_the_reason(adapted: Adapted) -> None:
    assert "adapter unknown is gone" in failure(new_sampler(adapted), job("a", prompt(4), "unknown"))


# --- log-probabilities of the prompt ---


@pytest.mark.parametrize("chunk", [4, 512])
def test_prompt_logprobs_equal_those_of_a_plain_forward(adapted: Adapted, chunk: int) -> None:
    tokens = prompt(15)
    rows = reference_logprobs(adapted, tokens, "one")
    targets = np.random.default_rng(0).integers(-1, VOCAB, size=(14, 3))
    targets[4] = -1
    request = job(
        "a", tokens, "one", max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=4, target_prompt_tokens=targets
    )
    others = [job(str(i), prompt(9 + i), "other", prompt_logprobs=True) for i in range(3)]
    response = finish(new_sampler(adapted, head_chunk_tokens=chunk), *others, request)["a"]

    wanted = rows[:-1].gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
    assert math.isnan(response.prompt_logprobs[0])
    np.testing.assert_allclose(response.prompt_logprobs[1:], wanted, atol=1e-4)

    top = rows[:-1].topk(4)
    assert response.topk_prompt_logprobs.token_ids.tolist() == [[0] * 4, *top.indices.tolist()]
    assert response.topk_prompt_logprobs.logprobs[0].tolist() == [-99999.0] * 4
    np.testing.assert_allclose(response.topk_prompt_logprobs.logprobs[1:], top.values, atol=1e-4)

    listed = rows[:-1].gather(1, torch.from_numpy(targets).clamp(min=0)).numpy()
    np.testing.assert_allclose(response.target_prompt_logprobs, np.where(targets < 0, 0, listed), atol=1e-4)
    assert (response.target_prompt_logprobs[4] == 0).all()
    assert abs(reference_logprobs(adapted, tokens)[:-1].numpy() - rows[:-1].numpy()).max() > 0.1


def test_only_the_last_n_prompt_tokens_are_scored_when_asked(adapted: Adapted) -> None:
    whole = job("a", prompt(15), "one", max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=2)
    last = job(
        "a", prompt(15), "one", max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=5
    )
    alternatives = job(
        "a", prompt(15), "one", max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=5, prompt_alt_tokens_k=1
    )
    wanted = answer(new_sampler(adapted), whole)
    for request in (last, alternatives):
        for chunk in (2, 512):
            response = answer(new_sampler(adapted, head_chunk_tokens=chunk), request)
            assert np.isnan(response.prompt_logprobs[:-5]).all()
            np.testing.assert_allclose(response.prompt_logprobs[-5:], wanted.prompt_logprobs[-5:], atol=1e-5)
            if request is last:
                assert (response.topk_prompt_logprobs.logprobs[:-5] == -99999.0).all()
                top = wanted.topk_prompt_logprobs.token_ids[-5:]
                assert response.topk_prompt_logprobs.token_ids[-5:].tolist() == top.tolist()


def test_alternatives_of_prompt_tokens_are_drawn_at_the_requests_temperature(adapted: Adapted) -> None:
    tokens = prompt(12)
    request = job("a", tokens, "one", temperature=0.7, prompt_alt_tokens_k=3000, max_tokens=1)
    response = answer(new_sampler(adapted, head_chunk_tokens=4), request)
    again = finish(new_sampler(adapted), job("b", prompt(20)), request)["a"]
    assert response.prompt_alt_tokens.shape == (11, 3000)
    assert (response.prompt_alt_tokens == again.prompt_alt_tokens).mean() > 0.999
    rows = reference_logprobs(adapted, tokens, "one")[:-1]
    drawn = response.prompt_alt_tokens.astype(np.int64)
    np.testing.assert_allclose(response.prompt_alt_logprobs, rows.gather(1, torch.from_numpy(drawn)), atol=1e-4)
    for i in (0, 10):
        assert abs(chi_square(drawn[i], filtered(rows[i], 0.7, -1, 1.0))) < 4
        assert chi_square(drawn[i], filtered(rows[i], 0.9, -1, 1.0)) > 8
    greedy = answer(new_sampler(adapted), job("a", tokens, "one", temperature=0, prompt_alt_tokens_k=2))
    assert greedy.prompt_alt_tokens.tolist() == [[token] * 2 for token in rows.argmax(-1).tolist()]


def test_a_prompt_of_one_token_has_nothing_to_score(adapted: Adapted) -> None:
    targets = np.zeros((0, 2), np.int64)
    options = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 3}
    response = answer(new_sampler(adapted), job("a", prompt(1), target_prompt_tokens=targets, **options))
    assert np.isnan(response.prompt_logprobs).tolist() == [True]
    assert response.topk_prompt_logprobs.logprobs.tolist() == [[-99999.0] * 2]
    assert response.target_prompt_logprobs.shape == (0, 2) and response.prompt_alt_tokens.shape == (0, 3)


def test_a_streaming_job_reports_what_each_slice_adds(adapted: Adapted) -> None:
    sampler = new_sampler(adapted)
    streamed = job("streamed", prompt(5), num_samples=2, topk_sample_logprobs=2, streams=True)
    results = [sampler.slice(SamplingSlice((streamed,), (), 0))]
    while results[-1].num_active:
        results.append(sampler.slice(SamplingSlice((), (), 0)))
    for number, sequence in enumerate(results[-1].finished["streamed"].sequences):
        own_parts = [part for each in results for part in each.progress.get("streamed", ()) if part.sample == number]
        tokens = [token for part in own_parts for token in part.tokens]
        assert len(own_parts) > 1 and tokens == sequence.tokens[: len(tokens)].tolist()
        assert all(part.stop_reason is None for part in own_parts)
        top = np.concatenate([part.topk_logprobs.token_ids for part in own_parts if part.topk_logprobs is not None])
        assert np.array_equal(top, sequence.topk_logprobs.token_ids[: len(tokens)])


def test_a_streaming_job_reports_which_samples_have_ended(adapted: Adapted) -> None:
    sampler = new_sampler(adapted)
    streamed = job("streamed", prompt(5), num_samples=8, max_tokens=60, stop_token_ids=tuple(range(40)), streams=True)
    results = [sampler.slice(SamplingSlice((streamed,), (), 0))]
    while results[-1].num_active:
        results.append(sampler.slice(SamplingSlice((), (), 0)))
    parts = [part for result in results for part in result.progress.get("streamed", ())]
    ended = {part.sample: part.stop_reason for part in parts if part.stop_reason is not None}
    sequences = results[-1].finished["streamed"].sequences
    assert 4 < len(ended) < 8 and all(sequences[sample].stop_reason == reason for sample, reason in ended.items())
    for sample in ended:
        assert sum(len(part.tokens) for part in parts if part.sample == sample) == len(sequences[sample].tokens)


@pytest.mark.parametrize("gathering_seconds", [0.0, 10.0])
def test_gathering_layers_does_not_count_against_a_slices_time(
    gathering_seconds: float, adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    @contextmanager
    def gathered() -> Iterator[None]:
        clock[0] += gathering_seconds
        yield

    def taking_a_second(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def running(*arguments: Any, **more: Any) -> Tensor:
            clock[0] += 1.0
            return run(*arguments, **more)

        return running

    monkeypatch.setattr(adapted.base.weights, "gathered", gathered)
    monkeypatch.setattr(adapted.base, "hidden_states", taking_a_second(adapted.base.hidden_states))
    if (tape := new_step_tape()) is not None:
        monkeypatch.setattr(type(tape), "repeat", taking_a_second(type(tape).repeat))
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    sampler = new_sampler(adapted)
    for joining in ((job("one", prompt(9), max_tokens=30, streams=True),), ()):
        (parts,) = sampler.slice(SamplingSlice(joining, (), 3500.0)).progress.values()
        assert sum(len(part.tokens) for part in parts) == 4
