"""Sampling: requests to samplers: accepted once, journaled, carried out and answered, over deaths of workers, too."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from ...schemas.codec import encode_sample_response
from ...schemas.errors import OperationError, RequestError
from ...schemas.futures import Pending, RetrieveFuturesRequest, RetrieveFuturesResponse, SubmitResponse
from ...schemas.sampling import SampleRequest, SampleResponse
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.verbs import SampledPart, SampleJob, WorkerLost
from ..config.served import require_served
from ..files.wal import Place
from ..http.bodies import LARGE_BYTES, Received
from ..journal.completions import Completions
from ..journal.futures import Ended, Future, Futures, Result
from ..journal.journal import Header, Journal, Journaled
from ..journal.journaled import decode_entry
from ..journal.quarantine import STRIKE, Strikes
from ..journal.recordings import Recordings
from ..store import CheckpointRecord
from ..tenants.auth import Tenant
from ..tenants.quotas import UNORDERED, Admission, Quotas
from ..tenants.sessions import Sessions
from .adapters import Adapters
from .drafts import Drafts
from .sampler import Sampler
from .samplers import Samplers
from .sampling_job import SamplingJob, Stops, check_alternatives

logger = logging.getLogger(__name__)

OnProgress = Callable[[tuple[SampledPart, ...]], None]


@dataclass(frozen=True)
class _Held:
    """What the journal has of a request until its result is stored: itself first, and then its strikes."""

    header: Header
    places: list[Place]


class Sampling:
    """`submit` answers at once, and futures have the results; `draw` answers with the samples, and keeps nothing."""

    def __init__(
        self,
        dispatch: WorkerDispatch,
        samplers: Samplers,
        adapters: Adapters,
        drafts: Drafts,
        sessions: Sessions,
        futures: Futures,
        journal: Journal,
        recordings: Recordings,
        completions: Completions,
        quotas: Quotas,
    ) -> None:
        self._dispatch = dispatch
        self._samplers = samplers
        self._adapters = adapters
        self._drafts = drafts
        self._sessions = sessions
        self._futures = futures
        self._journal = journal
        self._recordings = recordings
        self._completions = completions
        self._quotas = quotas
        self._tasks: set[asyncio.Task[None]] = set()
        self._drawing: set[asyncio.Timeout] = set()
        self._is_stopping = False

    async def resume(self, journaled: Iterable[Journaled]) -> set[Place]:
        """Takes up the requests that an earlier process has not answered; returns what of the journal they need."""
        strikes: dict[str, list[Place]] = defaultdict(list)
        waiting: dict[str, Journaled] = {}
        for one in journaled:
            if self._samplers.find(one.header.run_id) is None:
                continue
            if one.header.kind == STRIKE:
                strikes[one.header.request_id].append(one.place)
            elif one.header.kind == "sample":
                waiting[one.header.request_id] = one
        answered = await self._futures.earlier(list(waiting))
        held: set[Place] = set()
        for request_id, one in waiting.items():
            if request_id in answered:
                continue
            try:
                await self._resume(one, [one.place, *strikes[request_id]])
            except (RequestError, OSError, ValueError) as error:
                logger.error("%s cannot be taken up again: %s", request_id, error)
            else:
                held |= {one.place, *strikes[request_id]}
        return held

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(
        self, tenant: Tenant, request: SampleRequest, received: Received, admission: Admission
    ) -> SubmitResponse:
        """Accepts a sampling request; the same sampler and seq_id answer the same. Raises RequestError."""
        sampler = await self._samplers.asked(tenant, request)
        if request.seq_id is not None and request.seq_id < 0:
            raise RequestError(f"seq_id {request.seq_id} must not be negative")
        seq_id = sampler.free_seq_id() if request.seq_id is None else request.seq_id
        request_id = f"{sampler.record.sampler_id}:{seq_id}"
        # A number that is given here is no earlier process's; and it must be taken before anybody else is given one.
        is_named = sampler.first_seq_id and request.seq_id is not None
        answered_before = is_named and await self._futures.has_result(request_id)
        if seq_id not in sampler.accepted and not answered_before:
            job = self._job(sampler, request, request_id)
            self._admit(job, received, admission)
            accepting = self._accept(sampler, seq_id, job, received, admission)
            sampler.accepted[seq_id] = asyncio.create_task(accepting)
        if (accepting := sampler.accepted.get(seq_id)) is not None:
            await asyncio.shield(accepting)
        return SubmitResponse(
            request_id=request_id,
            sample_sequence_ids=[f"{request_id}:{number}" for number in range(request.num_samples)],
            seq_id=seq_id,
        )

    def _admit(self, job: SamplingJob, received: Received, admission: Admission) -> None:
        """Claims room for its result before any of it is worked out. Raises RequestError 400, 429."""
        check_alternatives(job.request, self._quotas.max_logprobs)
        tenant_id = job.sampler.record.tenant_id
        self._quotas.check_results(tenant_id, self._futures.kept_bytes(tenant_id), job.result_bytes)
        num_bytes = max(len(received.body) + job.result_bytes, job.num_bytes)
        admission.grow(num_bytes, UNORDERED)
        admission.keep(num_bytes, len(job.prompt))

    def drawing(self, sampler: Sampler, request: SampleRequest, stops: Stops) -> SamplingJob:
        """A request to be answered with its samples by `draw`, under `stops` in place of its own. RequestError."""
        return self._job(sampler, request, sampler.next_drawing_id(), stops)

    async def draw(self, job: SamplingJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """Raises OperationError, RequestError. A caller that is cancelled cancels the job. Nothing of it is kept.

        on_progress: called with what comes, as it comes; the response has all of it again. The caller charges for it.
        """
        end = asyncio.timeout(0 if self._is_stopping else None)
        self._drawing.add(end)
        try:
            async with end:
                with self._sessions.held(job.sampler.record.session_id):
                    job.draft = await self._drafts.asked(job.sampler, job.request)
                    return await self._sample(job, on_progress)
        except TimeoutError:
            if not end.expired():
                raise
            raise OperationError("the server is stopping: try again when it is back", "server") from None
        finally:
            self._drawing.discard(end)

    def stop_drawing(self) -> None:
        """Fails what `draw` has under way, and what it is asked for from now on."""
        self._is_stopping = True
        now = asyncio.get_running_loop().time()
        for end in self._drawing:
            if not end.expired():
                end.reschedule(now)

    async def completed(
        self, tenant: Tenant, request: RetrieveFuturesRequest, seconds: float
    ) -> RetrieveFuturesResponse:
        """What ended after `prev_cursor`, waiting for something to end. Raises RequestError 404 and 410."""
        sampler = await self._samplers.get(tenant, request.target.sampling_session_id)
        self._sessions.heard_of(sampler.record.session_id)
        log = await self._completions.log(sampler.record.sampler_id, request.target.cloned_sampler_id)
        log.see(request.prev_cursor)
        await self._futures.long_poll(log.grown, seconds)
        return RetrieveFuturesResponse(completions=log.unseen(), cursor=log.cursor)

    def cancel(self, request_id: str) -> None:
        """Ends a sampling request that is under way. Finished, unknown and training requests: no-op."""
        self._dispatch.cancel(request_id)

    async def _resume(self, one: Journaled, held: list[Place]) -> None:
        header = one.header
        sampler = self._samplers.find(header.run_id)
        assert sampler is not None
        model = require_served(self._dispatch, sampler.record.base_model)
        request = await decode_entry(await self._journal.read(one.place))
        assert isinstance(request, SampleRequest)
        job = SamplingJob(request, header.request_id, sampler, model, seed=header.drawn.get("seed"))
        job.was_begun, job.draft = True, await self._draft_left(job)
        sampler.accepted[header.seq_id] = None
        self._begin(job, _Held(header, held), None)

    async def _draft_left(self, job: SamplingJob) -> CheckpointRecord | None:
        try:
            return await self._drafts.asked(job.sampler, job.request)
        except RequestError as error:
            _log_without_draft(job, error)
            return None

    async def _accept(
        self, sampler: Sampler, seq_id: int, job: SamplingJob, received: Received, admission: Admission
    ) -> None:
        """Journals the request and starts it. What cannot be journaled, or has no such draft, is not accepted."""
        header = Header(
            kind="sample",
            tenant_id=sampler.record.tenant_id,
            run_id=sampler.record.sampler_id,
            seq_id=seq_id,
            request_id=job.request_id,
            drawn={} if job.drawn_seed is None else {"seed": job.drawn_seed},
            content_type=received.content_type,
            content_encoding=received.content_encoding,
        )
        try:
            job.draft = await self._drafts.asked(sampler, job.request)
            place = await self._journal.append(header, received.body)
        except BaseException:
            del sampler.accepted[seq_id]
            admission.release()
            raise
        sampler.accepted[seq_id] = None
        performing = self._begin(job, _Held(header, [place]), admission)
        # A task that is cancelled before its first step releases nothing by itself.
        performing.add_done_callback(lambda _: admission.release())

    def _begin(self, job: SamplingJob, held: _Held, admission: Admission | None) -> asyncio.Task[None]:
        """admission: None for a request that an earlier process accepted."""
        record = job.sampler.record
        job.strikes = Strikes("this request", partial(self._note_strike, held), len(held.places) - 1)
        future = self._futures.create(
            job.request_id, record.tenant_id, partial(self._pending, record.base_model), partial(self._release, held)
        )
        performing = asyncio.create_task(self._perform(job, future, admission))
        self._tasks.add(performing)
        performing.add_done_callback(self._tasks.discard)
        return performing

    def _release(self, held: _Held) -> None:
        for place in held.places:
            self._journal.release(place)

    def _job(
        self, sampler: Sampler, request: SampleRequest, request_id: str, stops: Stops | None = None
    ) -> SamplingJob:
        return SamplingJob(request, request_id, sampler, self._dispatch.models[sampler.record.base_model], stops)

    def _pending(self, base_model: str) -> Pending:
        return Pending(queue_state_reason=self._dispatch.status(base_model))

    async def _perform(self, job: SamplingJob, future: Future, admission: Admission | None) -> None:
        await self._resolve(job, future, admission)
        assert future.result is not None
        ended = Ended(job.request_id, future.result.is_error, len(future.result.body))
        self._completions.ended(job.sampler.record.sampler_id, ended)

    async def _resolve(self, job: SamplingJob, future: Future, admission: Admission | None) -> None:
        try:
            response = await self._sample(job)
            if admission is not None:
                admission.charge(response.num_tokens)
            if job.request.record_stability_info:
                await self._recordings.keep(job.request_id, future.tenant_id, job.prompt, response)
            self._futures.resolve(future, Result(await self._encoded(job, response), "sample"))
        except OperationError as error:
            self._futures.fail(future, error.message, error.category)
        except RequestError as error:
            self._futures.fail(future, error.message, "user")
        except Exception:
            logger.exception("sampling request %s failed", job.request_id)
            self._futures.fail(future, f"internal error in sampling request {job.request_id}", "server")
        finally:
            if admission is not None:
                admission.release()

    async def _encoded(self, job: SamplingJob, response: SampleResponse) -> bytes:
        if response.num_bytes < LARGE_BYTES:
            return encode_sample_response(response, job.target_layout)
        async with self._futures.one_at_a_time:
            return await asyncio.to_thread(encode_sample_response, response, job.target_layout)

    async def _sample(self, job: SamplingJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """Once more when the worker dies, unless it keeps dying of this request or some of it has been told."""
        sampler = job.sampler
        sampler.under_way.add(job.request_id)
        telling = _Telling(on_progress)
        work = job.for_worker(streams=on_progress is not None)
        try:
            while True:
                job.strikes.check()
                try:
                    return await self._attempt(job, work, telling)
                except WorkerLost as lost:
                    if telling.has_told:
                        raise
                    job.was_begun = True
                    await job.strikes.add(lost)
        finally:
            sampler.under_way.discard(job.request_id)

    async def _attempt(self, job: SamplingJob, work: SampleJob, telling: "_Telling") -> SampleResponse:
        sampler = job.sampler
        async with self._draft(job) as draft_id:
            # Last of what is loaded: a worker that has lost the draft meanwhile samples all the same.
            loading = await self._adapters.load(sampler)
            try:
                guessed = replace(work, draft_id=draft_id)
                return await self._dispatch.sample(sampler.record.base_model, guessed, telling.tell)
            except OperationError as error:
                if error.category == "server":
                    self._adapters.load_again(sampler, loading)
                raise

    @asynccontextmanager
    async def _draft(self, job: SamplingJob) -> AsyncIterator[str | None]:
        """See Drafts.using."""
        async with AsyncExitStack() as stack:
            try:
                draft_id = await stack.enter_async_context(self._drafts.using(job.draft))
            except OperationError as error:
                if not job.was_begun:
                    raise
                _log_without_draft(job, error)
                job.draft = draft_id = None
            yield draft_id

    async def _note_strike(self, held: _Held) -> None:
        """Raises RequestError."""
        held.places.append(await self._journal.append(replace(held.header, kind=STRIKE, drawn={})))


def _log_without_draft(job: SamplingJob, error: Exception) -> None:
    logger.warning("%s goes on without its draft: %s", job.request_id, error)


class _Telling:
    """Passes on what samples grow by. has_told: whether there was anything."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self.has_told = False
        self.tell = None if on_progress is None else self._tell

    def _tell(self, parts: tuple[SampledPart, ...]) -> None:
        assert self._on_progress is not None
        self.has_told = True
        self._on_progress(parts)
