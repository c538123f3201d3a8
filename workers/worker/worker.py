"""Implements one rank as a plain synchronous class with one method per verb. Knows no requests.

All ranks of a base model receive the same calls in the same order.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...schemas.errors import OperationError
from ...schemas.models import FullConfig, LoraConfig, Utilization
from ..checkpoint import read_new_model
from ..checkpoint.peft_import import import_adapter
from ..lora import Adapter
from ..models.loading import resolve_device, unique_name
from ..parallel.mesh import LOOPBACK, Mesh, Rendezvous, connect, own_host
from ..protocol.calls import (
    AdapterFile,
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
from ..protocol.plugins import plugin_rows
from ..protocol.shared_fs import SharedFileProbe
from ..protocol.worker_config import WorkerConfig
from ..registry.model_registry import ModelRegistry
from ..registry.programs import program_of
from ..sampler.multi_model import MultiModelSampler
from ..sampler.shared_state import SharedState
from ..state.trainable import Trainable
from ..state.vectors import FORWARD_VECTORS
from ..training.pass_runner import PassRunner
from .agreement import RankAgreement
from .loading import check_loaded, load_rank, prepared
from .rank_memory import RankMemory
from .rank_models import RankModels
from .run_files import RunFiles
from .snapshot_writer import SnapshotWriter
from .step_runner import StepRunner


class Worker:
    """Holds the models of runs and samplers, which share one base model or replace its weights by full weights.

    Failures of items are returned; a method for one run raises OperationError.
    """

    def __init__(self, config: WorkerConfig) -> None:
        """Loads the base model, unless there are several ranks: these `open_rendezvous` first.

        Raises ValueError as `load`.
        """
        config = self._config = prepared(config)
        self._name = config.model.name
        self._rendezvous: Rendezvous | None = None
        if config.parallel.num_ranks == 1:
            self._load(Mesh())

    def __getattr__(self, verb: str) -> Any:
        """Returns a verb that a plugin adds."""
        try:
            return vars(self)["_verbs"][verb]
        except KeyError:
            raise AttributeError(f"this worker has no {verb}") from None

    def open_rendezvous(self) -> str | None:
        """Returns the address at which the first rank waits for the others; None on the other ranks."""
        if self._config.rank > 0:
            return None
        host = LOOPBACK if self._config.is_local else own_host()
        self._rendezvous = Rendezvous.open(host, self._config.hang_seconds)
        return self._rendezvous.address

    def load(self, address: str) -> None:
        """Loads the base model after all ranks have met at the address.

        Raises:
            ValueError: the model cannot be served.
        """
        config = self._config
        rendezvous = self._rendezvous or Rendezvous.join(address, config.hang_seconds)
        connect(rendezvous, config.parallel, config.rank, resolve_device(config), config.hang_seconds)
        self._load(Mesh(config.parallel, config.rank))

    def reset(self) -> None:
        """Resets the rank to the state just after loading; waits for snapshots that are being written."""
        self._sampler.forget_all()
        self._memory.forget_cache()
        for model_id in self._models:
            self.drop_run(model_id)
        self._files.wait()

    def check_shared(self, probe: SharedFileProbe) -> str | None:
        """Returns why this rank does not share the probe's directory; None if it does."""
        return probe.find_problem()

    def _load(self, mesh: Mesh) -> None:
        loaded = load_rank(self._config, mesh)
        config, base, models = loaded.config, loaded.base, loaded.models
        self._mesh, self._base, self._limits, self._models = mesh, base, loaded.limits, models
        self._micro_batch_tokens, self._speed = config.micro_batch_tokens, loaded.speed
        self._num_teams = len(mesh.spec.rank_groups(("ep", "tp")))
        self._passes = PassRunner(base, models, self._limits, config, mesh, self._speed, loaded.exclusive_tokens)
        check_loaded(base, mesh, self._passes.scoring.bare_hidden_states)
        self._steps = StepRunner(models, mesh, config.adapter_slots)
        self._sampler = MultiModelSampler(SharedState(base, models, self._limits, config, mesh))
        agreement = self._agreement = RankAgreement(mesh)
        self._memory = RankMemory(base, models.residency, self._sampler, agreement.on_all, config.page_directory)
        self._rank_models = RankModels(models, self._memory, agreement)
        rows = plugin_rows("workers.drafts.rows", "VERBS").values()
        plugins = [make(models, self._rank_models, self._passes, mesh) for make in rows]
        self._verbs = {verb: getattr(plugin, verb) for plugin in plugins for verb in plugin.verbs}
        after_load = [plugin.after_load for plugin in plugins]
        writer = SnapshotWriter(base.device, self._name)
        self._files = RunFiles(models, self._rank_models, self._passes, mesh, agreement, writer, after_load)

    def info(self) -> ModelInfo:
        return ModelInfo(
            name=self._name,
            architecture=type(self._base.model).__name__,
            dtype=str(self._base.dtype).removeprefix("torch."),
            device=str(self._base.device),
            vocab_size=self._limits.vocab_size,
            max_context_length=self._limits.max_context_length,
            num_parameters=self._base.weights.num_parameters,
            eos_token_ids=self._base.loaded.eos_token_ids,
            micro_batch_tokens=self._micro_batch_tokens,
            config_eos_token_ids=self._base.loaded.config_eos_token_ids,
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
        model = self._rank_models.put(
            spec.run_id, partial(self._models.build_initialized, spec.training, program_of(spec.role, spec.training))
        )
        model.base_name = spec.base_name
        return self._models.describe(model)

    def drop_run(self, run_id: str) -> None:
        """Drops the run; ignores unknown ones."""
        self._passes.forget(run_id)
        if self._models.is_shared(run_id):  # samplers keep using its weights
            self._models.get(run_id).gradients.clear_window()
            self._models.get(run_id).clear_optimizer()
        self._models.drop(run_id)

    def run_pass(self, parts: Pass) -> tuple[PartAnswer, ...]:
        if self._memory.offloaded:
            self._memory.ensure_base()
        return self._passes.run_pass(parts)

    def apply_steps(self, steps: tuple[OptimizerStep, ...]) -> tuple[dict[str, float] | Failure, ...]:
        """Applies optimizer steps in chunks of at most as many runs as there are adapter slots; runs with full weights
        go alone.
        """
        for step in steps:
            if step.refusal_reason is not None:
                self._passes.forget(step.run_id)
        return self._steps.apply(steps)

    def clear_gradients(self, run_id: str) -> None:
        self._passes.forget(run_id)
        with self._rank_models.resident(run_id, FORWARD_VECTORS) as model:
            model.gradients.clear_window()

    def save_run(self, run_id: str, directory: str, optimizer: bool) -> None:
        """Writes the run as of its last optimizer step into an existing empty directory; pending gradients stay."""
        self._files.save(run_id, Path(directory), optimizer)

    def begin_snapshot(self, snapshot_id: int, run_id: str, directory: str, contents: SavedContents = "all") -> None:
        """Begins to write the run as it is now into an existing empty directory; see `ended_snapshots`.

        Contents other than "all" are as of the last optimizer step. Pending gradients stay.
        """
        self._files.begin(snapshot_id, run_id, Path(directory), contents)

    def ended_snapshots(self) -> dict[int, Failure | None]:
        """Returns the snapshots that have ended on all ranks since the last call: None if the files are written."""
        return self._files.take_ended()

    def load_run(self, run_id: str, directory: str, optimizer: bool) -> None:
        """Replaces the run's state by the checkpoint's; pending gradients are those of a snapshot, or none.

        Raises:
            OperationError: the checkpoint does not fit; the run is unchanged. A run that is not trained takes on a
                saved model of any shape.
        """
        self._files.load(run_id, Path(directory), optimizer)

    def copy_adapter(self, run_id: str, adapter_id: str) -> None:
        """Copies the run's current weights for a sampler, overwriting the same id. See WorkerConfig.full_sampling."""
        self._rank_models.check_samples(run_id)
        if self._config.full_sampling == "inflight" and self._models.is_exclusive(run_id):
            self._models.share(run_id, adapter_id)
            return
        self._rank_models.put(adapter_id, partial(self._models.copy_weights, run_id), is_copy=True)

    def load_adapter(self, adapter_id: str, directory: str) -> None:
        """Loads the weights of a checkpoint for a sampler. A sampler that shares a run's live weights keeps these."""
        if self._models.is_shared(adapter_id):
            return
        self._rank_models.put(adapter_id, partial(read_new_model, self._models, Path(directory)), is_copy=True)

    def drop_adapter(self, adapter_id: str) -> None:
        self._models.drop(adapter_id)

    def export_adapter(self, run_id: str) -> AdapterWeights | None:
        """Returns the run's current weights, for other workers of this base model.

        Full weights are gathered on the first rank only; the other ranks return None.
        """
        self._rank_models.check_samples(run_id)
        with self._rank_models.resident(run_id, FORWARD_VECTORS) as model:
            return exported_weights(model, self._mesh)

    def read_adapter(self, directory: str) -> AdapterWeights | None:
        """Returns a checkpoint's weights like `export_adapter`, without keeping them."""
        model = self._rank_models.build(partial(read_new_model, self._models, Path(directory)))
        return exported_weights(model, self._mesh)

    def import_adapter(self, adapter_id: str, exported: AdapterWeights) -> None:
        """Stores exported weights; the same id and shape is overwritten in place, and its samples continue with the new
        weights.

        Full weights are overwritten without an intermediate copy.
        """
        is_full = isinstance(exported.training, FullConfig)
        if is_full and self._models.is_overwritten(adapter_id, exported.training):
            with self._rank_models.resident(adapter_id, FORWARD_VECTORS) as model:
                overwrite_weights(model, exported)
            return
        self._rank_models.put(adapter_id, partial(import_weights, self._models, exported), is_copy=True)

    def convert_adapter(
        self, source: AdapterFile, lora: LoraConfig, directory: str, base_name: str | None = None
    ) -> LoraConfig:
        """Converts an adapter of peft into a checkpoint in an existing empty directory; returns what it adapts.

        Args:
            base_name: see RunSpec.
        """

        def write() -> LoraConfig:
            if not self._mesh.is_first:
                return lora
            return import_adapter(self._models.lora, lora, source, Path(directory), base_name or self._name)

        return self._agreement.on_all(write)

    def sample_slice(self, work: SamplingSlice) -> SliceResult:
        try:
            self._memory.ensure_all()
        except OperationError:
            # The caller fails all jobs.
            self._sampler.forget_all()
            self._memory.forget_cache()
            raise
        started = time.perf_counter()
        result = self._sampler.slice(work)
        # Teams of ranks sample different jobs; this one stands for all.
        if flops := self._sampler.take_flops() * self._num_teams:
            self._speed.record("sampling", flops, time.perf_counter() - started)
        return result

    def memory(self) -> dict[str, int]:
        return self._memory.by_purpose()

    def utilization(self) -> Utilization:
        return self._speed.utilization()

    def offload(self) -> float:
        """Offloads the rank from its device until a verb needs it; see RankMemory.offload.

        Returns:
            the seconds that moving has taken since the previous call.
        """
        return self._memory.offload()

    def device_name(self) -> str:
        """Returns a name of this rank's device that is unique over all machines."""
        return unique_name(self._base.device)


def exported_weights(model: Trainable, mesh: Mesh) -> AdapterWeights | None:
    """Returns the model's weights as a whole: an adapter's on all ranks, full weights on the first only (else None)."""
    layout = model.layout
    put_together = layout.whole_vector if isinstance(model, Adapter) else layout.whole_on_first
    whole = put_together(model.weights, mesh)
    return None if whole is None else AdapterWeights(model.training, whole.cpu().numpy())


def import_weights(models: ModelRegistry, exported: AdapterWeights) -> Trainable:
    """Builds a model of the exported weights."""
    model = models.build(exported.training)
    overwrite_weights(model, exported)
    return model


def overwrite_weights(model: Trainable, exported: AdapterWeights) -> None:
    """Replaces the model's weights in place by exported ones of the same shape."""
    whole = model.layout.unsharded.named_views(torch.from_numpy(exported.weights))
    model.layout.copy_parts(model.weights, whole)
