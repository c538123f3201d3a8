"""Runs: creates live runs on request, resumes them after a restart, and ends them with their sessions."""

import asyncio
import hashlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from ...schemas.checkpoints import LoadWeightsRequest
from ...schemas.codec import decode_model
from ...schemas.errors import RequestError
from ...schemas.models import (
    CreateModelRequest,
    DraftConfig,
    ExpertFactors,
    FullConfig,
    LoraConfig,
    OptimizerConfig,
    Role,
    TrainingConfig,
    UnloadModelResponse,
)
from ...schemas.schedules import CHECKPOINTS_KEY, NO_SCHEDULES, CheckpointSchedule, RunSchedules
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.plugins import plugin_rows
from ..checkpoints.checkpoints import Checkpoints
from ..config.base_model_lookup import base_model_of, require_served
from ..files.segment_log import RecordPosition
from ..http.bodies import ReceivedBody
from ..http.digests import Fingerprint, content_of
from ..journal.journal import EntryLocation, draw_seed
from ..journal.request_decoding import decode_entry
from ..operations.compatibility import check_role, check_target
from ..operations.loading import CreateRun, CreateRunFromCheckpoint
from ..operations.operation import json_result
from ..store import CheckpointRecord, RunRecord, Store, string_metadata
from ..tenants.auth import Tenant
from ..tenants.reservation import Reservation
from .recovery import JournaledRun
from .run import Run, Submitted
from .run_services import RunServices

logger = logging.getLogger(__name__)

_HELD_SECONDS = 600.0
_UNLOAD = ":unload"
"""Ends the id of the request that unloads a run."""
_IF_USED = (
    "is another process creating models in this session? Nothing was created: create a session in each process, or "
    "give a new model the next number"
)
_LORA_SEED, _FULL_SEED, _DRAFT_SEED = "lora_seed", "full_seed", "draft_seed"
"""Names of the seeds that are drawn if a request has none."""
_SEEDS = {LoraConfig: _LORA_SEED, FullConfig: _FULL_SEED, DraftConfig: _DRAFT_SEED}


