"""Samples of models with recurrent layers reuse all of a prompt but its last token; see also test_every_family.py."""

import numpy as np
import pytest
from trainhouse.schemas.sampling import SampleResponse

from ...tiny import RECURRENT_KINDS, tiny_model
from ..adapted import Adapted
from .test_prefixes import BLOCK, assert_same, core_first
from .test_sampler import answer, job, new_sampler, prompt, reference_of_sample

CORE = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "granite4", "falcon_h1", "nemotron_h_latent")


@pytest.fixture(scope="module", params=core_first(CORE, RECURRENT_KINDS))
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    adapted = Adapted(tiny_model(request.param, tmp_path_factory.mktemp(request.param)))
    adapted.create("one")
    return adapted


def assert_right(hybrid: Adapted, found: SampleResponse, tokens: np.ndarray, adapter_id: str | None = "one") -> None:
    """Compares the log-probabilities with those of one pass over each whole sequence."""
    for each in found.sequences:
        wanted = reference_of_sample(hybrid, tokens, each.tokens, adapter_id)
        np.testing.assert_allclose(each.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("length", [2, 3 * BLOCK, 100])
def test_a_repeated_prompt_runs_only_its_last_token(hybrid: Adapted, length: int) -> None:
    sampler, one = new_sampler(hybrid), job("a", prompt(length), "one", num_samples=2)
    first, again = answer(sampler, one), answer(sampler, one)
    assert (first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (0, length - 1)
    assert_same(again, first)
    assert_right(hybrid, again, one.prompt)
    with pytest.raises(AssertionError):
        assert_right(hybrid, again, prompt(length + 1))


def test_the_next_turn_of_a_conversation_reuses_all_of_the_last(hybrid: Adapted) -> None:
    sampler, tokens, known = new_sampler(hybrid), prompt(40), 0
    for turn in range(3):
        request = job(f"turn {turn}", tokens, "one", max_tokens=50, seed=turn)
        found = answer(sampler, request)
        assert found.prompt_cache_hit_tokens == known
        assert_right(hybrid, found, tokens)
        tokens = np.concatenate([tokens, found.sequences[0].tokens, prompt(10, seed=turn)])
        known = len(tokens) - 10 - 1


def test_the_planned_size_equals_the_bytes_of_the_tensors(hybrid: Adapted) -> None:
    sampler = new_sampler(hybrid)
    answer(sampler, job("a", prompt(40), num_samples=3))
    stored = sampler._scheduler.slots.cache
    assert sum(each.nbytes for each in stored.tensors()) == stored.num_bytes() == stored.prefixes.num_bytes > 0
