"""Speculative sampling of a model with recurrent states: these must stand for the accepted tokens alone."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.drafts.speculation.draft_proposer import DraftProposer
from trainhouse.workers.drafts.speculation.payoff import DraftPayoff
from trainhouse.workers.protocol.calls import SampleJob
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.sampler.requests.token_choice import DraftTokens
from trainhouse.workers.sampler.slots import PendingStates
from trainhouse.workers.worker.worker import Worker

from ....tiny import tiny_model
from ...jobs import job
from ...sampler.test_prefixes import BLOCK
from ...sampler.test_states import pass_sizes
from .test_speculation import assert_same_samples, engine_of, forget_prefixes, make_draft, preempted_lengths, run

__all__ = ["pass_sizes", "preempted_lengths"]

pytestmark = pytest.mark.slow

NUM_DRAFT_TOKENS = 3


@pytest.fixture(params=["llama", "qwen3_5"])
def worker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Returns a worker with a draft. Llama has moving sums as states."""
    if request.param == "llama":
        request.getfixturevalue("pass_sizes")
    return drafting_worker(request.param, tmp_path, monkeypatch)


def drafting_worker(kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Returns a worker with a draft, which is used whether or not it pays."""
    tiny_model(kind, directory / "model", initializer_range=0.2)
    worker = Worker(WorkerConfig(ServedModel("tiny", str(directory / "model")), threads=1))
    make_draft(worker, "draft", directory / "draft")
    monkeypatch.setattr(DraftPayoff, "pays", lambda *_: True)
    return worker


def greedy(name: str, length: int, **options: Any) -> SampleJob:
    prompt = np.random.default_rng(length).integers(3, 500, length)
    return job(name, prompt, None, temperature=0.0, **({"max_tokens": 25} | options))


def drafting(jobs: list[SampleJob]) -> list[SampleJob]:
    return [replace(each, draft_id="draft", num_draft_tokens=NUM_DRAFT_TOKENS) for each in jobs]


def propose_right_tokens(
    monkeypatch: pytest.MonkeyPatch, wanted: Mapping[str, SampleResponse], vocab_size: int = 512
) -> None:
    """Proposes in a sequence's n-th pass the next n modulo k + 1 of the wanted tokens, and k in all."""

    def propose(self: DraftProposer, sequences: Any, table: Any) -> dict[Any, DraftTokens]:
        found = proposed(self, sequences, table)
        for sequence, each in found.items():
            if num := len(each.tokens):
                start = int(table.count[sequence.line])
                tokens = wanted[sequence.job.spec.job_id].sequences[0].tokens[start : start + num].astype(np.int64)
                num_right = sequence.draft_stats.num_passes % (num + 1)
                tokens[num_right:] = 3 + (tokens[num_right:] + 1) % (vocab_size - 12)
                one_hot = torch.nn.functional.one_hot(torch.from_numpy(tokens), vocab_size).float()
                found[sequence] = replace(each, tokens=tokens, probabilities=one_hot)
        return found

    proposed = DraftProposer.propose
    monkeypatch.setattr(DraftProposer, "propose", propose)


def advance_by_one(self: PendingStates, lengths: Mapping[Any, int]) -> None:
    """Advances the states as if no draft token were accepted."""
    advance(self, {each: self._places[each].num_known + 1 for each in lengths if each in self._places})


advance = PendingStates.advance


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "deepseek_v32", "glm_moe_dsa"])
def test_samples_are_the_same_however_many_draft_tokens_are_accepted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Models with an indexer choose no rejected draft token."""
    if kind == "llama":
        request.getfixturevalue("pass_sizes")
    worker = drafting_worker(kind, tmp_path, monkeypatch)
    jobs = [greedy(str(length), length, num_samples=2) for length in (1, 5, 12, 40)]
    plain = [greedy("plain", 20, max_tokens=60)]
    wanted = run(worker, *jobs, *plain)
    propose_right_tokens(monkeypatch, wanted)
    found = run(worker, *drafting(jobs), *plain)
    at_ties = assert_same_samples(found, wanted)
    for one in jobs:
        guesses = found[one.job_id].guesses
        assert guesses is not None and len(guesses.by_accepted) == NUM_DRAFT_TOKENS + 1
        assert one.job_id in at_ties or min(guesses.by_accepted) > 0
    assert not engine_of(worker)._scheduler.slots.pending._inputs
    if kind in ("llama", "qwen3_5"):
        monkeypatch.setattr(PendingStates, "advance", advance_by_one)
        forget_prefixes(worker)
        with pytest.raises(AssertionError):
            assert_same_samples(run(worker, *drafting(jobs), *plain), wanted)


def test_the_turn_after_a_stop_among_draft_tokens_reuses_the_state_before_the_stop(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = greedy("a", 9)
    wanted = run(worker, one)
    propose_right_tokens(monkeypatch, wanted)
    tokens = wanted["a"].sequences[0].tokens
    for stop in range(3, 14):
        forget_prefixes(worker)
        first = int(np.flatnonzero(tokens == tokens[stop])[0])
        (drafted,) = drafting([replace(one, stop_token_ids=(int(tokens[stop]),))])
        sampled = run(worker, drafted)["a"].sequences[0]
        assert sampled.stop_reason == "stop" and sampled.tokens.tolist() == tokens[: first + 1].tolist()
        turn = job("turn", np.concatenate([one.prompt, sampled.tokens, one.prompt]), temperature=0.0)
        found = run(worker, turn)
        assert found["turn"].prompt_cache_hit_tokens == 9 + first
        forget_prefixes(worker)
        assert_same_samples(found, run(worker, turn))


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 100])
def test_a_repeated_prompt_starts_at_its_last_whole_block(worker: Worker, length: int) -> None:
    """The draft's prefix ends there, and it starts at the same token as the model."""
    (one,) = drafting([greedy("a", length)])
    first, again = run(worker, one), run(worker, one)
    hits = (length - 1) // BLOCK * BLOCK
    assert (first["a"].prompt_cache_hit_tokens, again["a"].prompt_cache_hit_tokens) == (0, hits)
    assert_same_samples(again, first)
    plain = run(worker, replace(one, draft_id=None))
    assert plain["a"].prompt_cache_hit_tokens == hits
    assert_same_samples(plain, first)


def test_preempted_samples_draft_again(worker: Worker, preempted_lengths: list[int], tmp_path: Path) -> None:
    jobs = drafting([greedy(str(length), length, num_samples=3, max_tokens=90) for length in (5, 6, 12, 30)])
    wanted = run(worker, *jobs)
    assert not preempted_lengths
    config = WorkerConfig(ServedModel("tiny", str(tmp_path / "model")), threads=1, kv_cache_bytes=1 << 18)
    small = Worker(config)
    small.load_draft("draft", str(tmp_path / "draft"))
    found = run(small, *jobs, budget_milliseconds=0)
    assert len(preempted_lengths) > 2
    assert_same_samples(found, wanted)
