"""Collects the samples of a job from the pieces in which vLLM sends them."""

from collections import defaultdict
from typing import Literal

import numpy as np

from ....schemas.sampling import SampledSequence, SampleResponse, TopkLogprobs
from ...protocol.calls import SampledPart, SampleJob
from ...scheduler.cohorts import OnProgress
from .api import SampleRange, VllmChoice, VllmCompletion, VllmUnreachable, is_greedy


class SampleCollector:
    """The samples of a job while they grow."""

    def __init__(self, job: SampleJob, on_progress: OnProgress | None) -> None:
        self._job = job
        self._on_progress = on_progress
        self._pieces: defaultdict[int, list[VllmChoice]] = defaultdict(list)
        self._num_cached: list[int] = []

    def add(self, ask: SampleRange, answer: VllmCompletion) -> None:
        if answer.num_cached is not None:
            self._num_cached.append(answer.num_cached)
        for piece in answer.choices:
            for sample in _samples_of(self._job, ask.first + piece.sample):
                self._pieces[sample].append(piece)
                if self._on_progress is not None and len(piece.tokens):
                    part = SampledPart(sample, piece.tokens, piece.logprobs, piece.top, _stop_reason(piece))
                    self._on_progress((part,))

    def response(self) -> SampleResponse:
        """Returns all samples, which must have ended."""
        sequences = tuple(_sequence(self._pieces[sample]) for sample in range(self._job.num_samples))
        return SampleResponse(sequences, prompt_cache_hit_tokens=min(self._num_cached, default=0))


def _samples_of(job: SampleJob, drawn: int) -> range:
    """Returns the job's samples that equal the drawn one: all of them if the job is greedy."""
    return range(job.num_samples) if is_greedy(job) else range(drawn, drawn + 1)


def _sequence(pieces: list[VllmChoice]) -> SampledSequence:
    reason = _stop_reason(pieces[-1]) if pieces else None
    if reason is None:
        raise VllmUnreachable(f"ended a sample with {pieces[-1].finish_reason if pieces else 'nothing'}", reached=True)
    tops = [piece.top for piece in pieces if piece.top is not None]
    return SampledSequence(
        stop_reason=reason,
        tokens=np.concatenate([piece.tokens for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        topk_logprobs=_joined(tops) if tops else None,
    )


def _stop_reason(piece: VllmChoice) -> Literal["stop", "length"] | None:
    """Returns None while the sample continues, and also if vLLM ended it with an error."""
    return piece.finish_reason if piece.finish_reason in ("stop", "length") else None


def _joined(tops: list[TopkLogprobs]) -> TopkLogprobs:
    return TopkLogprobs(np.concatenate([top.token_ids for top in tops]), np.concatenate([top.logprobs for top in tops]))
