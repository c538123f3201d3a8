"""Implements one rank as a plain synchronous class with one method per verb. Knows no requests.

All ranks of a base model receive the same calls in the same order.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors import SafetensorError

from ...schemas.errors import OperationError
from ...schemas.models import FullConfig, LoraConfig
from ..batch.validated import ModelLimits
from ..checkpoint import TrainedState, is_snapshot, read_draft, read_new_model, read_saved, save, target_directory
from ..checkpoint.peft_import import import_adapter
from ..drafts.draft_model import DraftModel
from ..drafts.groups import DraftGroups
from ..drafts.version import version_of_parts
from ..lora import Adapter, LoraLayers
from ..models.model import BaseModel, resolve_device, unique_name
from ..models.model_cache import with_local_model
from ..models.packing_checks import check_ranks
from ..ops.allocator import tune_allocator
from ..ops.memory import available_bytes, reporting_out_of_memory
from ..parallel.mesh import LOOPBACK, Mesh, Rendezvous, connect, own_host
from ..planner.footprint import gigabytes
from ..planner.layout_search import micro_batch_tokens
from ..planner.workload import Workload
from ..protocol.calls import (
    AdapterWeights,
    Failure,
    ModelInfo,
    OptimizerStep,
    PartAnswer,
    Pass,
    RunInfo,
    RunSpec,
    SamplingSlice,
    SavedContents,
    SliceResult,
)
from ..protocol.shared_fs import SharedFileProbe
from ..protocol.worker_config import DEFAULT_KV_CACHE_BYTES, DEFAULT_MICRO_BATCH_TOKENS, WorkerConfig
from ..registry.model_registry import KINDS, ModelRegistry, target_id
from ..registry.programs import program_of
from ..sampler import SAMPLERS
from ..shapes.model_shape import ModelShape, read_model
from ..state.optim import all_reduce_gradients, apply_steps, keep_on_first_rank, refuse_window
from ..state.residency import Residency
from ..state.trainable import Trainable
from ..state.vectors import FORWARD_VECTORS, STEP_VECTORS
from ..training.pass_runner import PassRunner
from .rank_memory import RankMemory
from .snapshot_writer import SnapshotWriter

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Memory that a loaded model leaves free on a GPU is split in three: KV cache, adapters, passes.
_MEMORY_SHARES = 3
_USUAL_RANK = 32


class Worker:
    """Holds the models of runs and samplers, which share one base model or replace its weights by full weights.

    Failures of items are returned; a method for one run raises OperationError.
    """

    def __init__(self, config: WorkerConfig) -> None:
        """Loads the base model, unless there are several ranks: these `open_rendezvous` first.

        Raises ValueError as `load`.
        """
        tune_allocator()
        # cuDNN plans attention for each new shape, about 30 ms each, and prompts and caches keep having new shapes.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
        config = self._config = with_local_model(config)
        self._name = config.model.name
        self._meeting: Rendezvous | None = None
        if config.parallel.num_ranks == 1:
            self._load(Mesh())

    def open_rendezvous(self) -> str | None:
        """Returns the address at which the first rank waits for the others; None on the other ranks."""
        if self._config.rank > 0:
            return None
        host = LOOPBACK if self._config.is_local else own_host()
        self._meeting = Rendezvous.open(host, self._config.hang_seconds)
        return self._meeting.address

    def load(self, address: str) -> None:
        """Loads the base model after all ranks have met at the address.

        Raises:
            ValueError: the model cannot be served.
        """
        config = self._config
        meeting = self._meeting or Rendezvous.join(address, config.hang_seconds)
        connect(meeting, config.parallel, config.rank, resolve_device(config), config.hang_seconds)
        self._load(Mesh(config.parallel, config.rank))

    def reset(self) -> None:
        """Resets the rank to the state just after loading; waits for snapshots that are being written."""
        self._sampler.forget_all()
        self._memory.forget_cache()
        for model_id in self._models:
            self.drop_run(model_id)
        self._snapshots.wait()
        self._ended_snapshots.clear()

    def check_shared(self, landmark: SharedFileProbe) -> str | None:
        """Returns why this rank does not share the landmark's directory; None if it does."""
        return landmark.find_problem()

    def _load(self, mesh: Mesh) -> None:
        config = self._config
        self._mesh = mesh
        self._base = _load(config, mesh)
        self._limits = _limits(self._base, config)
        lora = LoraLayers(self._base, config.max_lora_rank)
        config = replace(config, micro_batch_tokens=_micro_batch_tokens(config, self._base, mesh))
        config = _sized_for_device(config, self._base, lora, mesh)
        self._adapter_slots = config.adapter_slots
        slots = dict.fromkeys(KINDS, config.full_slots) | {Adapter.kind: config.adapter_slots}
        residency = Residency(self._base.device, slots, config.host_adapter_bytes, config.page_directory)
        groups = DraftGroups.of(mesh, self._base.config, config.draft_parallel)
        self._models = ModelRegistry(
            self._base, lora, residency, config.max_full_models, config.optimizer_states, groups
        )
        self._passes = PassRunner(self._base, self._models, self._limits, config, mesh)
        if mesh.has_forward_collectives:
            check_ranks(self._base.source, self._base.model, self._passes.scoring.bare_hidden_states)
        self._snapshots = SnapshotWriter(self._base.device, self._name)
        # Snapshot -> outcomes of the ranks that have ended it.
        self._ended_snapshots: dict[int, list[Failure | None]] = {}
        self._sampler = SAMPLERS["native"](self._base, self._models, self._limits, config, mesh)
        self._memory = RankMemory(self._base, residency, self._sampler, self._on_all, config.page_directory)

    def info(self) -> ModelInfo:
        return ModelInfo(
            name=self._name,
            architecture=type(self._base.model).__name__,
            dtype=str(self._base.dtype).removeprefix("torch."),
            device=str(self._base.device),
            vocab_size=self._limits.vocab_size,
            max_context_length=self._limits.max_context_length,
            num_parameters=self._base.num_parameters,
            eos_token_ids=self._base.eos_token_ids,
        )

    def create_run(self, spec: RunSpec) -> RunInfo:
        """Creates the run's model.

        Raises:
            OperationError: the LoRA rank is too high or nothing of the model would be trained; for a new run also if it
                names a group of layers that the model lacks.
        """
        if spec.run_id in self._models:
            raise OperationError(f"run {spec.run_id} exists already on this worker", "server")
        if spec.is_new and isinstance(spec.training, LoraConfig):
            self._models.lora.check_groups(spec.training)
        model = self._put(
            spec.run_id, partial(self._models.build_initialized, spec.training, program_of(spec.role, spec.training))
        )
        model.base_name = spec.base_name
        targets, others = (model.targets, model.not_adapted) if isinstance(model, Adapter) else ((), ())
        feature_bytes = model.feature_kind.token_bytes if isinstance(model, DraftModel) else 0
        names = tuple(target.name for target in targets)
        return RunInfo(model.layout.num_weights, names, model.training, feature_bytes, others)

    def drop_run(self, run_id: str) -> None:
        """Drops the run; ignores unknown ones."""
        self._passes.forget(run_id)
        if self._models.is_shared(run_id):  # samplers keep using its weights
            self._models.get(run_id).gradients.clear_window()
            self._models.get(run_id).clear_optimizer()
        self._models.drop(run_id)

    def run_pass(self, work: Pass) -> tuple[PartAnswer, ...]:
        self._memory.ensure_base()
        return self._passes.run_pass(work.parts)

    def apply_steps(self, steps: tuple[OptimizerStep, ...]) -> tuple[dict[str, float] | Failure, ...]:
        """Applies optimizer steps in chunks of at most as many runs as there are adapter slots; runs with full weights
        go alone.
        """
        for step in steps:
            if step.refusal_reason is not None:
                self._passes.forget(step.run_id)
        chunks = _chunks(steps, self._adapter_slots, self._models.is_exclusive)
        return tuple(answer for chunk in chunks for answer in self._apply_chunk(chunk))

    def clear_gradients(self, run_id: str) -> None:
        self._passes.forget(run_id)
        with self._resident(run_id, FORWARD_VECTORS) as model:
            model.gradients.clear_window()

    def save_run(self, run_id: str, directory: str, optimizer: bool) -> None:
        """Writes the run as of its last optimizer step into an existing empty directory; pending gradients stay."""
        with self._resident(run_id, STEP_VECTORS if optimizer else FORWARD_VECTORS) as model:
            learned = TrainedState.without_gradients(model, self._mesh, optimizer=optimizer)
            self._on_all(partial(save, learned, Path(directory), base_name=self._name))

    def begin_snapshot(self, snapshot_id: int, run_id: str, directory: str, contents: SavedContents = "all") -> None:
        """Begins to write the run as it is now into an existing empty directory; see `ended_snapshots`.

        Contents other than "all" are as of the last optimizer step. Pending gradients stay.
        """
        with self._resident(run_id, FORWARD_VECTORS if contents == "weights" else STEP_VECTORS) as model:
            if contents == "all" and model.gradients.window.num_operations:
                all_reduce_gradients([model], self._mesh)
            try:
                learned = _contents(model, contents, self._mesh)
                self._on_all(partial(self._snapshots.begin, snapshot_id, learned, Path(directory)))
            except Exception:
                self._snapshots.forget(snapshot_id)
                raise
            finally:
                if contents == "all":
                    # Keeps the sum over ranks unchanged.
                    keep_on_first_rank(model, self._mesh)

    def ended_snapshots(self) -> dict[int, Failure | None]:
        """Returns the snapshots that have ended on all ranks since the last call: None if the files are written."""
        for of_rank in self._mesh.all_gather_object(self._snapshots.take_ended()):
            for snapshot_id, failure in of_rank.items():
                self._ended_snapshots.setdefault(snapshot_id, []).append(failure)
        ended = [one for one, of_ranks in self._ended_snapshots.items() if len(of_ranks) == self._mesh.spec.num_ranks]
        return {one: next((each for each in self._ended_snapshots.pop(one) if each is not None), None) for one in ended}

    def load_run(self, run_id: str, directory: str, optimizer: bool) -> None:
        """Replaces the run's state by the checkpoint's; pending gradients are those of a snapshot, or none.

        Raises:
            OperationError: the checkpoint does not fit; the run is unchanged. A run that is not trained takes on a
                saved model of any shape.
        """
        self._check_run(run_id)
        before = self._models.get(run_id)
        if not (program := before.program).trains:
            is_copy = not self._models.is_exclusive(run_id)
            model = self._put(run_id, partial(read_new_model, self._models, Path(directory), program), is_copy)
            model.base_name = before.base_name
            self._passes.forget(run_id)
            return
        with self._resident(run_id) as model:
            saved = self._on_all(partial(read_saved, model, Path(directory), optimizer=optimizer))
            self._passes.forget(run_id)
            try:
                self._on_all(reporting_out_of_memory("the checkpoint", "try again")(partial(saved.load_into, model)))
            except Exception:
                model.gradients.window.refused = "its checkpoint was loaded only in part: load it again"
                raise
            keep_on_first_rank(model, self._mesh)
        if self._models.is_draft(run_id):
            if is_snapshot(Path(directory)):
                self.set_target(run_id, target_directory(Path(directory)))
            else:
                self._models.draft(run_id).has_loaded_weights = True

    def set_target(self, run_id: str, directory: str | Path | None) -> None:
        """Makes the draft predict the policy saved in `directory`; None means the bare base model."""
        self._check_draft(run_id)
        target = None if directory is None else self._build_on_all(partial(self._target_of, run_id, Path(directory)))
        versions = self._mesh.all_gather_object(self._models.version_of(target))
        self._models.set_target(run_id, target, version_of_parts(versions))
        self._passes.forget(run_id)

    def set_vocabulary(self, run_id: str, token_ids: np.ndarray) -> None:
        """Sets the tokens that a draft can propose, int64 ascending. Raises OperationError after its training has
        begun.
        """
        self._check_draft(run_id)
        self._passes.forget(run_id)
        with self._resident(run_id, FORWARD_VECTORS):
            self._models.draft(run_id).set_vocabulary(token_ids)

    def copy_adapter(self, run_id: str, adapter_id: str) -> None:
        """Copies the run's current weights for a sampler, overwriting the same id. See WorkerConfig.full_sampling."""
        self._check_samples(run_id)
        if self._config.full_sampling == "inflight" and self._models.is_exclusive(run_id):
            self._models.share(run_id, adapter_id)
            return
        self._put(adapter_id, partial(self._models.copy_weights, run_id), is_copy=True)

    def load_adapter(self, adapter_id: str, directory: str) -> None:
        """Loads the weights of a checkpoint for a sampler. A sampler that shares a run's live weights keeps these."""
        if self._models.is_shared(adapter_id):
            return
        self._put(adapter_id, partial(read_new_model, self._models, Path(directory)), is_copy=True)

    def load_draft(self, draft_id: str, directory: str) -> None:
        """Loads the weights of a draft checkpoint for speculative decoding; `drop_adapter` drops it."""
        self._put(draft_id, partial(read_draft, self._models, Path(directory)))

    def drop_adapter(self, adapter_id: str) -> None:
        """Drops the adapter or draft; ignores unknown ones."""
        self._models.drop(adapter_id)

    def export_adapter(self, run_id: str) -> AdapterWeights | None:
        """Returns the run's current weights, for other workers of this base model.

        Full weights are gathered on the first rank only; the other ranks return None.
        """
        self._check_samples(run_id)
        with self._resident(run_id, FORWARD_VECTORS) as model:
            return self._export(model)

    def read_adapter(self, directory: str) -> AdapterWeights | None:
        """Returns a checkpoint's weights like `export_adapter`, without keeping them."""
        return self._export(self._build_on_all(partial(read_new_model, self._models, Path(directory))))

    def import_adapter(self, adapter_id: str, exported: AdapterWeights) -> None:
        """Stores exported weights; the same id and shape is overwritten in place, and its samples continue with the new
        weights.

        Full weights are overwritten without an intermediate copy.
        """
        is_full = isinstance(exported.training, FullConfig)
        if is_full and self._models.is_overwritten(adapter_id, exported.training):
            with self._resident(adapter_id, FORWARD_VECTORS) as model:
                _overwrite(model, exported)
            return
        self._put(adapter_id, partial(self._import, exported), is_copy=True)

    def convert_adapter(
        self, source: str, lora: LoraConfig, directory: str, base_name: str | None = None
    ) -> LoraConfig:
        """Converts peft's adapter_model.safetensors into a checkpoint in an existing empty directory; returns what it
        adapts.

        Args:
            base_name: see RunSpec.
        """
        base_name = base_name or self._name
        wanted: list[LoraConfig] = []

        def write() -> None:
            wanted.append(import_adapter(self._models.lora, lora, Path(source), Path(directory), base_name))

        self._by_first(write)
        return wanted[0] if wanted else lora

    def sample_slice(self, work: SamplingSlice) -> SliceResult:
        try:
            self._memory.ensure_all()
        except OperationError:
            # The caller fails all jobs.
            self._sampler.forget_all()
            self._memory.forget_cache()
            raise
        return self._sampler.slice(work)

    def memory(self) -> dict[str, int]:
        """Returns RankMemory.by_purpose."""
        return self._memory.by_purpose()

    def offload(self) -> float:
        """Offloads the rank from its device until a verb needs it; see RankMemory.offload.

        Returns:
            the seconds that moving has taken since the previous call.
        """
        return self._memory.offload()

    def device_name(self) -> str:
        """Returns a name of this rank's device that is unique over all machines."""
        return unique_name(self._base.device)

    def _apply_chunk(self, steps: list[OptimizerStep]) -> list[dict[str, float] | Failure]:
        known = [step for step in steps if step.run_id in self._models]
        answers = dict(zip((step.run_id for step in known), self._apply_known(known), strict=True))
        return [answers.get(step.run_id, Failure(_unknown(step.run_id), "server")) for step in steps]

    def _apply_known(self, steps: list[OptimizerStep]) -> list[dict[str, float] | Failure]:
        with ExitStack() as held:
            failures = self._mesh.first_values([self._reload(step, held) for step in steps])
            for step, failure in zip(steps, failures, strict=True):
                if failure is not None:
                    refuse_window(self._models.get(step.run_id), step)
            coming = [step for step, failure in zip(steps, failures, strict=True) if failure is None]
            models = [self._models.get(step.run_id) for step in coming]
            applied = iter(apply_steps(models, coming, self._mesh))
            return [failure or next(applied) for failure in failures]

    def _reload(self, step: OptimizerStep, held: ExitStack) -> Failure | None:
        try:
            held.enter_context(self._models.resident([step.run_id]))
        except OperationError as error:
            return Failure.of(error)

    def _by_first(self, write: Callable[[], None]) -> None:
        self._on_all(write if self._mesh.is_first else _nothing)

    def _on_all(self, act: Callable[[], Result]) -> Result:
        """Runs `act` on this rank; if it fails on one rank, it fails on all.

        No rank continues to wait for one that failed, and none seems to have done what others have not.
        """
        done: list[Result] = []
        trouble: Exception | None = None
        try:
            done.append(act())
        except Exception as error:
            trouble = error
        [failure] = self._mesh.first_values([None if trouble is None else Failure.of(trouble)])
        if trouble is not None:
            raise trouble
        if failure is not None:
            raise failure.error()
        return done[0]

    def _put(self, model_id: str, make: Callable[[], Trainable], is_copy: bool = False) -> Trainable:
        """Stores a new model; see ModelRegistry.put. If a rank cannot build it, all keep what they had."""

        def make_with_room() -> Trainable:
            model = make()
            self._models.make_room(model_id, model, is_copy)
            return model

        return self._models.put(model_id, self._build_on_all(make_with_room))

    def _build_on_all(self, make: Callable[[], Trainable]) -> Trainable:
        """Builds the model on all ranks or on none."""
        self._memory.ensure_base()
        remedy = "try again when other runs have ended, or with a lower rank if it is an adapter"
        return self._on_all(reporting_out_of_memory("the model's weights", remedy)(make))

    def _import(self, exported: AdapterWeights) -> Trainable:
        model = self._models.build(exported.training)
        _overwrite(model, exported)
        return model

    def _export(self, model: Trainable) -> AdapterWeights | None:
        layout, is_adapter = model.layout, isinstance(model, Adapter)
        put_together = layout.whole_vector if is_adapter else layout.whole_on_first
        whole = put_together(model.weights, self._mesh)
        return None if whole is None else AdapterWeights(model.training, whole.cpu().numpy())

    @contextmanager
    def _resident(self, run_id: str, wanted: frozenset[str] = STEP_VECTORS) -> Iterator[Trainable]:
        self._check_run(run_id)
        with ExitStack() as held:
            (model,) = self._on_all(lambda: held.enter_context(self._models.resident([run_id], wanted)))
            yield model

    def _target_of(self, run_id: str, directory: Path) -> Trainable:
        target = read_new_model(self._models, directory)
        self._models.make_room(target_id(run_id), target, is_copy=True)
        return target

    def _check_draft(self, run_id: str) -> None:
        self._check_run(run_id)
        if not self._models.is_draft(run_id):
            role = self._models.get(run_id).program.role
            raise OperationError(f"run {run_id} is a {role}: only drafts have a target and their own vocabulary")

    def _check_samples(self, run_id: str) -> None:
        self._check_run(run_id)
        program = self._models.get(run_id).program
        if not program.samples:
            raise OperationError(f"a {program.role} cannot be sampled: sample from a policy")

    def _check_run(self, run_id: str) -> None:
        if run_id not in self._models:
            raise OperationError(_unknown(run_id), "server")


