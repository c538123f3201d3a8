"""Draws: the sampling jobs of one request that is answered with its samples, and what comes of them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from ..schemas.errors import OperationError, RequestError
from ..schemas.sampling import SampleResponse
from ..workers.verbs import SampledPart
from .quotas import Admission
from .samplers import Samplers, SamplingJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grown:
    """job: its number among those of the request. parts: what was added to its samples."""

    job: int
    parts: tuple[SampledPart, ...]


@dataclass(frozen=True)
class Drawn:
    """All that a job has sampled."""

    job: int
    response: SampleResponse


class Draws:
    """Starts the jobs, whose bytes and tokens the admission holds until `close`, which cancels those under way.

    streams: whether what is added is told as it comes.
    """

    def __init__(
        self, samplers: Samplers, jobs: Sequence[SamplingJob], admission: Admission, streams: bool, num_bytes: int
    ) -> None:
        self._samplers = samplers
        self._admission = admission
        self._streams = streams
        self._events: asyncio.Queue[Grown | Drawn | Exception] = asyncio.Queue()
        num_tokens = sum(len(job.prompt) for job in jobs)
        admission.keep(max(num_bytes, 4 * num_tokens), num_tokens)
        self._tasks = [asyncio.create_task(self._draw(number, job)) for number, job in enumerate(jobs)]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._admission.release()

    async def events(self) -> AsyncIterator[Grown | Drawn]:
        """Until all jobs are drawn. Raises OperationError, RequestError: one of them failed."""
        num_open = len(self._tasks)
        while num_open:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            num_open -= isinstance(event, Drawn)
            yield event

    async def _draw(self, number: int, job: SamplingJob) -> None:
        on_progress = partial(self._grow, number) if self._streams else None
        try:
            response = await self._samplers.draw(job, self._admission, on_progress)
            self._events.put_nowait(Drawn(number, response))
        except (OperationError, RequestError) as error:
            self._events.put_nowait(error)
        except Exception:
            logger.exception("drawing %s failed", job.request_id)
            self._events.put_nowait(OperationError(f"internal error in sampling request {job.request_id}", "server"))

    def _grow(self, number: int, parts: tuple[SampledPart, ...]) -> None:
        self._events.put_nowait(Grown(number, parts))
