"""Vllm: sampling by a vLLM server, one of ours or one that somebody runs, with the adapters that we train."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.errors import OperationError
from ...schemas.sampling import SampledSequence, SampleResponse, TopkLogprobs
from ..group import Group, OnProgress
from ..verbs import SampledPart, SampleJob
from ..work import Verb
from .underway import Told, Underway
from .vllm_adapters import VllmAdapters, link_files
from .vllm_api import (
    SAID_PARAMS,
    Ask,
    Piece,
    UnknownAdapter,
    VllmApi,
    VllmGone,
    VllmModel,
    is_greedy,
    prompt_logprobs,
    topk_prompt_logprobs,
)
from .vllm_process import VllmProcess

_MOST_ATTEMPTS = 3
"""A request over which vLLM ends, or breaks off, this often is not sent again."""

_MOST_SAMPLES = 64
"""Of one request to vLLM, whose --max-num-seqs bounds them."""

_HIGHEST_TEMPERATURE = 2.0

_PATIENCE_SECONDS = 120.0
_LONGEST_PAUSE_SECONDS = 8.0


class VllmAt:
    """A vLLM server that somebody else runs. It may come and go: requests wait a while for it."""

    num_starts = 0
    is_ready = True
    pids: Sequence[int] = ()

    def __init__(self, url: str, api_key: str | None) -> None:
        self.name = f"the vLLM at {url}"
        self.url = url.rstrip("/")
        self.api_key = api_key

    async def start(self, on_progress: Callable[[str], None]) -> None:
        on_progress(f"sampling by {self.name}")

    async def close(self) -> None:
        pass

    async def ready(self) -> None:
        pass


class Vllm:
    """A seed gives the same samples again; they are not those of the native engine, which draws otherwise.

    A request keeps the weights with which it began. While vLLM is away requests wait: for one of ours until it is back,
    for one at a URL two minutes.
    """

    def __init__(self, training: Group, server: VllmProcess | VllmAt, directory: Path | None) -> None:
        self._training = training
        self._server = server
        self._api = VllmApi(server)
        self._adapters = VllmAdapters(self._api, directory and directory / "adapters")
        self._underway = Underway()
        self._model: VllmModel | None = None

    async def start(self, on_progress: Callable[[str], None]) -> None:
        await self._server.start(on_progress)

    async def close(self) -> None:
        self._underway.close()
        await self._adapters.close()
        await self._api.close()
        await self._server.close()

    def status(self) -> str | None:
        if not self._server.is_ready:
            return f"{self._server.name} is starting again"
        if not len(self._underway):
            return None
        return f"{len(self._underway)} sampling requests wait or run on {self._server.name}"

    def pids(self) -> list[int]:
        return list(self._server.pids)

    async def copy_adapter(self, run_id: str, tenant_id: str, adapter_id: str) -> None:
        async def save(directory: Path) -> None:
            await self._training.submit(run_id, tenant_id, Verb("save_run", (run_id, str(directory), False)))

        await self._adapters.put(adapter_id, save)

    async def load_adapter(self, adapter_id: str, directory: Path) -> None:
        await self._adapters.put(adapter_id, partial(link_files, directory))

    async def drop_adapter(self, adapter_id: str) -> None:
        self._adapters.drop(adapter_id)

    async def sample(self, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        _check(job)
        return await self._underway.run(job.job_id, self._sample(job, Told(on_progress)))

    def cancel(self, job_id: str) -> None:
        self._underway.cancel(job_id)

    async def memory(self) -> dict[str, dict[str, int]]:
        return {}

    async def _sample(self, job: SampleJob, told: Told) -> SampleResponse:
        patience = _Patience(self._server)
        while True:
            await self._server.ready()
            try:
                return await self._attempt(job, told.from_the_start())
            except UnknownAdapter as error:
                self._forget(job)
                await patience.wait(VllmGone(str(error), reached=True), job)
            except VllmGone as error:
                self._model = None
                await patience.wait(error, job)

    async def _attempt(self, job: SampleJob, on_progress: OnProgress | None) -> SampleResponse:
        model = self._model = self._model or await self._api.model(self._training.name)
        max_tokens = _max_tokens(job, model)
        samples = Samples(job, on_progress)
        async with self._weights(job, model) as name:
            await _all([self._draw(ask, job, name, max_tokens, samples) for ask in asks_of(job)])
        return samples.response()

    @asynccontextmanager
    async def _weights(self, job: SampleJob, model: VllmModel) -> AsyncIterator[str]:
        """What vLLM calls them."""
        if job.adapter_id is None:
            yield model.name
            return
        async with self._adapters.in_use(job.adapter_id, self._server.num_starts) as name:
            yield name

    async def _draw(self, ask: Ask, job: SampleJob, name: str, max_tokens: int, samples: "Samples") -> None:
        if not job.streams or ask.scores_prompt:
            samples.grow(ask, await self._api.complete(job, ask, name, max_tokens))
            return
        async with aclosing(self._api.stream(job, ask, name, max_tokens)) as events:
            async for pieces in events:
                samples.grow(ask, pieces)

    def _forget(self, job: SampleJob) -> None:
        self._model = None
        if job.adapter_id is not None:
            self._adapters.forget(job.adapter_id)


class _Patience:
    """How long a request waits for vLLM, and how often it is sent again."""

    def __init__(self, server: VllmProcess | VllmAt) -> None:
        self._server = server
        self._num_attempts = 0
        self._pause = 0.25
        self._gone_since: float | None = None

    async def wait(self, gone: VllmGone, job: SampleJob) -> None:
        """Raises OperationError when it is enough."""
        self._num_attempts += gone.reached
        if self._num_attempts == _MOST_ATTEMPTS:
            raise OperationError(
                f"sampling request {job.job_id} failed {_MOST_ATTEMPTS} times: {self._server.name} {gone}; see its log",
                "server",
            )
        if gone.reached or self._gone_since is None:
            self._gone_since = time.monotonic()
        if isinstance(self._server, VllmAt) and time.monotonic() - self._gone_since > _PATIENCE_SECONDS:
            raise OperationError(
                f"{self._server.name} does not answer since {_PATIENCE_SECONDS:.0f} seconds ({gone}): start it, or"
                " start this server with --sampler native",
                "server",
            )
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)


class Samples:
    """The samples of a job as they come, in pieces."""

    def __init__(self, job: SampleJob, on_progress: OnProgress | None) -> None:
        self._job = job
        self._on_progress = on_progress
        self._pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        self._prompt: list[dict[str, Any] | None] | None = None

    def grow(self, ask: Ask, pieces: list[Piece]) -> None:
        if ask.scores_prompt:
            self._prompt = pieces[0].prompt_logprobs
        if not ask.keeps_samples:
            return
        for piece in pieces:
            for sample in _samples_of(self._job, ask.first + piece.sample):
                self._pieces[sample].append(piece)
                if self._on_progress is not None and len(piece.tokens):
                    self._on_progress((SampledPart(sample, piece.tokens, piece.logprobs, piece.top),))

    def response(self) -> SampleResponse:
        """Once all of them have ended."""
        job, found = self._job, self._prompt
        return SampleResponse(
            sequences=tuple(_sequence(self._pieces[sample]) for sample in range(job.num_samples)),
            prompt_logprobs=prompt_logprobs(job, found) if found and job.prompt_logprobs else None,
            topk_prompt_logprobs=topk_prompt_logprobs(job, found) if found and job.topk_prompt_logprobs else None,
        )


def asks_of(job: SampleJob) -> list[Ask]:
    """Greedy samples are all the same, and vLLM refuses more than one. What is streamed has no scores of the prompt."""
    scores_prompt = job.prompt_logprobs or job.topk_prompt_logprobs > 0
    if scores_prompt and job.streams:
        return [Ask(0, 1, scores_prompt=True, keeps_samples=False), *_draws(job, 0)]
    if scores_prompt:
        return [Ask(0, 1, scores_prompt=True), *_draws(job, 1)]
    return _draws(job, 0)


def _draws(job: SampleJob, first: int) -> list[Ask]:
    """Of the samples from `first` on."""
    num_samples = 1 if is_greedy(job) else job.num_samples
    starts = range(first, num_samples, _MOST_SAMPLES)
    return [Ask(start, min(_MOST_SAMPLES, num_samples - start)) for start in starts]


def _samples_of(job: SampleJob, drawn: int) -> range:
    """The job's samples that the drawn one is."""
    return range(job.num_samples) if is_greedy(job) else range(drawn, drawn + 1)