def _contents(model: Trainable, contents: SavedContents, mesh: Mesh) -> TrainedState:
    if contents == "all":
        return TrainedState.with_window(model, mesh)
    return TrainedState.without_gradients(model, mesh, optimizer=contents == "state")


def _overwrite(model: Trainable, exported: AdapterWeights) -> None:
    whole = model.layout.unsharded.named_views(torch.from_numpy(exported.weights))
    model.layout.copy_parts(model.weights, whole)


def _nothing() -> None:
    pass


def _unknown(run_id: str) -> str:
    return f"run {run_id} is not on this worker: create it or load its checkpoint"


def _chunks(
    steps: Sequence[OptimizerStep], most: int, is_alone: Callable[[str], bool]
) -> Iterator[list[OptimizerStep]]:
    """Yields chunks in order, none longer than `most` and none with a run twice; runs for which `is_alone` holds go
    alone.
    """
    chunk: dict[str, OptimizerStep] = {}
    for step in steps:
        if len(chunk) == most or step.run_id in chunk or (chunk and any(map(is_alone, (step.run_id, *chunk)))):
            yield list(chunk.values())
            chunk = {}
        chunk[step.run_id] = step
    if chunk:
        yield list(chunk.values())


def _load(config: WorkerConfig, mesh: Mesh) -> BaseModel:
    source = config.model.source
    if source.startswith(("/", ".")) and not Path(source).is_dir():
        raise ValueError(f"{source} is not a directory: give the model's directory or its hub id")
    try:
        return BaseModel(config, mesh)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{source} is not readable: {error}") from error


