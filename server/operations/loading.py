"""Operations that load checkpoints: creation of a run and load_weights; and which checkpoints fit which models."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from ...schemas.checkpoints import LoadWeightsResponse
from ...schemas.errors import OperationError, RequestError
from ...schemas.models import (
    CreateModelResponse,
    DraftConfig,
    ExpertFactors,
    FullConfig,
    LoraConfig,
    Role,
    draft_of,
)
from ...workers.protocol.calls import RunInfo, RunSpec
from ..checkpoints.checkpoint_paths import full_path
from ..checkpoints.checkpoints import hiding_directory_as
from ..http.bodies import Body
from ..journal.futures import Result
from ..journal.journal import Header
from ..journal.strikes import PoisonOperation
from ..store import CheckpointRecord, RunRecord
from .context import OperationContext
from .operation import Operation, json_result
from .pinned_checkpoints import Part

logger = logging.getLogger(__name__)

FindCheckpoint = Callable[[str], Awaitable[CheckpointRecord]]

_TRAININGS = {LoraConfig: "a LoRA adapter", FullConfig: "a full model", DraftConfig: "a draft model"}
_WHY_APART = {"critic": "critics have a different head", "draft": "drafts have a different network"}


@dataclass(eq=False)
class CreateRun(Operation):
    """A run's first operation, always seq_id 0.

    target_path: the checkpoint that is the target of a draft model.
    expert_factors: of an adapter whose request leaves them open.
    """

    kind = "create_model"
    changes_state = True
    changes_record = True
    sets_target = True
    target_path: str | None = None
    expert_factors: ExpertFactors | None = None

    @classmethod
    def of(cls, request: Any, header: Header | None = None) -> Self:
        assert header is not None, "created otherwise by Runs"
        created = cls(header.target_path, header.expert_factors)
        created.drawn = header.drawn
        return created

    def __post_init__(self) -> None:
        self.loads_files = self.target_path is not None

    def header(self, run: RunRecord, body: Body) -> Header:
        header = super().header(run, body)
        return replace(header, target_path=self.target_path, expert_factors=self.expert_factors)

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        await context.dispatch.drop_run(run.run_id)  # left by an earlier try that the database could not store
        info = await self._create(context, run, is_replay=False)
        if info.warning is not None:
            logger.warning("%s of %s: %s", run.run_id, run.base_model, info.warning)
        if await context.store.runs.get(run.run_id) is None:  # it may have been inserted before a crash
            await context.store.runs.insert(replace(run, training=info.training))
        return self._response(run, info)

    async def replay(self, context: OperationContext, run: RunRecord) -> None:
        await self._create(context, run, is_replay=True)

    async def undo(self, context: OperationContext, run: RunRecord, error: Exception) -> None:
        # It may exist without its checkpoint, and use memory until its session ends; a crash has dropped it.
        if not isinstance(error, PoisonOperation):
            await context.dispatch.drop_run(run.run_id)

    async def _create(self, context: OperationContext, run: RunRecord, *, is_replay: bool) -> RunInfo:
        tenant = await context.store.tenants.get(run.tenant_id)
        assert tenant is not None
        # Access to weights is granted by tenant name, possibly before the tenant exists.
        spec = RunSpec(run.run_id, run.training, run.role, is_new=self._is_new(is_replay))
        info = await context.dispatch.create_run(run.base_model, spec, tenant.name)
        await self._load(context, run, is_replay)
        if self.target_path is not None:
            await load_target(context, run, 0, self.target_path, context.find_checkpoint, is_replay=is_replay)
        context.infos[run.run_id] = info
        return info

    def _is_new(self, is_replay: bool) -> bool:
        """True if the workers initialise the weights."""
        return not is_replay

    async def _load(self, context: OperationContext, run: RunRecord, is_replay: bool) -> None:
        """Loads the checkpoint from which the run starts."""

    def _response(self, run: RunRecord, info: RunInfo) -> Result:
        response = CreateModelResponse(
            model_id=run.run_id,
            adapted=info.num_adapted,
            not_adapted=info.num_not_adapted,
            warning=info.warning,
            draft=draft_of(info.training),
            target_path=self.target_path,
        )
        return json_result(response)


@dataclass(eq=False)
class CreateRunFromCheckpoint(CreateRun):
    """optimizer: whether to load the optimizer state too."""

    kind = "create_model_from_checkpoint"
    path: str = field(kw_only=True)
    optimizer: bool = False

    @classmethod
    def of(cls, request: Any, header: Header | None = None) -> Self:
        assert header is not None, "created otherwise by Runs"
        return cls(header.target_path, path=request.path, optimizer=request.optimizer)

    def __post_init__(self) -> None:
        self.loads_files = True

    def _is_new(self, is_replay: bool) -> bool:
        return False

    async def _load(self, context: OperationContext, run: RunRecord, is_replay: bool) -> None:
        find = context.find_checkpoint
        await _load_weights(context, run, 0, self.path, self.optimizer, find, is_replay=is_replay)

    def _response(self, run: RunRecord, info: RunInfo) -> Result:
        return json_result(LoadWeightsResponse(path=full_path(self.path), model_id=run.run_id))


@dataclass(eq=False)
class LoadWeights(Operation):
    """Replaces the weights of a live run, and replaces or clears the optimizer state; pending gradients are dropped.

    reader: id of another tenant on whose behalf the checkpoint may be read.
    """

    kind = "load_weights"
    changes_state = True
    clears_gradients = True
    path: str
    optimizer: bool
    reader: str | None = None

    @classmethod
    def of(cls, request: Any, header: Header | None = None) -> Self:
        return cls(request.path, request.optimizer, None if header is None else header.reader)

    def __post_init__(self) -> None:
        self.loads_files = True

    def header(self, run: RunRecord, body: Body) -> Header:
        return replace(super().header(run, body), reader=self.reader)

    async def perform(self, context: OperationContext, run: RunRecord) -> Result:
        find = partial(context.checkpoints.resolve_for, readers={run.tenant_id, self.reader})
        await _load_weights(context, run, self.seq_id, self.path, self.optimizer, find, is_replay=False)
        return json_result(LoadWeightsResponse(path=self.path, model_id=run.run_id))

    async def replay(self, context: OperationContext, run: RunRecord) -> None:
        find = context.find_checkpoint
        await _load_weights(context, run, self.seq_id, self.path, self.optimizer, find, is_replay=True)


async def _load_weights(
    context: OperationContext,
    run: RunRecord,
    seq_id: int,
    path: str,
    optimizer: bool,
    find: FindCheckpoint,
    *,
    is_replay: bool,
) -> None:
    """Loads the checkpoint that `find` returns, or on a replay, the version that was pinned the first time."""

    async def checked() -> CheckpointRecord:
        checkpoint = await find(path)
        check_loadable(run, checkpoint, optimizer)
        return checkpoint

    directory = await _pinned_directory(context, run, seq_id, "weights", checked, is_replay=is_replay)
    with hiding_directory_as(full_path(path), directory):
        await context.dispatch.load_run(run.run_id, directory, optimizer)
    await context.features.release_holds_before(run, seq_id, were_used=False)


async def load_target(
    context: OperationContext, run: RunRecord, seq_id: int, path: str | None, find: FindCheckpoint, *, is_replay: bool
) -> None:
    """Sets the draft's target to a checkpoint, found like in `_load_weights`, or without a path to the base model."""
    if path is None:
        await context.dispatch.set_target(run.run_id, None)
        return

    async def checked() -> CheckpointRecord:
        checkpoint = await find(path)
        check_target(checkpoint, run.base_model)
        return checkpoint

    directory = await _pinned_directory(context, run, seq_id, "target", checked, is_replay=is_replay)
    with hiding_directory_as(full_path(path), directory):
        await context.dispatch.set_target(run.run_id, directory)


