"""What each operation of a run does when its turn has come. Their order, and what a failure means for the next ones,
is Run's; the reasons for failing are the dispatch's, the checkpoints' and the recordings'.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel

from ..schemas.checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from ..schemas.codec import encode_forward_backward_output
from ..schemas.errors import OperationError
from ..schemas.models import CreateModelResponse
from ..schemas.training import AdamParams, ForwardBackwardRequest, OptimStepRequest, OptimStepResponse
from ..workers.dispatch import WorkerDispatch
from ..workers.verbs import RunInfo, RunSpec, Step
from .auth import Tenant
from .bodies import Received
from .checkpoints import Checkpoints
from .futures import Result
from .journaled import Request
from .recordings import Recordings
from .samplers import Samplers
from .store import CheckpointKind, CheckpointRecord, RunRecord, Store


@dataclass(frozen=True)
class CreateRun:
    """Always a run's first operation, seq_id 0. checkpoint: what it starts from; optimizer: its state, too."""

    checkpoint: CheckpointRecord | None = None
    optimizer: bool = False


Operation = CreateRun | Request


def kind_of(operation: Operation) -> str:
    match operation:
        case CreateRun():
            return "create_model" if operation.checkpoint is None else "create_model_from_checkpoint"
        case ForwardBackwardRequest():
            return "forward" if operation.forward_only else "forward_backward"
        case _:
            return operation.type


@dataclass(frozen=True)
class Size:
    """num_bytes: that it holds in memory until it is done. num_tokens: that are to be trained or scored."""

    num_bytes: int
    num_tokens: int = 0


def size_of(operation: Operation, received: Received) -> Size:
    if not isinstance(operation, ForwardBackwardRequest):
        return Size(len(received.body))
    num_tokens = sum(len(datum.tokens) for datum in operation.data)
    arrays = (array for datum in operation.data for array in datum.loss_fn_inputs.values())
    num_bytes = sum(array.nbytes for array in arrays) + 4 * num_tokens
    return Size(max(num_bytes, len(received.body)), num_tokens)


def is_chained(operation: Operation) -> bool:
    """Whether it can be handed to the dispatch, which keeps a run's order, before what comes before it is done.

    stable_reinforce reads what earlier samples recorded first.
    """
    if isinstance(operation, ForwardBackwardRequest):
        return operation.loss_fn != "stable_reinforce"
    return isinstance(operation, OptimStepRequest)


