"""The options of a server process, in sections by topic: those that workers, the store and the checkpoints get are
declared in their configs, which the sections extend.

An option's name ends with its unit; sizes in bytes may be written as 256MiB.
"""

import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ...schemas.models import DraftConfig, Role
from ...workers.protocol.option import (
    Devices,
    Duration,
    NotNegative,
    NotNegativeNumber,
    Positive,
    Share,
    at_least,
    between,
    matching,
    option,
)
from ...workers.protocol.parallel_spec import SINGLE
from ...workers.protocol.worker_config import (
    WITH_RAY,
    Dtype,
    ModelOptions,
    PoolOptions,
    RankOptions,
    SchedulerOptions,
    ServedModel,
    VllmConfig,
)
from ..files.storage_config import CheckpointStorageConfig
from .option import LayoutOrAuto
from .option_values import TenantWeight

WITH_VLLM = ("sampler", "vllm")
SEPARABLE_ROLES = tuple(role for role in typing.get_args(Role) if role != "policy")
"""The roles that may have rank groups of their own."""

Urls = Annotated[
    str,
    matching(
        r"https?://[^\s,/]+[^\s,]*(,https?://[^\s,/]+[^\s,]*)*",
        "http://HOST:PORT, or a comma-separated list with one for each base model",
    ),
]


@dataclass(frozen=True)
class _BaseModels:  # apart, for its row to be the first
    base_models: tuple[ServedModel, ...] = option(
        (), "served model: directory, hub id or URL; repeatable", common=True, flag="--base-model"
    )


@dataclass(frozen=True)
class ModelsSection(ModelOptions, _BaseModels):
    """The base models that are served, and the models that may be trained on them."""


@dataclass(frozen=True)
class NetworkSection:
    """The address of the server, and the time limits of its connections."""

    host: str = option("127.0.0.1", "non-loopback needs API keys", metavar="ADDRESS", common=True)
    port: Annotated[int, between(0, 65535)] = option(8000, "0: picks a free port and prints it", common=True)
    allowed_hosts: tuple[str, ...] = option(
        (), "name that requests to a server without keys may have; repeatable", metavar="HOST", flag="--allowed-host"
    )
    tls_certificate: Path | None = option(None, "PEM file with its chain: serves https (docs/security.md)")
    tls_key: Path | None = option(None, "PEM file of the certificate's key, without a passphrase")
    keep_alive_seconds: Positive = option(75, "how long an idle connection stays open")
    long_poll_seconds: Annotated[float, between(0, 44)] = option(
        40.0, "longest wait of a poll for a result; SDKs give up at 45"
    )


@dataclass(frozen=True)
class RanksSection(RankOptions, PoolOptions):
    """The worker processes, and how they share a model."""

    parallel: LayoutOrAuto = option(SINGLE, "layout per model: fsdp=2,tp=4 or auto", common=True)
    device_memory_bytes: Positive | None = option(
        None, "memory of each device, for --parallel auto (default: queried from CUDA)", flag="--device-memory"
    )
    device_link: Literal["auto", "nvlink", "pcie", "host"] = option(
        "auto", "devices' link, for --parallel auto (auto: nvidia-smi's, else nvlink)"
    )
    shard: tuple[str, ...] = option(
        (), "changes how tp or ep splits the matching weights; repeatable", metavar="PATTERN=STYLE"
    )
    keep_workers_seconds: NotNegativeNumber = option(
        0.0, "how long workers stay without a server (0: they end with it)", only_with=WITH_RAY
    )


@dataclass(frozen=True)
class SamplingSection:
    """The sampler: the training workers, workers that only sample, or vLLM."""

    sampler: Literal["native", "vllm"] = option("native", "our own sampler, or vLLM", common=True)
    sampler_workers: NotNegative = option(0, "sampling-only workers per base model", common=True, not_with=WITH_VLLM)
    sampler_parallel: LayoutOrAuto = option(SINGLE, "layout of each sampler worker, ep=2,tp=2 or auto")
    sampler_device: Devices | None = option(
        None, "device of sampler workers, A,B: one for each; with vLLM, all that it uses"
    )
    vllm_python: Path | None = option(None, "Python with vLLM installed; --sampler vllm starts vLLM with it")
    vllm_url: Urls | None = option(None, "URL of a running vLLM; A,B: one for each base model", only_with=WITH_VLLM)
    vllm_api_key: str | None = option(
        None, "API key of the vLLM at --vllm-url (better set in the environment)", only_with=WITH_VLLM, secret=True
    )
    vllm_dtype: Dtype = option("auto", "dtype of the vLLM started here; auto: --dtype", only_with=WITH_VLLM)
    vllm_memory_share: Share = option(
        VllmConfig.memory_share, "fraction of GPU memory for the vLLM started here", only_with=WITH_VLLM
    )
    vllm_tp: Positive = option(1, "tensor-parallel GPUs of the vLLM started here", only_with=WITH_VLLM)
    vllm_draft: DraftConfig | None = option(
        None, "shape of drafts for the vLLM started here: such as eagle3,draft_vocab_size=32000", only_with=WITH_VLLM
    )
    vllm_draft_tokens: Annotated[int | None, between(1, 16)] = option(
        None, "draft tokens per pass of an eagle3 draft in vLLM (default: 4)", only_with=WITH_VLLM
    )


