"""Samples for a job: loads what it needs into the workers, and repeats it after their crashes."""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from ...schemas.errors import OperationError
from ...schemas.sampling import SampleResponse
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.calls import SampledPart, SampleJob, WorkerLost
from ...workers.protocol.work_context import CURRENT_WORK
from ...workers.sampler.requests.structured_output import is_costly
from ..telemetry.telemetry import Telemetry
from .constraint_checks import ConstraintChecks
from .draft_loader import DraftLoader
from .sampler_weights import SamplerWeights
from .sampling_job import SamplingJob

logger = logging.getLogger(__name__)

OnProgress = Callable[[tuple[SampledPart, ...]], None]


class SamplingExecution:
    """Runs jobs in the workers."""

    def __init__(
        self,
        dispatch: WorkerDispatch,
        weights: SamplerWeights,
        drafts: DraftLoader,
        constraints: ConstraintChecks,
        telemetry: Telemetry,
    ) -> None:
        self._dispatch = dispatch
        self._weights = weights
        self._drafts = drafts
        self._constraints = constraints
        self._telemetry = telemetry

    async def sample(self, job: SamplingJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """Samples, and retries after a worker crash unless the request keeps crashing workers or has been streamed."""
        sampler, record = job.sampler, job.sampler.record
        context = self._telemetry.work_began("sample", record.tenant_id, record.sampler_id)
        CURRENT_WORK.set(context)
        sampler.running_jobs.add(job.request_id)
        progress = _ProgressForwarder(on_progress)
        sampled, failure, began_at = None, None, time.monotonic()
        constraint = job.request.sampling_params.constraint
        try:
            work = job.for_worker(streams=on_progress is not None)
            if constraint is not None:
                seconds = await self._constraints.check(record.base_model, record.tenant_id, constraint)
                work = replace(work, compile_seconds=seconds)
            while True:
                job.strikes.check()
                try:
                    sampled = await self._attempt(job, work, progress)
                    return sampled
                except WorkerLost as lost:
                    if progress.has_streamed:
                        raise
                    job.was_begun = True
                    await job.strikes.add(lost)
                except OperationError as error:
                    if constraint is not None and is_costly(error.message):
                        self._constraints.failed(record.base_model, record.tenant_id, constraint, error.message)
                    raise
        except Exception as error:
            failure = error
            raise
        finally:
            sampler.running_jobs.discard(job.request_id)
            seconds, num_prompt, model = time.monotonic() - began_at, len(job.prompt), record.base_model
            self._telemetry.sample_ended(context, model, job.request_id, num_prompt, sampled, seconds, failure)

    def close(self) -> None:
        self._constraints.close()

    async def _attempt(self, job: SamplingJob, work: SampleJob, progress: "_ProgressForwarder") -> SampleResponse:
        sampler = job.sampler
        async with self._draft(job) as draft_id:
            # Loaded after the draft: the adapter is required, while a worker that has lost the draft samples without.
            if sampler.adapter_id is not None:
                await self._weights.load(sampler)
            with_draft = replace(work, draft_id=draft_id)
            try:
                return await self._dispatch.sample(sampler.record.base_model, with_draft, progress.forward)
            except OperationError as error:
                if error.category == "server" and sampler.adapter_id is not None:
                    self._weights.forget(sampler)
                raise

    @asynccontextmanager
    async def _draft(self, job: SamplingJob) -> AsyncIterator[str | None]:
        """Loads the job's draft, see `DraftLoader.use`; if that fails, a job that was begun continues without it."""
        async with AsyncExitStack() as stack:
            try:
                draft_id = await stack.enter_async_context(self._drafts.use(job.draft))
            except OperationError as error:
                if not job.was_begun:
                    raise
                log_draft_lost(job, error)
                job.draft = draft_id = None
            yield draft_id


def log_draft_lost(job: SamplingJob, error: Exception) -> None:
    logger.warning("%s continues without its draft: %s", job.request_id, error)


class _ProgressForwarder:
    """Forwards progress to the caller. has_streamed: True after the first increment; the job is not retried then."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self.has_streamed = False
        self.forward = None if on_progress is None else self._forward

    def _forward(self, parts: tuple[SampledPart, ...]) -> None:
        assert self._on_progress is not None
        self.has_streamed = True
        self._on_progress(parts)
