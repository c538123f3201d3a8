"""Operations: performs a run's operations through the dispatch, the checkpoints and the recordings.

Run decides on their order, and what a failure means for the operations after it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from ...schemas.checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from ...schemas.codec import encode_forward_backward_output
from ...schemas.drafts import BuildVocabMapRequest, CaptureRequest, SetTargetRequest, SetTargetResponse
from ...schemas.errors import OperationError, RequestError
from ...schemas.models import CreateModelRequest, CreateModelResponse, draft_of
from ...schemas.sampling import SampleRequest
from ...schemas.training import (
    AdamParams,
    Datum,
    FeatureLocation,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    OptimStepRequest,
    OptimStepResponse,
)
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.calls import OptimizerStep, RunInfo, RunSpec, WorkerLost
from ..checkpoints.checkpoint_paths import full_path
from ..checkpoints.checkpoints import Checkpoints, hiding_directory_as
from ..checkpoints.encryption import encrypt_files, parse_recipients
from ..features.feature_store import FEATURES, FeatureStore, check_captures, with_capture_layers
from ..files.wal import RecordPosition
from ..http.bodies import LARGE_BYTES, ReceivedBody
from ..journal.futures import Result
from ..journal.journal import Journal
from ..journal.recordings import Recordings
from ..journal.request_decoding import Request, decode_entry
from ..journal.seeds import with_drawn_seeds
from ..logs.repeated_errors import refusing_full_disk
from ..sampling.samplers import Samplers
from ..store import CheckpointKind, CheckpointRecord, RunRecord, Store
from ..tenants.auth import Tenant
from ..tenants.sessions import Sessions
from .compatibility import check_loadable, check_target
from .pinned_checkpoints import Part, PinnedCheckpoints
from .replay_log import Outcome
from .vocabulary import build_vocabulary

logger = logging.getLogger(__name__)

Find = Callable[[], Awaitable[CheckpointRecord]]


@dataclass(frozen=True)
class CreateRun:
    """A run's first operation, always seq_id 0.

    path: the checkpoint it starts from. optimizer: whether to load the optimizer state too. target_path: the checkpoint
    that is the target of a draft model.
    """

    path: str | None = None
    optimizer: bool = False
    target_path: str | None = None


@dataclass(frozen=True)
class LoadWeights:
    """Replaces the weights of a live run; reader: id of another tenant on whose behalf the checkpoint may be read."""

    path: str
    optimizer: bool
    reader: str | None = None


Operation = CreateRun | LoadWeights | Request


async def read_operation(journal: Journal, place: RecordPosition) -> Operation:
    """Returns the operation as it was accepted.

    Raises:
        OSError, ValueError: the entry cannot be read.
        RequestError: this version would not accept the operation.
    """
    entry = await journal.read(place)
    header = entry.header
    match await decode_entry(entry):
        case CreateModelRequest():
            return CreateRun(target_path=header.target_path)
        case LoadWeightsRequest(path=path, optimizer=optimizer) if header.kind == "load_weights":
            return LoadWeights(path, optimizer, header.reader)
        case LoadWeightsRequest(path=path, optimizer=optimizer):
            return CreateRun(path, optimizer, header.target_path)
        case ForwardBackwardRequest() as request:
            return replace(with_drawn_seeds(request, header.drawn), has_room=header.feature_bytes is not None)
        case SampleRequest():
            raise ValueError(f"the journal's entry at {place} is a sampling request")
        case request:
            return request


async def read_for_replay(journal: Journal, place: RecordPosition, outcome: Outcome | None) -> Operation:
    """Returns the operation as a rebuild must run it. Raises like `read_operation`.

    Args:
        outcome: how it ended the first time, None if that is not known.
    """
    operation = await read_operation(journal, place)
    if isinstance(operation, ForwardBackwardRequest) and outcome is Outcome.DONE:
        # The references to what it captured were already returned. An operation that failed must fail again.
        return replace(operation, capture_for=None)
    return operation


def kind_of(operation: Operation) -> str:
    match operation:
        case CreateRun():
            return "create_model" if operation.path is None else "create_model_from_checkpoint"
        case LoadWeights():
            return "load_weights"
        case ForwardBackwardRequest():
            return "forward" if operation.forward_only else "forward_backward"
        case _:
            return operation.type


def loads_files(operation: Operation) -> bool:
    """True if it loads a checkpoint's files, which are pinned until snapshots cover the load."""
    match operation:
        case CreateRun():
            return operation.path is not None or operation.target_path is not None
        case LoadWeights() | SetTargetRequest():
            return operation.path is not None
        case _:
            return False


