"""Runs the sampling jobs of one OpenAI request, and queues their progress and results for the response."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from ...schemas.errors import OperationError, RequestError
from ...schemas.sampling import SampleResponse
from ...workers.protocol.verbs import SampledPart
from ..sampling.sampling import Sampling
from ..sampling.sampling_job import SamplingJob
from ..tenants.quotas import Admission

logger = logging.getLogger(__name__)

MOST_HELD_BYTES = 16 << 20
_ARRAY_BYTES = 200
_STARTED_AT_ONCE = 16


@dataclass(frozen=True)
class Grown:
    """Reports progress of a job. job: its index in the request. parts: what was added to its samples."""

    job: int
    parts: tuple[SampledPart, ...]

    @property
    def num_bytes(self) -> int:
        """Approximates the memory that the event takes."""
        tops = [part.topk_logprobs for part in self.parts if part.topk_logprobs is not None]
        arrays = [array for part in self.parts for array in (part.tokens, part.logprobs)]
        arrays += [array for top in tops for array in (top.token_ids, top.logprobs)]
        return sum(_ARRAY_BYTES + array.nbytes for array in arrays)


@dataclass(frozen=True)
class Drawn:
    """Holds the complete result of a job. job: its index in the request."""

    job: int
    response: SampleResponse


class Draws:
    """Starts the jobs and reports their events; `close` cancels those that still run.

    admission: charges the tenant for the tokens. streams: True if progress is reported, not only results. If the client
    reads too slowly and MOST_HELD_BYTES are queued, a job's further progress is dropped: its result contains it.
    """

    def __init__(self, sampling: Sampling, jobs: Sequence[SamplingJob], admission: Admission, streams: bool) -> None:
        self._sampling = sampling
        self._jobs = jobs
        self._admission = admission
        self._streams = streams
        self._events: asyncio.Queue[Grown | Drawn | Exception] = asyncio.Queue()
        self._num_charged = [0] * len(jobs)
        self._num_held_bytes = 0
        self._not_told: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.create_task(self._start())

    def close(self) -> None:
        for task in (self._starting, *self._tasks):
            task.cancel()

    async def events(self) -> AsyncIterator[Grown | Drawn]:
        """Yields events until all jobs are finished.

        Raises:
            OperationError, RequestError: a job failed.
        """
        num_open = len(self._jobs)
        while num_open:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Grown):
                self._num_held_bytes -= event.num_bytes
            num_open -= isinstance(event, Drawn)
            yield event

    async def _start(self) -> None:
        for number, job in enumerate(self._jobs):
            self._tasks.append(asyncio.create_task(self._draw(number, job)))
            if number % _STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _draw(self, number: int, job: SamplingJob) -> None:
        on_progress = partial(self._grow, number) if self._streams else None
        try:
            response = await self._sampling.draw(job, on_progress)
            self._charge(number, response.num_tokens - self._num_charged[number])
            self._events.put_nowait(Drawn(number, response))
        except (OperationError, RequestError) as error:
            self._events.put_nowait(error)
        except Exception:
            logger.exception("sampling request %s failed", job.request_id)
            self._events.put_nowait(OperationError(f"internal error in sampling request {job.request_id}", "server"))

    def _grow(self, number: int, parts: tuple[SampledPart, ...]) -> None:
        event = Grown(number, parts)
        # Charged before delivery: a client that reads the tokens and disconnects must still pay for them.
        self._charge(number, sum(len(part.tokens) for part in parts))
        if self._num_held_bytes + event.num_bytes > MOST_HELD_BYTES:
            self._not_told.add(number)
        if number not in self._not_told:
            self._num_held_bytes += event.num_bytes
            self._events.put_nowait(event)

    def _charge(self, number: int, num_tokens: int) -> None:
        self._num_charged[number] += num_tokens
        self._admission.charge(num_tokens)
