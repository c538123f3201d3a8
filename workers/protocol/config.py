"""What a rank must know to load and run a base model, and a dispatch of all its ranks. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .parallel_spec import SINGLE, ParallelSpec

ZeroStage = Literal["3", "2"]
Quantization = Literal["none", "nf4"]
OptimizerStates = Literal["float32", "8bit"]

KV_CACHE_BYTES = 1 << 30
"""Where nothing says how large it is to be, and no device how large it can be."""

USUAL_MICRO_BATCH = 4096
"""Tokens of a micro-batch: more are no faster."""


@dataclass(frozen=True)
class Claim:
    """Who wants to use kept workers.

    holder: drawn anew by each server whenever it begins its work. epoch: of its lease; None of a server that needs
    none, and so does not know who comes before whom.
    """

    holder: str
    epoch: int | None = None


@dataclass(frozen=True)
class KeptAt:
    """Where workers are kept. secret: see read_secret. knobs: see pools/remote/protocol.Attach."""

    address: str
    secret: bytes = field(repr=False)
    claim: Claim
    knobs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True)
class Origin:
    """Where a base model is downloaded from: a URL, and which of the contents that it has had."""

    url: str
    version: str


@dataclass(frozen=True)
class ServedModel:
    """A base model: the name clients ask for, and the local directory or hub id that it is loaded from.

    origin: of one that lies at a URL; its source is what of it is on this machine then.
    """

    name: str
    source: str
    origin: Origin | None = None


@dataclass(frozen=True)
class WorkerConfig:
    """One rank's knobs; the server's config fills them, `Worker(config)` reads them.

    dtype: "auto" = bfloat16 on CUDA, float32 on CPU. device: "auto" = CUDA where there is one.
    base_quantization: of what adapters adapt: "nf4" = the frozen weights are held in 4 bits, and made whole for each
        product.
    threads: intra-operation CPU threads, 0 = cores / ranks.
    micro_batch_tokens: most tokens of one micro-batch (one longer sequence is run alone); 0 = USUAL_MICRO_BATCH, or
        fewer where memory does not hold so many (see `choice.micro_batch_tokens`).
    prefill_chunk_tokens: most tokens of prompts that are run between two steps of decoding.
    head_chunk_tokens: rows of logits that exist at a time.
    kv_cache_bytes: budget of the sampler's key/value cache; None = on CUDA a third of what the loaded model leaves
        free, on the CPU 1 GiB.
    adapter_slots: most adapters on the device at a time; the others wait in host memory, beyond host_adapter_bytes on
        disk. On CUDA only as many as fit a third of what the loaded model leaves free, at rank 32.
    full_slots: of models with weights of their own as many are on the device at a time; else as adapters.
    max_full_models: most of these that there may be, copies of them for samplers included.
    full_sampling: what a sampler of such a model has: "snapshot" = a copy of its weights; "inflight" = its weights as
        they are when a token is drawn.
    optimizer_states: how AdamW's moments of such models are held; those of adapters are float32.
    page_directory: for the adapters on disk; None = that of the system for temporary files.
    parallel, rank: the ranks that hold the model together, and which of them this one is.
    draft_parallel: how these ranks share out the work of drafts; None = tokens as the model's do, and else sequences.
    is_local: whether all of them are on this machine.
    tp_activations: what lies between the linear layers: "sharded" = each rank along tp has some tokens of it, in
        training; "whole" = all of them.
    zero_stage: how long ranks along fsdp have a layer's weights whole: "3" = while its forward runs, and while its
        backward runs; "2" = from the one to the other.
    activations: what a pass keeps of each layer for its way back: "keep" = all that this needs; "recompute" = the
        layer's input, from which it runs once more; "offload" = that, too, but in host memory.
    model_cache: where base models at URLs are downloaded to; None = below the user's directory for caches.
    shared_directories: of the server, for ranks that may be on other machines: they must be the same directories there.
    hang_seconds: what a call to the rank may take beyond the time that its work takes (see Patience); then it hangs,
        and is killed and started anew.
    """

    model: ServedModel
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    base_quantization: Quantization = "none"
    threads: int = 0
    max_lora_rank: int = 256
    max_context_length: int | None = None
    micro_batch_tokens: int = USUAL_MICRO_BATCH
    prefill_chunk_tokens: int = 512
    head_chunk_tokens: int = 512
    kv_cache_bytes: int | None = None
    adapter_slots: int = 64
    full_slots: int = 2
    max_full_models: int = 32
    full_sampling: Literal["snapshot", "inflight"] = "snapshot"
    optimizer_states: OptimizerStates = "float32"
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
    """vLLM as the sampler: servers at `urls`, one for each base model in their order, or else ours.

    python: of an environment that has vLLM, in which one is started for each base model. api_key: of those at `urls`.
    dtype: "auto" = that of training. memory_share: of a GPU. tensor_parallel: GPUs of each.
    """

    urls: tuple[str, ...] = ()
    api_key: str | None = None
    python: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    memory_share: float = 0.9
    tensor_parallel: int = 1


@dataclass(frozen=True)
class SamplingConfig:
    """Where sampling happens: in the training workers, in `workers` of each base model that only sample, or in vLLM.

    parallel: the ranks of each of those workers. devices: of those workers, each as WorkerConfig.device: one for all,
    or one for each; () = that of training. Of vLLM: all that it may use. directory: for copies of adapters, and vLLM's
    log; None = a temporary one.
    """

    workers: int = 0
    parallel: ParallelSpec = SINGLE
    vllm: VllmConfig | None = None
    devices: tuple[str, ...] = ()
    directory: str | None = None


@dataclass(frozen=True)
class RoleGroup:
    """Roles whose runs live in ranks of their own, apart from those of the other roles: so it is for each base model.

    parallel: their layout. devices: as WorkerConfig.device, one for all base models, or one for each in their order;
    () = those of the base model.
    """

    roles: tuple[str, ...]
    parallel: ParallelSpec = SINGLE
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As a user writes it."""
        devices = ",".join(self.devices)
        return f"{'+'.join(self.roles)}={self.parallel.axes}{f'@{devices}' if devices else ''}"


