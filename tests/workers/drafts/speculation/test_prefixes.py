"""Tests that neither the model nor its draft runs a cached prompt again, and that draft tokens stay the same."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from trainhouse.schemas.models import FullConfig, LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.drafts.speculation import draft_proposer
from trainhouse.workers.drafts.speculation.draft_proposer import DraftProposer
from trainhouse.workers.drafts.speculation.payoff import DraftPayoff
from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.protocol.calls import RunSpec, SampleJob, SamplingSlice
from trainhouse.workers.sampler.cache.cache import KVCache
from trainhouse.workers.sampler.cache.prefix_cache import BLOCK
from trainhouse.workers.sampler.requests.token_choice import DraftTokens
from trainhouse.workers.worker.worker import Worker

from ...jobs import job
from ...model_state import add_noise
from .test_speculation import Target, assert_same_samples, draft_caches, forget_prefixes, run, tokens
from .test_speculation import target as target

pytestmark = pytest.mark.slow

DRAFTS = "trained", "blocks"
TOLERANCE = 1e-4

# Tokens of each pass of the model, and the probabilities that drafts computed.
PassSizes = list[int]
Probabilities = list[Tensor]


@pytest.fixture
def worker(target: Target) -> Worker:
    """Returns a worker with an empty cache."""
    worker = Worker(target.config)
    load_drafts(worker, target)
    return worker


def load_drafts(worker: Worker, target: Target) -> None:
    for draft_id in DRAFTS:
        worker.load_draft(draft_id, str(target.directory / draft_id))


@pytest.fixture
def pass_sizes(monkeypatch: pytest.MonkeyPatch) -> PassSizes:
    sizes: PassSizes = []
    forward = BaseModel.hidden_states

    def counted(base: BaseModel, some: Tensor, *rest: Any, **more: Any) -> Tensor:
        sizes.append(len(some))
        return forward(base, some, *rest, **more)

    monkeypatch.setattr(BaseModel, "hidden_states", counted)
    return sizes


@pytest.fixture
def probabilities(monkeypatch: pytest.MonkeyPatch) -> Probabilities:
    found: Probabilities = []

    def recorded(*arguments: Any) -> dict[Any, DraftTokens]:
        draft_tokens = propose(*arguments)
        found.extend(each.probabilities.clone() for each in draft_tokens.values() if each.probabilities is not None)
        return draft_tokens

    propose = DraftProposer.propose
    monkeypatch.setattr(DraftProposer, "propose", recorded)
    return found


def text(length: int, number: int = 0) -> np.ndarray:
    return np.random.default_rng(number).integers(3, 500, length)


def drafting_job(draft_id: str | None, prompt: Sequence[int] | np.ndarray, **options: Any) -> SampleJob:
    options = {"temperature": 0.8, "max_tokens": 30, "num_draft_tokens": 3} | options
    return job("a", prompt, draft_id=draft_id, **options)


def answer(worker: Worker, wanted: SampleJob) -> SampleResponse:
    return run(worker, wanted)[wanted.job_id]


def answer_uncached(worker: Worker, wanted: SampleJob) -> SampleResponse:
    """Answers with an empty prefix cache."""
    forget_prefixes(worker)
    return answer(worker, wanted)


def assert_same(found: SampleResponse, wanted: SampleResponse) -> None:
    assert_same_samples({"a": found}, {"a": wanted})
    assert found.guesses == wanted.guesses


def max_difference(probabilities: Probabilities, num: int) -> float:
    """Returns the largest difference between the first `num` probabilities and the `num` after them."""
    assert len(probabilities) == 2 * num > 0
    return max(
        float((one - other).abs().max()) for one, other in zip(probabilities[:num], probabilities[num:], strict=True)
    )


@pytest.mark.parametrize("draft_id", DRAFTS)
@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 3 * BLOCK + 1, 100])
def test_a_repeated_prompt_is_not_run_again(
    worker: Worker, pass_sizes: PassSizes, probabilities: Probabilities, draft_id: str, length: int
) -> None:
    """The second sample of one request does not run it again either."""
    one, hits = drafting_job(draft_id, text(length), num_samples=2), (length - 1) // BLOCK * BLOCK
    first = answer(worker, one)
    num, sizes = len(probabilities), list(pass_sizes)
    pass_sizes.clear()
    again = answer(worker, one)
    assert (first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (0, hits)
    assert (sizes[0], pass_sizes[0]) == (length, length - hits)
    assert max(sizes[1:]) <= 2 * (1 + 3) and sizes[1:] == pass_sizes[1:]
    assert_same(again, first)
    assert max_difference(probabilities, num) < TOLERANCE


@pytest.mark.parametrize("draft_id", DRAFTS)
@pytest.mark.parametrize("pays", [True, False])
def test_the_next_turn_of_a_conversation_reuses_the_last(
    worker: Worker, draft_id: str, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's prefix reaches up to the last drafted token, whether drafting paid or not."""
    if pays:
        monkeypatch.setattr(DraftPayoff, "pays", lambda *_: True)
    turns, found, prompt = [], [], text(24)
    for turn in range(3):
        turns.append(drafting_job(draft_id, prompt, seed=turn, temperature=0.0, max_tokens=60))
        found.append(answer(worker, turns[-1]))
        prompt = np.concatenate([prompt, tokens(found[-1]), text(10, turn)])
    for number, (one, answered) in enumerate(zip(turns, found, strict=True)):
        num_drafted = 60 - 1 - 3 if pays else 8
        known = len(turns[number - 1].prompt) + num_drafted - 1 if number else 0
        assert answered.guesses is not None and (answered.guesses.passes > 8) == pays
        assert answered.prompt_cache_hit_tokens >= known // BLOCK * BLOCK
        assert_same(answered, answer_uncached(worker, one))


