"""Vllm: sampling by a vLLM server, one of ours or one that somebody runs, with the adapters that we train."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from ...schemas.errors import OperationError
from ...schemas.models import LoraConfig
from ...schemas.sampling import SampledSequence, SampleResponse, SamplingParams, TopkLogprobs
from ..group import Group, OnProgress
from ..verbs import RunSpec, SampledPart, SampleJob
from ..work import Verb
from .underway import Told, Underway
from .vllm_adapters import Version, VllmAdapters, link_files
from .vllm_api import (
    SAID_PARAMS,
    Ask,
    Piece,
    UnknownModel,
    VllmApi,
    VllmGone,
    VllmModel,
    is_greedy,
)
from .vllm_process import VllmProcess

_MOST_ATTEMPTS = 3
"""A request over which vLLM ends, or breaks off, this often is not sent again."""

_MOST_SAMPLES = 64
"""Of one request to vLLM, whose --max-num-seqs bounds them."""

_HIGHEST_TEMPERATURE = 2.0

_BARE = "bare-base"
"""Its id as an adapter, which no run and no sampler has: theirs are made of ids of sessions."""

_PATIENCE_SECONDS = 120.0
_LONGEST_PAUSE_SECONDS = 8.0

Answer = TypeVar("Answer")


class VllmAt:
    """A vLLM server that somebody else runs. It may come and go: requests wait a while for it."""

    num_starts = 0
    is_ready = True
    is_on_cpu = False
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
        self._adapters = VllmAdapters(self._api, training, directory and directory / "adapters")
        self._underway = Underway()
        self._model: VllmModel | None = None
        self._bare: str | None = None

    async def start(self, on_progress: Callable[[str], None]) -> None:
        await self._server.start(on_progress)
        if self._server.is_on_cpu:
            await self._add_bare_base()

    async def close(self) -> None:
        self._underway.close()
        await self._adapters.close()
        await self._api.close()
        await self._server.close()

    def status(self) -> str | None:
        if not self._server.is_ready:
            return f"{self._server.name} is starting again"
        number = len(self._underway)
        if not number:
            return None
        requests = f"{number} sampling requests wait or run" if number > 1 else "1 sampling request waits or runs"
        return f"{requests} on {self._server.name}"

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
        return await self._underway.run(job.job_id, self._answer(job, Told(on_progress)))

    def cancel(self, job_id: str) -> None:
        self._underway.cancel(job_id)

    async def memory(self) -> dict[str, dict[str, int]]:
        return {}

    async def _answer(self, job: SampleJob, told: Told) -> SampleResponse:
        with self._weights(job) as version:
            if not _wants_scores(job):
                return await self._sample(job, version, told)
            sampled, scored = await _all([self._sample(job, version, told), self._score(job, version)])
            return replace(scored, sequences=sampled.sequences)

    @contextmanager
    def _weights(self, job: SampleJob) -> Iterator[Version | None]:
        """None: the base, under its own name."""
        adapter_id = job.adapter_id or self._bare
        if adapter_id is None:
            yield None
            return
        with self._adapters.in_use(adapter_id) as version:
            yield version

    async def _score(self, job: SampleJob, version: Version | None) -> SampleResponse:
        """What the job asks about its prompt, by the training workers.

        vLLM 0.32 would add the output head's part of an adapter to the wrong rows of a prompt, and ends on a CPU when
        prompts are scored beside other requests.
        """
        adapter_id = None
        if version is not None and job.adapter_id is not None:
            await self._adapters.give_to_training(version)
            adapter_id = version.name
        params = SamplingParams(max_tokens=1, seed=job.params.seed, temperature=job.params.temperature)
        plain = replace(job, num_samples=1, topk_sample_logprobs=0, streams=False, stop_token_ids=(), stop_strings=())
        scoring = replace(plain, job_id=f"{job.job_id}:scores", adapter_id=adapter_id, params=params)
        return await self._training.sample(scoring)

    async def _sample(self, job: SampleJob, version: Version | None, told: Told) -> SampleResponse:
        patience = _Patience(self._server)
        while True:
            await self._server.ready()
            try:
                return await self._attempt(job, version, told.from_the_start())
            except UnknownModel as error:
                self._model = None
                if version is not None:
                    version.vllm_start = -1
                await patience.wait(VllmGone(str(error), reached=True), job)
            except VllmGone as error:
                self._model = None
                await patience.wait(error, job)

    async def _attempt(self, job: SampleJob, version: Version | None, on_progress: OnProgress | None) -> SampleResponse:
        model = self._model = self._model or await self._api.model(self._training.name)
        max_tokens = _max_tokens(job, model)
        if version is not None:
            await self._adapters.give_to_vllm(version, self._server.num_starts)
        samples, name = Samples(job, on_progress), version.name if version is not None else model.name
        await _all([self._draw(ask, job, name, max_tokens, samples) for ask in asks_of(job)])
        return samples.response()

    async def _draw(self, ask: Ask, job: SampleJob, name: str, max_tokens: int, samples: "Samples") -> None:
        if not job.streams:
            samples.grow(ask, await self._api.complete(job, ask, name, max_tokens))
            return
        async with aclosing(self._api.stream(job, ask, name, max_tokens)) as events:
            async for pieces in events:
                samples.grow(ask, pieces)

    async def _add_bare_base(self) -> None:
        """The base as an adapter that changes nothing.

        On a CPU vLLM 0.32 gives what has no adapter the one in its last slot, once that is taken.
        """
        spec = RunSpec(_BARE, LoraConfig(rank=1, seed=0, train_unembed=False))

        async def save(directory: Path) -> None:
            await self._training.submit(_BARE, "", Verb("create_run", (spec,), creates=_BARE))
            await self._training.submit(_BARE, "", Verb("save_run", (_BARE, str(directory), False)))
            await self._training.submit(_BARE, "", Verb("drop_run", (_BARE,), drops=_BARE))

        await self._adapters.put(_BARE, save)
        self._bare = _BARE


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

    def grow(self, ask: Ask, pieces: list[Piece]) -> None:
        for piece in pieces:
            for sample in _samples_of(self._job, ask.first + piece.sample):
                self._pieces[sample].append(piece)
                if self._on_progress is not None and len(piece.tokens):
                    part = SampledPart(sample, piece.tokens, piece.logprobs, piece.top, _stop_reason(piece))
                    self._on_progress((part,))

    def response(self) -> SampleResponse:
        """Once all of them have ended."""
        return SampleResponse(tuple(_sequence(self._pieces[sample]) for sample in range(self._job.num_samples)))


def asks_of(job: SampleJob) -> list[Ask]:
    """Greedy samples are all the same, and vLLM refuses more than one."""
    num_samples = 1 if is_greedy(job) else job.num_samples
    starts = range(0, num_samples, _MOST_SAMPLES)
    return [Ask(start, min(_MOST_SAMPLES, num_samples - start)) for start in starts]


def _samples_of(job: SampleJob, drawn: int) -> range:
    """The job's samples that the drawn one is."""
    return range(job.num_samples) if is_greedy(job) else range(drawn, drawn + 1)


