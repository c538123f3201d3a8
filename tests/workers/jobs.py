"""Sampling jobs for tests, and a sampler that runs them to their end in slices of one iteration."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from trainhouse.schemas.sampling import SamplingParams
from trainhouse.workers.protocol.verbs import SampleJob, Slice, SliceResult

MOST_SLICES = 20_000


def job(job_id: str, prompt: Sequence[int] | np.ndarray, adapter_id: str | None = None, **options: Any) -> SampleJob:
    """Nothing stops it but `max_tokens` unless `stop_token_ids` are given."""
    fields = SamplingParams.model_fields.keys()
    params = {"seed": 1, "max_tokens": 12} | {name: options.pop(name) for name in fields & options.keys()}
    stops: dict[str, Any] = {"stop_token_ids": (), "stop_strings": ()}
    tokens = np.asarray(prompt, dtype=np.int32)
    return SampleJob(job_id, adapter_id, tokens, SamplingParams.model_validate(params), **(stops | options))


SampleSlice = Callable[[Slice], SliceResult]
"""That of a Worker or of its sampler."""


def slices(sample_slice: SampleSlice, *jobs: SampleJob, budget_milliseconds: float = 0) -> Iterator[SliceResult]:
    """Joins all jobs at once; one slice after the other until nothing is active."""
    yield (result := sample_slice(Slice(jobs, (), budget_milliseconds)))
    for _ in range(MOST_SLICES):
        if not result.num_active:
            return
        yield (result := sample_slice(Slice((), (), budget_milliseconds)))
    raise AssertionError(f"{result.num_active} jobs are still active after {MOST_SLICES} slices")


def answers(sample_slice: SampleSlice, *jobs: SampleJob, budget_milliseconds: float = 1e6) -> dict:
    """Job id -> its answer."""
    results = slices(sample_slice, *jobs, budget_milliseconds=budget_milliseconds)
    return {job_id: answer for result in results for job_id, answer in result.finished.items()}