class Runs:
    """Owns the live runs. A run lives from its creation until its session ends or the server stops.

    The class is long because creating, resuming and ending runs change the same set of runs.
    """

    def __init__(
        self,
        store: Store,
        dispatch: WorkerDispatch,
        checkpoints: Checkpoints,
        services: RunServices,
    ) -> None:
        self._store = store
        self._dispatch = dispatch
        self._checkpoints = checkpoints
        self._services = services
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
        self, tenant: Tenant, request: CreateModelRequest, received: ReceivedBody, reservation: Reservation
    ) -> Submitted:
        """Creates a run, or returns the existing one if the same request was sent before.

        Raises:
            RequestError: the request is invalid, or a different one was sent with this session and model_seq_id.
        """
        _check_optimizer(request.optimizer_config)
        require_served(self._dispatch, request.base_model)
        training = _requested_training(request)
        if isinstance(training, LoraConfig) and training.rank > (most := self._services.config.models.max_lora_rank):
            raise RequestError(
                f"rank {training.rank} exceeds max_lora_rank {most}: lower the rank or start the server "
                f"with --max-lora-rank {training.rank}"
            )
        await self._services.sessions.require_open(tenant, request.session_id)
        target_path = await self._target(tenant, request)
        drawn = {} if training.seed is not None else {_SEEDS[type(training)]: draw_seed()}
        is_open = isinstance(training, LoraConfig) and training.expert_factors is None
        creation = CreateRun(target_path, drawn, "shared" if is_open else None)
        accepted = _accepted_training(request, creation.drawn, creation.expert_factors)
        model = _RequestedModel(request.base_model, accepted, request.model_role, target_path)
        record = _record(tenant, request.session_id, request.model_seq_id, model, request)
        return await self._create(record, creation, received, reservation)

    async def create_from_checkpoint(
        self, tenant: Tenant, request: LoadWeightsRequest, received: ReceivedBody, reservation: Reservation
    ) -> Submitted:
        """Creates a run with the checkpoint's base model, training config and weights. Raises RequestError like
        `create`.
        """
        if request.session_id is None or request.model_seq_id is None:
            raise RequestError(
                "load_weights needs model_id (and seq_id) of a live model, or session_id and model_seq_id of a new one"
            )
        _check_optimizer(request.optimizer_config or OptimizerConfig())
        await self._services.sessions.require_open(tenant, request.session_id)
        checkpoint = await self._checkpoints.resolve(tenant, request.path, request.weights_access_token)
        base_model = base_model_of(checkpoint, request.base_model)
        require_served(self._dispatch, base_model)
        target_path = await self._target_of_saved_draft(tenant, checkpoint)
        model = _RequestedModel(base_model, checkpoint.training, _role_from(checkpoint, request), target_path)
        record = _record(tenant, request.session_id, request.model_seq_id, model, request)
        creation = CreateRunFromCheckpoint(target_path, path=checkpoint.tinker_path, optimizer=request.optimizer)
        return await self._create(record, creation, received, reservation)

    async def get(self, tenant: Tenant, run_id: str) -> Run:
        """Returns a live run of the tenant. Raises RequestError: 404 if there is none, 410 if it is no longer live."""
        run = self._runs.get(run_id)
        if run is not None and run.record.tenant_id == tenant.id:
            self._services.sessions.touch(run.record.session_id)
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
        """Deletes snapshots, pinned checkpoints and features of runs that no longer exist; for server start."""
        live = {*self._runs, *self._not_resumed}
        await asyncio.to_thread(self._services.snapshot_store.sweep, live)
        await asyncio.to_thread(self._services.pinned_checkpoints.sweep, live)
        await asyncio.to_thread(self._services.context.evaluation_data.sweep, live)
        await self._services.features.sweep(live)

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
        record = record or await self._record_of(entries)
        if record is None:
            for one in entries:
                self._services.journal.release(one.place)
            return
        require_served(self._dispatch, record.base_model)
        run = Run(record, self._services)
        loadable = await self._loadable(record.run_id)
        await run.resume(await JournaledRun.of(entries, self._services.journal, self._services.futures), loadable)
        self._runs[record.run_id] = run
        self._services.context.evaluation_data.count(record, record.schedules.num_bytes)

    async def _target(self, tenant: Tenant, request: CreateModelRequest) -> str | None:
        """Returns the path of the target of a new draft model, as the request names it. Raises RequestError."""
        if request.target_path is None:
            return None
        checkpoint = await self._checkpoints.resolve(tenant, request.target_path)
        check_target(checkpoint, request.base_model)
        return checkpoint.tinker_path

    async def _target_of_saved_draft(self, tenant: Tenant, checkpoint: CheckpointRecord) -> str | None:
        """Returns the target of the draft model saved in the checkpoint, or None if the tenant cannot read it
        any more.
        """
        if checkpoint.target_path is None:
            return None
        try:
            return (await self._checkpoints.resolve(tenant, checkpoint.target_path)).tinker_path
        except RequestError:
            return None

    async def _loadable(self, run_id: str) -> Sequence[str]:
        """Returns the paths of the run's checkpoints, oldest first, if its client may be ahead of a restored copy."""
        if not (self._services.restore_marker.is_waiting(run_id) or self._services.restore_marker.is_behind(run_id)):
            return ()
        saved = await self._store.checkpoints.list_of_runs([run_id], time.time())
        return [checkpoint.tinker_path for checkpoint in saved if checkpoint.kind == "weights"]

    async def _record_of(self, entries: Sequence[EntryLocation]) -> RunRecord | None:
        """Returns the record of a run that was accepted, but not created yet; None if its creation has a result or is
        missing.
        """
        first = next((one for one in entries if one.header.seq_id == 0 and one.header.refused is None), None)
        if first is None or await self._services.futures.has_result(first.header.request_id):
            return None
        header = first.header
        tenant = Tenant(header.tenant_id, "")
        session_id, _, number = header.run_id.partition(":train:")
        entry = await self._services.journal.read(first.place)
        request = await decode_entry(entry)
        if isinstance(request, CreateModelRequest):
            accepted = _accepted_training(request, header.drawn, header.expert_factors)
            model = _RequestedModel(request.base_model, accepted, request.model_role, header.target_path)
            return _record(tenant, session_id, int(number), model, request)
        assert isinstance(request, LoadWeightsRequest)
        checkpoint = await self._checkpoints.find(request.path)
        if checkpoint is None:
            raise RequestError(f"checkpoint {request.path}, from which it was created, no longer exists", 404)
        role = _role_from(checkpoint, request)
        model = _RequestedModel(checkpoint.base_model, checkpoint.training, role, header.target_path)
        return _record(tenant, session_id, int(number), model, request)

    async def _create(
        self, record: RunRecord, operation: CreateRun, received: ReceivedBody, reservation: Reservation
    ) -> Submitted:
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
            return await run.submit(0, operation, received, reservation)
        finally:
            if not run.has_operations and self._runs.get(record.run_id) is run:
                del self._runs[record.run_id]  # the model_seq_id can be used again

    def _check_full(self, new: RunRecord) -> None:
        """Raises RequestError if there are too many full models. Samplers' copies of weights are counted only by the
        workers.
        """
        most = self._services.config.models.max_full_models
        if isinstance(new.training, FullConfig) and self._num_full(new.base_model) >= most:
            raise RequestError(
                f"{new.base_model} has as many full models as max_full_models {most} allows: end "
                f"the session of one, train LoRA, or start the server with --max-full-models {most + 1}"
            )

    def _num_full(self, base_model: str) -> int:
        records = (run.record for run in self._runs.values() if run.is_usable)
        return sum(isinstance(one.training, FullConfig) and one.base_model == base_model for one in records)


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


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if optimizer.type != "adamw":
        raise RequestError(f"optimizer {optimizer.type!r} is not supported: use adamw, the default")


