"""Samples of models with recurrent layers: prefixes, preemption, chunks and drafts change no token."""

import numpy as np
import pytest
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.protocol.calls import SamplingSlice

from ...tiny import tiny_model
from ..adapted import Adapted
from .test_prefixes import BLOCK, assert_same
from .test_sampler import answer, finish, job, new_sampler, prompt, reference_of_sample, tokens_of

HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "granite4", "falcon_h1", "nemotron_h_latent")


@pytest.fixture(scope="module", params=HYBRID)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    adapted = Adapted(tiny_model(request.param, tmp_path_factory.mktemp(request.param)))
    adapted.create("one")
    return adapted


def assert_right(hybrid: Adapted, found: SampleResponse, tokens: np.ndarray, adapter_id: str | None = "one") -> None:
    """Compares the log-probabilities with those of one pass over each whole sequence."""
    for each in found.sequences:
        wanted = reference_of_sample(hybrid, tokens, each.tokens, adapter_id)
        np.testing.assert_allclose(each.logprobs, wanted, atol=1e-4)


def test_samples_have_the_probabilities_of_whole_passes(hybrid: Adapted) -> None:
    jobs = [job(str(i), prompt(length), "one", num_samples=2) for i, length in enumerate((1, 2, 9, 9, 33, 70, 150))]
    found = finish(new_sampler(hybrid), *jobs)
    for one in jobs:
        assert_right(hybrid, found[one.job_id], one.prompt)
    with pytest.raises(AssertionError):
        assert_right(hybrid, found["1"], prompt(3))


@pytest.mark.parametrize("length", [2, 3 * BLOCK, 100])
def test_a_repeated_prompt_runs_only_its_last_token(hybrid: Adapted, length: int) -> None:
    sampler, one = new_sampler(hybrid), job("a", prompt(length), "one", num_samples=2)
    first, again = answer(sampler, one), answer(sampler, one)
    assert (first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (0, length - 1)
    assert_same(again, first)
    assert_right(hybrid, again, one.prompt)


def test_the_next_turn_of_a_conversation_reuses_all_of_the_last(hybrid: Adapted) -> None:
    sampler, tokens, known = new_sampler(hybrid), prompt(40), 0
    for turn in range(3):
        request = job(f"turn {turn}", tokens, "one", max_tokens=50, seed=turn)
        found = answer(sampler, request)
        assert found.prompt_cache_hit_tokens == known
        assert_right(hybrid, found, tokens)
        tokens = np.concatenate([tokens, found.sequences[0].tokens, prompt(10, seed=turn)])
        known = len(tokens) - 10 - 1


def test_preempted_and_parked_samples_resume_with_the_same_tokens(hybrid: Adapted) -> None:
    jobs = [job(str(i), prompt(10), "one", seed=i, max_tokens=150) for i in range(4)]
    wanted = finish(new_sampler(hybrid), *jobs)
    size = new_sampler(hybrid)._scheduler.slots.cache.size
    sampler = new_sampler(hybrid, kv_cache_bytes=4 * size.bytes_of(128), prefill_chunk_tokens=16)
    for joining in (tuple(jobs), ()):
        sampler.slice(SamplingSlice(joining, (), 0))
    assert sampler.held_bytes() == 4 * size.bytes_of(128)
    sampler.park()
    finished = finish(sampler)
    assert {i: tokens_of(finished[i]) for i in wanted} == {i: tokens_of(wanted[i]) for i in wanted}


def test_the_planned_size_equals_the_bytes_of_the_tensors(hybrid: Adapted) -> None:
    sampler = new_sampler(hybrid)
    answer(sampler, job("a", prompt(40), num_samples=3))
    stored = sampler._scheduler.slots.cache
    assert sum(each.nbytes for each in stored.tensors()) == stored.num_bytes() == stored.prefixes.num_bytes > 0
