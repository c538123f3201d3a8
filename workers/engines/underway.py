"""Sampling requests under way: cancelling them by id, and running them again without telling a token twice."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace

from ...schemas.errors import OperationError
from ...schemas.sampling import SampleResponse, TopkLogprobs
from ..group import OnProgress
from ..verbs import SampledPart


class Underway:
    """The requests that an engine works on, by job id."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[SampleResponse]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, job_id: str, work: Coroutine[None, None, SampleResponse]) -> SampleResponse:
        """Raises OperationError when it is cancelled by its id. A caller that is cancelled cancels it, too."""
        if job_id in self._tasks:
            work.close()
            raise OperationError(f"sampling request {job_id} is under way already", "server")
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
        """Finished or unknown: no-op."""
        if task := self._tasks.get(job_id):
            task.cancel()

    def close(self) -> None:
        """Fails what is under way."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()


class Told:
    """What a job's caller was told already. A request that is run again tells all of it again: that is left out.

    The same seed gives the same tokens, unless the adapter has moved on meanwhile.
    """

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._num_told: Counter[int] = Counter()

    def from_the_start(self) -> OnProgress | None:
        """For one run of the request; None when nobody listens."""
        if self._on_progress is None:
            return None
        listener, num_seen = self._on_progress, Counter[int]()

        def tell(parts: tuple[SampledPart, ...]) -> None:
            if fresh := tuple(rest for part in parts if (rest := self._rest(part, num_seen)) is not None):
                listener(fresh)

        return tell

    def _rest(self, part: SampledPart, num_seen: Counter[int]) -> SampledPart | None:
        num_known = self._num_told[part.sample] - num_seen[part.sample]
        num_seen[part.sample] += len(part.tokens)
        if num_known >= len(part.tokens):
            return None
        self._num_told[part.sample] = num_seen[part.sample]
        return part if num_known <= 0 else _behind(part, num_known)


def _behind(part: SampledPart, start: int) -> SampledPart:
    top = part.topk_logprobs
    return replace(
        part,
        tokens=part.tokens[start:],
        logprobs=part.logprobs[start:],
        topk_logprobs=top and TopkLogprobs(top.token_ids[start:], top.logprobs[start:]),
    )
