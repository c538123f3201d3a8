"""Tests that cohorts share the cache and nothing else: a slice advances one and changes no sample of another."""

from typing import Any
from unittest import mock

import pytest
from trainhouse.schemas.sampling import SampleResponse
from trainhouse.workers.batch.validated import ModelLimits
from trainhouse.workers.protocol.calls import SampleJob, SamplingSlice
from trainhouse.workers.protocol.worker_config import ServedModel, WorkerConfig
from trainhouse.workers.sampler.multi_model import MultiModelSampler
from trainhouse.workers.sampler.shared_state import SharedState

from ...drawn import assert_same_sample
from ..adapted import SIZES, Adapted
from .test_sampler import BYTES_PER_TOKEN, CONTEXT, VOCAB, adapted, answer, job, new_sampler, prompt, tokens_of

__all__ = ["adapted"]


def make_sampler(adapted: Adapted, **config: Any) -> MultiModelSampler:
    served = WorkerConfig(ServedModel("tiny", str(adapted.directory)), device="cpu", **(SIZES | config))
    return MultiModelSampler(SharedState(adapted.base, adapted.models, ModelLimits(VOCAB, CONTEXT), served))


def jobs_of(cohort: int) -> list[SampleJob]:
    return [
        job(
            f"{cohort}-{number}",
            prompt(20 + number, cohort),
            [None, "one", "other"][number],
            seed=cohort,
            max_tokens=60,
        )
        for number in range(3)
    ]


def finish_in_turns(sampler: Any, cohorts: dict[int, list[SampleJob]]) -> dict[str, SampleResponse]:
    finished: dict[str, Any] = {}
    joining = dict(cohorts)
    while cohorts:
        for cohort in list(cohorts):
            result = sampler.slice(SamplingSlice(tuple(joining.pop(cohort, ())), (), 0, cohort))
            assert {job_id.split("-")[0] for job_id in result.finished} <= {str(cohort)}
            finished |= result.finished
            if not result.num_active:
                del cohorts[cohort]
    return finished


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_bytes", [1 << 30, BYTES_PER_TOKEN * 300])
def test_alternating_cohorts_sample_as_each_job_alone(adapted: Adapted, kv_cache_bytes: int) -> None:
    sampler = make_sampler(adapted, kv_cache_bytes=kv_cache_bytes)
    found = finish_in_turns(sampler, {cohort: jobs_of(cohort) for cohort in (0, 3, 7)})
    for each in (one for cohort in (0, 3, 7) for one in jobs_of(cohort)):
        wanted = answer(new_sampler(adapted), each)
        for one, other in zip(found[each.job_id].sequences, wanted.sequences, strict=True):
            assert_same_sample(one, other, 1e-5)
    assert sampler.held_bytes() == 0 and not sampler._other_cohorts


def test_a_slice_advances_only_its_own_cohort(adapted: Adapted) -> None:
    sampler = make_sampler(adapted)
    streams = [job(f"{cohort}", prompt(20), max_tokens=60, streams=True) for cohort in (0, 1)]
    for cohort in (0, 1):
        assert sampler.slice(SamplingSlice((streams[cohort],), (), 0, cohort)).progress.keys() == {str(cohort)}
    for _ in range(5):
        result = sampler.slice(SamplingSlice((), (), 0, 1))
        assert result.progress.keys() == {"1"} and result.num_active == 1
    (part,) = sampler.slice(SamplingSlice((), (), 0, 0)).progress["0"]
    assert len(part.tokens) == 1, "it made no progress in the other cohort's slices"
    held = sampler.held_bytes()
    sampler.slice(SamplingSlice((job("2", prompt(20), max_tokens=60),), (), 0, 2))
    assert sampler.held_bytes() == held, "only one of the cohorts apart holds cache room: the previous one gave it up"
    assert sampler.slice(SamplingSlice((), ("2",), 0, 2)).num_active == 0 and sampler.held_bytes() < held
    assert len(sampler.slice(SamplingSlice((), (), 0, 1)).progress["1"][0].tokens) == 1 and sampler.held_bytes() == held
    assert sampler.slice(SamplingSlice((), ("1",), 0, 1)).num_active == 0 and not sampler._other_cohorts
    assert sampler.slice(SamplingSlice((), ("0",), 0, 0)).num_active == 0 and sampler.held_bytes() == 0


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_slice_drops_the_jobs_of_all_cohorts(adapted: Adapted, failing: int) -> None:
    """All cohorts share the cache, and the error may have left it half resized."""
    sampler = make_sampler(adapted)
    for cohort in (0, 1):
        sampler.slice(SamplingSlice(tuple(jobs_of(cohort)), (), 0, cohort))
    with mock.patch.object(adapted.base, "hidden_states", side_effect=KeyError("unforeseen")), pytest.raises(KeyError):
        sampler.slice(SamplingSlice((), (), 0, failing))
    assert sampler.held_bytes() == 0
    for cohort in (0, 1):
        result = sampler.slice(SamplingSlice((), (), 0, cohort))
        assert (result.num_active, result.finished) == (0, {})
    found = finish_in_turns(sampler, {0: jobs_of(0)})
    assert all(tokens_of(found[each.job_id]) == tokens_of(answer(new_sampler(adapted), each)) for each in jobs_of(0))