@dataclass(frozen=True)
class OperationSize:
    """num_bytes: held in memory until the operation is done. num_tokens: to be trained on or scored."""

    num_bytes: int
    num_tokens: int = 0


def size_of(operation: Operation, received: ReceivedBody) -> OperationSize:
    if isinstance(operation, CaptureRequest):
        return OperationSize(len(received.body), sum(len(each.tokens) for each in operation.data))
    if not isinstance(operation, ForwardBackwardRequest):
        return OperationSize(len(received.body))
    num_tokens = sum(len(datum.tokens) for datum in operation.data)
    arrays = (array for datum in operation.data for array in datum.loss_fn_inputs.values())
    num_bytes = sum(array.nbytes for array in arrays) + 4 * num_tokens
    return OperationSize(max(num_bytes, len(received.body)), num_tokens)


def has_room(operation: Operation) -> bool:
    """True if there is space for what the operation captures, or it captures nothing."""
    return not isinstance(operation, ForwardBackwardRequest) or operation.has_room


def is_chained(operation: Operation) -> bool:
    """True if the operation can be handed to the dispatch before the run's earlier operations are done.

    The dispatch keeps a run's order. stable_reinforce first reads what earlier samples recorded, and capture_for waits
    for space, so these are not chained.
    """
    if isinstance(operation, ForwardBackwardRequest):
        return operation.loss_fn != "stable_reinforce" and operation.capture_for is None
    return isinstance(operation, OptimStepRequest)


