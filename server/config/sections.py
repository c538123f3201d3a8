"""Every knob of a server process, in sections by topic: its default, unit, help and check.

A knob's name ends with its unit; sizes in bytes may be written as 256MiB.
"""
# ruff: noqa: RUF009  (knob() is a field)

import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ...schemas.models import DraftConfig, Role
from ...workers.protocol.parallel_spec import SINGLE, ParallelSpec
from ...workers.protocol.worker_config import RoleGroup, ServedModel
from .knob import (
    BASE_MODELS,
    DATABASE_URL,
    DEVICES,
    DRAFT,
    LAYOUT,
    LAYOUT_OR_AUTO,
    NOT_NEGATIVE,
    ONE_URL,
    POSITIVE,
    ROLE_GROUPS,
    SHARE,
    TEXTS,
    URLS,
    WEIGHTS,
    Bytes,
    Section,
    above,
    between,
    knob,
)
from .knob_values import TenantWeight

WITH_RAY = ("pool", "ray")
WITH_VLLM = ("sampler", "vllm")
SEPARABLE_ROLES = tuple(role for role in typing.get_args(Role) if role != "policy")
"""The roles that may have rank groups of their own."""


@dataclass(frozen=True)
class ModelsSection(Section):
    """The base models that are served, and the models that may be trained on them."""

    base_models: Annotated[tuple[ServedModel, ...], BASE_MODELS] = knob(
        (),
        "served model: directory, hub id or URL; repeatable",
        common=True,
        flag="--base-model",
    )
    model_cache: Path | None = knob(
        None, "directory for models downloaded from URLs (default: ~/.cache/trainhouse/models)", metavar="DIR"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = knob(
        "auto", "float32, bfloat16, auto (bfloat16 on CUDA)", metavar="TYPE", common=True
    )
    base_quantization: Literal["none", "nf4", "released"] = knob(
        "none", "frozen weights for LoRA: none, nf4 (4 bits), released (as in the files)", metavar="KIND"
    )
    max_lora_rank: int = knob(256, "largest LoRA rank that a run may request", common=True, check=POSITIVE)
    max_context_length: int | None = knob(None, "longest sequence, in tokens (default: the model's)", check=POSITIVE)
    max_full_models: int = knob(32, "most models with full weights; 0: LoRA only", check=NOT_NEGATIVE)
    full_sampling: Literal["snapshot", "inflight"] = knob(
        "snapshot", "full models sample a copy of the weights; inflight: the live ones"
    )
    optimizer_states: Literal["float32", "8bit"] = knob("float32", "precision of AdamW's moments for full models")


@dataclass(frozen=True)
class NetworkSection(Section):
    """The address of the server, and the time limits of its connections."""

    host: str = knob("127.0.0.1", "non-loopback needs API keys", metavar="ADDRESS", common=True)
    port: int = knob(8000, "0: picks a free port and prints it", common=True, check=between(0, 65535))
    allowed_hosts: Annotated[tuple[str, ...], TEXTS] = knob(
        (),
        "name that requests to a server without keys may have; repeatable",
        metavar="HOST",
        flag="--allowed-host",
    )
    tls_certificate: Path | None = knob(None, "PEM file with its chain: serves https (docs/security.md)")
    tls_key: Path | None = knob(None, "PEM file of the certificate's key, without a passphrase")
    keep_alive_seconds: int = knob(75, "how long an idle connection stays open", check=POSITIVE)
    long_poll_seconds: float = knob(
        40.0, "longest wait of a poll for a result; SDKs give up at 45", check=between(0, 44)
    )


@dataclass(frozen=True)
class StoreSection(Section):
    """The state directory and database, and the lease of servers that share a database."""

    state_dir: Path = knob(Path(".trainhouse"), "all state, for one server at a time", metavar="DIR", common=True)
    database_url: str | None = knob(
        None, "PostgreSQL instead of SQLite (better set in the environment)", check=DATABASE_URL, secret=True
    )
    durability: Literal["process", "power"] = knob("process", "survives kill -9; power: also a power cut (fsync)")
    advertise_url: str | None = knob(
        None, "URL at which servers on the same database reach this one (default: as printed)", check=ONE_URL
    )
    lease_seconds: float = knob(
        10.0, "how long a server may fail to renew its lease before another takes over", check=above(0.5)
    )


@dataclass(frozen=True)
class RanksSection(Section):
    """The worker processes, and how they share a model."""

    pool: Literal["local", "ray"] = knob("local", "local worker processes, or Ray actors", common=True)
    device: str = knob("auto", "auto, cpu, cuda:N; A,B: one per model", common=True, check=DEVICES)
    threads: int = knob(0, "CPU threads per worker; 0: cores / workers", common=True, check=NOT_NEGATIVE)
    parallel: Annotated[ParallelSpec | None, LAYOUT_OR_AUTO] = knob(
        SINGLE, "layout per model: fsdp=2,tp=4 or auto", common=True
    )
    device_memory_bytes: Bytes | None = knob(
        None,
        "memory of each device, for --parallel auto (default: queried from CUDA)",
        check=POSITIVE,
        flag="--device-memory",
    )
    device_link: Literal["auto", "nvlink", "pcie", "host"] = knob(
        "auto", "devices' link, for --parallel auto (auto: nvidia-smi's, else nvlink)"
    )
    draft_parallel: Annotated[ParallelSpec | None, LAYOUT] = knob(
        None, "layout of drafts, on as many ranks, such as replicas=2,tp=2 (docs/drafts.md)"
    )
    shard: Annotated[tuple[str, ...], TEXTS] = knob(
        (), "changes how tp or ep splits the matching weights; repeatable", metavar="PATTERN=STYLE"
    )
    tp_activations: Literal["sharded", "whole"] = knob("sharded", "a pass's tokens on each tp rank between layers")
    zero_stage: Literal["3", "2"] = knob("3", "2: fsdp keeps gathered weights from forward to backward")
    activations: Literal["keep", "recompute", "offload"] = knob(
        "keep", "how a pass holds activations for backward (docs/parallel.md)"
    )
    role_groups: Annotated[tuple[RoleGroup, ...], ROLE_GROUPS] = knob(
        (),
        "ROLES=LAYOUT[@DEVICE]: separate ranks for roles; repeatable (docs/roles.md)",
        flag="--role-group",
    )
    hang_seconds: float = knob(
        60.0, "how far a worker may exceed a call's expected time before a restart", check=above(0)
    )
    keep_workers_seconds: float = knob(
        0.0, "how long workers stay without a server (0: they end with it)", check=NOT_NEGATIVE, only_with=WITH_RAY
    )
    ray_address: str | None = knob(
        None, "address of a running Ray cluster (default: a small local one)", only_with=WITH_RAY
    )
    ray_cpus_per_rank: float = knob(1.0, "CPUs that each worker reserves", check=NOT_NEGATIVE, only_with=WITH_RAY)
    ray_gpus_per_rank: float = knob(
        1.0, "GPUs that each CUDA worker reserves", check=NOT_NEGATIVE, only_with=WITH_RAY, not_with=("device", "cpu")
    )


@dataclass(frozen=True)
class MemorySection(Section):
    """Tokens, models and caches that a worker holds at a time."""

    micro_batch_tokens: int = knob(0, "per micro-batch; 0: 4096, more on a fast GPU", common=True, check=NOT_NEGATIVE)
    head_chunk_tokens: int = knob(512, "rows of logits that are in memory at a time", check=POSITIVE)
    prefill_chunk_tokens: int = knob(
        0, "most prompt tokens prefilled between two decode steps; 0: 512, on a GPU 4096", check=NOT_NEGATIVE
    )
    adapter_slots: int = knob(
        64, "adapters on the device at a time; the others are offloaded to host memory", check=POSITIVE
    )
    full_slots: int = knob(2, "full models (not LoRA) on the device at a time", check=POSITIVE)
    host_adapter_bytes: Bytes = knob(
        4 << 30,
        "host memory for offloaded adapters and full models; the rest goes to disk",
        check=POSITIVE,
    )
    kv_cache_bytes: Bytes | None = knob(
        None, "per sampler (1GiB; a third of a GPU's free memory)", common=True, check=POSITIVE
    )


@dataclass(frozen=True)
class SamplingSection(Section):
    """The sampler: the training workers, workers that only sample, or vLLM."""

    sampler: Literal["native", "vllm"] = knob("native", "our own sampler, or vLLM", common=True)
    sampler_workers: int = knob(
        0, "sampling-only workers per base model", common=True, check=NOT_NEGATIVE, not_with=WITH_VLLM
    )
    sampler_parallel: Annotated[ParallelSpec | None, LAYOUT_OR_AUTO] = knob(
        SINGLE, "layout of each sampler worker, ep=2,tp=2 or auto"
    )
    sampler_device: str | None = knob(
        None, "device of sampler workers, A,B: one for each; with vLLM, all that it uses", check=DEVICES
    )
    vllm_python: Path | None = knob(None, "Python with vLLM installed; --sampler vllm starts vLLM with it")
    vllm_url: str | None = knob(
        None, "URL of a running vLLM; A,B: one for each base model", check=URLS, only_with=WITH_VLLM
    )
    vllm_api_key: str | None = knob(
        None, "API key of the vLLM at --vllm-url (better set in the environment)", only_with=WITH_VLLM, secret=True
    )
    vllm_dtype: Literal["auto", "float32", "bfloat16"] = knob(
        "auto", "dtype of the vLLM started here; auto: --dtype", only_with=WITH_VLLM
    )
    vllm_memory_share: float = knob(
        0.9, "fraction of GPU memory for the vLLM started here", check=SHARE, only_with=WITH_VLLM
    )
    vllm_tp: int = knob(1, "tensor-parallel GPUs of the vLLM started here", check=POSITIVE, only_with=WITH_VLLM)
    vllm_draft: Annotated[DraftConfig | None, DRAFT] = knob(
        None, "shape of drafts for the vLLM started here: such as eagle3,draft_vocab_size=32000", only_with=WITH_VLLM
    )
    vllm_draft_tokens: int | None = knob(
        None, "draft tokens per pass of an eagle3 draft in vLLM (default: 4)", check=between(1, 16), only_with=WITH_VLLM
    )


@dataclass(frozen=True)
class SchedulerSection(Section):
    """The shares of runs, samples and rank groups in the work and the devices."""

    pass_tokens: int = knob(0, "most tokens of one pass; 0: 8192, or a micro-batch on each GPU", check=NOT_NEGATIVE)
    slice_milliseconds: float = knob(50.0, "how long sampling keeps the workers while training waits", check=above(0))
    shared_devices: Literal["together", "turns"] = knob(
        "together", "turns: groups use a shared device one at a time (docs/roles.md)"
    )
    idle_device_seconds: float | None = knob(
        None, "idle time after which a group leaves its device (default: it stays)", check=above(0)
    )
    tenant_weights: Annotated[tuple[TenantWeight, ...], WEIGHTS] = knob(
        (), "weights of the fair share, alice=2,bob=0.5; all others: 1"
    )


@dataclass(frozen=True)
class LimitsSection(Section):
    """Limits of requests, of each tenant, and of all tenants together."""

    max_body_bytes: Bytes = knob(256 << 20, "largest request body as received", check=POSITIVE)
    max_decompressed_bytes: Bytes = knob(1 << 30, "largest request body after decompression", check=POSITIVE)
    max_logprobs: int = knob(20, "most alternatives per token that a sample may request", check=POSITIVE)
    queued_bytes: Bytes = knob(2 << 30, "memory for unanswered operations of all tenants", check=POSITIVE)
    unauthenticated_per_minute: int = knob(
        600, "requests without a valid key, per address; ten times that over all", check=POSITIVE
    )
    tenant_sessions: int = knob(1000, "most open sessions of a tenant", check=POSITIVE)
    tenant_runs: int = knob(2000, "most live runs of a tenant", check=POSITIVE)
    tenant_queued_operations: int = knob(20_000, "most unanswered operations of a tenant", check=POSITIVE)
    tenant_queued_bytes: Bytes = knob(512 << 20, "most bytes in unanswered operations of a tenant", check=POSITIVE)
    tenant_tokens_per_minute: int = knob(0, "trained and sampled tokens of a tenant; 0: unlimited", check=NOT_NEGATIVE)
    tenant_result_bytes: Bytes = knob(
        32 << 30, "most bytes of a tenant's kept results; beyond, no sampling", check=POSITIVE
    )
    tenant_feature_bytes: Bytes = knob(16 << 30, "most bytes of a tenant's captured features", check=POSITIVE)
    tenant_evaluation_bytes: Bytes = knob(1 << 30, "most bytes of data of a tenant's evaluations", check=POSITIVE)
    tenant_checkpoints: int = knob(10_000, "most checkpoints of a tenant", check=POSITIVE)
    tenant_checkpoint_bytes: Bytes = knob(4 << 40, "most bytes of a tenant's checkpoints", check=POSITIVE)
    tenant_metric_bytes: Bytes = knob(1 << 30, "most bytes of metrics that a tenant logs for its runs", check=POSITIVE)


@dataclass(frozen=True)
class SessionsSection(Section):
    """When sessions end, and how long runs wait for their requests."""

    session_expiry_seconds: float = knob(
        300.0, "time without heartbeats (sent every 10 s) that ends a session", check=above(0)
    )
    session_ttl_seconds: float = knob(2592000.0, "how long ended sessions that saved nothing are kept", check=above(0))
    seq_gap_seconds: float = knob(
        330.0, "wait for a missing seq_id before it counts as refused; SDKs retry for 300", check=above(0)
    )


@dataclass(frozen=True)
class FeaturesSection(Section):
    """Captured features of all tenants."""

    feature_bytes: Bytes = knob(
        16 << 30, "captured features of all tenants, in --state-dir (docs/drafts.md)", check=POSITIVE
    )
    feature_ttl_seconds: float = knob(86400.0, "longest time that captured features are kept", check=above(0))
    feature_wait_seconds: float = knob(
        20.0, "how long a capture waits for room before it is answered 429", check=NOT_NEGATIVE
    )


@dataclass(frozen=True)
class JournalSection(Section):
    """The journal of operations, the runs' snapshots, and the results that are kept."""

    journal_segment_bytes: Bytes = knob(64 << 20, "size at which the journal starts a new file", check=POSITIVE)
    snapshot_steps: int = knob(20, "optimizer steps of a run between two snapshots of it", check=POSITIVE)
    snapshot_bytes: Bytes = knob(256 << 20, "most bytes of a run's operations between two snapshots", check=POSITIVE)
    result_ttl_seconds: float = knob(86400.0, "how long results stay retrievable", check=above(0))
    history_ttl_seconds: float = knob(
        7776000.0, "how long metrics and operations of runs are kept (docs/metrics.md)", check=above(0)
    )
    result_memory_bytes: Bytes = knob(64 << 20, "memory for results; the oldest are kept on disk only", check=POSITIVE)


@dataclass(frozen=True)
class CheckpointsSection(Section):
    """The directories and URLs of checkpoints and their copies."""

    checkpoints: str | None = knob(
        None, "directory, s3://BUCKET/... or another fsspec URL (default: in --state-dir)", metavar="URL"
    )
    mirrors: Annotated[tuple[str, ...], TEXTS] = knob(
        (),
        "URL that receives a copy of every checkpoint; repeatable",
        metavar="URL",
        flag="--mirror",
    )
    checkpoint_cache_bytes: Bytes = knob(16 << 30, "local read cache for checkpoints at a URL", check=POSITIVE)


@dataclass(frozen=True)
class SdkSection(Section):
    """Settings that the server asks SDKs to follow."""

    sdk_max_chunk_datums: int = knob(1024, "datums that SDKs send in one forward_backward", check=POSITIVE)
    sdk_max_chunk_bytes: Bytes = knob(5_000_000, "bytes that SDKs send in one forward_backward", check=POSITIVE)
    sdk_compression: Literal["none", "zstd"] = knob("none", "compression of the forward_backward bodies that SDKs send")
    sdk_sample_polling: Literal["each", "together"] = knob(
        "each", "SDKs poll for each sample, or for all of a client's together"
    )
    unknown_fields: Literal["refuse", "warn"] = knob(
        "refuse", "unknown fields of requests; warn: ignores them, and says so"
    )


@dataclass(frozen=True)
class ProcessSection(Section):
    """The process itself: its log, and how it starts and ends."""

    drain_seconds: float = knob(
        20.0, "how long accepted work may continue at shutdown before connections close", check=NOT_NEGATIVE
    )
    shutdown_seconds: int = knob(3, "how long open requests may continue at shutdown after that", check=NOT_NEGATIVE)
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", "lowest severity that is logged")
    log_format: Literal["auto", "text", "json"] = knob("auto", "lines of the log; auto: text on a terminal, else json")
    slow_pass_seconds: float = knob(60.0, "passes and steps that take longer are logged as warnings", check=POSITIVE)
    ready_file: Path | None = knob(None, "written with the URL when the server is ready, removed at its end")
