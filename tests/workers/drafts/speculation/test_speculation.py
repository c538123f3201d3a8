"""Tests that samples with a draft model are the same, or have the same distribution, as without one."""

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
from trainhouse.workers.drafts.speculation.draft_proposer import DraftProposer
from trainhouse.workers.protocol.calls import OperationPart, OptimizerStep, RunSpec, SampleJob, SamplingSlice
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.sampler import runner
from trainhouse.workers.sampler.cache.cache import KVCache
from trainhouse.workers.sampler.requests.token_choice import DraftTokens, VerifyResult, verify
from trainhouse.workers.sampler.scheduler import SequenceScheduler
from trainhouse.workers.worker.worker import Worker

from ....drawn import as_drawn
from ....tiny import tiny_model
from ...jobs import answers, job, slices
from ...model_state import add_noise
from ...sampler.test_distribution import CASES, LEAST_P_VALUE, LENGTH, NUM_SEQUENCES, PROMPT, Model, p_value, tokens_of
from ...sampler.test_distribution import model as model

pytestmark = pytest.mark.slow

NUM_PROMPTS = 200
ADAM = AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)
DRAFTS = ("random", "trained", "blocks")

# Loss settings of a pass over a draft's data.
LOSSES: Mapping[str, Mapping[str, float | str]] = {"eagle3": {"ttt_length": 4}, "dflash": {"seed": 0}}
BLOCKS = {"algorithm": "dflash", "num_layers": 2, "block_size": 6}


@dataclass(frozen=True)
class Target:
    """A worker with drafts of its base model.

    rollouts: the model's greedy samples, int64 [n, tokens].
    directory: holds a folder for each draft id.
    """

    worker: Worker
    config: WorkerConfig
    rollouts: np.ndarray
    directory: Path


def make_draft(
    worker: Worker, draft_id: str, directory: Path, rollouts: np.ndarray | None = None, **fields: Any
) -> None:
    """Loads a new draft, trained on the rollouts if there are any."""
    config = DraftConfig.model_validate({"algorithm": "eagle3", "seed": 3} | fields)
    worker.create_run(RunSpec("draft", config, "draft"))
    if "draft_vocab_size" in fields:
        worker.set_vocabulary("draft", np.arange(1, 1 + fields["draft_vocab_size"], dtype=np.int64))
    for number in range(0 if rollouts is None else 60):
        train_pass(worker, number, rollouts, algorithm=config.algorithm)
        worker.apply_steps((OptimizerStep("draft", ADAM, "mean"),))
    directory.mkdir()
    worker.save_run("draft", str(directory), optimizer=False)
    worker.drop_run("draft")
    worker.load_draft(draft_id, str(directory))


def train_pass(worker: Worker, number: int, rollouts: np.ndarray, algorithm: str = "eagle3") -> ForwardBackwardOutput:
    data = tuple(Datum(row.astype(np.int32), {}) for row in rollouts)
    return forward_backward(worker, number, ForwardBackwardRequest("draft", 1, data, algorithm, LOSSES[algorithm]))


