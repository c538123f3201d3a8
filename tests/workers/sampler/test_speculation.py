"""Samples that a draft guesses: the same ones, or the same distribution, as without."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainhouse.schemas.models import DraftConfig, LoraConfig
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.schemas.training import AdamParams, Datum, ForwardBackwardOutput, ForwardBackwardRequest
from trainhouse.workers.protocol.calls import OperationPart, OptimizerStep, Pass, RunSpec, SampleJob, SamplingSlice
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.sampler import native_sampler as native
from trainhouse.workers.sampler import speculation
from trainhouse.workers.sampler.cache.cache import KVCache
from trainhouse.workers.sampler.rank_sync import VerifyResult
from trainhouse.workers.sampler.scheduler import SequenceScheduler
from trainhouse.workers.sampler.speculation import DraftTokens, SpeculativeDecoder
from trainhouse.workers.worker.worker import Worker

from ...tiny import tiny_model
from ..jobs import answers, job, slices
from .test_distribution import CASES, LEAST_P_VALUE, LENGTH, NUM_SEQUENCES, PROMPT, Model, p_value, tokens_of
from .test_distribution import model as model

NUM_PROMPTS = 200
ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)
DRAFTS = ("random", "trained", "blocks")

# Of a pass over a draft's data.
LOSSES: Mapping[str, Mapping[str, float | str]] = {"eagle3": {"ttt_length": 4}, "dflash": {"seed": 0}}
BLOCKS = {"algorithm": "dflash", "num_layers": 2, "block_size": 6}


@dataclass(frozen=True)
class Target:
    """rollouts: int64 [n, tokens], of the model's likeliest tokens. directory: of the drafts, by their ids."""

    worker: Worker
    rollouts: np.ndarray
    directory: Path


def made(worker: Worker, draft_id: str, directory: Path, rollouts: np.ndarray | None = None, **fields: Any) -> None:
    """rollouts: that it is trained on, if any."""
    config = DraftConfig.model_validate({"algorithm": "eagle3", "seed": 3} | fields)
    worker.create_run(RunSpec("draft", config, "draft"))
    if "draft_vocab_size" in fields:
        worker.set_vocabulary("draft", np.arange(1, 1 + fields["draft_vocab_size"], dtype=np.int64))
    for number in range(0 if rollouts is None else 60):
        passed(worker, number, rollouts, algorithm=config.algorithm)
        worker.apply_steps((OptimizerStep("draft", ADAM, "mean"),))
    directory.mkdir()
    worker.save_run("draft", str(directory), optimizer=False)
    worker.drop_run("draft")
    worker.load_draft(draft_id, str(directory))


def passed(worker: Worker, number: int, rollouts: np.ndarray, algorithm: str = "eagle3") -> ForwardBackwardOutput:
    data = tuple(Datum(row.astype(np.int32), {}) for row in rollouts)
    return answered(worker, number, ForwardBackwardRequest("draft", 1, data, algorithm, LOSSES[algorithm]))


def answered(worker: Worker, number: int, request: ForwardBackwardRequest) -> ForwardBackwardOutput:
    (answer,) = worker.run_pass(Pass((OperationPart(number, request),)))
    assert isinstance(answer, ForwardBackwardOutput), answer
    return answer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """With weights large enough for the likeliest token to be one by far."""
    directory = tmp_path_factory.mktemp("target")
    tiny_model("llama", directory / "model", num_hidden_layers=4, initializer_range=0.2)
    worker = Worker(WorkerConfig(ServedModel("tiny", str(directory / "model")), threads=1, full_slots=5))
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 512, 4) for _ in range(12)]
    found = run(worker, *(job(str(i), prompt, temperature=0.0, max_tokens=40) for i, prompt in enumerate(prompts)))
    rollouts = np.stack([np.concatenate([prompt, tokens(found[str(i)])]) for i, prompt in enumerate(prompts)])
    made(worker, "random", directory / "random")
    made(worker, "trained", directory / "trained", rollouts)
    made(worker, "of few", directory / "of few", draft_vocab_size=300)
    made(worker, "blocks", directory / "blocks", rollouts, **BLOCKS)
    made(worker, "random blocks", directory / "random blocks", **BLOCKS)
    return Target(worker, rollouts, directory)


def run(worker: Worker, *jobs: SampleJob, **options: Any) -> dict[str, SampleResponse]:
    found = answers(worker.sample_slice, *jobs, **options)
    assert all(isinstance(answer, SampleResponse) for answer in found.values()), found
    return found


