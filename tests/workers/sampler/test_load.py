"""Tests the sampler under load: 500 requests share a cache that holds 30, and all finish in order of arrival.

Slices are of one iteration, in which every sample that holds a place in the cache gets a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.batch.validated import ModelLimits
from trainhouse.workers.protocol.calls import SampleJob, SamplingSlice, SliceResult
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.sampler.engine import SamplingEngine
from trainhouse.workers.sampler.shared_state import SharedState

from ...drawn import assert_same_sample
from ..adapted import SIZES, Adapted
from ..jobs import MAX_SLICES, answers, job, slices

VOCAB, CONTEXT = 512, 1024
# One token's bytes in the tiny models: 2 layers, 2 key/value heads of 16 float32 numbers, keys and values.
pytestmark = pytest.mark.slow

BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4

NUM_REQUESTS, NUM_THAT_FIT = 500, 30
NUM_GROWING, JOIN_AT_A_TIME = 15, 100

# Allowed slices, relative to a cache that is always full: blocks are not, and prompts take time too.
SLACK = 3.0
# The oldest request may miss tokens in this many slices after its first one, while others' prompts run.
MAX_SILENT_SLICES = 2


@pytest.fixture(scope="module")
def adapted(tiny_models: dict[str, Path]) -> Adapted:
    adapted = Adapted(tiny_models["qwen3"])
    adapted.create("one")
    adapted.create("other", rank=8, train_unembed=False)
    return adapted


def new_sampler(adapted: Adapted, kv_cache_bytes: int) -> SamplingEngine:
    served = ServedModel("tiny", str(adapted.directory))
    config = WorkerConfig(served, device="cpu", kv_cache_bytes=kv_cache_bytes, **SIZES)
    return SamplingEngine(SharedState(adapted.base, adapted.models, ModelLimits(VOCAB, CONTEXT), config))


def ragged_jobs() -> list[SampleJob]:
    """Returns jobs with prompts of 4 to 120 tokens and 2 to 60 new ones, spaced logarithmically; some have two samples.

    The first ones all grow from short to long, so that some of them are preempted.
    """
    random = np.random.default_rng(3)
    prompts = random.permutation(np.geomspace(4, 120, NUM_REQUESTS).astype(int))
    lengths = random.permutation(np.geomspace(2, 60, NUM_REQUESTS).astype(int))
    prompts[:NUM_GROWING], lengths[:NUM_GROWING] = 10, 150
    return [
        job(
            f"job{i}",
            random.integers(3, VOCAB, prompts[i]),
            [None, "one", "other"][i % 3],
            seed=i,
            max_tokens=int(lengths[i]),
            num_samples=1 + (i % 5 == 0),
            streams=True,
        )
        for i in range(NUM_REQUESTS)
    ]


def max_tokens(job: SampleJob) -> int:
    assert job.params.max_tokens
    return job.params.max_tokens


def num_tokens(job: SampleJob) -> int:
    return len(job.prompt) + max_tokens(job)


def budget_of(jobs: Sequence[SampleJob]) -> int:
    """Returns the bytes of NUM_THAT_FIT average samples."""
    samples = [num_tokens(job) for job in jobs for _ in range(job.num_samples)]
    return round(NUM_THAT_FIT * float(np.mean(samples))) * BYTES_PER_TOKEN


def token_slices(job: SampleJob) -> int:
    """Returns the job's cached tokens, summed over all its slices."""
    return job.num_samples * sum(range(len(job.prompt), num_tokens(job)))


