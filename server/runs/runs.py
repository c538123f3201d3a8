"""Runs: creates live runs on request, resumes them after a restart, and ends them with their sessions."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from typing import TypeGuard

from ...schemas.checkpoints import LoadWeightsRequest
from ...schemas.errors import RequestError
from ...schemas.futures import SubmitResponse
from ...schemas.models import (
    CreateModelRequest,
    FullConfig,
    UnloadModelResponse,
)
from ..config.base_model_lookup import require_served
from ..files.segment_log import RecordPosition
from ..http.bodies import Body
from ..http.digests import Fingerprint
from ..http.verbs import HAS_DRAFTS
from ..journal.journal import EntryLocation
from ..operations.operation import json_result
from ..store import RunRecord
from ..tenants.auth import Tenant
from ..tenants.quotas import Reservation
from .recovery import JournaledRun
from .run import Run
from .run_requests import RunRequests
from .run_state import RunServices

logger = logging.getLogger(__name__)

_HELD_SECONDS = 600.0
_UNLOAD = ":unload"
"""Ends the id of the request that unloads a run."""
_IF_USED = (
    "is another process creating models in this session? Nothing was created: create a session in each process, or "
    "give a new model the next number"
)


class Runs:
    """Owns the live runs. A run lives from its creation until it is unloaded, its session ends or the server
    stops."""

    def __init__(self, services: RunServices) -> None:
        self._services = services
        self._store = services.context.store
        self._requests = RunRequests(services)
        self._runs: dict[str, Run] = {}
        self._ending: dict[asyncio.Task[None], Run] = {}
        self._not_resumed: dict[str, Sequence[EntryLocation]] = {}
        self._saved_at = time.time()

    async def resume(self, journaled: Iterable[EntryLocation], session_ids: Iterable[str]) -> set[RecordPosition]:
        """Resumes the runs of sessions that an earlier process left open; returns the journal places they need.

        A run cannot be resumed if its base model is not served now or its entries cannot be read; then the journal
        keeps all of its entries until its session ends.
        """
        of_runs: dict[str, list[EntryLocation]] = defaultdict(list)
        for one in journaled:
            of_runs[one.header.run_id].append(one)
        records: dict[str, RunRecord | None] = {}
        for session_id in session_ids:
            begun = [run_id for run_id in of_runs if run_id.startswith(f"{session_id}:train:")]
            records |= dict.fromkeys(begun)
            records |= {record.run_id: record for record in await self._store.runs.list_of_session(session_id)}
        for request_id in await self._services.futures.find_encodings([_unload_id(run_id) for run_id in records]):
            del records[request_id.removesuffix(_UNLOAD)]
        self._services.restore_marker.begin(records.keys())
        held: set[RecordPosition] = set()
        for run_id, record in records.items():
            try:
                await self._resume(record, of_runs[run_id])
            except (RequestError, OSError, ValueError) as error:
                logger.error("%s cannot be resumed now: %s", run_id, error)
                self._not_resumed[run_id] = of_runs[run_id]
                await self._services.futures.fail_lost(one.header for one in of_runs[run_id])
            held |= {one.place for one in of_runs[run_id]}
        return held

    async def create(
        self, tenant: Tenant, request: CreateModelRequest | LoadWeightsRequest, body: Body, reservation: Reservation
    ) -> SubmitResponse:
        """Creates a run, or returns the existing one if the same request was sent before.

        Raises:
            RequestError: the request is invalid, or a different one was sent with this session and model_seq_id.
        """
        if isinstance(request, CreateModelRequest):
            requested = await self._requests.of_model(tenant, request)
        else:
            requested = await self._requests.of_checkpoint(tenant, request)
        record = requested.record
        stored = record.run_id not in self._runs and await self._store.runs.get(record.run_id) is not None
        # Looked for again: a request with the same model_seq_id may have created it while the store was read.
        if record.run_id not in self._runs:
            if stored or record.run_id in self._not_resumed:
                raise _not_live(record.run_id)
            self._services.quotas.check_runs(record.tenant_id, self.num_live(record.tenant_id))
            self._check_full(record)
            self._runs[record.run_id] = Run(record, self._services)
        run = self._runs[record.run_id]
        _check_same(run.record, record)
        try:
            return await run.submit(0, requested.creation, body, reservation)
        finally:
            if not run.has_operations and self._runs.get(record.run_id) is run:
                del self._runs[record.run_id]  # the model_seq_id can be used again

    async def get(self, tenant: Tenant, run_id: str) -> Run:
        """Returns a live run of the tenant. Raises RequestError: 404 if there is none, 410 if it is no longer live."""
        run = self._runs.get(run_id)
        if run is not None and run.record.tenant_id == tenant.id:
            self._services.context.sessions.touch(run.record.session_id)
            return run
        record = None if run is not None else await self._store.runs.get(run_id)
        if record is not None and record.tenant_id == tenant.id:
            raise _not_live(run_id)
        raise RequestError(f"there is no model {run_id}: create one with create_model", 404)

    async def share(self, run_id: str, adapter_id: str) -> bool:
        """Copies the run's live weights to a sampler and returns True, if it has full weights and the config allows
        sharing.

        Raises like Run.share.
        """
        run = self._runs.get(run_id)
        if run is None or not isinstance(run.record.training, FullConfig):
            return False
        return self._services.config.shares_full_weights and await run.share(adapter_id)

    async def end_session(self, session_id: str) -> None:
        for run_id in [run_id for run_id in self._not_resumed if run_id.startswith(f"{session_id}:train:")]:
            self._services.restore_marker.mark_continued(run_id)
            for one in self._not_resumed.pop(run_id):
                self._services.journal.release(one.place)
        ended = [run for run in self._runs.values() if run.record.session_id == session_id]
        for run in ended:
            del self._runs[run.record.run_id]
        for run in ended:
            reason = f"session {session_id} of run {run.record.run_id} has ended: create a new one"
            # Not awaited: an operation in progress may take long.
            self._end_later(run, run.end(reason))

    async def unload(self, tenant: Tenant, run_id: str) -> str:
        """Ends a live run before its session ends, and returns the id of the request whose result says so.

        Returns when the run is gone. The result is stored first: a restart resumes no run that has it. Samplers of the
        run stay.

        Raises:
            RequestError: 404 if the tenant has no such run, 410 if it ended otherwise.
        """
        futures, request_id = self._services.futures, _unload_id(run_id)
        ending = next((task for task, run in self._ending.items() if _is_of(run, tenant, run_id)), None)
        if _is_of(run := self._runs.get(run_id), tenant, run_id):
            del self._runs[run_id]
            ending = self._end_later(run, self._unload(run, request_id))
        if ending is not None:
            await asyncio.shield(ending)
        try:
            await futures.require(request_id, tenant.id)
        except RequestError:
            await self.get(tenant, run_id)  # raises what holds of a run that is not live
            raise
        return request_id

    async def _unload(self, run: Run, request_id: str) -> None:
        futures, record = self._services.futures, run.record
        future = futures.create(request_id, record.tenant_id)
        futures.resolve(future, json_result(UnloadModelResponse(model_id=record.run_id)))
        await future.done.wait()
        await run.end(f"run {record.run_id} was unloaded: create a new one from a checkpoint")

    def _end_later(self, run: Run, end: Coroutine[None, None, None]) -> asyncio.Task[None]:
        ending = asyncio.create_task(end)
        self._ending[ending] = run
        ending.add_done_callback(self._ending.pop)
        return ending

    async def sweep(self) -> None:
        """Deletes snapshots, pinned checkpoints, evaluation data and features of runs that no longer exist, at the
        server's start."""
        live = {*self._runs, *self._not_resumed}
        await asyncio.to_thread(self._services.snapshot_store.sweep, live)
        await asyncio.to_thread(self._services.context.pinned_checkpoints.sweep, live)
        await asyncio.to_thread(self._services.context.evaluation_data.sweep, live)
        await self._services.context.features.sweep(live)

    async def snapshot_old_runs(self, held_seconds: float = _HELD_SECONDS) -> None:
        """Takes snapshots of runs with journal entries older than that, one run after the other.

        These runs then need no entries any more, nor the checkpoints and features that their operations refer to.
        """
        for run in list(self._runs.values()):
            await run.snapshot_if_older_than(held_seconds)

    @property
    def ending_session_ids(self) -> frozenset[str]:
        """Returns the sessions whose runs are still releasing their resources."""
        return frozenset(run.record.session_id for run in self._ending.values())

    @property
    def is_busy(self) -> bool:
        return any(run.is_busy for run in (*self._runs.values(), *self._ending.values()))

    @property
    def num_lost(self) -> int:
        """Returns the number of runs that the workers have lost and that will be rebuilt when they are needed."""
        return sum(run.is_lost for run in self._runs.values())

    async def snapshot(self) -> None:
        """Takes snapshots of all idle runs, so that the next process has no operations to replay."""
        await asyncio.gather(*(run.snapshot() for run in self._runs.values()))

    async def save_request_times(self) -> Iterable[str]:
        """Stores when runs were last used, for listings of runs; returns those that were used since the last call."""
        now, runs = time.time(), self._runs.items()
        times = {run_id: run.last_request_at for run_id, run in runs if run.last_request_at >= self._saved_at}
        if times:
            await self._store.runs.touch(times)
        self._saved_at = now  # not before they are stored, which may fail
        return times

    async def close(self) -> None:
        for ending in self._ending:
            ending.cancel()
        await asyncio.gather(*(run.stop() for run in (*self._runs.values(), *self._ending.values())))

    def num_parameters(self, run_id: str) -> int | None:
        """Returns the number of weights that a live run trains; None if it is not live, or not created yet."""
        info = self._services.context.infos.get(run_id)
        return None if info is None else info.num_parameters

    def num_live(self, tenant_id: str | None = None) -> int:
        """Returns the number of live runs of the tenant, or of all tenants."""
        return sum(tenant_id in (None, run.record.tenant_id) for run in self._runs.values())

    async def _resume(self, record: RunRecord | None, entries: Sequence[EntryLocation]) -> None:
        """Resumes one run; record: None if the run was accepted, but may not be created yet."""
        record = record or await self._requests.journaled(entries)
        if record is None:
            for one in entries:
                self._services.journal.release(one.place)
            return
        require_served(self._services.context.dispatch, record.base_model)
        if record.role == "draft" and not HAS_DRAFTS:
            raise RequestError(f"run {record.run_id} is a draft, and this installation is without server/drafts")
        run = Run(record, self._services)
        loadable = await self._loadable(record.run_id)
        await run.resume(await JournaledRun.of(entries, self._services.journal, self._services.futures), loadable)
        self._runs[record.run_id] = run
        self._services.context.evaluation_data.count(record, record.schedules.num_bytes)

    async def _loadable(self, run_id: str) -> Sequence[str]:
        """Returns the paths of the run's checkpoints, oldest first, if its client may be ahead of a restored copy."""
        if not (self._services.restore_marker.is_waiting(run_id) or self._services.restore_marker.is_behind(run_id)):
            return ()
        saved = await self._store.checkpoints.list_of_runs([run_id], time.time())
        return [checkpoint.tinker_path for checkpoint in saved if checkpoint.kind == "weights"]

    def _check_full(self, new: RunRecord) -> None:
        """Raises RequestError if there are too many full models. Samplers' copies of weights are counted only by the
        workers.
        """
        most = self._services.config.models.max_full_models
        others = [
            run.record for run in self._runs.values() if run.is_usable and run.record.base_model == new.base_model
        ]
        num_full = sum(isinstance(other.training, FullConfig) for other in others)
        if isinstance(new.training, FullConfig) and num_full >= most:
            raise RequestError(
                f"{new.base_model} has as many full models as max_full_models {most} allows: end "
                f"the session of one, train LoRA, or start the server with --max-full-models {most + 1}"
            )


def _check_same(known: RunRecord, requested: RunRecord) -> None:
    """Raises RequestError if the same model_seq_id was used for a different request."""
    if known.asked is None or requested.asked is None:
        return
    was, asked = _fingerprint(known.asked), _fingerprint(requested.asked)
    if was.digest != asked.digest:
        number = known.run_id.rpartition(":")[2]
        # Not 409, since clients retry that.
        raise RequestError(f"model_seq_id {number} of session {known.session_id} {asked.words(was)}: {_IF_USED}")


def _fingerprint(asked: str) -> Fingerprint:
    kind, _, digest = asked.rpartition(":")
    return Fingerprint(kind or "different request", digest)  # earlier versions stored no kind


def _is_of(run: Run | None, tenant: Tenant, run_id: str) -> TypeGuard[Run]:
    return run is not None and run.record.run_id == run_id and run.record.tenant_id == tenant.id


def _unload_id(run_id: str) -> str:
    return f"{run_id}{_UNLOAD}"


def _not_live(run_id: str) -> RequestError:
    return RequestError(
        f"run {run_id} is not live: it was unloaded, its session has ended, or it could not be resumed; create a new "
        "model from its last checkpoint (create_training_client_from_state)",
        410,
    )