def forward_backward(worker: Worker, number: int, request: ForwardBackwardRequest) -> ForwardBackwardOutput:
    (answer,) = worker.run_pass((OperationPart(number, request),))
    assert isinstance(answer, ForwardBackwardOutput), answer
    return answer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Returns a model whose weights are so large that the likeliest token leads by far."""
    directory = tmp_path_factory.mktemp("target")
    tiny_model("llama", directory / "model", num_hidden_layers=4, initializer_range=0.2)
    config = WorkerConfig(ServedModel("tiny", str(directory / "model")), threads=1, full_slots=5)
    worker = Worker(config)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 512, 4) for _ in range(12)]
    found = run(worker, *(job(str(i), prompt, temperature=0.0, max_tokens=40) for i, prompt in enumerate(prompts)))
    rollouts = np.stack([np.concatenate([prompt, tokens(found[str(i)])]) for i, prompt in enumerate(prompts)])
    make_draft(worker, "random", directory / "random")
    make_draft(worker, "trained", directory / "trained", rollouts)
    make_draft(worker, "small vocabulary", directory / "small vocabulary", draft_vocab_size=300)
    make_draft(worker, "blocks", directory / "blocks", rollouts, **BLOCKS)
    make_draft(worker, "random blocks", directory / "random blocks", **BLOCKS)
    return Target(worker, config, rollouts, directory)


def run(worker: Worker, *jobs: SampleJob, **options: Any) -> dict[str, SampleResponse]:
    found = answers(worker.sample_slice, *jobs, **options)
    assert all(isinstance(answer, SampleResponse) for answer in found.values()), found
    return found


def finish_one(worker: Worker, wanted: SampleJob) -> SampleResponse:
    """Runs slices until this job has finished; others may still be active."""
    found = worker.sample_slice(SamplingSlice((wanted,), (), 0)).finished
    while wanted.job_id not in found:
        found = worker.sample_slice(SamplingSlice((), (), 0)).finished
    answer = found[wanted.job_id]
    assert isinstance(answer, SampleResponse)
    return answer


def tokens(response: SampleResponse, sample: int = 0) -> np.ndarray:
    return response.sequences[sample].tokens


def with_draft(jobs: list[SampleJob], draft_id: str, num: int | None = None) -> list[SampleJob]:
    """Sets the draft and the number of draft tokens; None alternates from one to five."""
    return [replace(each, draft_id=draft_id, num_draft_tokens=num or 1 + i % 5) for i, each in enumerate(jobs)]


def random_jobs(num: int, rollouts: np.ndarray, **options: Any) -> list[SampleJob]:
    """Returns jobs with prompts of many lengths, some of which begin a rollout that drafts were trained on."""
    random = np.random.default_rng(1)
    jobs = []
    for number in range(num):
        prompt = random.integers(3, 512, random.integers(1, 40))
        if number % 4 == 0:
            prompt = rollouts[number % len(rollouts)][: random.integers(4, 20)]
        jobs.append(job(f"{number}", prompt, max_tokens=int(random.integers(1, 16)), seed=number, **options))
    return jobs


def assert_same_samples(
    found: Mapping[str, SampleResponse], wanted: Mapping[str, SampleResponse], max_flips: int = 0
) -> set[str]:
    """Returns the jobs in which a draw went to another token: at a tie, and in at most max_flips elsewhere.

    After a rejected draft token, what is drawn from is a small difference of two probabilities, whose rounding errors
    are large.
    """
    flipped: set[str] = set()
    at_ties: set[str] = set()
    for job_id, response in wanted.items():
        for ours, theirs in zip(found[job_id].sequences, response.sequences, strict=True):
            shared = min(len(ours.tokens), len(theirs.tokens))
            differ = np.flatnonzero(ours.tokens[:shared] != theirs.tokens[:shared])
            if len(differ):
                shared = differ[0]
                (at_ties if as_drawn(ours) == as_drawn(theirs) else flipped).add(job_id)
            else:
                assert len(ours.tokens) == len(theirs.tokens) and ours.stop_reason == theirs.stop_reason
            np.testing.assert_allclose(ours.logprobs[:shared], theirs.logprobs[:shared], atol=1e-4)
    assert len(flipped) <= max_flips, flipped
    return flipped | at_ties


@pytest.mark.parametrize("draft_id", [*DRAFTS, "small vocabulary", "random blocks"])
def test_greedy_tokens_are_the_same_with_a_draft(target: Target, draft_id: str) -> None:
    jobs = random_jobs(NUM_PROMPTS, target.rollouts, temperature=0.0)
    wanted = run(target.worker, *jobs)
    found = run(target.worker, *with_draft(jobs, draft_id))
    assert_same_samples(found, wanted)
    assert all(response.guesses is None for response in wanted.values())
    counts = [each.guesses for each in found.values() if each.guesses is not None]
    assert len(counts) > NUM_PROMPTS / 2
    assert all(sum(each.by_accepted) == each.passes and each.accepted <= each.drafted for each in counts)
    if draft_id in ("trained", "blocks"):
        assert sum(each.accepted for each in counts) > 50


@pytest.mark.parametrize("draft_id", DRAFTS)
def test_samples_depend_only_on_their_own_seed(target: Target, draft_id: str) -> None:
    """Batches, drafting of other samples and the number of slices make no difference."""
    jobs = with_draft(random_jobs(24, target.rollouts, temperature=0.8, num_samples=2), draft_id, 3)
    together = run(
        target.worker, *jobs, *(replace(each, job_id=f"plain {each.job_id}", draft_id=None) for each in jobs)
    )
    alone = {each.job_id: run(target.worker, each, budget_milliseconds=0)[each.job_id] for each in jobs}
    assert_same_samples(together, alone, max_flips=2)
    plain = {each.job_id: together[f"plain {each.job_id}"] for each in jobs}
    assert any(
        len(tokens(each)) != len(tokens(alone[i])) or (tokens(each) != tokens(alone[i])).any()
        for i, each in plain.items()
    )


def with_mixed_drafts(jobs: list[SampleJob]) -> list[SampleJob]:
    """Alternates between no draft and each of several."""
    ids = None, "trained", "blocks", "random", "random blocks"
    return [replace(each, draft_id=ids[number % len(ids)]) for number, each in enumerate(with_draft(jobs, "any"))]


def test_samples_with_several_drafts_or_none_run_together(target: Target) -> None:
    """Requests several samples of each job."""
    jobs = [replace(each, num_samples=2) for each in random_jobs(60, target.rollouts, temperature=0.0)]
    wanted = run(target.worker, *jobs)
    found = run(target.worker, *with_mixed_drafts(jobs))
    assert_same_samples(found, wanted)
    drafting_ids = {each.draft_id for each in with_mixed_drafts(jobs) if found[each.job_id].guesses is not None}
    assert drafting_ids == {"trained", "blocks", "random", "random blocks"}


SMALL_CACHE = 1 << 19


@pytest.fixture(scope="module")
def small_cache(target: Target) -> Worker:
    """Returns a worker whose cache has no room for all samples."""
    small_cache = Worker(replace(target.config, kv_cache_bytes=SMALL_CACHE))
    for draft_id in ("trained", "blocks", "random", "random blocks"):
        small_cache.load_draft(draft_id, str(target.directory / draft_id))
    return small_cache


@pytest.fixture
def preempted_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the lengths of samples that used a draft and were preempted."""
    found: list[int] = []

    def preempt(self: SequenceScheduler) -> None:
        before = {sequence: sequence.draft_stats.num_passes for sequence in self.admitted()}
        preempt_youngest(self)
        left = before.keys() - self.admitted()
        found.extend(len(sequence.tokens) for sequence in left if before[sequence])

    preempt_youngest = SequenceScheduler._preempt_youngest
    monkeypatch.setattr(SequenceScheduler, "_preempt_youngest", preempt)
    return found


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 0.8])
def test_preempted_samples_draft_again(
    target: Target, small_cache: Worker, temperature: float, preempted_lengths: list[int]
) -> None:
    """The seed gives the same tokens and the same draft tokens as without preemption."""
    options = {"temperature": temperature}
    jobs = with_mixed_drafts([replace(each, num_samples=3) for each in longer_jobs(40, target.rollouts, **options)])
    wanted = run(target.worker, *jobs)
    assert not preempted_lengths
    found = run(small_cache, *jobs, budget_milliseconds=0)
    assert len(preempted_lengths) > 4
    flipped = assert_same_samples(found, wanted, max_flips=2 if temperature else 0)
    same = [each.job_id for each in jobs if each.job_id not in flipped]
    assert [found[job_id].guesses for job_id in same] == [wanted[job_id].guesses for job_id in same]
    assert small_cache._sampler.held_bytes() == 0
    assert not engine_of(small_cache)._proposer._states