@dataclass
class Trace:
    """Records slices: those with tokens of each job (its last one included), answers and cache sizes."""

    progress_slices: dict[str, list[int]] = field(default_factory=dict)
    responses: dict[str, SampleResponse] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    cache_bytes: list[int] = field(default_factory=list)
    num_active: list[int] = field(default_factory=list)

    def note(self, work: SamplingSlice, result: SliceResult, cache_bytes: int) -> None:
        self.cancelled |= set(work.cancel)
        for name in (*result.progress, *result.finished):
            self.progress_slices.setdefault(name, []).append(len(self.cache_bytes))
        self.responses |= result.finished
        self.cache_bytes.append(cache_bytes)
        self.num_active.append(result.num_active)

    def longest_silence(self, job_id: str, start: int = 0) -> int:
        """Returns the largest number of slices between two with tokens of the job, from `start` on."""
        numbers = [start, *(number for number in self.progress_slices[job_id] if number > start)]
        return int(max(np.diff(numbers), default=1)) - 1


def run(sampler: SamplingEngine, jobs: Sequence[SampleJob], cancel_at: Mapping[str, int]) -> Trace:
    """Runs all jobs, which join in the first slices; those in `cancel_at` are cancelled at that slice unless done."""
    trace, waiting = Trace(), list(jobs)
    for number in range(MAX_SLICES):
        join, waiting = waiting[:JOIN_AT_A_TIME], waiting[JOIN_AT_A_TIME:]
        cancel = [name for name, at in cancel_at.items() if at == number and name not in trace.responses]
        work = SamplingSlice(tuple(join), tuple(cancel), 0)
        trace.note(work, sampler.slice(work), sampler.cache_bytes())
        if not waiting and not trace.num_active[-1]:
            return trace
    raise AssertionError(f"{trace.num_active[-1]} jobs are still active after {MAX_SLICES} slices")


JOBS = ragged_jobs()
BUDGET = budget_of(JOBS)


@pytest.fixture(scope="module")
def sampler(adapted: Adapted) -> SamplingEngine:
    return new_sampler(adapted, BUDGET)