def _sized_for_device(config: WorkerConfig, base: BaseModel, lora: LoraLayers, mesh: Mesh) -> WorkerConfig:
    """Returns the config with a KV cache and adapter slots that fit the device, the same on all ranks."""
    if base.device.type != "cuda":
        return replace(config, kv_cache_bytes=config.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES)
    free, _ = torch.cuda.mem_get_info(base.device)
    share = min(mesh.all_gather_object(free)) // _MEMORY_SHARES
    slots = min(config.adapter_slots, share // max(lora.bytes_at_rank(_USUAL_RANK), 1))
    return replace(config, kv_cache_bytes=config.kv_cache_bytes or share, adapter_slots=max(slots, 1))


def _micro_batch_tokens(config: WorkerConfig, base: BaseModel, mesh: Mesh) -> int:
    """Returns the configured size or one that fits the rank with the least free memory; the same on all ranks."""
    shape = read_model(config.model)
    free = [each for each in mesh.all_gather_object(available_bytes(base.device)) if each is not None]
    if config.micro_batch_tokens or not free or not isinstance(shape, ModelShape):
        return config.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    # Ranks on the CPU share one memory.
    share = min(free) // (config.parallel.num_ranks if base.device.type == "cpu" and config.is_local else 1)
    load = Workload.of(
        config, DEFAULT_MICRO_BATCH_TOKENS, "float32" if base.dtype == torch.float32 else "bfloat16", samples=True
    )
    tokens = micro_batch_tokens(shape, config.parallel, load, share)
    if tokens < DEFAULT_MICRO_BATCH_TOKENS and config.rank == 0:
        logger.warning(
            "%s: micro-batches have at most %d tokens instead of %d: no more fit into a third of the %s that a rank has"
            " free (--micro-batch-tokens, --activations recompute)",
            *(config.model.name, tokens, DEFAULT_MICRO_BATCH_TOKENS, gigabytes(share)),
        )
    return tokens


def _limits(base: BaseModel, config: WorkerConfig) -> ModelLimits:
    longest, wanted = base.num_positions, config.max_context_length
    if longest is not None and wanted is not None and wanted > longest:
        raise ValueError(
            f"max_context_length {wanted} exceeds the {longest} positions of {config.model.name}: lower it"
        )
    length = wanted or longest
    if length is None:
        raise ValueError(f"the config of {config.model.name} gives no maximum context length: set --max-context-length")
    return ModelLimits(base.vocab_size, length)
