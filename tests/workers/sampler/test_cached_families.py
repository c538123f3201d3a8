"""Samples of all families without recurrent layers: prefixes, several samples and preemption change no token."""

import numpy as np
import pytest

from ...tiny import FAMILY_KINDS, PLAIN_KINDS, RECURRENT_KINDS, tiny_model
from ..adapted import Adapted
from .test_prefixes import BLOCK, assert_resumes_after_preemption, assert_same, core_first
from .test_sampler import answer, job, new_sampler, prompt, reference_of_sample

# Caps on scores, shared keys and values, heads of several sizes, latent attention, an indexer, parts of sequences,
# sinks.
CORE = ("gemma2", "gemma4", "gemma4_large", "gemma4_moe", "deepseek_v3", "glm_moe_dsa", "llama4", "gpt_oss")
KINDS = [kind for kind in (*FAMILY_KINDS, *PLAIN_KINDS) if kind not in RECURRENT_KINDS]


@pytest.fixture(scope="module", params=core_first(CORE, KINDS))
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
    assert_resumes_after_preemption(adapted)