@pytest.fixture(scope="module")
def trace(sampler: SamplingEngine) -> Trace:
    """Cancels every eighth request at a random time: some are waiting then, some are running, some are done."""
    random = np.random.default_rng(4)
    times = random.integers(len(JOBS) // JOIN_AT_A_TIME, int(ideal_slices(JOBS)), len(JOBS))
    return run(sampler, JOBS, {JOBS[i].job_id: int(times[i]) for i in range(0, len(JOBS), 8)})


def ideal_slices(jobs: Sequence[SampleJob]) -> float:
    """Returns the slices that these jobs would take if the cache were always full."""
    return sum(map(token_slices, jobs)) / (BUDGET / BYTES_PER_TOKEN)


def test_requests_that_are_not_cancelled_get_all_their_tokens(trace: Trace) -> None:
    assert max(trace.num_active) > 0.95 * NUM_REQUESTS and len(trace.cancelled) > 20
    assert trace.responses.keys() == {each.job_id for each in JOBS} - trace.cancelled
    for each in JOBS:
        if each.job_id in trace.responses:
            lengths = [len(sequence.tokens) for sequence in trace.responses[each.job_id].sequences]
            assert lengths == [max_tokens(each)] * each.num_samples


def test_the_cache_stays_within_its_budget(trace: Trace) -> None:
    assert max(trace.cache_bytes) <= BUDGET


def test_the_cache_uses_its_budget_when_demand_exceeds_it(adapted: Adapted, trace: Trace) -> None:
    assert max(trace.cache_bytes) > BUDGET / 2
    unbounded = new_sampler(adapted, 1 << 30)
    unbounded.slice(SamplingSlice(tuple(JOBS), (), 0))
    assert unbounded.cache_bytes() > BUDGET


def test_no_memory_is_held_after_the_load(sampler: SamplingEngine, trace: Trace) -> None:
    assert trace.num_active[-1] == 0 and sampler.held_bytes() == 0
    sampler.slice(SamplingSlice((JOBS[0],), (), 0))
    assert sampler.held_bytes() > 0
    assert sampler.slice(SamplingSlice((), (JOBS[0].job_id,), 0)).num_active == 0 and sampler.held_bytes() == 0


@pytest.mark.usefixtures("trace")
def test_as_many_requests_fit_after_the_load_as_before(adapted: Adapted, sampler: SamplingEngine) -> None:
    """Takes no more slices than a new sampler does."""
    some = JOBS[-60:]
    assert len(list(slices(sampler.slice, *some))) <= len(list(slices(new_sampler(adapted, BUDGET).slice, *some)))


def test_cancelling_all_requests_frees_everything_immediately(adapted: Adapted) -> None:
    sampler = new_sampler(adapted, BUDGET)
    sampler.slice(SamplingSlice(tuple(JOBS), (), 0))
    for _ in range(5):
        sampler.slice(SamplingSlice((), (), 0))
    assert sampler.held_bytes() > 0
    result = sampler.slice(SamplingSlice((), tuple(each.job_id for each in JOBS), 0))
    assert (result.num_active, result.finished, sampler.held_bytes()) == (0, {}, 0)


def test_preempted_requests_sample_the_same_as_alone(adapted: Adapted, trace: Trace) -> None:
    """Includes the growing requests, some of which were preempted for a while."""
    some = [each for each in JOBS if each.job_id in trace.responses][: 3 * NUM_GROWING]
    assert max(trace.longest_silence(each.job_id) for each in some) > 10
    alone = answers(new_sampler(adapted, 1 << 30).slice, *some)
    for each in some:
        for one, other in zip(alone[each.job_id].sequences, trace.responses[each.job_id].sequences, strict=True):
            assert_same_sample(one, other)


@pytest.mark.parametrize("num_others", [0, 10])
def test_an_accepted_request_can_grow_to_the_whole_budget(adapted: Adapted, num_others: int) -> None:
    sampler = new_sampler(adapted, CONTEXT * BYTES_PER_TOKEN)
    long = job("long", range(3, 23), max_tokens=CONTEXT - 20)
    others = [job(f"other{i}", range(3 + i, 60), max_tokens=20) for i in range(num_others)]
    response = answers(sampler.slice, *others[::2], long, *others[1::2])["long"]
    assert isinstance(response, SampleResponse), response
    assert len(response.sequences[0].tokens) == CONTEXT - 20


# --- order ---


def first_tokens(trace: Trace) -> list[int | None]:
    """Returns the slices of the first tokens in order of arrival; None if a request was cancelled before."""
    return [trace.progress_slices[each.job_id][0] if each.job_id in trace.progress_slices else None for each in JOBS]


def test_requests_begin_in_order_of_arrival(trace: Trace) -> None:
    begun = [number for number in first_tokens(trace) if number is not None]
    assert begun == sorted(begun)
    assert len(set(begun)) > 50


def latest_first_token(position: int) -> float:
    """Returns the slice by which the request at this position must have a token: only earlier ones may delay it."""
    longest = max(num_tokens(each) for each in JOBS)
    return SLACK * ideal_slices(JOBS[:position]) + longest + position / JOIN_AT_A_TIME


def num_late(slices_of_first_tokens: Sequence[int | None]) -> int:
    return sum(
        number is not None and number > latest_first_token(position)
        for position, number in enumerate(slices_of_first_tokens)
    )


def test_a_request_waits_only_for_earlier_requests(trace: Trace) -> None:
    found = first_tokens(trace)
    assert num_late(found) == 0
    assert num_late(found[::-1]) > 50, "serving the latest request first would be noticed"
    one_by_one = np.cumsum([max_tokens(each) for each in JOBS]).tolist()
    assert num_late(one_by_one) > 100, "serving one request after another would be noticed"


def test_the_oldest_request_gets_tokens_without_pauses(trace: Trace) -> None:
    """Checks each request from the moment when all earlier ones have ended and it has begun."""
    all_before_ended = 0
    for each in JOBS:
        if each.job_id in trace.responses:
            start = max(all_before_ended, trace.progress_slices[each.job_id][0])
            assert trace.longest_silence(each.job_id, start) <= MAX_SILENT_SLICES
            all_before_ended = max(all_before_ended, trace.progress_slices[each.job_id][-1])
