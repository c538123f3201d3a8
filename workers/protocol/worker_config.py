"""Holds the configuration that a rank needs to load and run a base model, and that a dispatch needs to run all ranks.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from ...schemas.models import DraftConfig
from .parallel_spec import SINGLE, ParallelSpec

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


@dataclass(frozen=True)
class WorkerConfig:
    """Holds one rank's settings; the server's config fills them, `Worker(config)` reads them.

    dtype: "auto" is bfloat16 on CUDA and float32 on CPU. device: "auto" is CUDA if available.
    base_quantization: how the frozen weights under adapters are held; "nf4" holds them in 4 bits, "released" those that
        the release packed as it did. Both dequantize them for each product.
    threads: intra-operation CPU threads; 0 means cores / ranks.
    micro_batch_tokens: most tokens of one micro-batch (a single longer sequence runs alone); 0 means
        DEFAULT_MICRO_BATCH_TOKENS, more on a fast GPU, or fewer if memory does not suffice (see
        workers/planner/micro_batches.py).
    prefill_chunk_tokens: most prompt tokens that are run between two decode steps; 0 means 512, or 4096 on CUDA.
    head_chunk_tokens: rows of logits that exist at a time.
    kv_cache_bytes: budget of the KV cache; None means, on CUDA, a third of what the loaded model leaves free, and 1 GiB
        on the CPU.
    adapter_slots: most adapters on the device at a time; the others are offloaded to host memory and, beyond
        host_adapter_bytes, to disk. On CUDA limited to what fits in a third of what the loaded model leaves free, at
        LoRA rank 32.
    full_slots: most models with full weights on the device at a time; the others are offloaded like adapters.
    max_full_models: most models with full weights that may exist, sampler copies included.
    full_sampling: what the sampler of such a model uses: "snapshot" is a copy of its weights; "inflight" is its live
        weights at the time a token is sampled.
    optimizer_states: dtype of the AdamW moments of such models; those of adapters are float32.
    page_directory: for adapters offloaded to disk; None means the system's temporary directory.
    parallel, rank: the layout of the ranks that hold the model together, and the number of this rank.
    draft_parallel: how these ranks share the work of draft models; None splits tokens as the model does, else
        sequences.
    is_local: true if all ranks are on this machine.
    tp_activations: activations between linear layers in training: "sharded" splits their tokens over the tp ranks;
        "whole" keeps all tokens on each.
    zero_stage: how long fsdp ranks hold a layer's gathered weights: "3" gathers for its forward and again for its
        backward; "2" keeps them from forward to backward.
    activations: what a pass keeps of each layer for the backward: "keep" keeps everything needed; "recompute" keeps the
        layer's input and runs it a second time; "offload" is the same with the input in host memory.
    model_cache: where base models at URLs are downloaded to; None means a folder in the user's cache directory.
    shared_directories: directories of the server that must be the same on the machines of all ranks.
    hang_seconds: time that a call may take beyond its expected work (see CallTimeouts) before the rank counts as hung,
        is killed and restarted.
    """

    model: ServedModel
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    base_quantization: Quantization = "none"
    threads: int = 0
    max_lora_rank: int = 256
    max_context_length: int | None = None
    micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS
    prefill_chunk_tokens: int = DEFAULT_PREFILL_CHUNK_TOKENS
    head_chunk_tokens: int = 512
    kv_cache_bytes: int | None = None
    adapter_slots: int = 64
    full_slots: int = 2
    max_full_models: int = 32
    full_sampling: Literal["snapshot", "inflight"] = "snapshot"
    optimizer_states: OptimizerStateDtype = "float32"
    host_adapter_bytes: int = 4 << 30
    page_directory: str | None = None
    parallel: ParallelSpec = SINGLE
    draft_parallel: ParallelSpec | None = None
    rank: int = 0
    is_local: bool = True
    tp_activations: Literal["sharded", "whole"] = "sharded"
    zero_stage: ZeroStage = "3"
    activations: Literal["keep", "recompute", "offload"] = "keep"
    model_cache: str | None = None
    shared_directories: tuple[str, ...] = ()
    hang_seconds: float = 60.0


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
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
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


@dataclass(frozen=True)
class DispatchConfig:
    """Configures one rank group for each base model, its sampler workers, and the groups of roles with ranks of their
    own.

    pool: "local" starts processes on this machine, "ray" starts actors.
    ray_address: None starts a small cluster here.
    ray_gpus_per_rank: for ranks on CUDA; less than 1 if several base models share a GPU.
    slice_milliseconds: about how long a sampling slice occupies the ranks.
    pass_tokens: most tokens of one pass; sequences longer than half of it may exceed it. 0 means `default_pass_tokens`.
    role_groups: roles with groups of their own; all other roles, and everything that is sampled, use the model's group.
    shared_devices: how groups share a device: "together" uses it all at once; "turns" uses it one group at a time, with
        the other groups offloaded.
    idle_device_seconds: idle time after which a group is offloaded from its device until it has work; None means never.
    tenant_weights: tenant id -> its relative share of the passes' tokens; 1 for tenants not named.
    worker: class built on every rank, as "module:Class".
    aliases: further names of base models -> the name in `models`.
    kept: set if the workers, which are on Ray, outlive the server.
    """

    models: tuple[WorkerConfig, ...]
    pool: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    ray_cpus_per_rank: float = 1.0
    ray_gpus_per_rank: float = 1.0
    slice_milliseconds: float = 50.0
    pass_tokens: int = 0
    role_groups: tuple[RoleGroup, ...] = ()
    shared_devices: Literal["together", "turns"] = "together"
    idle_device_seconds: float | None = None
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    worker: str = "trainhouse.workers.worker.worker:Worker"
    aliases: Mapping[str, str] = field(default_factory=dict)
    kept: KeptWorkers | None = None