def _requested_training(request: CreateModelRequest) -> TrainingConfig:
    """Returns the training config that the request implies. Raises RequestError."""
    if request.draft is not None or request.model_role == "draft" or request.target_path is not None:
        return _requested_draft(request)
    if request.training == "full" and request.lora_config is not None:
        raise RequestError(
            "training is 'full' and there is a lora_config: leave out lora_config to train all weights, or training to "
            "train LoRA"
        )
    if request.training != "lora" and request.lora_config is None:
        return FullConfig(seed=request.seed)
    if request.seed is not None:
        raise RequestError(f"seed {request.seed} is only for full models: for LoRA set lora_config.seed")
    return request.lora_config or LoraConfig()


def _requested_draft(request: CreateModelRequest) -> DraftConfig:
    if not plugin_rows("server.drafts.operations", "OPERATIONS"):
        raise RequestError("draft models need server/drafts and workers/drafts, which this installation is without")
    if request.model_role != "draft":
        given = "draft" if request.draft is not None else "target_path"
        raise RequestError(
            f"{given} is given and model_role is {request.model_role!r}: send model_role 'draft', or leave out {given}"
        )
    if request.draft is None:
        raise RequestError("model_role is 'draft' and there is no draft: send one, such as {'algorithm': 'eagle3'}")
    if request.lora_config is not None or request.training is not None:
        given = "lora_config" if request.lora_config is not None else "training"
        raise RequestError(f"all weights of a draft model are trained: leave out {given}")
    if request.seed is not None:
        raise RequestError(f"seed {request.seed} is only for full models: for a draft model set draft.seed")
    return DraftConfig(**request.draft.model_dump())


def _accepted_training(
    request: CreateModelRequest, drawn: Mapping[str, int], expert_factors: ExpertFactors | None
) -> TrainingConfig:
    """Returns the training config with what the request left open: the seeds in `drawn`, and an adapter's
    `expert_factors`.

    A drawn LoRA seed marks a request that an earlier version accepted, which trained LoRA by default.
    """
    training = LoraConfig() if request.lora_config is None and _LORA_SEED in drawn else _requested_training(request)
    settled: dict[str, object] = {"seed": drawn.get(_SEEDS[type(training)], training.seed)}
    if expert_factors is not None:
        settled["expert_factors"] = expert_factors
    return training.model_copy(update=settled)


def _role_from(checkpoint: CheckpointRecord, request: LoadWeightsRequest) -> Role:
    """Raises RequestError if the checkpoint's weights do not fit a model of the requested role."""
    role = request.model_role or checkpoint.role
    check_role(checkpoint, role)
    return role


@dataclass(frozen=True)
class _RequestedModel:
    """Describes the model of a new run."""

    base_model: str
    training: TrainingConfig
    role: Role
    target_path: str | None


def _record(
    tenant: Tenant,
    session_id: str,
    model_seq_id: int,
    model: _RequestedModel,
    request: CreateModelRequest | LoadWeightsRequest,
) -> RunRecord:
    now = time.time()
    return RunRecord(
        run_id=f"{session_id}:train:{model_seq_id}",
        session_id=session_id,
        tenant_id=tenant.id,
        base_model=model.base_model,
        training=model.training,
        role=model.role,
        target_path=model.target_path,
        created_at=now,
        last_request_at=now,
        user_metadata=(metadata := string_metadata(request.user_metadata)),
        asked=_hash(request),
        schedules=_schedules_in(metadata or {}),
    )


def _schedules_in(metadata: Mapping[str, str]) -> RunSchedules:
    """Returns what clients that have only metadata ask for: a CheckpointSchedule in JSON. Raises RequestError."""
    if (text := metadata.get(CHECKPOINTS_KEY)) is None:
        return NO_SCHEDULES
    try:
        return RunSchedules(checkpoints=decode_model(CheckpointSchedule, text.encode()))
    except RequestError as error:
        raise RequestError(f"user_metadata {CHECKPOINTS_KEY}: {error.message}") from None


def _hash(request: CreateModelRequest | LoadWeightsRequest) -> str:
    """Returns the request's kind and a hash of its content."""
    as_json = json.dumps({"kind": request.type, **content_of(request)}, sort_keys=True)
    return f"{request.type}:{hashlib.sha256(as_json.encode()).hexdigest()}"
