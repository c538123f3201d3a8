"""Tests that common prefixes run once and long prompts in chunks between decode steps, without changing a sample."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.protocol.calls import SamplingSlice
from trainhouse.workers.sampler.cache.prefix_cache import BLOCK

from ...drawn import assert_same_sample
from ..adapted import Adapted, copy_adapter
from .test_sampler import BYTES_PER_TOKEN, adapted, answer, finish, job, new_sampler, prompt

__all__ = ["adapted"]


def core_first(core: Sequence[str], kinds: Sequence[str]) -> list[Any]:
    """Returns parameters for models: the core in every run of the tests, the others in full ones."""
    return [*core, *(pytest.param(kind, marks=pytest.mark.full) for kind in kinds if kind not in core)]


def assert_same(found: SampleResponse, wanted: SampleResponse) -> None:
    for one, other in zip(found.sequences, wanted.sequences, strict=True):
        assert_same_sample(one, other, 1e-5)


@pytest.mark.parametrize("adapter_id", [None, "one"])
@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 100, 2 * BLOCK])
def test_a_repeated_prompt_hits_the_prefix_cache(adapted: Adapted, adapter_id: str | None, length: int) -> None:
    sampler, one = new_sampler(adapted), job("a", prompt(length), adapter_id, num_samples=2)
    first = answer(sampler, one)
    again = answer(sampler, one)
    # The last token always runs: its hidden state is what the next one is drawn from.
    assert (first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (0, (length - 1) // BLOCK * BLOCK)
    assert_same(again, first)


def test_the_next_turn_of_a_conversation_reuses_the_last(adapted: Adapted) -> None:
    sampler, tokens = new_sampler(adapted), prompt(40)
    for turn in range(3):
        request = job(f"turn {turn}", tokens, "one", max_tokens=50, seed=turn)
        found = answer(sampler, request)
        assert_same(found, answer(new_sampler(adapted), request))
        # The previous turn's tokens are cached, except for its last one and those that fill no block.
        assert found.prompt_cache_hit_tokens == (0 if turn == 0 else (len(tokens) - 10 - 1) // BLOCK * BLOCK)
        tokens = np.concatenate([tokens, found.sequences[0].tokens, prompt(10, seed=turn)])


def test_prompts_with_a_common_prefix_share_it(adapted: Adapted) -> None:
    sampler, header = new_sampler(adapted), prompt(3 * BLOCK)
    jobs = [job(str(i), np.concatenate([header, prompt(5 + i, seed=i)]), "one", seed=i) for i in range(4)]
    finish(sampler, jobs[0])
    found = finish(sampler, *jobs[1:])
    assert [found[one.job_id].prompt_cache_hit_tokens for one in jobs[1:]] == [3 * BLOCK] * 3
    for one in jobs[1:]:
        assert_same(found[one.job_id], answer(new_sampler(adapted), one))


def test_prefixes_are_not_shared_between_tenants(adapted: Adapted) -> None:
    sampler, tokens = new_sampler(adapted), prompt(100)

    def hits(tenant_id: str) -> int:
        return answer(sampler, replace(job("a", tokens, None), tenant_id=tenant_id)).prompt_cache_hit_tokens

    assert [hits(tenant_id) for tenant_id in ("one", "other", "one", "other", "")] == [0, 0, 96, 96, 0]


def test_a_prefix_is_valid_only_for_its_weights(adapted: Adapted) -> None:
    copy_adapter(adapted.models, "one", "moving")
    sampler, tokens = new_sampler(adapted), prompt(100)

    def hits(adapter_id: str | None) -> int:
        found = answer(sampler, job("a", tokens, adapter_id))
        assert_same(found, answer(new_sampler(adapted), job("a", tokens, adapter_id)))
        return found.prompt_cache_hit_tokens

    assert [hits("moving"), hits("moving"), hits("other"), hits(None), hits("moving")] == [0, 96, 0, 0, 96]
    copy_adapter(adapted.models, "other", "moving")
    assert [hits("moving"), hits("moving")] == [0, 96]
    adapted.models.drop("moving")
    copy_adapter(adapted.models, "one", "moving")
    assert hits("moving") == 0


def test_a_sample_begun_before_its_weights_changed_leaves_no_prefix(adapted: Adapted) -> None:
    copy_adapter(adapted.models, "one", "moving")
    sampler = new_sampler(adapted)
    sampler.slice(SamplingSlice((job("a", prompt(20), "moving", max_tokens=80),), (), 0))
    copy_adapter(adapted.models, "other", "moving")
    sampled = finish(sampler)["a"].sequences[0].tokens
    turn = job("b", np.concatenate([prompt(20), sampled]), "moving")
    found = answer(sampler, turn)
    assert found.prompt_cache_hit_tokens == 0
    assert_same(found, answer(new_sampler(adapted), turn))


def test_a_scored_prompt_runs_from_its_first_scored_token(adapted: Adapted) -> None:
    sampler, tokens = new_sampler(adapted), prompt(100)
    answer(sampler, job("before", tokens))
    whole = answer(sampler, job("whole", tokens, prompt_logprobs=True))
    last = answer(sampler, job("last", tokens, prompt_logprobs=True, prompt_logprobs_last_n=10, topk_prompt_logprobs=2))
    assert (whole.prompt_cache_hit_tokens, last.prompt_cache_hit_tokens) == (0, 64)
    fresh = answer(new_sampler(adapted), job("fresh", tokens, prompt_logprobs=True))
    np.testing.assert_allclose(whole.prompt_logprobs, fresh.prompt_logprobs, atol=1e-5)
    np.testing.assert_allclose(last.prompt_logprobs[-10:], fresh.prompt_logprobs[-10:], atol=1e-5)
    assert np.isnan(last.prompt_logprobs[:-10]).all()


def test_prefixes_are_evicted_for_samples_and_newer_prefixes(adapted: Adapted) -> None:
    sampler = new_sampler(adapted, kv_cache_bytes=512 * BYTES_PER_TOKEN)
    for seed in range(8):
        answer(sampler, job("a", prompt(100, seed), max_tokens=2))
        assert sampler.cache_bytes() <= 512 * BYTES_PER_TOKEN and sampler.held_bytes() == 0
    assert answer(sampler, job("newest", prompt(100, 7))).prompt_cache_hit_tokens == 96
    assert answer(sampler, job("oldest", prompt(100, 0))).prompt_cache_hit_tokens == 0
    assert len(answer(sampler, job("large", prompt(400), max_tokens=112)).sequences[0].tokens) == 112


def test_long_prompts_run_in_chunks_while_others_get_a_token_per_slice(adapted: Adapted) -> None:
    sampler = new_sampler(adapted, prefill_chunk_tokens=64)
    quick = job("quick", prompt(8), "one", max_tokens=30, streams=True)
    sampler.slice(SamplingSlice((quick,), (), 0))
    late = [job("late", prompt(500), "other", num_samples=2), job("scored", prompt(300), None, prompt_logprobs=True)]
    sizes, results = [], []
    with pytest.MonkeyPatch.context() as patch:
        run = adapted.base.hidden_states

        def counted(tokens: Tensor, *rest: Any, **more: Any) -> Tensor:
            sizes.append(len(tokens))
            return run(tokens, *rest, **more)

        patch.setattr(adapted.base, "hidden_states", counted)
        results = [sampler.slice(SamplingSlice(tuple(late) if first else (), (), 0)) for first in (True, *[False] * 10)]
    num_tokens = [sum(len(part.tokens) for part in result.progress["quick"]) for result in results]
    assert num_tokens == [1] * 11 and sizes[:7] == [65] * 7 and max(sizes) <= 64 + 3
    finished = {name: found for result in results for name, found in result.finished.items()} | finish(sampler)
    for one in (quick, *late):
        assert_same(finished[one.job_id], answer(new_sampler(adapted), one))
    whole = answer(new_sampler(adapted), late[1])
    np.testing.assert_allclose(finished["scored"].prompt_logprobs, whole.prompt_logprobs, atol=1e-5)


def test_a_finished_sample_does_not_evict_its_own_prefix(adapted: Adapted) -> None:
    """Slots take 512 and 64 of the cache's 1024 tokens, the sample's prefix 320, and four other prefixes the rest."""
    sampler, turn = new_sampler(adapted, kv_cache_bytes=1024 * BYTES_PER_TOKEN), job("a", prompt(320), max_tokens=40)
    sampler.slice(SamplingSlice((turn,), (), 0))
    for seed in range(4):
        sampler.slice(SamplingSlice((job(f"other {seed}", prompt(BLOCK + 1, seed), max_tokens=2),), (), 0))
        sampler.slice(SamplingSlice((), (), 0))
    sampled = finish(sampler)["a"].sequences[0].tokens
    again = answer(sampler, job("b", np.concatenate([prompt(320), sampled]), max_tokens=2))
    assert again.prompt_cache_hit_tokens == 11 * BLOCK