def _sequence(pieces: list[Piece]) -> SampledSequence:
    reason = _stop_reason(pieces[-1]) if pieces else None
    if reason is None:
        raise VllmGone(f"ended a sample with {pieces[-1].finish_reason if pieces else 'nothing'}", reached=True)
    tops = [piece.top for piece in pieces if piece.top is not None]
    return SampledSequence(
        stop_reason=reason,
        tokens=np.concatenate([piece.tokens for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        topk_logprobs=_joined(tops) if tops else None,
    )


def _stop_reason(piece: Piece) -> Literal["stop", "length"] | None:
    """None while it goes on, and when something went wrong with it."""
    return piece.finish_reason if piece.finish_reason in ("stop", "length") else None


def _joined(tops: list[TopkLogprobs]) -> TopkLogprobs:
    return TopkLogprobs(np.concatenate([top.token_ids for top in tops]), np.concatenate([top.logprobs for top in tops]))


async def _all(works: Sequence[Coroutine[None, None, Answer]]) -> list[Answer]:
    """When one fails, none of the others goes on."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _wants_scores(job: SampleJob) -> bool:
    alternatives = job.target_prompt_tokens is not None or job.prompt_alt_tokens_k > 0
    return job.prompt_logprobs or job.topk_prompt_logprobs > 0 or alternatives


def _max_tokens(job: SampleJob, model: VllmModel) -> int:
    room = model.max_length - len(job.prompt)
    if room < 1:
        raise OperationError(
            f"the prompt has {len(job.prompt)} tokens, and vLLM's context of {model.max_length} holds one less at the"
            " most: shorten it"
        )
    return min(job.params.max_tokens or room, room)


def _unavailable(job: SampleJob) -> list[str]:
    """What the job asks and we do not ask vLLM."""
    fields = type(job.params).model_fields.items()
    return [name for name, field in fields if name not in SAID_PARAMS and getattr(job.params, name) != field.default]


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
