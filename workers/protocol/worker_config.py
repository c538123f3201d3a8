"""Holds the configuration that a rank needs to load and run a base model, and that a dispatch needs to run all ranks.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from ...schemas.models import DraftConfig
from .option import Devices, Duration, NotNegative, NotNegativeNumber, Positive, option
from .parallel_spec import SINGLE, ParallelSpec

Dtype = Literal["auto", "float32", "bfloat16"]
ZeroStage = Literal["3", "2"]
Quantization = Literal["none", "nf4", "released"]
OptimizerStateDtype = Literal["float32", "8bit"]
Training = Literal["lora", "full"]
TRAININGS: tuple[Training, ...] = ("lora", "full")

DEFAULT_KV_CACHE_BYTES = 1 << 30
"""Used when the config gives no size and the device gives no limit."""

DEFAULT_MICRO_BATCH_TOKENS = 4096
"""Tokens of a micro-batch; larger ones are no faster on a CPU."""

LEAST_PASS_TOKENS = 8192
"""Tokens of a pass where nothing sets more."""

DEFAULT_PREFILL_CHUNK_TOKENS, GPU_PREFILL_CHUNK_TOKENS = 512, 4096

WITH_RAY = ("pool", "ray")


def default_pass_tokens(micro_batch_tokens: int, spec: ParallelSpec, on_cpu: bool) -> int:
    """Returns the tokens of a pass that gives each data share of GPUs a whole micro-batch."""
    return LEAST_PASS_TOKENS if on_cpu else max(LEAST_PASS_TOKENS, micro_batch_tokens * spec.num_data_shares)


@dataclass(frozen=True)
class KeptWorkers:
    """Identifies the workers on Ray that outlive the servers of a state directory, and the server that wants them.

    id_file: a file of the state directory; the workers end when it no longer contains `state_id`.
    seconds: how long they stay without a server.
    server: drawn by each server whenever it begins its work.
    epoch: epoch of its lease; None for a server without one, which is the only one that uses the directory.
    """

    id_file: str
    state_id: str
    seconds: float
    server: str
    epoch: int | None = None

    @property
    def namespace(self) -> str:
        """The beginning of the Ray namespace of these workers. A copied state directory has another one."""
        return f"trainhouse-{hash_of(self.id_file, self.state_id)}"


def hash_of(*parts: str) -> str:
    return blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class DownloadOrigin:
    """Identifies the download of a base model: its URL and the version of the contents."""

    url: str
    version: str


@dataclass(frozen=True)
class ServedModel:
    """A base model to serve.

    name: the name that clients request. source: the local directory or hub id that it is loaded from.
    origin: set if the model was downloaded from a URL; `source` is then its copy on this machine.
    """

    name: str
    source: str
    origin: DownloadOrigin | None = None


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The base models: how they are held, and which models may be trained on them."""

    model_cache: Path | None = option(
        None, "directory for models downloaded from URLs (default: ~/.cache/trainhouse/models)", metavar="DIR"
    )
    dtype: Dtype = option("auto", "float32, bfloat16, auto (bfloat16 on CUDA)", metavar="TYPE", common=True)
    base_quantization: Quantization = option(
        "none", "frozen weights for LoRA: none, nf4 (4 bits), released (as in the files)", metavar="KIND"
    )
    """Quantized weights are dequantized for each product."""
    max_lora_rank: Positive = option(256, "largest LoRA rank that a run may request", common=True)
    max_context_length: Positive | None = option(None, "longest sequence, in tokens (default: the model's)")
    max_full_models: NotNegative = option(32, "most models with full weights; 0: LoRA only")
    """Copies that sample count, too."""
    full_sampling: Literal["snapshot", "inflight"] = option(
        "snapshot", "full models sample a copy of the weights; inflight: the live ones"
    )
    """The live weights are those at the time a token is sampled."""
    optimizer_states: OptimizerStateDtype = option("float32", "precision of AdamW's moments for full models")
    """Those of adapters are float32."""


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The device of a rank, and what it computes there."""

    device: Devices = option("auto", "auto, cpu, cuda:N; A,B: one per model", common=True)
    """auto is CUDA if available."""
    threads: NotNegative = option(0, "CPU threads per worker; 0: cores / workers", common=True)
    draft_parallel: ParallelSpec | None = option(
        None, "layout of drafts, on as many ranks, such as replicas=2,tp=2 (docs/drafts.md)"
    )
    """A layout splits the sequences of a draft's pass; without one, its tokens are split as the model splits them."""
    tp_activations: Literal["sharded", "whole"] = option("sharded", "a pass's tokens on each tp rank between layers")
    """Applies to training: sharded splits them over the ranks, whole keeps all on each."""
    zero_stage: ZeroStage = option("3", "2: fsdp keeps gathered weights from forward to backward")
    """3 gathers a layer's weights for its forward and again for its backward."""
    activations: Literal["keep", "recompute", "offload"] = option(
        "keep", "how a pass holds activations for backward (docs/parallel.md)"
    )
    """recompute keeps each layer's input and runs the layer again; offload does so with the input in host memory."""
    hang_seconds: Duration = option(60.0, "how far a worker may exceed a call's expected time before a restart")
    """See CallTimeouts."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Tokens, models and caches that a worker holds at a time."""

    micro_batch_tokens: NotNegative = option(0, "per micro-batch; 0: 4096, more on a fast GPU", common=True)
    """A longer sequence runs alone. 0 gives fewer if memory does not suffice: workers/planner/micro_batches.py."""
    head_chunk_tokens: Positive = option(512, "rows of logits that are in memory at a time")
    prefill_chunk_tokens: NotNegative = option(
        0, "most prompt tokens prefilled between two decode steps; 0: 512, on a GPU 4096"
    )
    adapter_slots: Positive = option(64, "adapters on the device at a time; the others are offloaded to host memory")
    """On CUDA at most those that fit in a third of what the loaded model leaves free, at LoRA rank 32."""
    full_slots: Positive = option(2, "full models (not LoRA) on the device at a time")
    host_adapter_bytes: Positive = option(
        4 << 30, "host memory for offloaded adapters and full models; the rest goes to disk"
    )
    kv_cache_bytes: Positive | None = option(None, "per sampler (1GiB; a third of a GPU's free memory)", common=True)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(MemoryOptions, RankOptions, ModelOptions):
    """The options of the server that each of its workers gets."""