class Operations:
    """Performs operations of all runs; `infos` holds what the workers report about the live ones."""

    def __init__(
        self,
        dispatch: WorkerDispatch,
        store: Store,
        sessions: Sessions,
        checkpoints: Checkpoints,
        samplers: Samplers,
        recordings: Recordings,
        loaded: PinnedCheckpoints,
        features: FeatureStore,
    ) -> None:
        self._dispatch = dispatch
        self._store = store
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._samplers = samplers
        self._recordings = recordings
        self._loaded = loaded
        self._features = features
        self.infos: dict[str, RunInfo] = {}

    async def perform(self, run: RunRecord, operation: Operation, seq_id: int) -> Result:
        """Performs the operation and returns its result.

        A repeated seq_id is a retry after a crash, which may have happened when everything but the response was done.

        Raises:
            OperationError: the operation failed.
            RequestError: access was denied.
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
            case LoadWeights():
                return await self._load_weights(run, operation, seq_id)
            case SetTargetRequest():
                return await self._set_target(run, operation, seq_id)
            case BuildVocabMapRequest():
                return await self._build_vocab_map(run, operation, seq_id)
            case CaptureRequest():
                return await self._capture(run, operation, seq_id)

    async def replay(self, run: RunRecord, operation: Operation, seq_id: int) -> None:
        """Like `perform`, but while rebuilding a lost run: skips the access check, which passed the first time.

        Args:
            operation: as returned by `read_for_replay`.
        """
        match operation:
            case LoadWeights(path=path):
                await self._load(run, operation, seq_id, partial(self._known, path), again=True)
            case SetTargetRequest(path=path):
                await self._apply_target(run, path, seq_id, self._known, again=True)
            case _:
                await self.perform(run, operation, seq_id)

    async def stored_record(self, run: RunRecord) -> RunRecord:
        """Returns the record of a created run as the store has it, with the defaults that the workers filled in."""
        stored = await self._store.runs.get(run.run_id)
        assert stored is not None
        return replace(run, training=stored.training, target_path=stored.target_path)

    async def share(self, run: RunRecord, adapter_id: str) -> None:
        """Copies the run's weights to a sampler on the workers. Raises OperationError."""
        await self._dispatch.copy_adapter(run.run_id, adapter_id)

    async def clear_gradients(self, run: RunRecord, seq_id: int) -> None:
        """Clears the gradients of the operations before this seq_id."""
        await self._dispatch.clear_gradients(run.run_id)
        await self._features.release_holds_before(run, seq_id, were_used=False)

    async def drop(self, run: RunRecord) -> None:
        """Drops the run from the workers at the end of its session. Raises OperationError."""
        # The run's last operation may have created one more sampler.
        await self._samplers.end_session(run.session_id)
        self.infos.pop(run.run_id, None)
        await self._features.end_run(run)
        await self._dispatch.drop_run(run.run_id)

    async def create_in_workers(self, run: RunRecord, operation: CreateRun, *, is_rebuild: bool) -> RunInfo:
        """Creates the run in the workers, for the first time or (again) to rebuild it. Raises OperationError."""
        tenant = await self._store.tenants.get(run.tenant_id)
        assert tenant is not None
        # Access to weights is granted by tenant name, possibly before the tenant exists.
        spec = RunSpec(run.run_id, run.training, run.role, is_new=not is_rebuild and operation.path is None)
        info = await self._dispatch.create_run(run.base_model, spec, tenant.name)
        if operation.path is not None:
            await self._load(run, operation, 0, partial(self._known, operation.path), again=is_rebuild)
        if operation.target_path is not None:
            await self._apply_target(run, operation.target_path, 0, self._known, again=is_rebuild)
        self.infos[run.run_id] = info
        return info

    async def discard(self, run: RunRecord) -> None:
        """Drops what the workers may still have of the run. Raises OperationError."""
        await self._dispatch.drop_run(run.run_id)

    async def restore(self, run: RunRecord, snapshot: Path) -> None:
        """Loads a snapshot into a run that has been created. Raises OperationError."""
        with hiding_directory_as(f"snapshot {snapshot.name}", snapshot):
            await self._dispatch.load_run(run.run_id, snapshot, optimizer=True)

    async def snapshot(self, run: RunRecord, directory: Path) -> None:
        """Writes the state after the operations handed over so far into an empty directory. Raises OperationError."""
        await self._dispatch.snapshot_run(run.run_id, directory)

    async def _create(self, run: RunRecord, operation: CreateRun) -> Result:
        await self.discard(run)  # left by an earlier try that the database could not store
        try:
            info = await self.create_in_workers(run, operation, is_rebuild=False)
        except WorkerLost:
            raise
        except (OperationError, RequestError):
            await self.discard(run)  # it may exist without its checkpoint, and use memory until its session ends
            raise
        if await self._store.runs.get(run.run_id) is None:  # it may have been inserted before a crash
            await self._store.runs.insert(replace(run, training=info.training))
        if operation.path is not None:
            return _json(LoadWeightsResponse(path=full_path(operation.path), model_id=run.run_id))
        draft = draft_of(info.training)
        answer = CreateModelResponse(
            model_id=run.run_id,
            adapted=info.num_adapted,
            not_adapted=info.num_not_adapted,
            draft=draft,
            target_path=operation.target_path,
        )
        return _json(answer)

    async def _forward_backward(self, run: RunRecord, operation: ForwardBackwardRequest) -> Result:
        if operation.loss_fn == "stable_reinforce":
            operation = await self._recordings.fill_in(run.tenant_id, operation)
        try:
            told = self._features.with_feature_place(run, operation)
            if operation.capture_for is None:
                output = await self._dispatch.forward_backward(told)
            else:
                output = await self._capture_during_pass(run, told, operation.capture_for)
        except WorkerLost:
            raise
        except OperationError:
            await self._features.release_hold(run, operation.seq_id)
            raise
        if operation.forward_only:
            await self._features.release_hold(run, operation.seq_id)
        arrays = (array for datum in output.loss_fn_outputs for array in datum.values())
        if sum(array.nbytes for array in arrays) < LARGE_BYTES:
            return Result(encode_forward_backward_output(output), "forward_backward")
        return Result(await asyncio.to_thread(encode_forward_backward_output, output), "forward_backward")

    async def _capture_during_pass(
        self, run: RunRecord, operation: ForwardBackwardRequest, draft_id: str
    ) -> ForwardBackwardOutput:
        """Runs a policy's pass and captures features for one use by the draft.

        Data whose features found no space, or could not be stored, have no reference; the policy's training is the
        same.
        """
        draft = await self._store.runs.get(draft_id)
        check_captures(run, draft, draft_id)
        assert draft is not None
        self._check_live(draft)
        if not operation.has_room:
            return await self._uncaptured(operation)
        async with AsyncExitStack() as held:
            try:
                place = with_capture_layers(await self._capturing(run, held), draft)
            except OperationError as error:
                logger.error("run %s captures nothing for %s: %s", run.run_id, draft_id, error)
                return await self._uncaptured(operation)
            output = await self._dispatch.forward_backward(replace(operation, features=place))
            kept = tuple(each for each in output.loss_fn_outputs if FEATURES in each)
            request_id = f"{run.run_id}:{operation.seq_id}"
            try:
                found = await self._features.keep(draft, request_id, replace(output, loss_fn_outputs=kept), uses=1)
            except OSError as error:
                logger.error("run %s captures nothing for %s: %s", run.run_id, draft_id, error)
                found = None
        if found is not None and not self._sessions.is_open(draft.session_id):  # it may have ended during the pass
            await self._features.release(draft, found.feature_refs)
            found = None
        # If some features have already disappeared, no references are returned.
        refs = iter(found.feature_refs if found is not None else [None] * len(kept))
        told = [{name: each for name, each in one.items() if name != FEATURES} for one in output.loss_fn_outputs]
        of_each = tuple(next(refs) if FEATURES in one else None for one in output.loss_fn_outputs)
        return replace(output, loss_fn_outputs=tuple(told), feature_refs=of_each)

    async def _uncaptured(self, operation: ForwardBackwardRequest) -> ForwardBackwardOutput:
        output = await self._dispatch.forward_backward(replace(operation, capture_for=None))
        return replace(output, feature_refs=(None,) * len(operation.data))

    def _check_live(self, draft: RunRecord) -> None:
        """Raises OperationError if the draft's session has ended."""
        if not self._sessions.is_open(draft.session_id):
            raise OperationError(
                f"draft {draft.run_id}, named by capture_for, has ended with its session: create one, and name its"
                " model_id"
            )

    async def _optim_step(self, run: RunRecord, operation: OptimStepRequest, seq_id: int) -> Result:
        if operation.optimizer_params is not None:
            raise OperationError(
                f"optimizer {operation.optimizer_params.get('type')!r} is not supported: send adam_params (AdamW)"
            )
        params = operation.adam_params or AdamParams()
        try:
            metrics = await self._dispatch.optim_step(
                OptimizerStep(run.run_id, params, operation.gradient_scale, seq_id=seq_id)
            )
        except WorkerLost:
            raise
        except OperationError as error:
            if error.category == "user":  # the gradients are cleared
                await self._features.release_holds_before(run, seq_id, were_used=False)
            raise
        await self._features.release_holds_before(run, seq_id, were_used=True)
        return _json(OptimStepResponse(metrics=metrics))

    async def _save_weights(self, run: RunRecord, operation: SaveWeightsRequest, request_id: str) -> Result:
        """Saves the state after the last optimizer step; pending gradients stay pending."""
        path = await self._save(run, "weights", operation.path, request_id, operation, operation.overwrite)
        return _json(SaveWeightsResponse(path=path))

    async def _save_for_sampler(self, run: RunRecord, operation: SaveWeightsForSamplerRequest, seq_id: int) -> Result:
        if run.role not in ("policy", "draft"):
            raise OperationError(f"a {run.role} cannot be sampled: sample from a policy")
        if run.role == "draft" and operation.path is None:
            raise OperationError("a draft cannot be sampled by itself: give a path under which its weights are saved")
        if operation.path is None:
            sampler_id = await self._samplers.create_ephemeral(run, operation, seq_id)
            return _json(SaveWeightsForSamplerResponse(sampling_session_id=sampler_id))
        path = await self._save(run, "sampler_weights", operation.path, run.request_id(seq_id), operation)
        return _json(SaveWeightsForSamplerResponse(path=path))

    async def _save_external(self, run: RunRecord, operation: SaveWeightsExternalRequest, request_id: str) -> Result:
        """Saves PEFT files, or a full model's, for download through the checkpoint's external_weights_urls."""
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
        """Publishes a checkpoint, unless this request already has; returns its path.

        Only checkpoints of kind `weights` include the optimizer state.
        """
        if run.role == "reference":
            raise OperationError(
                "a reference cannot be saved: its weights are those of the checkpoint it was loaded from"
            )
        if not await self._checkpoints.was_saved(run, kind, name, request_id):
            optimizer = kind == "weights"
            is_export = isinstance(operation, SaveWeightsExternalRequest)
            recipients = parse_recipients(operation.age_encryption_recipients or ()) if is_export else ()
            metadata = None if is_export else operation.user_metadata
            writing = self._checkpoints.writing(
                run,
                kind,
                name,
                overwrite,
                operation.ttl_seconds,
                metadata,
                has_optimizer=optimizer,
                request_id=request_id,
            )
            with refusing_full_disk("the checkpoint was"):
                async with writing as staging:
                    await self._dispatch.save_run(run.run_id, staging, optimizer=optimizer)
                    await asyncio.to_thread(encrypt_files, staging, recipients)
        return f"tinker://{run.run_id}/{kind}/{name}"

    async def _load_weights(self, run: RunRecord, operation: LoadWeights, seq_id: int) -> Result:
        """Replaces the weights, and replaces or clears the optimizer state; pending gradients are dropped."""
        readers = {run.tenant_id, operation.reader}
        find = partial(self._checkpoints.resolve_for, operation.path, readers)
        await self._load(run, operation, seq_id, find, again=False)
        return _json(LoadWeightsResponse(path=operation.path, model_id=run.run_id))

    async def _known(self, path: str) -> CheckpointRecord:
        """Returns the checkpoint without an access check, for a tenant whose access was checked before."""
        checkpoint = await self._checkpoints.find(path)
        if checkpoint is None:
            raise OperationError(f"checkpoint {path} is gone")
        return checkpoint

    async def _load(
        self, run: RunRecord, operation: CreateRun | LoadWeights, seq_id: int, find: Find, *, again: bool
    ) -> None:
        """Loads the checkpoint that `find` returns, or if `again`, the version that was pinned the first time."""

        async def found() -> CheckpointRecord:
            checkpoint = await find()
            check_loadable(run, checkpoint, operation.optimizer)
            return checkpoint

        directory = await self._pinned_directory(run, seq_id, "weights", found, again=again)
        assert operation.path is not None
        with hiding_directory_as(full_path(operation.path), directory):
            await self._dispatch.load_run(run.run_id, directory, operation.optimizer)
        await self._features.release_holds_before(run, seq_id, were_used=False)

    async def _set_target(self, run: RunRecord, operation: SetTargetRequest, seq_id: int) -> Result:
        """Changes the target; pending gradients and the draft's weights stay as they are."""
        if run.role != "draft":
            raise OperationError(f"a {run.role} has no target: set_target is only for draft models")
        find = partial(self._checkpoints.resolve_for, readers={run.tenant_id})
        path = operation.path and full_path(operation.path)
        await self._apply_target(run, path, seq_id, find, again=False)
        await self._store.runs.set_target(run.run_id, path)
        return _json(SetTargetResponse(target_path=path))

    async def _apply_target(
        self,
        run: RunRecord,
        path: str | None,
        seq_id: int,
        find: Callable[[str], Awaitable[CheckpointRecord]],
        *,
        again: bool,
    ) -> None:
        """Sets the draft's target to a checkpoint, or to the bare base model if `path` is None; `again` as in
        `_load`.
        """
        if path is None:
            await self._dispatch.set_target(run.run_id, None)
            return

        async def found() -> CheckpointRecord:
            checkpoint = await find(path)
            check_target(checkpoint, run.base_model)
            return checkpoint

        directory = await self._pinned_directory(run, seq_id, "target", found, again=again)
        with hiding_directory_as(full_path(path), directory):
            await self._dispatch.set_target(run.run_id, directory)

    async def _build_vocab_map(self, run: RunRecord, operation: BuildVocabMapRequest, seq_id: int) -> Result:
        draft = draft_of(run.training)
        if draft is None:
            raise OperationError(f"a {run.role} uses the full vocabulary: build_vocab_map is only for draft models")
        vocab_size = self._dispatch.models[run.base_model].vocab_size
        size = draft.draft_vocab_size or vocab_size
        vocabulary = await asyncio.to_thread(build_vocabulary, operation, size, vocab_size)
        await self._dispatch.set_vocabulary(run.run_id, vocabulary.token_ids)
        await self._features.release_holds_before(run, seq_id, were_used=False)
        return _json(vocabulary.described())

    async def _capture(self, run: RunRecord, operation: CaptureRequest, seq_id: int) -> Result:
        """Runs a pass of the target alone; features that are already stored are not computed again."""
        if run.role != "draft":
            raise OperationError(f"a {run.role} has no target: capture is only for draft models")
        data = tuple(Datum(np.asarray(each.tokens, np.int32)) for each in operation.data)
        async with AsyncExitStack() as held:
            place = await self._capturing(run, held)
            request = ForwardBackwardRequest(
                run.run_id, seq_id, data, operation.type, forward_only=True, features=place
            )
            output = await self._dispatch.forward_backward(request)
            uses, seconds = operation.uses, operation.ttl_seconds
            kept = await self._features.keep(run, f"{run.run_id}:{seq_id}", output, uses, seconds)
            if kept is None:
                what = f"features have disappeared from {place.directory}: capture again"
                raise OperationError(what, "server")
        return _json(kept)

    async def _capturing(self, run: RunRecord, held: AsyncExitStack) -> FeatureLocation:
        """Enters FeatureStore.capturing until `held` is closed. Raises OperationError if features cannot be written."""
        try:
            return await held.enter_async_context(self._features.capturing(run.tenant_id))
        except OSError as error:
            raise OperationError(
                f"features cannot be written: {error}: make room on this disk, and see that the server may write there",
                "server",
            ) from None

    async def _pinned_directory(self, run: RunRecord, seq_id: int, part: Part, find: Find, *, again: bool) -> Path:
        """Returns the directory of the checkpoint pinned for this operation, pinning the one that `find` returns if
        necessary.

        Args:
            again: as in `_load`.
        """
        try:
            directory = await self._loaded.find(run.run_id, seq_id, part)
        except ValueError as error:
            if again:
                logger.error("a checkpoint that %s has loaded is damaged: %s", run.run_id, error)
                raise OperationError(
                    "the loaded checkpoint is damaged on the server's disk: see the server's log", "server"
                ) from None
            directory = None  # pinned by a try that was never answered
        if directory is not None:
            return directory
        async with self._checkpoints.reading(await find()) as files:
            return await self._loaded.pin(run.run_id, seq_id, files, part)


def _json(response: BaseModel) -> Result:
    return Result(response.model_dump_json(exclude_none=True).encode())