def _sequence(pieces: list[Piece]) -> SampledSequence:
    reason = pieces[-1].finish_reason if pieces else None
    if reason != "stop" and reason != "length":
        raise VllmGone(f"ended a sample with {reason}", reached=True)
    tops = [piece.top for piece in pieces if piece.top is not None]
    return SampledSequence(
        stop_reason=reason,
        tokens=np.concatenate([piece.tokens for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        topk_logprobs=_joined(tops) if tops else None,
    )


def _joined(tops: list[TopkLogprobs]) -> TopkLogprobs:
    return TopkLogprobs(np.concatenate([top.token_ids for top in tops]), np.concatenate([top.logprobs for top in tops]))


async def _all(works: list[Coroutine[None, None, None]]) -> None:
    """When one fails, none of the others goes on."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _max_tokens(job: SampleJob, model: VllmModel) -> int:
    room = model.max_length - len(job.prompt)
    if room < 1:
        raise OperationError(
            f"the prompt has {len(job.prompt)} tokens, and vLLM's context of {model.max_length} holds one less at the"
            " most: shorten it"
        )
    return min(job.params.max_tokens or room, room)


def _unavailable(job: SampleJob) -> list[str]:
    """What the job asks and vLLM, or what we say to it, has not."""
    asked = [("target_prompt_logprobs", job.target_prompt_tokens is not None)]
    asked += [("prompt_alt_tokens_k", job.prompt_alt_tokens_k > 0)]
    fields = type(job.params).model_fields.items()
    asked += [(name, getattr(job.params, name) != field.default) for name, field in fields if name not in SAID_PARAMS]
    return [name for name, is_asked in asked if is_asked]


def _check(job: SampleJob) -> None:
    """Raises OperationError on what vLLM has not, and on what would confuse it."""
    for name in _unavailable(job):
        raise OperationError(
            f"{name} is not to be had from vLLM: leave it out, or start the server with --sampler native"
        )
    if job.params.temperature > _HIGHEST_TEMPERATURE:
        raise OperationError(
            f"temperature {job.params.temperature:g} exceeds vLLM's {_HIGHEST_TEMPERATURE:g}: lower it, or start the"
            " server with --sampler native"
        )
    if not len(job.prompt):
        raise OperationError("the prompt is empty: give at least one token, such as the model's BOS token")
    if "" in job.stop_strings:
        raise OperationError("a stop string is empty, which would stop every sample at once: leave it out")
    last_n = job.prompt_logprobs_last_n
    if last_n is not None and not (job.prompt_logprobs and 1 <= last_n < len(job.prompt)):
        raise OperationError(
            f"prompt_logprobs_last_n {last_n} goes with prompt_logprobs and lies between 1 and len(prompt) - 1 ="
            f" {len(job.prompt) - 1}"
        )
