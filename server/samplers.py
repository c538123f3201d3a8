"""Samplers: sampling sessions, the adapters that they load when first asked, and their sampling requests.

A sampler has the weights of the bare base model, of a checkpoint, or of a run (an ephemeral one: a copy made at a
moment, or one that moves with the run's "inflight" saves). It goes with its session.
"""

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np

from ..schemas.checkpoints import SaveWeightsForSamplerRequest
from ..schemas.codec import CsrLayout, csr_layout_from_json, encode_sample_response, tensor_from_json
from ..schemas.errors import OperationError, RequestError
from ..schemas.futures import (
    Pending,
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
    SubmitResponse,
)
from ..schemas.models import CreateSessionRequest
from ..schemas.sampling import CreateSamplingSessionRequest, SampleRequest, SampleResponse
from ..schemas.version import VERSION
from ..workers.dispatch import WorkerDispatch
from ..workers.verbs import ModelInfo, SampledPart, SampleJob, WorkerLost
from .auth import Tenant
from .bodies import Received
from .checkpoints import Checkpoints
from .completions import Completions
from .ephemeral import EphemeralWeights
from .futures import Ended, Future, Futures, Result
from .journal import Header, Journal, Journaled
from .journaled import decode_entry
from .quotas import Admission
from .recordings import Recordings
from .segments import Place
from .sessions import Sessions
from .store import CheckpointRecord, RunRecord, SamplerRecord, Store
from .strikes import STRIKE, Strikes

logger = logging.getLogger(__name__)

MOST_SAMPLES = 4096
_SEED_LIMIT = 1 << 31

OnProgress = Callable[[tuple[SampledPart, ...]], None]


@dataclass(eq=False)
class Sampler:
    """adapter_id: None = the bare base model. loading: the adapter's, once it was asked for.

    first_seq_id: of the requests that leave theirs out, not 0 where an earlier process has made the sampler. accepted:
    seq_id -> its submit being journaled, None once it was. under_way: ids of the jobs that are loading or sampling.
    """

    record: SamplerRecord
    adapter_id: str | None
    first_seq_id: int = 0
    loading: asyncio.Future[None] | None = None
    accepted: dict[int, asyncio.Task[None] | None] = field(default_factory=dict)
    under_way: set[str] = field(default_factory=set)
    drawing_numbers: Iterator[int] = field(default_factory=partial(count, 1))
    num_joined: int = 0

    def free_seq_id(self) -> int:
        next_seq_id = self.first_seq_id + len(self.accepted)
        return next_seq_id if next_seq_id not in self.accepted else max(self.accepted) + 1

    def next_drawing_id(self) -> str:
        """Of a request that is answered with its samples; never a seq_id's. In any thread."""
        return f"{self.record.sampler_id}:draw-{next(self.drawing_numbers)}"

    def join(self) -> int:
        """A number for one more client, from 1."""
        self.num_joined += 1
        return self.num_joined


@dataclass(frozen=True)
class _Weights:
    """What a one-shot request samples."""

    tenant_id: str
    base_model: str
    model_path: str | None


