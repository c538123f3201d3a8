"""Builds sampling jobs for tests and runs them to their end, slice by slice."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.workers.protocol.calls import SampleJob, SamplingSlice, SliceResult

MAX_SLICES = 20_000


def job(job_id: str, prompt: Sequence[int] | np.ndarray, adapter_id: str | None = None, **options: Any) -> SampleJob:
    """Returns a job that only `max_tokens` ends unless `stop_token_ids` are given."""
    fields = SamplingParams.model_fields.keys()
    params = {"seed": 1, "max_tokens": 12} | {name: options.pop(name) for name in fields & options.keys()}
    stops: dict[str, Any] = {"stop_token_ids": (), "stop_strings": ()}
    tokens = np.asarray(prompt, dtype=np.int32)
    return SampleJob(job_id, adapter_id, tokens, SamplingParams.model_validate(params), **(stops | options))


SampleSlice = Callable[[SamplingSlice], SliceResult]
"""The `sample_slice` of a Worker or of its sampler."""


def slices(sample_slice: SampleSlice, *jobs: SampleJob, budget_milliseconds: float = 0) -> Iterator[SliceResult]:
    """Yields the results of slices until no job is active; all jobs join the first slice."""
    yield (result := sample_slice(SamplingSlice(jobs, (), budget_milliseconds)))
    for _ in range(MAX_SLICES):
        if not result.num_active:
            return
        yield (result := sample_slice(SamplingSlice((), (), budget_milliseconds)))
    raise AssertionError(f"{result.num_active} jobs are still active after {MAX_SLICES} slices")


def answers(sample_slice: SampleSlice, *jobs: SampleJob, budget_milliseconds: float = 1e6) -> dict:
    """Returns each job's answer by its id."""
    results = slices(sample_slice, *jobs, budget_milliseconds=budget_milliseconds)
    return {job_id: answer for result in results for job_id, answer in result.finished.items()}