@pytest.mark.parametrize("is_blind", [False, True])
def test_prompts_that_differ_after_a_block_share_only_earlier_blocks(
    worker: Worker, target: Target, probabilities: Probabilities, monkeypatch: pytest.MonkeyPatch, is_blind: bool
) -> None:
    """A draft's state at a token depends on the next token.

    If blocks were identified by their own tokens alone (is_blind), the draft would use another prompt's state.
    """
    if is_blind:
        monkeypatch.setattr(draft_proposer, "KVCache", blind_cache)
    worker.load_draft("random", str(target.directory / "random"))
    one, other = (drafting_job("random", np.concatenate([text(3 * BLOCK), text(5, number)])) for number in (1, 2))
    wanted = answer_uncached(worker, other)
    num = len(probabilities)
    answer_uncached(worker, one)
    del probabilities[num:]
    found = answer(worker, other)
    assert (found.prompt_cache_hit_tokens == 2 * BLOCK) != is_blind
    first, *_ = (
        float((mine - its).abs().max()) for mine, its in zip(probabilities[num:], probabilities[:num], strict=False)
    )
    assert (first > TOLERANCE) == is_blind
    if not is_blind:
        assert_same(found, wanted)
        assert max_difference(probabilities, num) < TOLERANCE


def blind_cache(*arguments: Any, num_ahead: int) -> KVCache:
    assert num_ahead
    return KVCache(*arguments)


def test_prefixes_are_valid_only_for_their_draft_and_weights(worker: Worker, target: Target) -> None:
    worker.create_run(RunSpec("policy", LoraConfig(rank=4, seed=5)))
    worker.copy_adapter("policy", "adapter")

    def hits(draft_id: str | None, adapter_id: str | None = None) -> int:
        one = replace(drafting_job(draft_id, text(100)), adapter_id=adapter_id)
        found = answer(worker, one)
        return found.prompt_cache_hit_tokens

    assert [hits(each) for each in (None, "trained", "trained", "blocks", "blocks", None)] == [0, 0, 96, 0, 96, 96]
    assert [hits("trained", "adapter"), hits("trained", "adapter")] == [0, 96]
    add_noise(worker, "policy", 0.1)
    worker.copy_adapter("policy", "adapter")
    assert [hits("trained", "adapter"), hits("trained", "adapter"), hits("trained")] == [0, 96, 96]
    worker.load_draft("trained", str(target.directory / "random"))
    assert [hits("trained"), hits("trained"), hits("blocks"), hits(None)] == [0, 96, 96, 96]