@dataclass(frozen=True)
class SchedulerSection(SchedulerOptions):
    """The shares of runs, samples and rank groups in the work and the devices."""

    tenant_weights: tuple[TenantWeight, ...] = option((), "weights of the fair share, alice=2,bob=0.5; all others: 1")


@dataclass(frozen=True)
class LimitsSection:
    """Limits of requests, of each tenant, and of all tenants together."""

    max_body_bytes: Positive = option(256 << 20, "largest request body as received")
    max_decompressed_bytes: Positive = option(1 << 30, "largest request body after decompression")
    max_logprobs: Positive = option(20, "most alternatives per token that a sample may request")
    queued_bytes: Positive = option(2 << 30, "memory for unanswered operations of all tenants")
    unauthenticated_per_minute: Positive = option(
        600, "requests without a valid key, per address; ten times that over all"
    )
    tenant_sessions: Positive = option(1000, "most open sessions of a tenant")
    tenant_runs: Positive = option(2000, "most live runs of a tenant")
    tenant_queued_operations: Positive = option(20_000, "most unanswered operations of a tenant")
    tenant_queued_bytes: Positive = option(512 << 20, "most bytes in unanswered operations of a tenant")
    tenant_tokens_per_minute: NotNegative = option(0, "trained and sampled tokens of a tenant; 0: unlimited")
    tenant_result_bytes: Positive = option(32 << 30, "most bytes of a tenant's kept results; beyond, no sampling")
    tenant_feature_bytes: Positive = option(16 << 30, "most bytes of a tenant's captured features")
    tenant_evaluation_bytes: Positive = option(1 << 30, "most bytes of data of a tenant's evaluations")
    tenant_checkpoints: Positive = option(CheckpointStorageConfig.tenant_checkpoints, "most checkpoints of a tenant")
    tenant_checkpoint_bytes: Positive = option(
        CheckpointStorageConfig.tenant_checkpoint_bytes, "most bytes of a tenant's checkpoints"
    )
    tenant_metric_bytes: Positive = option(1 << 30, "most bytes of metrics that a tenant logs for its runs")


@dataclass(frozen=True)
class SessionsSection:
    """When sessions end, and how long runs wait for their requests."""

    session_expiry_seconds: Duration = option(300.0, "time without heartbeats (sent every 10 s) that ends a session")
    session_ttl_seconds: Duration = option(2592000.0, "how long ended sessions that saved nothing are kept")
    seq_gap_seconds: Duration = option(
        330.0, "wait for a missing seq_id before it counts as refused; SDKs retry for 300"
    )


@dataclass(frozen=True)
class FeaturesSection:
    """Captured features of all tenants."""

    feature_bytes: Positive = option(16 << 30, "captured features of all tenants, in --state-dir (docs/drafts.md)")
    feature_ttl_seconds: Duration = option(86400.0, "longest time that captured features are kept")
    feature_wait_seconds: NotNegativeNumber = option(
        20.0, "how long a capture waits for room before it is answered 429"
    )


@dataclass(frozen=True)
class JournalSection:
    """The journal of operations, the runs' snapshots, and the results that are kept."""

    journal_segment_bytes: Positive = option(64 << 20, "size at which the journal starts a new file")
    snapshot_steps: Positive = option(20, "optimizer steps of a run between two snapshots of it")
    snapshot_bytes: Positive = option(256 << 20, "most bytes of a run's operations between two snapshots")
    result_ttl_seconds: Duration = option(86400.0, "how long results stay retrievable")
    history_ttl_seconds: Duration = option(
        7776000.0, "how long metrics and operations of runs are kept (docs/metrics.md)"
    )
    result_memory_bytes: Positive = option(64 << 20, "memory for results; the oldest are kept on disk only")


@dataclass(frozen=True)
class SdkSection:
    """Settings that the server asks SDKs to follow."""

    sdk_max_chunk_datums: Positive = option(1024, "datums that SDKs send in one forward_backward")
    sdk_max_chunk_bytes: Positive = option(5_000_000, "bytes that SDKs send in one forward_backward")
    sdk_compression: Literal["none", "zstd"] = option(
        "none", "compression of the forward_backward bodies that SDKs send"
    )
    sdk_sample_polling: Literal["each", "together"] = option(
        "each", "SDKs poll for each sample, or for all of a client's together"
    )
    unknown_fields: Literal["refuse", "warn"] = option(
        "refuse", "unknown fields of requests; warn: ignores them, and says so"
    )


@dataclass(frozen=True)
class ProcessSection:
    """The process itself: its log, and how it starts and ends."""

    drain_seconds: NotNegativeNumber = option(
        20.0, "how long accepted work may continue at shutdown before connections close"
    )
    shutdown_seconds: NotNegative = option(3, "how long open requests may continue at shutdown after that")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "lowest severity that is logged")
    log_format: Literal["auto", "text", "json"] = option(
        "auto", "lines of the log; auto: text on a terminal, else json"
    )
    slow_pass_seconds: Annotated[float, at_least(1)] = option(
        60.0, "passes and steps that take longer are logged as warnings"
    )
    ready_file: Path | None = option(None, "written with the URL when the server is ready, removed at its end")