def test_draft_caches_are_reported_within_the_budget_and_offloaded(target: Target, small_cache: Worker) -> None:
    jobs = with_mixed_drafts(
        [replace(each, num_samples=2) for each in longer_jobs(20, target.rollouts, temperature=0.0)]
    )
    wanted = run(target.worker, *jobs)
    found: dict[str, Any] = {}
    draft_bytes: list[int] = []
    for number, result in enumerate(slices(small_cache.sample_slice, *jobs)):
        found |= result.finished
        memory = small_cache.memory()
        assert memory["kv_cache_of_drafts"] < memory["kv_cache"] <= SMALL_CACHE
        draft_bytes.append(memory["kv_cache_of_drafts"])
        if number % 5 == 0:
            small_cache.offload()
            keys = [key for cache in draft_caches(small_cache) for key in cache.tensors()]
            assert all(key.untyped_storage().nbytes() == 0 for key in keys), "they are not on the device"
            assert keys or not draft_bytes[-1]
    assert_same_samples(found, wanted)
    prefix_bytes = sum(cache.prefixes.num_bytes for cache in draft_caches(small_cache))
    assert max(draft_bytes) > draft_bytes[-1] == prefix_bytes


def engine_of(worker: Worker) -> Any:
    """Returns the base model's sampling engine."""
    return worker._sampler._of_base