def finished(worker: Worker, wanted: SampleJob) -> SampleResponse:
    """Beside others, which need not end."""
    found = worker.sample_slice(SamplingSlice((wanted,), (), 0)).finished
    while wanted.job_id not in found:
        found = worker.sample_slice(SamplingSlice((), (), 0)).finished
    answer = found[wanted.job_id]
    assert isinstance(answer, SampleResponse)
    return answer


def tokens(response: SampleResponse, sample: int = 0) -> np.ndarray:
    return response.sequences[sample].tokens


def guessed(jobs: list[SampleJob], draft_id: str, num: int | None = None) -> list[SampleJob]:
    """num: of guesses at a time; None = one to five, in turn."""
    return [replace(each, draft_id=draft_id, num_draft_tokens=num or 1 + i % 5) for i, each in enumerate(jobs)]


def some_jobs(num: int, rollouts: np.ndarray, **options: Any) -> list[SampleJob]:
    """Prompts of all lengths, among them beginnings of what drafts were trained on."""
    random = np.random.default_rng(1)
    jobs = []
    for number in range(num):
        prompt = random.integers(3, 512, random.integers(1, 40))
        if number % 4 == 0:
            prompt = rollouts[number % len(rollouts)][: random.integers(4, 20)]
        jobs.append(job(f"{number}", prompt, max_tokens=int(random.integers(1, 16)), seed=number, **options))
    return jobs


def assert_alike(found: Mapping[str, SampleResponse], wanted: Mapping[str, SampleResponse]) -> None:
    for job_id, response in wanted.items():
        for ours, theirs in zip(found[job_id].sequences, response.sequences, strict=True):
            np.testing.assert_array_equal(ours.tokens, theirs.tokens, err_msg=job_id)
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
            assert ours.stop_reason == theirs.stop_reason


@pytest.mark.parametrize("draft_id", [*DRAFTS, "of few", "random blocks"])
def test_the_likeliest_tokens_are_the_same_with_a_draft(target: Target, draft_id: str) -> None:
    jobs = some_jobs(NUM_PROMPTS, target.rollouts, temperature=0.0)
    wanted = run(target.worker, *jobs)
    found = run(target.worker, *guessed(jobs, draft_id))
    assert_alike(found, wanted)
    assert all(response.guesses is None for response in wanted.values())
    counts = [each.guesses for each in found.values() if each.guesses is not None]
    assert len(counts) > NUM_PROMPTS / 2
    assert all(sum(each.by_accepted) == each.passes and each.accepted <= each.drafted for each in counts)
    if draft_id in ("trained", "blocks"):
        assert sum(each.accepted for each in counts) > 50


@pytest.mark.parametrize("draft_id", DRAFTS)
def test_samples_hang_on_their_own_seed_alone(target: Target, draft_id: str) -> None:
    """Whatever company they have, guessed or not, and in however many slices."""
    jobs = guessed(some_jobs(24, target.rollouts, temperature=0.8, num_samples=2), draft_id, 3)
    together = run(
        target.worker, *jobs, *(replace(each, job_id=f"plain {each.job_id}", draft_id=None) for each in jobs)
    )
    alone = {each.job_id: run(target.worker, each, budget_milliseconds=0)[each.job_id] for each in jobs}
    assert_alike(together, alone)
    plain = {each.job_id: together[f"plain {each.job_id}"] for each in jobs}
    assert any(
        len(tokens(each)) != len(tokens(alone[i])) or (tokens(each) != tokens(alone[i])).any()
        for i, each in plain.items()
    )


def of_all(jobs: list[SampleJob]) -> list[SampleJob]:
    """Some without a draft, and others with each of several."""
    ids = None, "trained", "blocks", "random", "random blocks"
    return [replace(each, draft_id=ids[number % len(ids)]) for number, each in enumerate(guessed(jobs, "any"))]


def test_rows_of_several_drafts_and_of_none_run_together(target: Target) -> None:
    """In the same passes, several samples of each."""
    jobs = [replace(each, num_samples=2) for each in some_jobs(60, target.rollouts, temperature=0.0)]
    wanted = run(target.worker, *jobs)
    found = run(target.worker, *of_all(jobs))
    assert_alike(found, wanted)
    has_guesses = {each.draft_id for each in of_all(jobs) if found[each.job_id].guesses is not None}
    assert has_guesses == {"trained", "blocks", "random", "random blocks"}


