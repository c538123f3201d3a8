"""Creates, finds and ends samplers (sampling sessions); sampling_service.py handles the requests to them.

A sampler has the weights of the bare base model, of a checkpoint, or of a run. The last kind is ephemeral: either a
copy of the run's weights at one moment ("snapshot"), or weights that each later "inflight" save of the run replaces.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import NamedTuple

from ... import __version__
from ...schemas.checkpoints import SaveWeightsForSamplerRequest
from ...schemas.errors import OperationError, RequestError
from ...schemas.models import CreateSessionRequest
from ...schemas.sampling import CreateSamplingSessionRequest, SampleRequest
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.calls import WorkerLost
from ..checkpoints.checkpoint_paths import full_path
from ..checkpoints.checkpoints import Checkpoints
from ..config.base_model_lookup import base_model_of, require_served
from ..journal.completion_log import Completions
from ..store import RunRecord, SamplerRecord, Store
from ..tenants.auth import Tenant
from ..tenants.sessions import Sessions
from .draft_loader import DraftLoader
from .sampler import Sampler
from .sampler_weights import SamplerWeights


class _OneShotKey(NamedTuple):
    """The weights that a one-shot request samples."""

    tenant_id: str
    base_model: str
    model_path: str | None


class Samplers:
    """Owns the samplers of open sessions."""

    def __init__(
        self,
        dispatch: WorkerDispatch,
        store: Store,
        sessions: Sessions,
        checkpoints: Checkpoints,
        weights: SamplerWeights,
        drafts: DraftLoader,
        completions: Completions,
    ) -> None:
        self._dispatch = dispatch
        self._store = store
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._weights = weights
        self._drafts = drafts
        self._completions = completions
        self._samplers: dict[str, Sampler] = {}
        self._creating: dict[str | _OneShotKey, asyncio.Task[str]] = {}
        self._one_shots: dict[_OneShotKey, str] = {}

    async def restore(self) -> None:
        """Restores the samplers of sessions that an earlier process left open."""
        # The clock in microseconds exceeds every number that an earlier process gave, so request ids stay unique.
        first_seq_id = int(time.time() * 1e6)
        for record in await self._store.samplers.list_open():
            sampler = self._samplers[record.sampler_id] = Sampler(record, record.adapter_id, first_seq_id)
            if record.is_ephemeral and not self._weights.files.has(record.adapter_id):
                sampler.adapter_id = None
            self._weights.hold_of(sampler)
        await self._weights.files.remove_all_but({sampler.adapter_id for sampler in self._samplers.values()})

    @property
    def is_busy(self) -> bool:
        return any(sampler.running_jobs for sampler in self._samplers.values())

    # Creation

    async def create(self, tenant: Tenant, request: CreateSamplingSessionRequest) -> str:
        """Creates a sampler and returns its id. Idempotent per session and sampling_session_seq_id. Raises
        RequestError: the request is wrong, or its number belongs to a different sampler."""
        await self._sessions.require_open(tenant, request.session_id)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        if sampler_id not in self._samplers:
            await self._share_creation(sampler_id, lambda: self._create(tenant, sampler_id, request))
        if (sampler := self._samplers.get(sampler_id)) is not None:  # None: its session has ended meanwhile
            _check_same(sampler.record, request)
        return sampler_id

    async def create_ephemeral(self, run: RunRecord, request: SaveWeightsForSamplerRequest, seq_id: int) -> str:
        """Creates a sampler with the run's current weights and returns its id, made from the save's `seq_id` if the
        request names no sampling_session_seq_id. Raises OperationError."""
        sampler_id = f"{run.session_id}:sample:{request.sampling_session_seq_id}"
        if request.sampling_session_seq_id is None or sampler_id in self._samplers:
            sampler_id = f"{run.session_id}:sample:{run.run_id.rpartition(':')[2]}-{seq_id}"
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
        await self._save_weights(run.run_id, adapter_id)
        if sampler_id not in self._samplers:  # present: the save is a retry after a crash
            await self._add(record)
        for sampler in self._samplers.values():
            if sampler.record.adapter_id == adapter_id:  # all inflight samplers of a run share one adapter
                sampler.adapter_id = adapter_id
                self._weights.hold_of(sampler)
        return sampler_id

    async def _save_weights(self, run_id: str, adapter_id: str) -> None:
        """Takes the weights; if the workers refuse them, deletes the files unless other samplers use the adapter."""
        try:
            await self._weights.save_from_run(run_id, adapter_id)
        except WorkerLost:
            raise
        except OperationError:
            if all(sampler.record.adapter_id != adapter_id for sampler in self._samplers.values()):
                await self._weights.files.remove(adapter_id)
            raise

    async def _share_creation(self, key: str | _OneShotKey, create: Callable[[], Coroutine[None, None, str]]) -> str:
        """Returns the result of `create`, which concurrent callers with the same key share."""
        if key not in self._creating:
            self._creating[key] = asyncio.create_task(create())
            self._creating[key].add_done_callback(lambda _: self._creating.pop(key))
        return await asyncio.shield(self._creating[key])

    async def _create(self, tenant: Tenant, sampler_id: str, request: CreateSamplingSessionRequest) -> str:
        base_model = await self._base_model(tenant, request.base_model, request.model_path)
        draft = await self._drafts.find(tenant.id, request.draft_path, base_model) if request.draft_path else None
        record = SamplerRecord(
            sampler_id=sampler_id,
            session_id=request.session_id,
            tenant_id=tenant.id,
            base_model=base_model,
            created_at=time.time(),
            kind="checkpoint" if request.model_path else "base",
            model_path=request.model_path,
            draft_path=draft and draft.tinker_path,
        )
        await self._add(record)
        return sampler_id

    async def _add(self, record: SamplerRecord) -> None:
        """Adds the sampler to the store and to the open ones."""
        # A retry may find the row, if the database committed it but its answer was lost.
        if await self._store.samplers.get(record.sampler_id) is None:
            await self._store.samplers.insert(record)
        sampler = self._samplers[record.sampler_id] = Sampler(record, record.adapter_id)
        self._weights.hold_of(sampler)
        if not self._sessions.is_open(record.session_id):  # it ended meanwhile
            await self.end_session(record.session_id)

    async def _base_model(self, tenant: Tenant, base_model: str | None, model_path: str | None) -> str:
        if model_path:
            checkpoint = await self._checkpoints.resolve(tenant, model_path)
            if checkpoint.role != "policy":
                raise RequestError(f"{checkpoint.tinker_path} was saved by a {checkpoint.role}, which cannot sample")
            base_model = base_model_of(checkpoint, base_model)
        if base_model is None:
            raise RequestError("a sampling session needs base_model or model_path: send one of them")
        require_served(self._dispatch, base_model)
        return base_model

    async def _one_shot(self, tenant: Tenant, base_model: str | None, model_path: str | None) -> str:
        """Returns the sampler that all requests of a tenant share that name these weights instead of a sampler; its
        session ends when it is idle."""
        weights = _OneShotKey(tenant.id, await self._base_model(tenant, base_model, model_path), model_path)
        if weights not in self._one_shots:
            creating = self._share_creation(weights, lambda: self._create_one_shot(tenant, weights))
            self._one_shots[weights] = await creating
        return self._one_shots[weights]

    async def _create_one_shot(self, tenant: Tenant, weights: _OneShotKey) -> str:
        session = await self._sessions.create(tenant, CreateSessionRequest(sdk_version=__version__), None)
        own = {"session_id": session.session_id, "sampling_session_seq_id": 0}
        create = CreateSamplingSessionRequest(**own, base_model=weights.base_model, model_path=weights.model_path)
        return await self.create(tenant, create)

    # Lookup

    def find(self, sampler_id: str) -> Sampler | None:
        """Returns the sampler, of any tenant, if its session is open."""
        return self._samplers.get(sampler_id)

    async def find_by_name(self, tenant: Tenant, name: str) -> Sampler:
        """Returns a sampler by a base model's name, a checkpoint's path or a sampling session's id. Raises
        RequestError: 400 if the path is malformed, else like `get`, and 410 if the weights are lost."""
        if name.startswith("tinker://"):
            sampler_id = await self._one_shot(tenant, None, name)
        elif name in self._dispatch.models:
            sampler_id = await self._one_shot(tenant, name, None)
        else:
            sampler_id = name
        return self._require_usable(await self.get(tenant, sampler_id))

    def live_of(self, tenant: Tenant) -> list[SamplerRecord]:
        """Returns the tenant's samplers of runs in training, the newest first."""
        records = [one.record for one in self._samplers.values() if one.record.tenant_id == tenant.id]
        return sorted((one for one in records if one.is_ephemeral), key=lambda one: -one.created_at)

    async def get(self, tenant: Tenant, sampler_id: str) -> Sampler:
        """Returns the tenant's sampler. Raises RequestError: 404 if it is unknown or another tenant's, 410 if its
        session has ended."""
        if (sampler := self._samplers.get(sampler_id)) is None:
            record = await self._store.samplers.get(sampler_id)
            if record is not None and record.tenant_id == tenant.id:
                raise RequestError(f"the session of sampler {sampler_id} has ended: create a new one", 410)
        elif sampler.record.tenant_id == tenant.id:
            return sampler
        raise RequestError(f"no sampler {sampler_id} exists: create one with create_sampling_session", 404)

    async def find_requested(self, tenant: Tenant, request: SampleRequest) -> Sampler:
        """Returns the sampler that a sampling request addresses. Raises RequestError: see `get`; 400 if the request
        names neither a sampler nor weights."""
        if not (sampler_id := request.sampling_session_id):
            if request.base_model is None and request.model_path is None:
                raise RequestError("sampling_session_id is missing: send it, or base_model, or model_path")
            if (seq_id := request.seq_id) is not None:
                raise RequestError(f"seq_id {seq_id} without sampling_session_id: leave seq_id out, or send both")
            sampler_id = await self._one_shot(tenant, request.base_model, request.model_path)
        return self._require_usable(await self.get(tenant, sampler_id))

    def _require_usable(self, sampler: Sampler) -> Sampler:
        """Records that the session is in use; returns the sampler. Raises RequestError 410 if its weights are lost."""
        self._sessions.touch(sampler.record.session_id)
        if sampler.record.is_ephemeral and sampler.adapter_id is None:
            raise RequestError(
                f"the weights of sampler {sampler.record.sampler_id} were lost when the server restarted: "
                "save_weights_for_sampler again, or sample a named checkpoint",
                410,
            )
        return sampler

    # End

    async def end_session(self, session_id: str) -> None:
        """Ends the session's samplers; their requests fail. The workers drop their adapters in the background."""
        ended = [one for one in self._samplers.values() if one.record.session_id == session_id]
        for sampler in ended:
            del self._samplers[sampler.record.sampler_id]
            sampler.has_ended = True
            self._drafts.release_of(sampler)
            self._completions.forget(sampler.record.sampler_id)
            for request_id in sampler.running_jobs:
                self._dispatch.cancel(request_id)
            self._weights.release_of(sampler)
        self._one_shots = {weights: one for weights, one in self._one_shots.items() if one in self._samplers}


def _check_same(known: SamplerRecord, request: CreateSamplingSessionRequest) -> None:
    """Raises RequestError if the request has the number of an existing sampler but describes a different one."""
    requested = (request.base_model or known.base_model, _full(request.model_path), _full(request.draft_path))
    if not known.is_ephemeral and requested == (known.base_model, _full(known.model_path), _full(known.draft_path)):
        return
    # 400 and not 409, because clients retry after a 409.
    what = f"of {known.model_path or known.base_model}"
    if known.is_ephemeral:
        what = f"with the weights that run {known.run_id} had"
    elif known.draft_path:
        what += f" with draft_path {known.draft_path}"
    raise RequestError(
        f"sampling_session_seq_id {request.sampling_session_seq_id} of session {known.session_id} was a sampler {what},"
        " this is another sampler: is another process sampling in this session? Nothing was created: create a session"
        " in each process, or give a new sampler the next number"
    )


def _full(path: str | None) -> str | None:
    return full_path(path) if path else None