class Operations:
    """infos: of the live runs."""

    def __init__(
        self,
        dispatch: WorkerDispatch,
        store: Store,
        checkpoints: Checkpoints,
        samplers: Samplers,
        recordings: Recordings,
    ) -> None:
        self._dispatch = dispatch
        self._store = store
        self._checkpoints = checkpoints
        self._samplers = samplers
        self._recordings = recordings
        self.infos: dict[str, RunInfo] = {}

    async def perform(self, run: RunRecord, operation: Operation, seq_id: int) -> Result:
        """The same seq_id again = once more after a crash, which may have come when all but the answer was done.

        Raises OperationError, or RequestError where the reason is one of access.
        """
        match operation:
            case CreateRun():
                return await self._create(run, operation)
            case ForwardBackwardRequest():
                return await self._forward_backward(run, replace(operation, seq_id=seq_id))
            case OptimStepRequest():
                return await self._optim_step(run, operation, seq_id)
            case SaveWeightsRequest():
                return await self._save_weights(run, operation, run.request_id(seq_id))
            case SaveWeightsForSamplerRequest():
                return await self._save_for_sampler(run, operation, seq_id)
            case SaveWeightsExternalRequest():
                return await self._save_external(run, operation, run.request_id(seq_id))
            case LoadWeightsRequest():
                return await self._load_weights(run, operation)

    async def repeat(self, run: RunRecord, operation: Operation, seq_id: int) -> None:
        """As `perform`, for a run that is made again: who could read a checkpoint then need not be able to now."""
        if not isinstance(operation, LoadWeightsRequest):
            await self.perform(run, operation, seq_id)
            return
        checkpoint = await self._checkpoints.known(operation.path)
        if checkpoint is None:
            raise OperationError(f"checkpoint {operation.path}, which was loaded then, is gone")
        await self._load(run, checkpoint, operation.optimizer)

    async def clear_gradients(self, run: RunRecord) -> None:
        await self._dispatch.clear_gradients(run.run_id)

    async def drop(self, run: RunRecord) -> None:
        """At the end of its session. Raises OperationError."""
        # Its last operation may have made one more.
        await self._samplers.end_session(run.session_id)
        self.infos.pop(run.run_id, None)
        await self._dispatch.drop_run(run.run_id)

    async def make(self, run: RunRecord, operation: CreateRun) -> None:
        """In the workers, as it is created. Raises OperationError."""
        tenant = await self._store.get_tenant(run.tenant_id)
        assert tenant is not None
        # Weights are given by name, to tenants who may come later.
        info = await self._dispatch.create_run(run.base_model, RunSpec(run.run_id, run.lora), tenant.name)
        if operation.checkpoint is not None:
            await self._load(run, operation.checkpoint, operation.optimizer)
        self.infos[run.run_id] = info

    async def discard(self, run: RunRecord) -> None:
        """What the workers may still have of it. Raises OperationError."""
        await self._dispatch.drop_run(run.run_id)

    async def restore(self, run: RunRecord, snapshot: Path) -> None:
        """Of a run that has been made. Raises OperationError."""
        await self._dispatch.load_run(run.run_id, snapshot, optimizer=True)

    async def snapshot(self, run: RunRecord, directory: Path) -> None:
        """The state behind what was handed over before, into an empty directory. Raises OperationError."""
        await self._dispatch.snapshot_run(run.run_id, directory)

    async def _create(self, run: RunRecord, operation: CreateRun) -> Result:
        await self.discard(run)  # of an earlier try, for which the database had no room
        await self.make(run, operation)
        if await self._store.get_run(run.run_id) is None:  # else it was there before a crash
            await self._store.insert_run(run)
        if operation.checkpoint is not None:
            return _json(LoadWeightsResponse(path=operation.checkpoint.tinker_path, model_id=run.run_id))
        return _json(CreateModelResponse(model_id=run.run_id))

    async def _forward_backward(self, run: RunRecord, operation: ForwardBackwardRequest) -> Result:
        if operation.loss_fn == "stable_reinforce":
            operation = await self._recordings.fill_in(run.tenant_id, operation)
        output = await self._dispatch.forward_backward(operation)
        return Result(encode_forward_backward_output(output), "forward_backward")

    async def _optim_step(self, run: RunRecord, operation: OptimStepRequest, seq_id: int) -> Result:
        if operation.optimizer_params is not None:
            raise OperationError(
                f"optimizer {operation.optimizer_params.get('type')!r} is not supported: send adam_params (AdamW)"
            )
        params = operation.adam_params or AdamParams()
        metrics = await self._dispatch.optim_step(Step(run.run_id, params, operation.gradient_scale, seq_id=seq_id))
        return _json(OptimStepResponse(metrics=metrics))

    async def _save_weights(self, run: RunRecord, operation: SaveWeightsRequest, request_id: str) -> Result:
        """The state after the last optimizer step; gradients that wait for the next one stay where they are."""
        path = await self._save(run, "weights", operation.path, request_id, operation, operation.overwrite)
        return _json(SaveWeightsResponse(path=path))

    async def _save_for_sampler(self, run: RunRecord, operation: SaveWeightsForSamplerRequest, seq_id: int) -> Result:
        if operation.path is None:
            sampler_id = await self._samplers.create_ephemeral(run, operation, seq_id)
            return _json(SaveWeightsForSamplerResponse(sampling_session_id=sampler_id))
        path = await self._save(run, "sampler_weights", operation.path, run.request_id(seq_id), operation)
        return _json(SaveWeightsForSamplerResponse(path=path))

    async def _save_external(self, run: RunRecord, operation: SaveWeightsExternalRequest, request_id: str) -> Result:
        """PEFT files, to be downloaded through the checkpoint's external_weights_urls."""
        if operation.age_encryption_recipients:
            raise OperationError(
                "age_encryption_recipients is not supported: leave it out, and encrypt what was downloaded"
            )
        path = await self._save(run, "external_weights", operation.path, request_id, operation)
        saved = await self._checkpoints.resolve(Tenant(run.tenant_id, ""), path)
        return _json(SaveWeightsExternalResponse(path=path, size_bytes=saved.size_bytes))

    async def _save(
        self,
        run: RunRecord,
        kind: CheckpointKind,
        name: str,
        request_id: str,
        operation: SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest,
        overwrite: bool = False,
    ) -> str:
        """Publishes a checkpoint, unless this very request has; returns its path. Only `weights` have the optimizer."""
        if not await self._checkpoints.was_saved(run, kind, name, request_id):
            optimizer = kind == "weights"
            metadata = None if isinstance(operation, SaveWeightsExternalRequest) else operation.user_metadata
            async with self._checkpoints.writing(
                run,
                kind,
                name,
                overwrite,
                operation.ttl_seconds,
                metadata,
                has_optimizer=optimizer,
                request_id=request_id,
            ) as staging:
                await self._dispatch.save_run(run.run_id, staging, optimizer=optimizer)
        return f"tinker://{run.run_id}/{kind}/{name}"

    async def _load_weights(self, run: RunRecord, operation: LoadWeightsRequest) -> Result:
        """Replaces the weights and replaces or clears the optimizer's state; gradients that wait are dropped."""
        checkpoint = await self._checkpoints.resolve(
            Tenant(run.tenant_id, ""), operation.path, operation.weights_access_token
        )
        await self._load(run, checkpoint, operation.optimizer)
        return _json(LoadWeightsResponse(path=operation.path, model_id=run.run_id))

    async def _load(self, run: RunRecord, checkpoint: CheckpointRecord, optimizer: bool) -> None:
        if checkpoint.base_model != run.base_model:
            raise OperationError(
                f"{checkpoint.tinker_path} was trained on {checkpoint.base_model}, run {run.run_id} on "
                f"{run.base_model}: load it into a run of its own base model"
            )
        if optimizer and not checkpoint.has_optimizer:
            raise OperationError(
                f"{checkpoint.tinker_path} has no optimizer state: load it with optimizer=false, or load a checkpoint "
                "that save_state wrote"
            )
        async with self._checkpoints.reading(checkpoint) as directory:
            await self._dispatch.load_run(run.run_id, directory, optimizer)


def _json(response: BaseModel) -> Result:
    return Result(response.model_dump_json(exclude_none=True).encode())
