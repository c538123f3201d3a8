"""Accepts each sampling request once, journals it, and answers it.

Samplers are found by samplers.py; execution.py runs the jobs.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from ...schemas.codec import encode_sample_response
from ...schemas.errors import OperationError, RequestError
from ...schemas.futures import Pending, RetrieveFuturesRequest, RetrieveFuturesResponse, SubmitResponse
from ...schemas.sampling import SampleRequest, SampleResponse
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.work_context import CURRENT_WORK
from ..config.base_model_lookup import require_served
from ..files.segment_log import RecordPosition
from ..http.bodies import LARGE_BYTES, Body
from ..http.digests import Fingerprint
from ..journal.completion_log import Completions
from ..journal.futures import Future, Futures, Result, ResultSummary, check_same
from ..journal.journal import SAMPLING_RULES, EntryLocation, Header, Journal, request_id_of
from ..journal.recordings import Recordings
from ..journal.request_decoding import decode_entry
from ..journal.strikes import STRIKE, Strikes
from ..tenants.auth import Tenant
from ..tenants.quotas import UNORDERED, Quotas, Reservation
from ..tenants.sessions import Sessions
from .draft_loader import DraftLoader
from .execution import OnProgress, SamplingExecution, log_draft_lost
from .sampler import Sampler
from .samplers import Samplers
from .sampling_job import SamplingJob, Stops, check_alternatives

logger = logging.getLogger(__name__)

_IF_USED = (
    "is another process sampling with this session's numbers? Nothing was sampled: create a sampling client in each "
    "process, or leave out seq_id"
)


@dataclass(frozen=True)
class _JournaledRequest:
    """The journal entries that a request needs until its result is stored: its own, then those of its strikes."""

    header: Header
    places: list[RecordPosition]

    def release(self, journal: Journal) -> None:
        for place in self.places:
            journal.release(place)


class SamplingService:
    """Runs sampling requests: `submit` returns at once, and a future has the result; `sample_now` waits for the samples
    and keeps nothing."""

    def __init__(
        self,
        dispatch: WorkerDispatch,
        samplers: Samplers,
        execution: SamplingExecution,
        drafts: DraftLoader,
        sessions: Sessions,
        futures: Futures,
        journal: Journal,
        recordings: Recordings,
        completions: Completions,
        quotas: Quotas,
    ) -> None:
        self._dispatch = dispatch
        self._samplers = samplers
        self._execution = execution
        self._drafts = drafts
        self._sessions = sessions
        self._futures = futures
        self._journal = journal
        self._recordings = recordings
        self._completions = completions
        self._quotas = quotas
        self._tasks: set[asyncio.Task[None]] = set()
        self._sample_now_timeouts: set[asyncio.Timeout] = set()
        self._is_stopping = False

    async def resume(self, journaled: Iterable[EntryLocation]) -> set[RecordPosition]:
        """Resumes the requests that an earlier process left unanswered; returns the journal entries that they need."""
        strikes: dict[str, list[RecordPosition]] = defaultdict(list)
        waiting: dict[str, EntryLocation] = {}
        for one in journaled:
            if self._samplers.find(one.header.run_id) is None:
                continue
            if one.header.kind == STRIKE:
                strikes[one.header.request_id].append(one.place)
            elif one.header.kind == "sample":
                waiting[one.header.request_id] = one
        answered = await self._futures.find_encodings(list(waiting))
        held: set[RecordPosition] = set()
        for request_id, one in waiting.items():
            if request_id in answered:
                continue
            try:
                await self._resume(one, strikes[request_id])
            except (RequestError, OSError, ValueError) as error:
                logger.error("%s cannot be resumed: %s", request_id, error)
            else:
                held |= {one.place, *strikes[request_id]}
        return held

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._execution.close()

    async def submit(
        self, tenant: Tenant, request: SampleRequest, body: Body, reservation: Reservation
    ) -> SubmitResponse:
        """Accepts a sampling request. A retry, with the seq_id of an accepted one, gets the same response again. Raises
        RequestError: the request is wrong, over a limit or cannot be journaled, or its seq_id was used for another."""
        sampler = await self._samplers.find_requested(tenant, request)
        if (work := CURRENT_WORK.get()) is not None:
            work.run = sampler.record.sampler_id
        seq_id = sampler.free_seq_id() if request.seq_id is None else request.seq_id
        if seq_id < 0:
            raise RequestError(f"seq_id {seq_id} must not be negative")
        request_id = request_id_of(sampler.record.sampler_id, seq_id)
        # Only a seq_id from the client can have a result of an earlier process. For one assigned here nothing is
        # awaited, so that no concurrent request is assigned the same.
        is_named = sampler.first_seq_id and request.seq_id is not None
        answered_before = is_named and await self._futures.has_result(request_id)
        is_repeated = seq_id in sampler.accepted or answered_before
        if not is_repeated:
            job = SamplingJob(request, request_id, sampler, self._dispatch.models[sampler.record.base_model])
            self._admit(job, body, reservation)
            accepting = self._accept(sampler, seq_id, job, body, reservation)
            sampler.accepted[seq_id] = asyncio.create_task(accepting)
        if (accepting := sampler.accepted.get(seq_id)) is not None:
            await asyncio.shield(accepting)
        if is_repeated and body.digest is not None:
            number = f"seq_id {seq_id} of sampler {sampler.record.sampler_id}"
            again = Fingerprint("sample", body.digest)
            await check_same(self._futures, request_id, number, again, _IF_USED)
        return SubmitResponse(
            request_id=request_id,
            sample_sequence_ids=[f"{request_id}:{number}" for number in range(request.num_samples)],
            seq_id=seq_id,
        )

    def _admit(self, job: SamplingJob, body: Body, reservation: Reservation) -> None:
        """Reserves room for the result before the work begins. Raises RequestError 400, 429."""
        check_alternatives(job.request, self._quotas.max_logprobs)
        tenant_id = job.sampler.record.tenant_id
        self._quotas.check_results(tenant_id, self._futures.kept_bytes.of(tenant_id), job.result_bytes)
        num_bytes = max(len(body.received) + job.result_bytes, job.num_bytes)
        reservation.grow(num_bytes, UNORDERED)
        reservation.keep(num_bytes, len(job.prompt))

    def job_for_sample_now(self, sampler: Sampler, request: SampleRequest, stops: Stops) -> SamplingJob:
        """Returns a job for `sample_now`, with `stops` in place of the request's own. Raises RequestError."""
        request_id = f"{sampler.record.sampler_id}:draw-{next(sampler.sample_now_numbers)}"
        return SamplingJob(request, request_id, sampler, self._dispatch.models[sampler.record.base_model], stops)

    async def sample_now(self, job: SamplingJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """Samples and returns the response, with all increments that `on_progress` was called with. Cancelling the call
        cancels the job; nothing of it is kept. The caller charges the tenant for the tokens. Raises OperationError,
        RequestError: the job failed, or the server is stopping."""
        end = asyncio.timeout(0 if self._is_stopping else None)
        self._sample_now_timeouts.add(end)
        try:
            async with end:
                with self._sessions.kept_open(job.sampler.record.session_id):
                    job.draft = await self._drafts.draft_for(job.sampler, job.request)
                    return await self._execution.sample(job, on_progress)
        except TimeoutError:
            if not end.expired():
                raise
            raise OperationError("the server is stopping: try again when it is back", "server") from None
        finally:
            self._sample_now_timeouts.discard(end)

    def stop_sample_now(self) -> None:
        """Fails the running and all future calls of `sample_now`."""
        self._is_stopping = True
        now = asyncio.get_running_loop().time()
        for end in self._sample_now_timeouts:
            if not end.expired():
                end.reschedule(now)

    async def retrieve_completed(
        self, tenant: Tenant, request: RetrieveFuturesRequest, seconds: float
    ) -> RetrieveFuturesResponse:
        """Returns the requests that ended after `prev_cursor`; waits up to `seconds` if there are none yet. Raises
        RequestError like `Samplers.get`."""
        sampler = await self._samplers.get(tenant, request.target.sampling_session_id)
        self._sessions.touch(sampler.record.session_id)
        log = await self._completions.log(sampler.record.sampler_id, request.target.cloned_sampler_id)
        log.acknowledge(request.prev_cursor)
        await self._futures.long_polls.wait(log.has_unseen, seconds)
        return RetrieveFuturesResponse(completions=log.unseen(), cursor=log.cursor)

    async def _resume(self, one: EntryLocation, strikes: list[RecordPosition]) -> None:
        header = one.header
        sampler = self._samplers.find(header.run_id)
        assert sampler is not None
        model = require_served(self._dispatch, sampler.record.base_model)
        request = await decode_entry(await self._journal.read(one.place))
        assert isinstance(request, SampleRequest)
        job = SamplingJob.resumed(request, header, sampler, model)
        try:
            job.draft = await self._drafts.draft_for(sampler, request)
        except RequestError as error:
            log_draft_lost(job, error)
        sampler.accepted[header.seq_id] = None
        self._begin(job, _JournaledRequest(header, [one.place, *strikes]), None)

    async def _accept(
        self, sampler: Sampler, seq_id: int, job: SamplingJob, body: Body, reservation: Reservation
    ) -> None:
        """Journals the request and starts it. Not accepted if its draft is missing or the journal cannot be written."""
        header = Header(
            kind="sample",
            tenant_id=sampler.record.tenant_id,
            run_id=sampler.record.sampler_id,
            seq_id=seq_id,
            request_id=job.request_id,
            drawn={} if job.drawn_seed is None else {"seed": job.drawn_seed},
            sampling_rules=SAMPLING_RULES,
            content_type=body.content_type,
            content_encoding=body.content_encoding,
            digest=body.digest,
        )
        try:
            job.draft = await self._drafts.draft_for(sampler, job.request)
            place = await self._journal.append(header, body.received)
        except BaseException:
            del sampler.accepted[seq_id]
            reservation.release()
            raise
        sampler.accepted[seq_id] = None
        performing = self._begin(job, _JournaledRequest(header, [place]), reservation)
        # A task that is cancelled before its first step never runs its `finally`.
        performing.add_done_callback(lambda _: reservation.release())

    def _begin(
        self, job: SamplingJob, journaled: _JournaledRequest, reservation: Reservation | None
    ) -> asyncio.Task[None]:
        """Starts the job and creates its future. reservation: None if an earlier process accepted the request."""
        record = job.sampler.record
        job.strikes = Strikes("this request", partial(self._record_strike, journaled), len(journaled.places) - 1)
        pending, answered = partial(self._pending, job.sampler), partial(journaled.release, self._journal)
        fingerprint = journaled.header.fingerprint
        future = self._futures.create(job.request_id, record.tenant_id, pending, answered, fingerprint)
        performing = asyncio.create_task(self._resolve(job, future, reservation))
        self._tasks.add(performing)
        performing.add_done_callback(self._tasks.discard)
        return performing

    def _pending(self, sampler: Sampler) -> Pending:
        return Pending(queue_state_reason=sampler.outage or self._dispatch.status(sampler.record.base_model))

    async def _resolve(self, job: SamplingJob, future: Future, reservation: Reservation | None) -> None:
        try:
            response = await self._execution.sample(job)
            if reservation is not None:
                reservation.charge(response.num_tokens)
            if job.request.record_stability_info:
                await self._recordings.keep(job.request_id, future.tenant_id, job.prompt, response)
            body = await _encoded(job, response, self._futures.large_result_lock)
            self._futures.resolve(future, Result(body, "sample"))
        except OperationError as error:
            self._futures.fail(future, error.message, error.category)
        except RequestError as error:
            self._futures.fail(future, error.message, "user")
        except Exception:
            logger.exception("sampling request %s failed", job.request_id)
            self._futures.fail(future, f"internal error in sampling request {job.request_id}", "server")
        finally:
            if reservation is not None:
                reservation.release()
        assert future.result is not None
        ended = ResultSummary(job.request_id, future.result.is_error, len(future.result.body))
        self._completions.record(job.sampler.record.sampler_id, ended)

    async def _record_strike(self, journaled: _JournaledRequest) -> None:
        journaled.places.append(await self._journal.append(replace(journaled.header, kind=STRIKE, drawn={})))


async def _encoded(job: SamplingJob, response: SampleResponse, large_result_lock: asyncio.Lock) -> bytes:
    if response.num_bytes < LARGE_BYTES:
        return encode_sample_response(response, job.target_layout)
    async with large_result_lock:
        return await asyncio.to_thread(encode_sample_response, response, job.target_layout)