@pytest.fixture(scope="module")
def small(target: Target) -> Worker:
    """With a cache that has not room for all."""
    small = Worker(replace(target.worker._config, kv_cache_bytes=1 << 19))
    for draft_id in ("trained", "blocks", "random", "random blocks"):
        small.load_draft(draft_id, str(target.directory / draft_id))
    return small


@pytest.fixture
def lengths_on_leaving(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the samples that gave way, and had been guessed."""
    found: list[int] = []

    def preempt(self: SequenceScheduler) -> None:
        before = {row: row.draft_stats.num_passes for row in self.admitted()}
        preempt_youngest(self)
        left = before.keys() - self.admitted()
        found.extend(len(row.tokens) for row in left if before[row])

    preempt_youngest = SequenceScheduler._preempt_youngest
    monkeypatch.setattr(SequenceScheduler, "_preempt_youngest", preempt)
    return found


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 0.8])
def test_rows_give_way_and_are_guessed_again(
    target: Target, small: Worker, temperature: float, lengths_on_leaving: list[int]
) -> None:
    """As they would have been: a seed gives the same tokens, and the same guesses."""
    options = {"temperature": temperature}
    jobs = of_all([replace(each, num_samples=3) for each in longer_jobs(40, target.rollouts, **options)])
    wanted = run(target.worker, *jobs)
    assert not lengths_on_leaving
    found = run(small, *jobs, budget_milliseconds=0)
    assert len(lengths_on_leaving) > 4
    assert_alike(found, wanted)
    assert [found[each.job_id].guesses for each in jobs] == [wanted[each.job_id].guesses for each in jobs]
    assert small._sampler.held_bytes() == 0
    assert not small._sampler._of_base._speculation._states


def test_what_drafts_have_is_told_of_within_the_budget_and_leaves_the_device(target: Target, small: Worker) -> None:
    jobs = of_all([replace(each, num_samples=2) for each in longer_jobs(20, target.rollouts, temperature=0.0)])
    wanted = run(target.worker, *jobs)
    found: dict[str, Any] = {}
    of_drafts: list[int] = []
    for number, result in enumerate(slices(small.sample_slice, *jobs)):
        found |= result.finished
        memory = small.memory()
        assert memory["kv_cache_of_drafts"] < memory["kv_cache"] <= small._config.kv_cache_bytes
        of_drafts.append(memory["kv_cache_of_drafts"])
        if number % 5 == 0:
            small.offload()
            keys = [key for cache in caches_of_drafts(small) for key in cache.tensors()]
            assert all(key.untyped_storage().nbytes() == 0 for key in keys), "they have left"
            assert keys or not of_drafts[-1]
    assert_alike(found, wanted)
    of_prefixes = sum(cache.prefixes.num_bytes for cache in caches_of_drafts(small))
    assert max(of_drafts) > of_drafts[-1] == of_prefixes


def caches_of_drafts(worker: Worker) -> list[KVCache]:
    return list(worker._sampler._draft_caches._caches.values())


def longer_jobs(num: int, rollouts: np.ndarray, **options: Any) -> list[SampleJob]:
    """That outgrow their slots."""
    found = []
    for number, each in enumerate(some_jobs(num, rollouts, **options)):
        update = {"max_tokens": 30 + 2 * number, "seed": 100 + number}
        found.append(replace(each, params=each.params.model_copy(update=update)))
    return found


@pytest.mark.parametrize("draft_id", ["trained", "blocks"])
def test_an_adapter_is_guessed_by_any_draft(target: Target, draft_id: str) -> None:
    worker = target.worker
    worker.create_run(RunSpec("policy", LoraConfig(rank=4, seed=5)))
    weights = worker._models.get("policy").weights
    weights.add_(0.1 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(0)))
    worker.copy_adapter("policy", "adapter")
    jobs = [replace(each, adapter_id="adapter") for each in some_jobs(20, target.rollouts, temperature=0.0)]
    wanted = run(worker, *jobs)
    base = [replace(each, job_id=f"base {each.job_id}", adapter_id=None) for each in jobs]
    found = run(worker, *guessed([*jobs, *base], draft_id))
    assert_alike(found, wanted)
    assert any((tokens(found[each.job_id]) != tokens(found[f"base {each.job_id}"])).any() for each in jobs)
    worker.drop_run("policy")
    worker.drop_adapter("adapter")


def test_what_else_is_asked_for_comes_as_without(target: Target) -> None:
    options = {"temperature": 0.0, "topk_sample_logprobs": 3}
    jobs = some_jobs(20, target.rollouts, **options)
    ends = run(target.worker, *jobs)
    stopping = [
        replace(each, stop_token_ids=(int(tokens(ends[each.job_id])[-1]),), prompt_logprobs=True) for each in jobs
    ]
    wanted = run(target.worker, *stopping)
    found = run(target.worker, *guessed(stopping, "trained"))
    assert_alike(found, wanted)
    assert {sequence.stop_reason for response in found.values() for sequence in response.sequences} == {"stop"}
    for job_id, response in wanted.items():
        ours, theirs = (each.sequences[0].topk_logprobs for each in (found[job_id], response))
        assert ours is not None and theirs is not None
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_allclose(found[job_id].prompt_logprobs, response.prompt_logprobs, atol=1e-4)


def test_what_no_draft_knows_is_not_guessed(target: Target) -> None:
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.7},
        {"logit_bias": {"5": 3.0}},
        {"min_tokens": 4},
    ]
    jobs = [job(str(i), [4, 5, 6], temperature=0.0, **each) for i, each in enumerate(options)]
    wanted = run(target.worker, *jobs)
    found = run(target.worker, *guessed(jobs, "trained"))
    assert_alike(found, wanted)
    assert all(response.guesses is None for response in found.values())


def test_a_perfect_draft_is_right_all_the_time(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says what the model does; a random one is hardly ever."""
    num = 4
    prompts = [target.rollouts[i][:5] for i in range(4)]
    jobs = guessed([job(str(i), each, temperature=0.0, max_tokens=21) for i, each in enumerate(prompts)], "random", num)
    of_random = [each.guesses for each in run(target.worker, *jobs).values()]
    assert all(each is not None and each.acceptance_length < 1.5 for each in of_random)

    def perfect(self: SpeculativeDecoder, draft: Any, rows: list[Any], num: int, table: Any) -> list[DraftTokens]:
        found = as_drawn(self, draft, rows, num, table)
        for each, row in zip(found, rows, strict=True):
            first = int(table.length[row.table_row])
            each.tokens[:] = target.rollouts[int(row.job.request.job_id)][first : first + num]
            assert each.probabilities is not None
            each.probabilities.zero_()[np.arange(num), each.tokens] = 1
        return found

    as_drawn = SpeculativeDecoder._propose_group
    monkeypatch.setattr(SpeculativeDecoder, "_propose_group", perfect)
    found = run(target.worker, *jobs)
    for job_id, response in found.items():
        np.testing.assert_array_equal(tokens(response), target.rollouts[int(job_id)][5:26])
        assert response.guesses is not None
        assert (response.guesses.passes, response.guesses.acceptance_length) == (4, num + 1)


@pytest.mark.parametrize(("fields", "num"), [({}, 4), (BLOCKS, 5)], ids=["eagle3", "dflash"])
def test_the_acceptance_length_is_that_which_a_forward_tells(
    target: Target, tmp_path: Path, fields: dict[str, Any], num: int
) -> None:
    """Of the same texts, as far as was guessed: behind a token that came with the prompt."""
    worker, algorithm = target.worker, fields.get("algorithm", "eagle3")
    made(worker, "measured", tmp_path / "measured", target.rollouts, **fields)
    prompts = target.rollouts[:, :4]
    jobs = [job(str(i), each, temperature=0.0, max_tokens=40) for i, each in enumerate(prompts)]
    found = run(worker, *guessed(jobs, "measured", num))
    data: list[Datum] = []
    passes = accepted = 0
    for i, rollout in enumerate(target.rollouts):
        each = found[str(i)].guesses
        assert each is not None
        num_guessed = each.passes + each.accepted
        weights = np.array([0] * 3 + [1] * (1 + num_guessed), np.float32)
        data.append(Datum(rollout[: 5 + num_guessed].astype(np.int32), {"weights": np.append(weights, 0)}))
        passes, accepted = passes + each.passes, accepted + each.accepted
    worker.create_run(RunSpec("draft", DraftConfig.model_validate({"algorithm": algorithm} | fields), "draft"))
    worker.load_run("draft", str(tmp_path / "measured"), optimizer=False)
    request = ForwardBackwardRequest("draft", 1, tuple(data), algorithm, LOSSES[algorithm], forward_only=True)
    metrics = answered(worker, 999, request).metrics
    worker.drop_run("draft")
    assert accepted > 0.3 * passes
    assert metrics["acceptance_length/greedy:sum"] == passes + accepted
    assert metrics["acceptance_length/greedy/of:sum"] == passes


def test_guessing_ends_where_it_does_not_pay(target: Target) -> None:
    """After so many passes of each sample, by its own guesses alone."""
    prompts = [target.rollouts[i][:5] for i in range(4)]
    jobs = [job(str(i), each, temperature=0.0, max_tokens=35) for i, each in enumerate(prompts)]
    wanted = run(target.worker, *jobs)
    of_random = run(target.worker, *guessed(jobs, "random", 4))
    assert_alike(of_random, wanted)
    assert all(each.guesses is not None and each.guesses.passes == 8 for each in of_random.values())
    of_trained = run(target.worker, *guessed(jobs, "trained", 1))
    assert any(each.guesses is not None and each.guesses.passes > 8 for each in of_trained.values())


def test_among_many_samples_guesses_pay_less(target: Target) -> None:
    """Of those whose seed nobody asked for: the others are what they are alone. What is known of a draft goes for those
    that come later, too."""
    prompts = [target.rollouts[i % 12][:5] for i in range(30)]
    jobs = [job(str(i), each, temperature=0.0, max_tokens=35) for i, each in enumerate(prompts)]
    wanted = run(target.worker, *jobs)

    def passes(*some: SampleJob) -> list[int]:
        found = run(target.worker, *some)
        assert_alike(found, {job_id: wanted[job_id] for job_id in found})
        return [each.guesses.passes for each in found.values() if each.guesses is not None]

    asked_for = guessed(jobs, "trained", 1)
    drawn = [replace(each, seed_is_drawn=True) for each in asked_for]
    assert max(passes(*drawn)) <= 2
    assert max(passes(*asked_for)) > 8 and max(passes(replace(drawn[0], owner="alone"))) > 8
    random = [replace(each, seed_is_drawn=True, owner="alice") for each in guessed(jobs, "random", 2)]
    assert max(passes(*random[:8])) <= 2 and passes(random[8]) == [1]
    assert passes(replace(random[9], owner="bob")) == [8], "what others sample tells nothing"
    assert passes(*guessed(jobs, "random", 2)[:8]) == [8] * 8


def test_where_guesses_have_not_paid_they_are_tried_now_and_then(target: Target) -> None:
    """Of a few samples, and of one that begins alone, by which it is seen when they do; of the others the draft is not
    even told what they begin with."""
    seeds = [seed for seed in range(80) if seed % 8]
    jobs = [
        replace(job(f"{seed}", target.rollouts[0][:5], seed=seed, max_tokens=35), draft_id="random", seed_is_drawn=True)
        for seed in [*seeds[:30], 80, 88]
    ]
    run(target.worker, *(replace(each, owner="eve") for each in jobs[:8]))
    found = run(target.worker, *(replace(each, owner="eve") for each in jobs))
    assert {job_id for job_id, each in found.items() if each.guesses is not None} == {"1", "80", "88"}
    asked_for = run(target.worker, *(replace(each, owner="eve", seed_is_drawn=False) for each in jobs))
    assert all(each.guesses is not None for each in asked_for.values())


def test_more_drafts_than_the_device_holds_take_turns(target: Target, tmp_path: Path) -> None:
    """One leaves in the middle of a prompt that it was told of: its sample goes on without, and nobody else fails."""
    worker = Worker(replace(target.worker._config, full_slots=2, prefill_chunk_tokens=16))
    for draft_id in "XWY":
        made(worker, draft_id, tmp_path / draft_id)
    long = np.random.default_rng(1).integers(3, 500, 200)
    jobs = [
        job("1", [4, 5, 6], temperature=0.0, max_tokens=12),
        job("2", [5, 6, 7], temperature=0.0, max_tokens=200),
        job("3", [6, 7, 8], temperature=0.0, max_tokens=200),
        job("4", long, temperature=0.0, max_tokens=20),
    ]
    wanted = run(target.worker, *jobs)
    first, second, third, fourth = (replace(each, draft_id=one) for each, one in zip(jobs, "XWYX", strict=True))
    found = dict(worker.sample_slice(SamplingSlice((first, second), (), 0)).finished)
    for joining in ((), (third, fourth), *[()] * 1000):
        found |= (result := worker.sample_slice(SamplingSlice(joining, (), 0))).finished
        if len(found) == len(jobs) and not result.num_active:
            break
    assert_alike(found, wanted)


def test_a_draft_that_nobody_wants_any_more_takes_no_room(target: Target) -> None:
    """Its job goes on without, as does one that no draft can guess: the next one has the device's only place."""
    worker = Worker(replace(target.worker._config, full_slots=1))
    for draft_id in ("random", "of few", "trained"):
        worker.load_draft(draft_id, str(target.directory / draft_id))
    prompt = target.rollouts[0][:5]
    first = job("first", prompt, temperature=0.0, max_tokens=100, draft_id="random")
    second = job("second", prompt, temperature=0.0, max_tokens=100, draft_id="of few", logit_bias={"5": 1.0})
    worker.sample_slice(SamplingSlice((first, second), (), 0))
    (row,) = worker._sampler._of_base._jobs["first"].sequences
    for _ in range(50):
        if row.without_draft:
            break
        worker.sample_slice(SamplingSlice((), (), 0))
    third = job("third", prompt, temperature=0.0, max_tokens=12, draft_id="trained")
    found = finished(worker, third)
    assert row.without_draft and row.stop_reason is None, "it is still under way"
    assert found.guesses is not None


def test_of_a_draft_that_has_diverged_nothing_is_right() -> None:
    target = torch.zeros(3, 8)
    target[:, 0] = 1
    broken = DraftTokens(np.array([5, 6]), torch.full((2, 8), float("nan")))
    found = speculation.verify(broken, target, torch.arange(8), np.uint64(3), 10)
    assert (found.num_accepted, found.token) == (0, 0)


# Samples that are drawn


OF_TINY = {
    "of all tokens": {},
    "of some": {"draft_vocab_size": 5},
    "in blocks": {"algorithm": "dflash", "block_size": 3},
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "of some" else pytest.mark.full) for name in OF_TINY],
)
def drawing(model: Model, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    worker = Worker(WorkerConfig(ServedModel("tiny", str(model.directory)), threads=1, head_chunk_tokens=4096))
    made(worker, "draft of it", tmp_path_factory.mktemp("draft") / "saved", **OF_TINY[request.param])
    return worker


def drawn(worker: Worker, name: str) -> np.ndarray:
    """int64 [NUM_SEQUENCES, LENGTH]"""
    params, num_jobs = CASES[name].params, 8
    jobs = [
        job(f"{seed}", PROMPT, seed=seed, num_samples=NUM_SEQUENCES // num_jobs, max_tokens=LENGTH, **params)
        for seed in range(num_jobs)
    ]
    found = run(worker, *guessed(jobs, "draft of it", 2))
    assert all(response.guesses is not None and response.guesses.accepted for response in found.values())
    return np.concatenate([tokens_of(found[f"{seed}"]) for seed in range(num_jobs)])


@pytest.mark.parametrize(
    "name",
    [
        "all",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("as the model is", "cold", "hot", "top_k", "top_p", "min_p")
        ),
    ],
)
def test_sequences_come_as_often_as_enumeration_says(model: Model, drawing: Worker, name: str) -> None:
    samples = drawn(drawing, name)
    assert p_value(samples, model.exact(CASES[name].params)) > LEAST_P_VALUE
    for wrong in CASES[name].wrong:
        assert p_value(samples, model.exact(wrong)) < LEAST_P_VALUE / 100


@pytest.mark.parametrize("fault", ["all are right", pytest.param("nothing is left out", marks=pytest.mark.full)])
def test_a_wrong_rule_is_told_apart(model: Model, drawing: Worker, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(guesses: DraftTokens, target: torch.Tensor, vocabulary: torch.Tensor, *rest: Any) -> VerifyResult:
        right = verify(guesses, target, vocabulary, *rest)
        if fault == "all are right":
            return verify(guesses, target.new_ones(target.shape), vocabulary, *rest)
        without = DraftTokens(guesses.tokens[: right.num_accepted], guesses.probabilities)
        return verify(without, target[: right.num_accepted + 1], vocabulary, *rest)

    verify = speculation.verify
    monkeypatch.setattr(native, "verify", wrong)
    assert p_value(drawn(drawing, "as the model is"), model.exact({})) < LEAST_P_VALUE / 100