@dataclass(frozen=True)
class DispatchConfig:
    """One group per model, of as many ranks as its layout has, those that only sample, and those of roles apart.

    pool: "local" = processes of this machine, "ray" = actors. ray_address: None starts a small cluster here.
    ray_gpus_per_rank: of ranks on CUDA; less than 1 when several base models share a GPU.
    slice_milliseconds: about how long sampling holds the ranks at a time.
    pass_tokens: most tokens of one pass; sequences longer than half of it may take a pass beyond it.
    role_groups: roles in groups of their own; the others, and all that is sampled, are in the model's.
    shared_devices: how groups have a device that they share: "together" = all at once; "turns" = one after the other,
        the others wait off it.
    idle_device_seconds: without work; then a group leaves its device until it has some. None = it stays.
    tenant_weights: tenant id -> its share of the passes' tokens relative to the others; 1 for those not named.
    worker: the class built on every rank, as "module:Class".
    aliases: further names of base models -> that under which `models` has them.
    kept: where another process keeps the workers, which are then as it was told.
    """

    models: tuple[WorkerConfig, ...]
    pool: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    ray_cpus_per_rank: float = 1.0
    ray_gpus_per_rank: float = 1.0
    slice_milliseconds: float = 50.0
    pass_tokens: int = 8192
    role_groups: tuple[RoleGroup, ...] = ()
    shared_devices: Literal["together", "turns"] = "together"
    idle_device_seconds: float | None = None
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    worker: str = "trainhouse.workers.worker.worker:Worker"
    aliases: Mapping[str, str] = field(default_factory=dict)
    kept: KeptAt | None = None
