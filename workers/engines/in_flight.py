"""Sampling requests in flight: cancels them by id, and retries them without streaming any token twice."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ...schemas.errors import OperationError
from ...schemas.sampling import SampleResponse, TopkLogprobs
from ..protocol.calls import SampledPart
from ..scheduler.work import OnProgress

Attempt = Callable[[OnProgress | None], Coroutine[None, None, SampleResponse]]


class InFlightRequests:
    """The requests that an engine is working on, by job id."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[SampleResponse]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, job_id: str, work: Coroutine[None, None, SampleResponse]) -> SampleResponse:
        """Runs the request until it ends. Cancelling the caller cancels the request too.

        Raises:
            OperationError: the request was cancelled by its id, or the server is shutting down.
        """
        if job_id in self._tasks:
            work.close()
            raise OperationError(f"sampling request {job_id} is already in flight", "server")
        task = self._tasks[job_id] = asyncio.create_task(work)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            del self._tasks[job_id]
        if task.cancelled() and self._closed:
            raise OperationError("the server is shutting down", "server")
        if task.cancelled():
            raise OperationError(f"sampling request {job_id} was cancelled")
        return task.result()

    def cancel(self, job_id: str) -> None:
        """Cancels the request. Finished and unknown ids are ignored."""
        if task := self._tasks.get(job_id):
            task.cancel()

    async def close(self) -> None:
        """Fails all requests in flight, and waits until they have ended."""
        self._closed = True
        await cancel_and_wait(self._tasks.values())


class StreamDeduplicator:
    """Streams the tokens of a job, whose attempts follow one another, each once.

    A retried request samples everything again from the start: tokens already streamed are left out. The same seed gives
    the same tokens, unless the adapter has a newer version by then or vLLM batched the request differently.
    """

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._streamed: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    @property
    def has_streamed(self) -> bool:
        return bool(self._streamed)

    async def run(self, attempt: Attempt) -> SampleResponse:
        """Runs the request. Raises OperationError as soon as its tokens differ from those already streamed."""
        if self._on_progress is None:
            return await attempt(None)
        # By sample: the tokens that earlier attempts streamed, and how many tokens this one has sampled.
        self._earlier = {sample: np.concatenate(parts) for sample, parts in self._streamed.items()}
        self._num_sampled: Counter[int] = Counter()
        self._differs: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(attempt(self._forward_new))
        try:
            await asyncio.wait({task, self._differs}, return_when=asyncio.FIRST_COMPLETED)
            if not self._differs.done():
                for sample, earlier in self._earlier.items():
                    self._compare(task.result().sequences[sample].tokens[: len(earlier)], earlier)
            if self._differs.done():
                raise OperationError(
                    "the sampler crashed during this request, and the retry sampled tokens that differ from those"
                    " already streamed: send the request again",
                    "server",
                )
            return task.result()
        finally:
            await cancel_and_wait([task])

    def _forward_new(self, parts: tuple[SampledPart, ...]) -> None:
        fresh = tuple(rest for part in parts if (rest := self._unseen(part)) is not None)
        if fresh and not self._differs.done():
            for part in fresh:
                self._streamed[part.sample].append(part.tokens)
            assert self._on_progress is not None
            self._on_progress(fresh)

    def _unseen(self, part: SampledPart) -> SampledPart | None:
        """Returns the tokens of this part that have not been streamed; None if all of them have."""
        start = self._num_sampled[part.sample]
        self._num_sampled[part.sample] += len(part.tokens)
        earlier = self._earlier.get(part.sample, part.tokens[:0])[start : start + len(part.tokens)]
        self._compare(part.tokens[: len(earlier)], earlier)
        if len(earlier) == len(part.tokens):
            return None
        if not len(earlier):
            return part
        rest, top = slice(len(earlier), None), part.topk_logprobs
        top = top and TopkLogprobs(top.token_ids[rest], top.logprobs[rest])
        return replace(part, tokens=part.tokens[rest], logprobs=part.logprobs[rest], topk_logprobs=top)

    def _compare(self, tokens: np.ndarray, earlier: np.ndarray) -> None:
        if not np.array_equal(tokens, earlier) and not self._differs.done():
            self._differs.set_result(None)


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits until they have ended."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
