"""Runs the sampling jobs of one OpenAI request, and queues their progress and results for the response."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from ...schemas.errors import OperationError, RequestError
from ...schemas.sampling import SampleResponse
from ...workers.protocol.calls import SampledPart
from ..sampling.sampling_job import SamplingJob
from ..sampling.sampling_service import SamplingService
from ..tenants.quotas import Reservation

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 16 << 20
_ARRAY_BYTES = 200
_STARTED_AT_ONCE = 16


@dataclass(frozen=True)
class JobProgress:
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
class JobResult:
    """Holds the complete result of a job. job: its index in the request."""

    job: int
    response: SampleResponse


class SampleBatch:
    """Starts the jobs and reports their events; `close` cancels those that still run.

    reservation: charges the tenant for the tokens. streams: True if progress is reported, not only results. If the
    client reads too slowly and MAX_QUEUED_BYTES are queued, a job's further progress is dropped: its result has it.
    """

    def __init__(
        self, sampling: SamplingService, jobs: Sequence[SamplingJob], reservation: Reservation, streams: bool
    ) -> None:
        self._sampling = sampling
        self._jobs = jobs
        self._reservation = reservation
        self._streams = streams
        self._events: asyncio.Queue[JobProgress | JobResult | Exception] = asyncio.Queue()
        self._num_charged = [0] * len(jobs)
        self._num_queued_bytes = 0
        self._without_progress: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.create_task(self._start())

    def close(self) -> None:
        for task in (self._starting, *self._tasks):
            task.cancel()

    async def events(self) -> AsyncIterator[JobProgress | JobResult]:
        """Yields events until all jobs are finished.

        Raises:
            OperationError, RequestError: a job failed.
        """
        num_open = len(self._jobs)
        while num_open:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, JobProgress):
                self._num_queued_bytes -= event.num_bytes
            num_open -= isinstance(event, JobResult)
            yield event

    async def _start(self) -> None:
        for number, job in enumerate(self._jobs):
            self._tasks.append(asyncio.create_task(self._run_job(number, job)))
            if number % _STARTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _run_job(self, number: int, job: SamplingJob) -> None:
        on_progress = partial(self._report_progress, number) if self._streams else None
        try:
            response = await self._sampling.sample_now(job, on_progress)
            self._charge(number, response.num_tokens - self._num_charged[number])
            self._events.put_nowait(JobResult(number, response))
        except (OperationError, RequestError) as error:
            self._events.put_nowait(error)
        except Exception:
            logger.exception("sampling request %s failed", job.request_id)
            self._events.put_nowait(OperationError(f"internal error in sampling request {job.request_id}", "server"))

    def _report_progress(self, number: int, parts: tuple[SampledPart, ...]) -> None:
        event = JobProgress(number, parts)
        # Charged before delivery: a client that reads the tokens and disconnects must still pay for them.
        self._charge(number, sum(len(part.tokens) for part in parts))
        if self._num_queued_bytes + event.num_bytes > MAX_QUEUED_BYTES:
            self._without_progress.add(number)
        if number not in self._without_progress:
            self._num_queued_bytes += event.num_bytes
            self._events.put_nowait(event)

    def _charge(self, number: int, num_tokens: int) -> None:
        self._num_charged[number] += num_tokens
        self._reservation.charge(num_tokens)