def draft_caches(worker: Worker) -> list[KVCache]:
    return list(engine_of(worker)._proposer._caches._caches.values())


def forget_prefixes(worker: Worker) -> None:
    worker._sampler.forget_all()


def longer_jobs(num: int, rollouts: np.ndarray, **options: Any) -> list[SampleJob]:
    """Returns jobs that outgrow their cache slots."""
    found = []
    for number, each in enumerate(random_jobs(num, rollouts, **options)):
        update = {"max_tokens": 30 + 2 * number, "seed": 100 + number}
        found.append(replace(each, params=each.params.model_copy(update=update)))
    return found


@pytest.mark.parametrize("draft_id", ["trained", "blocks"])
def test_an_adapter_can_use_any_draft(target: Target, draft_id: str) -> None:
    worker = target.worker
    worker.create_run(RunSpec("policy", LoraConfig(rank=4, seed=5)))
    add_noise(worker, "policy", 0.1)
    worker.copy_adapter("policy", "adapter")
    jobs = [replace(each, adapter_id="adapter") for each in random_jobs(20, target.rollouts, temperature=0.0)]
    wanted = run(worker, *jobs)
    base = [replace(each, job_id=f"base {each.job_id}", adapter_id=None) for each in jobs]
    found = run(worker, *with_draft([*jobs, *base], draft_id))
    assert_same_samples(found, wanted)
    assert any((tokens(found[each.job_id]) != tokens(found[f"base {each.job_id}"])).any() for each in jobs)
    worker.drop_run("policy")
    worker.drop_adapter("adapter")


def test_other_options_give_the_same_results_with_a_draft(target: Target) -> None:
    options = {"temperature": 0.0, "topk_sample_logprobs": 3}
    jobs = random_jobs(20, target.rollouts, **options)
    ends = run(target.worker, *jobs)
    stopping = [
        replace(each, stop_token_ids=(int(tokens(ends[each.job_id])[-1]),), prompt_logprobs=True) for each in jobs
    ]
    wanted = run(target.worker, *stopping)
    found = run(target.worker, *with_draft(stopping, "trained"))
    assert_same_samples(found, wanted)
    assert {sequence.stop_reason for response in found.values() for sequence in response.sequences} == {"stop"}
    for job_id, response in wanted.items():
        ours, theirs = (each.sequences[0].topk_logprobs for each in (found[job_id], response))
        assert ours is not None and theirs is not None
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_allclose(found[job_id].prompt_logprobs, response.prompt_logprobs, atol=1e-4)


