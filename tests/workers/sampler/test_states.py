"""Samples of a model with recurrent states: the tiny model's hidden states, with moving sums over each sequence."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.ops.attention import Packing
from trainhouse.workers.ops.kv_cache import CachedRow
from trainhouse.workers.protocol.calls import SamplingSlice
from trainhouse.workers.protocol.worker_config import WorkerConfig
from trainhouse.workers.sampler.cache.cache import KVCache
from trainhouse.workers.sampler.engine import SamplingEngine

from ..adapted import Adapted
from ..moving_sum import MovingSum
from .test_prefixes import BLOCK, assert_same
from .test_sampler import (
    BYTES_PER_TOKEN,
    adapted,
    answer,
    failure,
    finish,
    job,
    new_sampler,
    prompt,
    reference_of_sample,
    tokens_of,
)

__all__ = ["adapted"]

pytestmark = pytest.mark.usefixtures("pass_sizes")

SUMS = [MovingSum(width=64, layer=layer) for layer in (3, 5)]
STATE_BYTES = 2 * 64 * 4

# The tokens of each pass.
PassSizes = list[int]


def cache_with_states(base: BaseModel, config: WorkerConfig) -> KVCache:
    plain = cache_of(base, config)
    return KVCache(replace(plain.size, bytes_per_sequence=STATE_BYTES), plain.budget)


cache_of = KVCache.of


def with_sums(hidden: Tensor, packing: Packing | CachedRow) -> Tensor:
    for op in SUMS:
        inputs = [hidden, hidden[:, :1].sigmoid()]
        sums = op.scan(inputs, packing)[0] if isinstance(packing, Packing) else packing.recur(op, inputs)
        hidden = hidden + 0.1 * sums
    return hidden


@pytest.fixture
def pass_sizes(monkeypatch: pytest.MonkeyPatch) -> PassSizes:
    """Gives all models states. Returns the number of tokens of each pass."""
    sizes: PassSizes = []
    forward = BaseModel.hidden_states

    def hidden_states(base: BaseModel, tokens: Tensor, positions: Tensor, packing: Any, **more: Any) -> Tensor:
        sizes.append(len(tokens))
        return with_sums(forward(base, tokens, positions, packing, **more), packing)

    monkeypatch.setattr(BaseModel, "hidden_states", hidden_states)
    monkeypatch.setattr(KVCache, "of", cache_with_states)
    return sizes


def assert_right(adapted: Adapted, found: Any, tokens: np.ndarray, adapter_id: str | None = None) -> None:
    """Compares the log-probabilities with those of one pass over each whole sequence."""
    for each in found.sequences:
        wanted = reference_of_sample(adapted, tokens, each.tokens, adapter_id)
        np.testing.assert_allclose(each.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("adapter_id", [None, "one"])
def test_samples_have_the_probabilities_of_whole_passes(adapted: Adapted, adapter_id: str | None) -> None:
    jobs = [job(str(i), prompt(length), adapter_id, num_samples=2) for i, length in enumerate((1, 2, 9, 9, 33, 70))]
    found = finish(new_sampler(adapted), *jobs)
    for one in jobs:
        assert_right(adapted, found[one.job_id], one.prompt, adapter_id)
    with pytest.raises(AssertionError):
        assert_right(adapted, found["1"], prompt(3), adapter_id)


@pytest.mark.parametrize("length", [2, BLOCK, BLOCK + 1, 100, 2 * BLOCK + 1])
def test_a_repeated_prompt_runs_only_its_last_token(adapted: Adapted, pass_sizes: PassSizes, length: int) -> None:
    sampler, one = new_sampler(adapted), job("a", prompt(length), "one", num_samples=2)
    first = answer(sampler, one)
    num = len(pass_sizes)
    again = answer(sampler, one)
    assert (first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (0, length - 1)
    assert pass_sizes[:3] == [length - 1, 1, 2] and pass_sizes[num:] == pass_sizes[1:num]
    assert_same(again, first)
    assert_right(adapted, again, one.prompt, "one")


def test_the_next_turn_of_a_conversation_reuses_all_of_the_last(adapted: Adapted) -> None:
    sampler, tokens, known = new_sampler(adapted), prompt(40), 0
    for turn in range(3):
        request = job(f"turn {turn}", tokens, "one", max_tokens=50, seed=turn)
        found = answer(sampler, request)
        assert found.prompt_cache_hit_tokens == known
        assert_right(adapted, found, tokens, "one")
        tokens = np.concatenate([tokens, found.sequences[0].tokens, prompt(10, seed=turn)])
        known = len(tokens) - 10 - 1


def test_the_third_prompt_with_a_common_beginning_reuses_it(adapted: Adapted) -> None:
    """The second one runs the beginning again, because there is no state at its end yet, and stores that state."""
    sampler, header = new_sampler(adapted), prompt(3 * BLOCK + 5)
    jobs = [job(str(i), np.concatenate([header, prompt(20 + i, seed=i)]), "one", seed=i) for i in range(4)]
    found = [answer(sampler, one) for one in jobs]
    assert [each.prompt_cache_hit_tokens for each in found] == [0, 0, 3 * BLOCK, 3 * BLOCK]
    for one, each in zip(jobs, found, strict=True):
        assert_right(adapted, each, one.prompt, "one")


def test_a_shorter_prompt_does_not_use_the_state_after_a_longer_one(adapted: Adapted) -> None:
    for length in (2 * BLOCK, 2 * BLOCK + 7):
        sampler = new_sampler(adapted)
        answer(sampler, job("long", prompt(3 * BLOCK)))
        found = answer(sampler, job("short", prompt(3 * BLOCK)[:length]))
        assert found.prompt_cache_hit_tokens == 0
        assert_right(adapted, found, prompt(3 * BLOCK)[:length])


def test_scored_prompts_run_from_a_state_before_their_first_scored_token(adapted: Adapted) -> None:
    sampler, tokens = new_sampler(adapted), prompt(100)
    answer(sampler, job("beginning", tokens[:60]))
    answer(sampler, job("before", tokens))
    found = answer(sampler, job("last", tokens, prompt_logprobs=True, prompt_logprobs_last_n=10))
    assert found.prompt_cache_hit_tokens == 59
    fresh = answer(new_sampler(adapted), job("fresh", tokens, prompt_logprobs=True))
    assert found.prompt_logprobs is not None and fresh.prompt_logprobs is not None
    np.testing.assert_allclose(found.prompt_logprobs[-10:], fresh.prompt_logprobs[-10:], atol=1e-5)


def test_long_prompts_run_in_chunks_and_their_states_are_found(adapted: Adapted, pass_sizes: PassSizes) -> None:
    sampler = new_sampler(adapted, prefill_chunk_tokens=64)
    quick = job("quick", prompt(8), "one", max_tokens=30)
    for joining in ((quick,), ()):
        sampler.slice(SamplingSlice(joining, (), 0))
    late = job("late", prompt(300), "other", num_samples=2)
    found = finish(sampler, late)
    assert pass_sizes[2:7] == [65, 65, 65, 65, 44]
    for one in (quick, late):
        assert_right(adapted, found[one.job_id], one.prompt, one.adapter_id)
    # A chunk's keys and values need more memory than a state.
    other = np.concatenate([prompt(300)[:140], prompt(9)])
    hit = answer(sampler, job("other", other, "other"))
    assert hit.prompt_cache_hit_tokens == 128
    assert_right(adapted, hit, other, "other")


def test_preempted_and_parked_samples_resume_with_the_same_tokens(adapted: Adapted) -> None:
    jobs = [job(str(i), prompt(10), None, seed=i, max_tokens=150) for i in range(4)]
    wanted = finish(new_sampler(adapted), *jobs)
    slot = 128 * BYTES_PER_TOKEN + STATE_BYTES
    sampler = new_sampler(adapted, kv_cache_bytes=4 * slot)
    sampler.slice(SamplingSlice(tuple(jobs), (), 0))
    sampler.slice(SamplingSlice((), (), 0))
    assert sampler.held_bytes() == 4 * slot
    sampler.park()
    assert not sampler.held_bytes()
    finished = finish(sampler)
    assert {i: tokens_of(finished[i]) for i in wanted} == {i: tokens_of(wanted[i]) for i in wanted}
    for one in jobs:
        assert_right(adapted, finished[one.job_id], one.prompt)


def test_states_count_in_the_budget(adapted: Adapted) -> None:
    budget = 128 * BYTES_PER_TOKEN + STATE_BYTES
    sampler = new_sampler(adapted, kv_cache_bytes=budget - 1)
    message = failure(sampler, job("too long", prompt(100), max_tokens=29))
    assert f"needs {budget} bytes" in message and f"kv_cache_bytes {budget - 1}" in message
    assert len(answer(new_sampler(adapted, kv_cache_bytes=budget), job("fits", prompt(100), max_tokens=29)).sequences)


@pytest.mark.parametrize("num_slots", [3, 20])
def test_a_small_cache_never_exceeds_its_budget_and_gives_the_same_samples(adapted: Adapted, num_slots: int) -> None:
    jobs = [job(str(i), prompt(8 + 7 * (i % 5), i % 7), "one", seed=i, max_tokens=40) for i in range(24)]
    wanted = finish(new_sampler(adapted), *jobs)
    budget = num_slots * (64 * BYTES_PER_TOKEN + STATE_BYTES)
    sampler, found = new_sampler(adapted, kv_cache_bytes=budget), {}
    for result in results(sampler, jobs):
        found |= result.finished
        stored = sampler._scheduler.slots.cache
        assert sampler.cache_bytes() <= budget
        assert stored.prefixes.num_bytes == sum(each.nbytes for each in stored.prefixes.tensors())
    assert {i: tokens_of(found[i]) for i in wanted} == {i: tokens_of(wanted[i]) for i in wanted}


def results(sampler: SamplingEngine, jobs: Sequence[Any]) -> Iterator[Any]:
    yield (result := sampler.slice(SamplingSlice(tuple(jobs), (), 0)))
    while result.num_active:
        yield (result := sampler.slice(SamplingSlice((), (), 0)))


def test_the_size_equals_the_bytes_of_the_tensors(adapted: Adapted) -> None:
    sampler = new_sampler(adapted)
    answer(sampler, job("a", prompt(40), num_samples=3))
    stored = sampler._scheduler.slots.cache
    assert sum(each.nbytes for each in stored.tensors()) == stored.num_bytes() == stored.prefixes.num_bytes > 0


def test_a_nonfinite_sequence_leaves_the_next_one_in_its_slot_alone(adapted: Adapted) -> None:
    sampler, one = new_sampler(adapted), job("a", prompt(20))
    first = answer(sampler, one)
    cache = sampler._scheduler.slots.cache
    for pool in cache._pools.values():
        for each in pool.tensors.tensors():
            each.fill_(torch.nan)
    cache.prefixes = cache._new_prefixes()
    assert_same(answer(sampler, one), first)