@dataclass(frozen=True)
class WorkerConfig(WorkerOptions):
    """Configures one rank: the server's options, and what differs by model, rank and machine."""

    model: ServedModel
    page_directory: str | None = None
    """Directory of adapters offloaded to disk; None means the system's temporary directory."""
    parallel: ParallelSpec = SINGLE
    """The layout of the ranks that hold the model together."""
    rank: int = 0
    is_local: bool = True
    """True if all ranks are on this machine."""
    shared_directories: tuple[str, ...] = ()
    """Directories of the server that must be the same on the machines of all ranks."""


@dataclass(frozen=True)
class VllmConfig:
    """Configures vLLM as the sampler: servers at `urls`, one for each base model in order, or else servers that we
    start.

    python: interpreter of an environment with vLLM, used to start one server for each base model.
    api_key: for the servers at `urls`.
    dtype: "auto" is the dtype of training.
    memory_share: fraction of a GPU's memory.
    tensor_parallel: GPUs of each server.
    draft: the shape of the drafts that servers which we start can use; None = they use none.
    draft_tokens: at a time, of eagle3.
    """

    urls: tuple[str, ...] = ()
    api_key: str | None = None
    python: str | None = None
    dtype: Dtype = "auto"
    memory_share: float = 0.9
    tensor_parallel: int = 1
    draft: DraftConfig | None = None
    draft_tokens: int = 4


@dataclass(frozen=True)
class SamplingConfig:
    """Selects the sampler: the training workers, `workers` sampler workers of each base model, or vLLM.

    parallel: layout of each sampler worker.
    devices: one for all sampler workers or one for each, as in WorkerConfig.device; () means the training device. With
        vLLM: all devices that it may use.
    directory: for copies of adapters and vLLM's log; None means a temporary one.
    """

    workers: int = 0
    parallel: ParallelSpec = SINGLE
    vllm: VllmConfig | None = None
    devices: tuple[str, ...] = ()
    directory: str | None = None


@dataclass(frozen=True)
class RoleGroup:
    """Gives these roles ranks of their own, apart from the other roles, for each base model.

    parallel: the layout of these ranks.
    devices: as in WorkerConfig.device, one for all base models or one for each in order; () means the base model's
        devices.
    """

    roles: tuple[str, ...]
    parallel: ParallelSpec = SINGLE
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Formats the group as a user writes it on the command line."""
        devices = ",".join(self.devices)
        return f"{'+'.join(self.roles)}={self.parallel.axes}{f'@{devices}' if devices else ''}"


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """The place where workers run, and the roles that have some of their own."""

    pool: Literal["local", "ray"] = option("local", "local worker processes, or Ray actors", common=True)
    ray_address: str | None = option(
        None, "address of a running Ray cluster (default: a small local one)", only_with=WITH_RAY
    )
    ray_cpus_per_rank: NotNegativeNumber = option(1.0, "CPUs that each worker reserves", only_with=WITH_RAY)
    ray_gpus_per_rank: NotNegativeNumber = option(
        1.0, "GPUs that each CUDA worker reserves", only_with=WITH_RAY, not_with=("device", "cpu")
    )
    """Less than 1 if several base models share a GPU."""
    role_groups: tuple[RoleGroup, ...] = option(
        (), "ROLES=LAYOUT[@DEVICE]: separate ranks for roles; repeatable (docs/roles.md)", flag="--role-group"
    )
    """All other roles, and everything that is sampled, use the model's group."""


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """The shares of runs, samples and rank groups in the work and the devices."""

    pass_tokens: NotNegative = option(0, "most tokens of one pass; 0: 8192, or a micro-batch on each GPU")
    """A sequence longer than half of it may exceed it; 0 is `default_pass_tokens`."""
    slice_milliseconds: Duration = option(50.0, "how long sampling keeps the workers while training waits")
    shared_devices: Literal["together", "turns"] = option(
        "together", "turns: groups use a shared device one at a time (docs/roles.md)"
    )
    """The other groups are offloaded meanwhile."""
    idle_device_seconds: Duration | None = option(
        None, "idle time after which a group leaves its device (default: it stays)"
    )


@dataclass(frozen=True)
class DispatchConfig(PoolOptions, SchedulerOptions):
    """Configures one rank group for each base model, its sampler workers, and the groups of roles with ranks of their
    own."""

    models: tuple[WorkerConfig, ...]
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Tenant id -> its relative share of the passes' tokens; 1 for tenants not named."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    worker: str = "trainhouse.workers.worker.worker:Worker"
    """The class built on every rank, as "module:Class"."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of base models -> the name in `models`."""
    kept: KeptWorkers | None = None
    """Set if the workers, which are on Ray, outlive the server."""