async def _pinned_directory(
    context: OperationContext,
    run: RunRecord,
    seq_id: int,
    part: Part,
    find: Callable[[], Awaitable[CheckpointRecord]],
    *,
    is_replay: bool,
) -> Path:
    """Returns the directory of the checkpoint pinned for this operation; if there is none, pins what `find` returns."""
    try:
        directory = await context.pinned_checkpoints.find(run.run_id, seq_id, part)
    except ValueError as error:
        if is_replay:
            logger.error("a checkpoint that %s has loaded is damaged: %s", run.run_id, error)
            raise OperationError(
                "the loaded checkpoint is damaged on the server's disk: see the server's log", "server"
            ) from None
        directory = None  # pinned by a try that was never answered
    if directory is not None:
        return directory
    async with context.checkpoints.reading(await find()) as files:
        return await context.pinned_checkpoints.pin(run.run_id, seq_id, files, part)


def check_role(checkpoint: CheckpointRecord, role: Role) -> None:
    """Raises RequestError if the checkpoint's weights do not fit a model of this role."""
    if not _same_weights(checkpoint.role, role):
        apart = checkpoint.role if checkpoint.role in _WHY_APART else role
        raise RequestError(
            f"{checkpoint.tinker_path} was saved by a {checkpoint.role}: no {role} can be created from it, since "
            f"{_WHY_APART[apart]}"
        )


def check_loadable(run: RunRecord, checkpoint: CheckpointRecord, optimizer: bool) -> None:
    """Raises OperationError if the checkpoint cannot be loaded into the run."""
    if checkpoint.base_model != run.base_model:
        raise OperationError(
            f"{checkpoint.tinker_path} was trained on {checkpoint.base_model}, run {run.run_id} on "
            f"{run.base_model}: load it into a run of the same base model"
        )
    if not _same_weights(checkpoint.role, run.role):
        raise OperationError(
            f"{checkpoint.tinker_path} was saved by a {checkpoint.role}, and run {run.run_id} is a {run.role}: "
            f"load it into a {checkpoint.role}"
        )
    if run.role != "reference" and type(run.training) is not type(checkpoint.training):
        theirs, ours = (_TRAININGS[type(each)] for each in (checkpoint.training, run.training))
        raise OperationError(
            f"{checkpoint.tinker_path} is of {theirs}, and run {run.run_id} is {ours}: create a model from it "
            "(create_training_client_from_state)"
        )
    if optimizer and not checkpoint.has_optimizer:
        raise OperationError(
            f"{checkpoint.tinker_path} has no optimizer state: load its weights alone (load_state(path), in JSON "
            '"optimizer": false), or load a checkpoint that save_state wrote'
        )


def check_target(checkpoint: CheckpointRecord, base_model: str) -> None:
    """Raises RequestError if the checkpoint cannot be the target of a draft model of this base model."""
    if checkpoint.role != "policy":
        raise RequestError(
            f"{checkpoint.tinker_path} was saved by a {checkpoint.role}: the target of a draft must be a policy's "
            "checkpoint"
        )
    if checkpoint.base_model != base_model:
        raise RequestError(
            f"{checkpoint.tinker_path} was trained on {checkpoint.base_model}, and the draft is of {base_model}: its "
            "target must be a checkpoint of the same base model"
        )


def _same_weights(one: Role, other: Role) -> bool:
    """A reference has a policy's weights, but is not trained."""
    return one == other or {one, other} == {"policy", "reference"}
