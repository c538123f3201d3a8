"""Samples of models whose layers use the keys and values of others, have heads of several sizes, or cap scores."""

import numpy as np
import pytest
from trainhouse.workers.protocol.calls import SamplingSlice

from ...tiny import tiny_model
from ..adapted import Adapted
from .test_prefixes import BLOCK, assert_same
from .test_sampler import answer, finish, job, new_sampler, prompt, reference_of_sample, tokens_of


@pytest.fixture(scope="module", params=["gemma2", "gemma4", "gemma4_large"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    adapted = Adapted(tiny_model(request.param, tmp_path_factory.mktemp(request.param)))
    adapted.create("one")
    return adapted


def test_samples_and_repeated_prompts_have_the_probabilities_of_whole_passes(adapted: Adapted) -> None:
    sampler = new_sampler(adapted, prefill_chunk_tokens=32)
    for length in (1, 9, 3 * BLOCK + 4, 150):
        one = job(str(length), prompt(length), "one", num_samples=2)
        first, again = answer(sampler, one), answer(sampler, one)
        assert again.prompt_cache_hit_tokens == (length - 1) // BLOCK * BLOCK
        assert_same(again, first)
        for each in first.sequences:
            wanted = reference_of_sample(adapted, one.prompt, each.tokens, "one")
            np.testing.assert_allclose(each.logprobs, wanted, atol=1e-4)
            other = reference_of_sample(adapted, one.prompt, each.tokens, None)
            assert np.abs(np.asarray(each.logprobs) - other).max() > 1e-4


def test_preempted_samples_resume_with_the_same_tokens(adapted: Adapted) -> None:
    jobs = [job(str(i), prompt(10), "one", seed=i, max_tokens=150) for i in range(4)]
    wanted = finish(new_sampler(adapted), *jobs)
    size = new_sampler(adapted)._scheduler.slots.cache.size
    sampler = new_sampler(adapted, kv_cache_bytes=4 * size.bytes_of(128), prefill_chunk_tokens=16)
    for joining in (tuple(jobs), ()):
        sampler.slice(SamplingSlice(joining, (), 0))
    assert sampler.held_bytes() == 4 * size.bytes_of(128)
    sampler.park()
    finished = finish(sampler)
    assert {i: tokens_of(finished[i]) for i in wanted} == {i: tokens_of(wanted[i]) for i in wanted}