def test_options_that_change_the_logits_disable_drafting(target: Target) -> None:
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.7},
        {"logit_bias": {"5": 3.0}},
        {"min_tokens": 4},
    ]
    jobs = [job(str(i), [4, 5, 6], temperature=0.0, **each) for i, each in enumerate(options)]
    wanted = run(target.worker, *jobs)
    found = run(target.worker, *with_draft(jobs, "trained"))
    assert_same_samples(found, wanted)
    assert all(response.guesses is None for response in found.values())


def test_all_tokens_of_a_perfect_draft_are_accepted(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches a random draft, whose tokens are rarely accepted, to propose what the model would sample."""
    num = 4
    prompts = [target.rollouts[i][:5] for i in range(4)]
    jobs = with_draft(
        [job(str(i), each, temperature=0.0, max_tokens=21) for i, each in enumerate(prompts)], "random", num
    )
    with_random = [each.guesses for each in run(target.worker, *jobs).values()]
    assert all(each is not None and each.acceptance_length < 1.5 for each in with_random)

    def perfect(self: DraftProposer, sequences: Any, table: Any) -> dict[Any, DraftTokens]:
        found = propose(self, sequences, table)
        for sequence, each in found.items():
            first, num = int(table.length[sequence.line]), len(each.tokens)
            each.tokens[:] = target.rollouts[int(sequence.job.spec.job_id)][first : first + num]
            if each.probabilities is not None:
                each.probabilities.zero_()[np.arange(num), each.tokens] = 1
        return found

    propose = DraftProposer.propose
    monkeypatch.setattr(DraftProposer, "propose", perfect)
    found = run(target.worker, *jobs)
    for job_id, response in found.items():
        np.testing.assert_array_equal(tokens(response), target.rollouts[int(job_id)][5:26])
        assert response.guesses is not None
        assert (response.guesses.passes, response.guesses.acceptance_length) == (4, num + 1)


@pytest.mark.parametrize(("fields", "num"), [({}, 4), (BLOCKS, 5)], ids=["eagle3", "dflash"])
def test_the_acceptance_length_equals_that_of_a_forward(
    target: Target, tmp_path: Path, fields: dict[str, Any], num: int
) -> None:
    """Runs the same texts as far as they were drafted, which starts after the token that the prefill samples."""
    worker, algorithm = target.worker, fields.get("algorithm", "eagle3")
    make_draft(worker, "measured", tmp_path / "measured", target.rollouts, **fields)
    prompts = target.rollouts[:, :4]
    jobs = [job(str(i), each, temperature=0.0, max_tokens=40) for i, each in enumerate(prompts)]
    found = run(worker, *with_draft(jobs, "measured", num))
    data: list[Datum] = []
    passes = accepted = 0
    for i, rollout in enumerate(target.rollouts):
        each = found[str(i)].guesses
        assert each is not None
        num_drafted = each.passes + each.accepted
        weights = np.array([0] * 3 + [1] * (1 + num_drafted), np.float32)
        data.append(Datum(rollout[: 5 + num_drafted].astype(np.int32), {"weights": np.append(weights, 0)}))
        passes, accepted = passes + each.passes, accepted + each.accepted
    worker.create_run(RunSpec("draft", DraftConfig.model_validate({"algorithm": algorithm} | fields), "draft"))
    worker.load_run("draft", str(tmp_path / "measured"), optimizer=False)
    request = ForwardBackwardRequest("draft", 1, tuple(data), algorithm, LOSSES[algorithm], forward_only=True)
    metrics = forward_backward(worker, 999, request).metrics
    worker.drop_run("draft")
    assert accepted > 0.3 * passes
    assert metrics["acceptance_length/greedy:sum"] == passes + accepted
    assert metrics["acceptance_length/greedy/of:sum"] == passes


def test_drafting_stops_when_it_does_not_pay(target: Target) -> None:
    """Each sample decides by its own acceptance after eight passes."""
    prompts = [target.rollouts[i][:5] for i in range(4)]
    jobs = [job(str(i), each, temperature=0.0, max_tokens=35) for i, each in enumerate(prompts)]
    wanted = run(target.worker, *jobs)
    with_random = run(target.worker, *with_draft(jobs, "random", 4))
    assert_same_samples(with_random, wanted)
    assert all(each.guesses is not None and each.guesses.passes == 8 for each in with_random.values())
    with_trained = run(target.worker, *with_draft(jobs, "trained", 1))
    assert any(each.guesses is not None and each.guesses.passes > 8 for each in with_trained.values())


def test_drafting_pays_less_among_many_samples(target: Target) -> None:
    """Applies only to samples whose seed the server drew; those with a requested seed behave as if alone.

    Statistics of a draft carry over to the tenant's later samples.
    """
    prompts = [target.rollouts[i % 12][:5] for i in range(30)]
    jobs = [job(str(i), each, temperature=0.0, max_tokens=35) for i, each in enumerate(prompts)]
    wanted = run(target.worker, *jobs)

    def passes(*some: SampleJob) -> list[int]:
        found = run(target.worker, *some)
        assert_same_samples(found, {job_id: wanted[job_id] for job_id in found})
        return [each.guesses.passes for each in found.values() if each.guesses is not None]

    requested = with_draft(jobs, "trained", 1)
    drawn = [replace(each, seed_is_drawn=True) for each in requested]
    assert max(passes(*drawn)) <= 2
    assert max(passes(*requested)) > 8 and max(passes(replace(drawn[0], tenant_id="alone"))) > 8
    random = [replace(each, seed_is_drawn=True, tenant_id="alice") for each in with_draft(jobs, "random", 2)]
    assert max(passes(*random[:8])) <= 2 and passes(random[8]) == [1]
    assert passes(replace(random[9], tenant_id="bob")) == [8], "other tenants' samples do not count"
    assert passes(*with_draft(jobs, "random", 2)[:8]) == [8] * 8


def test_drafting_that_did_not_pay_is_retried_now_and_then(target: Target) -> None:
    """A few samples still draft, to notice a change; for the others the draft does not even read the prompt."""
    seeds = [seed for seed in range(80) if seed % 8]
    jobs = [
        replace(job(f"{seed}", target.rollouts[0][:5], seed=seed, max_tokens=35), draft_id="random", seed_is_drawn=True)
        for seed in [*seeds[:30], 80, 88]
    ]
    run(target.worker, *(replace(each, tenant_id="eve") for each in jobs[:8]))
    found = run(target.worker, *(replace(each, tenant_id="eve") for each in jobs))
    assert {job_id for job_id, each in found.items() if each.guesses is not None} == {"1", "80", "88"}
    requested = run(target.worker, *(replace(each, tenant_id="eve", seed_is_drawn=False) for each in jobs))
    assert all(each.guesses is not None for each in requested.values())


def test_more_drafts_than_the_device_holds_take_turns(target: Target, tmp_path: Path) -> None:
    """One is evicted in the middle of a prompt: its sample continues without it, and no other fails."""
    worker = Worker(replace(target.config, full_slots=2, prefill_chunk_tokens=16))
    for draft_id in "XWY":
        make_draft(worker, draft_id, tmp_path / draft_id)
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
    assert_same_samples(found, wanted)


def test_an_unused_draft_frees_its_slot(target: Target) -> None:
    """Jobs that stopped drafting, or never can, free the device's only slot for the next draft."""
    worker = Worker(replace(target.config, full_slots=1))
    for draft_id in ("random", "small vocabulary", "trained"):
        worker.load_draft(draft_id, str(target.directory / draft_id))
    prompt = target.rollouts[0][:5]
    first = job("first", prompt, temperature=0.0, max_tokens=100, draft_id="random")
    second = job("second", prompt, temperature=0.0, max_tokens=100, draft_id="small vocabulary", logit_bias={"5": 1.0})
    worker.sample_slice(SamplingSlice((first, second), (), 0))
    (sequence,) = next(iter(engine_of(worker)._jobs)).sequences
    for _ in range(50):
        if sequence.without_draft:
            break
        worker.sample_slice(SamplingSlice((), (), 0))
    third = job("third", prompt, temperature=0.0, max_tokens=12, draft_id="trained")
    found = finish_one(worker, third)
    assert sequence.without_draft and sequence.stop_reason is None, "it is still running"
    assert found.guesses is not None


def test_tokens_of_a_diverged_draft_are_rejected() -> None:
    target = torch.zeros(3, 8)
    target[:, 0] = 1
    broken = DraftTokens(np.array([5, 6]), torch.full((2, 8), float("nan")), torch.arange(8))
    found = verify(broken, target, np.uint64(3), 10)
    assert (found.num_accepted, found.token) == (0, 0)


# --- random samples ---


TINY_DRAFTS = {
    "all tokens": {},
    "some tokens": {"draft_vocab_size": 5},
    "blocks": {"algorithm": "dflash", "block_size": 3},
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "some tokens" else pytest.mark.full) for name in TINY_DRAFTS],
)
def drafting_worker(model: Model, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    worker = Worker(WorkerConfig(ServedModel("tiny", str(model.directory)), threads=1, head_chunk_tokens=4096))
    make_draft(worker, "saved draft", tmp_path_factory.mktemp("draft") / "saved", **TINY_DRAFTS[request.param])
    return worker


def draw(worker: Worker, name: str) -> np.ndarray:
    """Returns int64 [NUM_SEQUENCES, LENGTH]."""
    params, num_jobs = CASES[name].params, 8
    jobs = [
        job(f"{seed}", PROMPT, seed=seed, num_samples=NUM_SEQUENCES // num_jobs, max_tokens=LENGTH, **params)
        for seed in range(num_jobs)
    ]
    found = run(worker, *with_draft(jobs, "saved draft", 2))
    assert all(response.guesses is not None and response.guesses.accepted for response in found.values())
    return np.concatenate([tokens_of(found[f"{seed}"]) for seed in range(num_jobs)])


@pytest.mark.parametrize(
    "name",
    [
        "all",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("unfiltered", "cold", "hot", "top_k", "top_p", "min_p")
        ),
    ],
)
def test_sequences_follow_the_enumerated_distribution(model: Model, drafting_worker: Worker, name: str) -> None:
    samples = draw(drafting_worker, name)
    assert p_value(samples, model.exact(CASES[name].params)) > LEAST_P_VALUE
    for wrong in CASES[name].wrong:
        assert p_value(samples, model.exact(wrong)) < LEAST_P_VALUE / 100


@pytest.mark.parametrize("fault", ["accept all", pytest.param("no residual", marks=pytest.mark.full)])
def test_a_wrong_acceptance_rule_is_detected(
    model: Model, drafting_worker: Worker, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(draft_tokens: DraftTokens, target: torch.Tensor, *rest: Any) -> VerifyResult:
        right = verify(draft_tokens, target, *rest)
        if fault == "accept all":
            return verify(draft_tokens, target.new_ones(target.shape), *rest)
        without = replace(draft_tokens, tokens=draft_tokens.tokens[: right.num_accepted])
        return verify(without, target[: right.num_accepted + 1], *rest)

    monkeypatch.setattr(runner, "verify", wrong)
    assert p_value(draw(drafting_worker, "unfiltered"), model.exact({})) < LEAST_P_VALUE / 100