class Samplers:
    def __init__(
        self,
        dispatch: WorkerDispatch,
        store: Store,
        sessions: Sessions,
        checkpoints: Checkpoints,
        futures: Futures,
        journal: Journal,
        recordings: Recordings,
        weights: EphemeralWeights,
    ) -> None:
        self._dispatch = dispatch
        self._store = store
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._futures = futures
        self._journal = journal
        self._recordings = recordings
        self._weights = weights
        self._completions = Completions(futures)
        self._samplers: dict[str, Sampler] = {}
        self._creating: dict[str | _Weights, asyncio.Task[str]] = {}
        self._one_shots: dict[_Weights, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._drawing: set[asyncio.Timeout] = set()
        self._is_stopping = False

    async def open(self) -> None:
        """Samplers of sessions that an earlier process left open."""
        # Microseconds, because results of an earlier process have the numbers that it counted.
        first_seq_id = int(time.time() * 1e6)
        for record in await self._store.list_open_samplers():
            sampler = self._samplers[record.sampler_id] = Sampler(record, record.adapter_id, first_seq_id)
            if record.is_ephemeral and not self._weights.has(record.adapter_id):
                sampler.adapter_id = None
        await self._weights.sweep({sampler.adapter_id for sampler in self._samplers.values()})

    async def resume(self, journaled: Iterable[Journaled]) -> set[Place]:
        """Takes up the requests that an earlier process has not answered; returns what of the journal they need."""
        strikes: dict[str, list[Place]] = defaultdict(list)
        waiting: dict[str, Journaled] = {}
        for one in journaled:
            if one.header.run_id in self._samplers and one.header.kind == STRIKE:
                strikes[one.header.request_id].append(one.place)
            elif one.header.run_id in self._samplers and one.header.kind == "sample":
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

    async def _resume(self, one: Journaled, held: list[Place]) -> None:
        header = one.header
        sampler = self._samplers[header.run_id]
        model = require_served(self._dispatch, sampler.record.base_model)
        request = await decode_entry(await self._journal.read(one.place))
        assert isinstance(request, SampleRequest)
        job = SamplingJob(request, header.request_id, sampler, model, seed=header.drawn.get("seed"))
        sampler.accepted[header.seq_id] = None
        self._begin(job, _Held(header, held), None)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Making and finding them

    async def create(self, tenant: Tenant, request: CreateSamplingSessionRequest) -> str:
        """The sampler's id; the same session and number answer the same. Raises RequestError."""
        await self._sessions.require_open(tenant, request.session_id)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        if sampler_id in self._samplers:
            return sampler_id
        return await self._once(sampler_id, lambda: self._create(tenant, sampler_id, request))

    async def create_ephemeral(self, run: RunRecord, request: SaveWeightsForSamplerRequest, seq_id: int) -> str:
        """A sampler with the weights that the run has now. seq_id: the request's in the run. Raises OperationError."""
        sampler_id = self._ephemeral_id(run, request, seq_id)
        record = SamplerRecord(
            sampler_id=sampler_id,
            session_id=run.session_id,
            tenant_id=run.tenant_id,
            base_model=run.base_model,
            created_at=time.time(),
            kind=request.kind,
            run_id=run.run_id,
        )
        adapter_id = record.adapter_id
        assert adapter_id is not None
        async with self._weights.writing(adapter_id) as directory:
            await self._dispatch.save_run(run.run_id, directory, optimizer=False)
        # Behind that: who loads it anew meanwhile loads these weights.
        await self._dispatch.copy_adapter(run.run_id, adapter_id)
        if sampler_id not in self._samplers:  # else a crash took the answer
            await self._add(record)
        for sampler in self._samplers.values():
            if sampler.record.adapter_id == adapter_id:  # those of an inflight one share it
                sampler.adapter_id, sampler.loading = adapter_id, _done()
        return sampler_id

    async def named(self, tenant: Tenant, name: str) -> Sampler:
        """Of a base model's name, a checkpoint's path, or a sampling session's id.

        Raises RequestError: 400 not a path, 404 nothing of this name, or not for this tenant, 410 it is over.
        """
        if name.startswith("tinker://"):
            sampler_id = await self._one_shot(tenant, None, name)
        elif name in self._dispatch.models:
            sampler_id = await self._one_shot(tenant, name, None)
        else:
            sampler_id = name
        return self._in_use(await self.get(tenant, sampler_id))

    async def get(self, tenant: Tenant, sampler_id: str) -> Sampler:
        """Raises RequestError 404, also for another tenant's, and 410 when its session has ended."""
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            await self._refuse_unknown(tenant, sampler_id)
        elif sampler.record.tenant_id == tenant.id:
            return sampler
        raise RequestError(f"there is no sampler {sampler_id}: create one with create_sampling_session", 404)

    async def end_session(self, session_id: str) -> None:
        """Drops the session's samplers; their requests fail. Their adapters go when the worker comes to it."""
        ended = [one for one in self._samplers.values() if one.record.session_id == session_id]
        for sampler in ended:
            del self._samplers[sampler.record.sampler_id]
            self._completions.forget(sampler.record.sampler_id)
            for request_id in sampler.under_way:
                self._dispatch.cancel(request_id)
        self._one_shots = {weights: one for weights, one in self._one_shots.items() if one in self._samplers}
        loading = {sampler.adapter_id: sampler.loading for sampler in ended if sampler.adapter_id}
        for adapter_id, task in loading.items():
            self._in_background(self._drop_adapter(adapter_id, task))

    async def _drop_adapter(self, adapter_id: str, loading: asyncio.Future[None] | None) -> None:
        if loading is not None:
            await asyncio.wait({loading})
        await self._weights.remove(adapter_id)
        try:
            await self._dispatch.drop_adapter(adapter_id)
        except OperationError as error:
            logger.warning("adapter %s could not be dropped: %s", adapter_id, error)

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _once(self, key: str | _Weights, create: Callable[[], Coroutine[None, None, str]]) -> str:
        """What `create` answers, whoever else asks for the same meanwhile."""
        if key not in self._creating:
            self._creating[key] = asyncio.create_task(create())
            self._creating[key].add_done_callback(lambda _: self._creating.pop(key))
        return await asyncio.shield(self._creating[key])

    async def _create(self, tenant: Tenant, sampler_id: str, request: CreateSamplingSessionRequest) -> str:
        record = SamplerRecord(
            sampler_id=sampler_id,
            session_id=request.session_id,
            tenant_id=tenant.id,
            base_model=await self._base_model(tenant, request.base_model, request.model_path),
            created_at=time.time(),
            kind="checkpoint" if request.model_path else "base",
            model_path=request.model_path,
        )
        await self._add(record)
        return sampler_id

    async def _add(self, record: SamplerRecord) -> None:
        """In the store, too, unless an outage took the answer that it is there."""
        if await self._store.get_sampler(record.sampler_id) is None:
            await self._store.insert_sampler(record)
        self._samplers[record.sampler_id] = Sampler(record, record.adapter_id)
        if not self._sessions.is_open(record.session_id):  # it ended meanwhile
            await self.end_session(record.session_id)

    async def _base_model(self, tenant: Tenant, base_model: str | None, model_path: str | None) -> str:
        if model_path:
            base_model = base_model_of(await self._checkpoints.resolve(tenant, model_path), base_model)
        if base_model is None:
            raise RequestError("a sampling session needs base_model or model_path")
        require_served(self._dispatch, base_model)
        return base_model

    def _ephemeral_id(self, run: RunRecord, request: SaveWeightsForSamplerRequest, seq_id: int) -> str:
        asked = f"{run.session_id}:sample:{request.sampling_session_seq_id}"
        if request.sampling_session_seq_id is not None and asked not in self._samplers:
            return asked
        return f"{run.session_id}:sample:{run.run_id.rpartition(':')[2]}-{seq_id}"

    async def _refuse_unknown(self, tenant: Tenant, sampler_id: str) -> None:
        record = await self._store.get_sampler(sampler_id)
        if record is not None and record.tenant_id == tenant.id:
            raise RequestError(f"the session of sampler {sampler_id} has ended: create a new one", 410)

    # Sampling

    async def submit(
        self, tenant: Tenant, request: SampleRequest, received: Received, admission: Admission
    ) -> SubmitResponse:
        """Accepts a sampling request; the same sampler and seq_id answer the same. Raises RequestError."""
        sampler = await self._require(tenant, request)
        if request.seq_id is not None and request.seq_id < 0:
            raise RequestError(f"seq_id {request.seq_id} must not be negative")
        seq_id = sampler.free_seq_id() if request.seq_id is None else request.seq_id
        request_id = f"{sampler.record.sampler_id}:{seq_id}"
        # A number that is given here is no earlier process's; and it must be taken before anybody else is given one.
        is_named = sampler.first_seq_id and request.seq_id is not None
        answered_before = is_named and await self._futures.has_result(request_id)
        if seq_id not in sampler.accepted and not answered_before:
            job = self._job(sampler, request, request_id)
            admission.keep(max(len(received.body), 4 * len(job.prompt)), len(job.prompt))
            accepting = self._accept(sampler, seq_id, job, received, admission)
            sampler.accepted[seq_id] = asyncio.create_task(accepting)
        if (accepting := sampler.accepted.get(seq_id)) is not None:
            await asyncio.shield(accepting)
        return SubmitResponse(
            request_id=request_id,
            sample_sequence_ids=[f"{request_id}:{number}" for number in range(request.num_samples)],
            seq_id=seq_id,
        )

    def drawing(self, sampler: Sampler, request: SampleRequest, stops: "Stops") -> "SamplingJob":
        """A request to be answered with its samples by `draw`, under `stops` in place of its own. RequestError."""
        return self._job(sampler, request, sampler.next_drawing_id(), stops)

    async def draw(self, job: "SamplingJob", on_progress: OnProgress | None = None) -> SampleResponse:
        """Raises OperationError, RequestError. A caller that is cancelled cancels the job. Nothing of it is kept.

        on_progress: called with what comes, as it comes; the response has all of it again. The caller charges for it.
        """
        end = asyncio.timeout(0 if self._is_stopping else None)
        self._drawing.add(end)
        try:
            async with end:
                with self._sessions.held(job.sampler.record.session_id):
                    return await self._sample(job, on_progress)
        except TimeoutError:
            if not end.expired():
                raise
            raise OperationError("the server is stopping: try again when it is back", "server") from None
        finally:
            self._drawing.discard(end)

    @property
    def is_busy(self) -> bool:
        return any(sampler.under_way for sampler in self._samplers.values())

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
        sampler = await self.get(tenant, request.target.sampling_session_id)
        self._sessions.heard_of(sampler.record.session_id)
        log = await self._completions.log(sampler.record.sampler_id, request.target.cloned_sampler_id)
        log.see(request.prev_cursor)
        await self._futures.long_poll(log.grown, seconds)
        return RetrieveFuturesResponse(completions=log.unseen(), cursor=log.cursor)

    def cancel(self, request_id: str) -> None:
        """Ends a sampling request that is under way. Finished, unknown and training requests: no-op."""
        self._dispatch.cancel(request_id)

    async def _require(self, tenant: Tenant, request: SampleRequest) -> Sampler:
        sampler_id = request.sampling_session_id
        if not sampler_id:
            _check_one_shot(request)
            sampler_id = await self._one_shot(tenant, request.base_model, request.model_path)
        return self._in_use(await self.get(tenant, sampler_id))

    def _in_use(self, sampler: Sampler) -> Sampler:
        """Raises RequestError 410 when its weights are lost."""
        self._sessions.heard_of(sampler.record.session_id)
        if sampler.record.is_ephemeral and sampler.adapter_id is None:
            raise RequestError(
                f"the weights of sampler {sampler.record.sampler_id} were lost when the server restarted: "
                "save_weights_for_sampler again, or sample a named checkpoint",
                410,
            )
        return sampler

    async def _one_shot(self, tenant: Tenant, base_model: str | None, model_path: str | None) -> str:
        """For requests that name weights and no sampler: one for all of a tenant's, in a session that silence ends."""
        weights = _Weights(tenant.id, await self._base_model(tenant, base_model, model_path), model_path)
        if weights not in self._one_shots:
            self._one_shots[weights] = await self._once(weights, lambda: self._create_one_shot(tenant, weights))
        return self._one_shots[weights]

    async def _create_one_shot(self, tenant: Tenant, weights: _Weights) -> str:
        session = await self._sessions.create(tenant, CreateSessionRequest(sdk_version=VERSION), None)
        own = {"session_id": session.session_id, "sampling_session_seq_id": 0}
        create = CreateSamplingSessionRequest(**own, base_model=weights.base_model, model_path=weights.model_path)
        return await self.create(tenant, create)

    async def _accept(
        self, sampler: Sampler, seq_id: int, job: "SamplingJob", received: Received, admission: Admission
    ) -> None:
        """Journals the request and starts it. Nothing is accepted when the journal cannot be written."""
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
            place = await self._journal.append(header, received.body)
        except BaseException:
            del sampler.accepted[seq_id]
            admission.release()
            raise
        sampler.accepted[seq_id] = None
        performing = self._begin(job, _Held(header, [place]), admission)
        # A task that is cancelled before its first step releases nothing by itself.
        performing.add_done_callback(lambda _: admission.release())

    def _begin(self, job: "SamplingJob", held: "_Held", admission: Admission | None) -> asyncio.Task[None]:
        """admission: None for a request that an earlier process accepted."""
        record = job.sampler.record
        job.strikes = Strikes("this request", partial(self._note_strike, held), len(held.places) - 1)
        future = self._futures.create(
            job.request_id, record.tenant_id, partial(self._pending, record.base_model), partial(self._release, held)
        )
        return self._in_background(self._perform(job, future, admission))

    def _release(self, held: "_Held") -> None:
        for place in held.places:
            self._journal.release(place)

    def _job(
        self, sampler: Sampler, request: SampleRequest, request_id: str, stops: "Stops | None" = None
    ) -> "SamplingJob":
        return SamplingJob(request, request_id, sampler, self._dispatch.models[sampler.record.base_model], stops)

    def _pending(self, base_model: str) -> Pending:
        return Pending(queue_state_reason=self._dispatch.status(base_model))

    async def _perform(self, job: "SamplingJob", future: Future, admission: Admission | None) -> None:
        await self._resolve(job, future, admission)
        assert future.result is not None
        ended = Ended(job.request_id, future.result.is_error, len(future.result.body))
        self._completions.ended(job.sampler.record.sampler_id, ended)

    async def _resolve(self, job: "SamplingJob", future: Future, admission: Admission | None) -> None:
        try:
            response = await self._sample(job)
            if admission is not None:
                admission.charge(response.num_tokens)
            if job.request.record_stability_info:
                await self._recordings.keep(job.request_id, future.tenant_id, job.prompt, response)
            self._futures.resolve(future, Result(encode_sample_response(response, job.target_layout), "sample"))
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

    async def _sample(self, job: "SamplingJob", on_progress: OnProgress | None = None) -> SampleResponse:
        """Once more when the worker dies, unless it keeps dying of this request or some of it has been told."""
        sampler = job.sampler
        sampler.under_way.add(job.request_id)
        telling = _Telling(on_progress)
        work = job.for_worker(streams=on_progress is not None)
        try:
            while True:
                job.strikes.check()
                loading = await self._load(sampler)
                try:
                    return await self._dispatch.sample(sampler.record.base_model, work, telling.tell)
                except WorkerLost as lost:
                    self._load_again(sampler, loading)
                    if telling.has_told:
                        raise
                    await job.strikes.add(lost)
                except OperationError as error:
                    if error.category == "server":
                        self._load_again(sampler, loading)
                    raise
        finally:
            sampler.under_way.discard(job.request_id)

    async def _note_strike(self, held: "_Held") -> None:
        """Raises RequestError."""
        held.places.append(await self._journal.append(replace(held.header, kind=STRIKE, drawn={})))

    async def _load(self, sampler: Sampler) -> "asyncio.Future[None] | None":
        """Its adapter, once, for whoever comes first; returns that loading, None where there is nothing to load."""
        if sampler.record.kind == "base":
            return None
        strikes = Strikes(f"load the weights of sampler {sampler.record.sampler_id}")
        while True:
            loading = sampler.loading = sampler.loading or asyncio.create_task(self._load_now(sampler))
            try:
                await asyncio.shield(loading)
            except WorkerLost as lost:
                self._load_again(sampler, loading)
                await strikes.add(lost)
            except (OperationError, RequestError):
                self._load_again(sampler, loading)
                raise
            else:
                return loading

    async def _load_now(self, sampler: Sampler) -> None:
        record = sampler.record
        assert sampler.adapter_id is not None
        if record.model_path is None:
            directory = self._weights.directory(sampler.adapter_id)
            await self._dispatch.load_adapter(record.base_model, sampler.adapter_id, directory)
            return
        checkpoint = await self._checkpoints.resolve(Tenant(record.tenant_id, ""), record.model_path)
        async with self._checkpoints.reading(checkpoint) as directory:
            await self._dispatch.load_adapter(record.base_model, sampler.adapter_id, directory)

    def _load_again(self, sampler: Sampler, loading: "asyncio.Future[None] | None") -> None:
        """The worker may have died, and the adapter with it; unless somebody else has seen to that."""
        if sampler.loading is loading:
            sampler.loading = None


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


def _done() -> "asyncio.Future[None]":
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


def require_served(dispatch: WorkerDispatch, base_model: str) -> ModelInfo:
    """Raises RequestError."""
    if base_model not in dispatch.models:
        raise RequestError(f"base model {base_model} is not served here: choose one of {', '.join(dispatch.models)}")
    return dispatch.models[base_model]


def _check_one_shot(request: SampleRequest) -> None:
    if request.base_model is None and request.model_path is None:
        raise RequestError("sampling_session_id is missing: send it, or base_model, or model_path")
    if request.seq_id is not None:
        raise RequestError(f"seq_id {request.seq_id} without sampling_session_id: leave it out, or send both")


def base_model_of(checkpoint: CheckpointRecord, asked: str | None) -> str:
    """Raises RequestError when another one is asked for."""
    if asked not in (None, checkpoint.base_model):
        raise RequestError(
            f"{checkpoint.tinker_path} was trained on {checkpoint.base_model}, not on {asked}: leave out base_model"
        )
    return checkpoint.base_model


def draw_seed() -> int:
    return secrets.randbelow(_SEED_LIMIT)


@dataclass(frozen=True)
class Stops:
    """What ends a sample before max_tokens: tokens, and texts (matched over the borders of tokens)."""

    token_ids: tuple[int, ...]
    strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Held:
    """What the journal has of a request until its result is stored: itself first, and then its strikes."""

    header: Header
    places: list[Place]


class SamplingJob:
    """A sampling request, checked against its model, its seed drawn. stops: None = those of the request."""

    def __init__(
        self,
        request: SampleRequest,
        request_id: str,
        sampler: Sampler,
        model: ModelInfo,
        stops: Stops | None = None,
        seed: int | None = None,
    ) -> None:
        """seed: that was drawn before, where the request leaves it open. Raises RequestError."""
        self.request = request
        self.request_id = request_id
        self.sampler = sampler
        self.prompt = _prompt(request, model)
        self.stops = stops or _stops(request, model)
        drawn = draw_seed() if seed is None else seed
        self._seed = drawn if request.sampling_params.seed is None else request.sampling_params.seed
        _check_counts(request, model, len(self.prompt))
        self._targets = _targets(request, len(self.prompt))
        self.strikes = Strikes("this request")
        self.target_layout: CsrLayout | None = None
        if request.target_prompt_logprobs is not None:
            self.target_layout = csr_layout_from_json(request.target_prompt_logprobs)

    @property
    def drawn_seed(self) -> int | None:
        """None when the request has one."""
        return self._seed if self.request.sampling_params.seed is None else None

    def for_worker(self, streams: bool = False) -> SampleJob:
        request = self.request
        return SampleJob(
            job_id=self.request_id,
            adapter_id=self.sampler.adapter_id,
            prompt=self.prompt,
            params=request.sampling_params.model_copy(update={"seed": self._seed}),
            stop_token_ids=self.stops.token_ids,
            stop_strings=self.stops.strings,
            num_samples=request.num_samples,
            prompt_logprobs=request.prompt_logprobs,
            prompt_logprobs_last_n=request.prompt_logprobs_last_n,
            topk_prompt_logprobs=request.topk_prompt_logprobs,
            topk_sample_logprobs=request.topk_sample_logprobs,
            target_prompt_tokens=self._targets,
            prompt_alt_tokens_k=request.prompt_alt_tokens_k,
            streams=streams,
            owner=self.sampler.record.tenant_id,
        )


def _stops(request: SampleRequest, model: ModelInfo) -> Stops:
    match request.sampling_params.stop:
        case None:
            return Stops(model.eos_token_ids)
        case str() as string:
            return Stops((), (string,))
        case several:
            strings = tuple(one for one in several if isinstance(one, str))
            return Stops(tuple(one for one in several if isinstance(one, int)), strings)


def _prompt(request: SampleRequest, model: ModelInfo) -> np.ndarray:
    """int32 [T], T >= 1."""
    for index, chunk in enumerate(request.prompt.chunks):
        if chunk.type != "encoded_text":
            raise RequestError(
                f"prompt chunk {index} is of type {chunk.type!r}, which is not supported: send encoded_text chunks only"
            )
    tokens = request.prompt.to_ints()
    if not tokens:
        raise RequestError("the prompt is empty: send at least one token")
    if wrong := next((token for token in tokens if not 0 <= token < model.vocab_size), None):
        raise RequestError(
            f"prompt token {wrong} is not in the vocabulary of {model.name}: token ids are 0 to {model.vocab_size - 1}"
        )
    if len(tokens) >= model.max_context_length:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens; {model.name} takes at most {model.max_context_length} with what is "
            "sampled: shorten it"
        )
    return np.asarray(tokens, np.int32)