def test_the_sampler_of_a_full_model_finds_its_earlier_prefixes(worker: Worker) -> None:
    # Such a model's sampler is created for its jobs and removed after them.
    worker.create_run(RunSpec("policy", FullConfig()))
    worker.copy_adapter("policy", "full")
    one = replace(drafting_job("trained", text(100)), adapter_id="full")
    first = answer(worker, one)
    assert not worker._sampler._of_models
    again = answer(worker, one)
    assert (first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (0, 96)
    assert first.guesses is not None
    assert_same(again, first)


@pytest.mark.parametrize("draft_id", DRAFTS)
def test_chunked_prompts_continue_from_cached_prefixes(worker: Worker, target: Target, draft_id: str) -> None:
    chunked = Worker(replace(target.config, prefill_chunk_tokens=16))
    load_drafts(chunked, target)
    other = replace(drafting_job(draft_id, text(5, 7), max_tokens=150, seed=3), job_id="other")
    found = []
    for prompt in (text(100), np.concatenate([text(100), text(90, 1)])):
        chunked.sample_slice(SamplingSlice((other,), (), 0))
        found.append(run(chunked, drafting_job(draft_id, prompt)))
        assert_same(found[-1]["a"], answer_uncached(worker, drafting_job(draft_id, prompt)))
        assert_same(found[-1]["other"], answer_uncached(worker, other))
    assert [each["a"].prompt_cache_hit_tokens for each in found] == [0, 96]


def test_a_sample_begun_before_its_draft_changed_leaves_no_prefix(worker: Worker, target: Target) -> None:
    worker.sample_slice(SamplingSlice((drafting_job("trained", text(100), max_tokens=60),), (), 0))
    worker.load_draft("trained", str(target.directory / "random"))
    run(worker)
    one = drafting_job("trained", text(100), max_tokens=10)
    found = answer(worker, one)
    assert found.prompt_cache_hit_tokens == 0
    assert_same(found, answer_uncached(worker, one))


def test_draft_prefixes_are_counted_evicted_and_dropped_with_the_draft(worker: Worker, target: Target) -> None:
    """Evicts the least recently used prefix first, of the model or of a draft."""
    config = replace(target.config, kv_cache_bytes=1 << 19)
    small = Worker(config)
    load_drafts(small, target)
    budget = small._sampler._shared.cache.budget
    for number in range(30):
        answer(small, drafting_job(DRAFTS[number % 2], text(60 + number, number), max_tokens=12))
        memory = small.memory()
        kept = [cache.prefixes.num_bytes for cache in draft_caches(small)]
        assert memory["kv_cache"] <= config.kv_cache_bytes and budget.held_bytes() == 0
        assert memory["kv_cache_of_drafts"] == sum(kept) > 0
        on_device = sum(each.nbytes for each in budget.tensors())
        assert memory["kv_cache"] >= on_device > 0
    newest, oldest = (drafting_job(DRAFTS[number % 2], text(60 + number, number), max_tokens=2) for number in (29, 0))
    assert answer(small, newest).prompt_cache_hit_tokens == 64
    assert answer(small, oldest).prompt_cache_hit_tokens == 0
    large = drafting_job(None, text(400, 99), max_tokens=2)
    assert answer(small, large).prompt_cache_hit_tokens == 0
    for draft_id in DRAFTS:
        small.drop_adapter(draft_id)
    run(small, drafting_job(None, text(5), max_tokens=1))
    assert small.memory()["kv_cache_of_drafts"] == 0


def test_a_request_that_drafts_nothing_needs_no_draft_prefix(worker: Worker) -> None:
    one = drafting_job("trained", text(100), max_tokens=1)
    assert [answer(worker, one).prompt_cache_hit_tokens for _ in range(2)] == [0, 0], (
        "one token needs no cache slot, so no prefix is kept"
    )
    answer(worker, drafting_job(None, text(100)))
    assert answer(worker, one).prompt_cache_hit_tokens == 96
