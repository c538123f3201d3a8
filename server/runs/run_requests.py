"""Requests for new runs: what a request, or the journal's entry of an accepted one, asks for."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
)
from ...schemas.schedules import CHECKPOINTS_KEY, NO_SCHEDULES, CheckpointSchedule, RunSchedules
from ..config.base_model_lookup import base_model_of, require_served
from ..http.digests import content_of
from ..http.verbs import HAS_DRAFTS
from ..journal.journal import EntryLocation, draw_seed
from ..journal.request_decoding import decode_entry
from ..operations.loading import CreateRun, CreateRunFromCheckpoint, check_role, check_target
from ..store import CheckpointRecord, RunRecord, string_metadata
from ..tenants.auth import Tenant
from .run_state import RunServices

_LORA_SEED, _FULL_SEED, _DRAFT_SEED = "lora_seed", "full_seed", "draft_seed"
"""Names of the seeds that are drawn if a request has none."""
_SEEDS = {LoraConfig: _LORA_SEED, FullConfig: _FULL_SEED, DraftConfig: _DRAFT_SEED}


@dataclass(frozen=True)
class RequestedRun:
    """A run that may not exist yet, and the operation that creates it."""

    record: RunRecord
    creation: CreateRun


class RunRequests:
    """Reads requests for new runs."""

    def __init__(self, services: RunServices) -> None:
        self._services = services
        self._dispatch, self._checkpoints = services.context.dispatch, services.context.checkpoints

    async def of_model(self, tenant: Tenant, request: CreateModelRequest) -> RequestedRun:
        """Raises RequestError if the request is invalid."""
        _check_optimizer(request.optimizer_config)
        require_served(self._dispatch, request.base_model)
        training = _requested_training(request)
        if isinstance(training, LoraConfig) and training.rank > (most := self._services.config.models.max_lora_rank):
            raise RequestError(
                f"rank {training.rank} exceeds max_lora_rank {most}: lower the rank or start the server "
                f"with --max-lora-rank {training.rank}"
            )
        await self._services.context.sessions.require_open(tenant, request.session_id)
        target_path = await self._target(tenant, request)
        is_open = isinstance(training, LoraConfig) and training.expert_factors is None
        creation = CreateRun(target_path, "shared" if is_open else None)
        creation.drawn = {} if training.seed is not None else {_SEEDS[type(training)]: draw_seed()}
        accepted = _accepted_training(request, creation.drawn, creation.expert_factors)
        model = _RequestedModel(request.base_model, accepted, request.model_role, target_path)
        return RequestedRun(_record(tenant, request.session_id, request.model_seq_id, model, request), creation)

    async def of_checkpoint(self, tenant: Tenant, request: LoadWeightsRequest) -> RequestedRun:
        """Returns a run with the checkpoint's base model, training config and weights. Raises RequestError."""
        if request.session_id is None or request.model_seq_id is None:
            raise RequestError(
                "load_weights needs model_id (and seq_id) of a live model, or session_id and model_seq_id of a new one"
            )
        _check_optimizer(request.optimizer_config or OptimizerConfig())
        await self._services.context.sessions.require_open(tenant, request.session_id)
        checkpoint = await self._checkpoints.resolve(tenant, request.path, request.weights_access_token)
        base_model = base_model_of(checkpoint, request.base_model)
        require_served(self._dispatch, base_model)
        target_path = await self._target_of_saved_draft(tenant, checkpoint)
        model = _RequestedModel(base_model, checkpoint.training, _role_from(checkpoint, request), target_path)
        creation = CreateRunFromCheckpoint(target_path, path=checkpoint.tinker_path, optimizer=request.optimizer)
        return RequestedRun(_record(tenant, request.session_id, request.model_seq_id, model, request), creation)

    async def journaled(self, entries: Sequence[EntryLocation]) -> RunRecord | None:
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
    if not HAS_DRAFTS:
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