def _check_counts(request: SampleRequest, model: ModelInfo, num_prompt: int) -> None:
    if request.num_samples > MOST_SAMPLES:
        raise RequestError(f"num_samples {request.num_samples} exceeds {MOST_SAMPLES}: send several requests")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if (count := getattr(request, name)) > model.vocab_size:
            raise RequestError(f"{name} {count} exceeds the vocabulary of {model.name}, {model.vocab_size} tokens")
    room, max_tokens = model.max_context_length - num_prompt, request.sampling_params.max_tokens
    if max_tokens is not None and max_tokens > room:
        raise RequestError(
            f"max_tokens {max_tokens} exceeds the {room} tokens that a prompt of {num_prompt} leaves of the context of "
            f"{model.name}: lower it, or leave it out to sample until the context ends"
        )
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and last_n > num_prompt - 1:
        raise RequestError(f"prompt_logprobs_last_n {last_n} exceeds the {num_prompt - 1} positions that are scored")


def _targets(request: SampleRequest, num_prompt: int) -> np.ndarray | None:
    """int64 [T - 1, K], -1 = nothing."""
    if request.target_prompt_logprobs is None:
        return None
    targets = tensor_from_json(request.target_prompt_logprobs, fill=-1, name="target_prompt_logprobs")
    if targets.ndim != 2 or len(targets) != num_prompt - 1 or targets.dtype.kind != "i":
        raise RequestError(
            f"target_prompt_logprobs is {targets.dtype} {list(targets.shape)}: it must be int64 [{num_prompt - 1}, K], "
            "one row less than the prompt has tokens"
        )
    return targets
