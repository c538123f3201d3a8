"""Creates the pools of groups, on this machine or on Ray.

Imports neither torch nor ray.
"""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ....schemas.adapters.model_files import model_directory
from ...pools.base import Pool, PoolSpec
from ...pools.local import LocalPool
from ...pools.ray.actors import KeptGroup
from ...pools.ray.cluster import RayCluster
from ...pools.ray.pool import RayPool
from ...protocol.log_lines import LogSettings
from ...protocol.methods import RESET
from ...protocol.parallel_spec import SINGLE
from ...protocol.timeouts import CallTimeouts
from ...protocol.worker_config import DispatchConfig, RoleGroup, SamplingConfig, WorkerConfig, hash_of
from ...resources.devices import check_cuda, check_devices, device_of, first_device
from ...resources.machine import cuda_devices, runs_on_cpu
from ...shapes.draft_spec import check_drafts
from ...shapes.layouts.checks import check_layout
from ...shapes.model_shape import read_model
from .footprint import check_fit

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[3]


class PoolFactory:
    """Creates pools of processes of this machine, or of Ray actors."""

    def __init__(self, config: DispatchConfig) -> None:
        self._config = config
        self._cluster = RayCluster(config.ray_address) if config.pool == "ray" else None
        self._opened: set[str] = set()
        self._fingerprint = ""

    async def open(self) -> None:
        """Checks the configuration and prepares to create pools.

        Raises:
            ValueError: a layout is impossible for its model, or memory does not suffice.
        """
        if self._config.ray_address is None:
            for _, model in groups_of(self._config):
                check_cuda(model.device)
        check_layouts(self._config, cuda_devices())
        groups = _rank_configs(self._config)
        if self._config.kept is None:  # else the models may be loaded already
            check_fit(groups, self._config.shared_devices == "turns" and self._cluster is None)
        copies = [copy for group in groups for copy in group]
        if self._cluster is None and (num_ranks := sum(map(runs_on_cpu, copies))) > num_cores():
            logger.warning("%d ranks on the CPU share %d cores: fewer would be faster", num_ranks, num_cores())
        if self._config.kept is not None:
            self._fingerprint = await asyncio.to_thread(_fingerprint, self._config)
        if self._cluster is not None:
            await self._cluster.connect(self._config.ray_cpus_per_rank * len(copies))

    def new_pool(self, group: str, model: WorkerConfig) -> Pool:
        """Returns a pool for the named group, not started yet."""
        spec = PoolSpec(
            worker=self._config.worker,
            configs=_configs_by_rank(model, is_local=self._cluster is None),
            threads=model.threads,
            cpus_per_rank=self._config.ray_cpus_per_rank,
            gpus_per_rank=0.0 if runs_on_cpu(model) else self._config.ray_gpus_per_rank,
            blocks=model.parallel.neighbour_blocks,
            log=LogSettings.of_this_process(logger),
        )
        return RayPool(spec, self._cluster, self._kept_group(group, model)) if self._cluster else LocalPool(spec)

    def _kept_group(self, group: str, model: WorkerConfig) -> KeptGroup | None:
        """Returns where the group's ranks are kept. Only the first pool of a group takes over ranks of an earlier
        server: a later one replaces ranks that have failed.
        """
        if self._config.kept is None:
            return None
        is_first = group not in self._opened
        self._opened.add(group)
        takeover_seconds = CallTimeouts(model).for_method(RESET)
        return KeptGroup(self._config.kept, group, self._fingerprint, takeover_seconds, replaces=not is_first)

    async def close(self) -> None:
        """Releases resources after all pools are closed."""
        if self._cluster is not None:
            await self._cluster.disconnect()


def check_layouts(config: DispatchConfig, num_devices: int | None) -> None:
    """Checks all layouts for the models that are on this machine already; other models are checked by their ranks.

    Args:
        num_devices: CUDA devices of the machine; None = unknown.
    Raises:
        ValueError: a layout is impossible for its model, or takes devices that are not there.
    """
    for model in config.models:
        _check_layout(model, config.pool == "local", num_devices)
    _check_roles(config, num_devices)
    for model in (*policy_configs(config), *_all_role_configs(config).values()):
        _check_drafts(model)
    _check_samplers(config, num_devices)


def _fingerprint(config: DispatchConfig) -> str:
    """Returns a hash of all that the ranks are made of, their source code included.

    The same on machines with different numbers of cores: threads count as they are configured.
    """
    groups = [(name, replace(model, shared_directories=(), threads=0)) for name, model in groups_of(config)]
    threads = [model.threads for model in config.models]
    resources = config.worker, threads, config.ray_cpus_per_rank, config.ray_gpus_per_rank
    return hash_of(repr((groups, resources)), *(file.read_text() for file in _source_files()))


def _source_files() -> Sequence[Path]:
    files = (file for part in ("schemas", "workers") for file in sorted((_PACKAGE / part).rglob("*.*")))
    return [file for file in files if file.suffix in (".py", ".c", ".h", ".json")]


def groups_of(config: DispatchConfig) -> Iterator[tuple[str, WorkerConfig]]:
    """Yields every group of worker processes by name: for each base model its own, those of roles, then its
    samplers.
    """
    for model in policy_configs(config):
        yield model.model.name, model
        yield from role_configs(config, model).items()
        if config.sampling.vllm is None:
            yield from named_sampler_configs(model, config.sampling)


def policy_configs(config: DispatchConfig) -> tuple[WorkerConfig, ...]:
    """Returns the configs of the base models' own workers."""
    has_drafts = all("draft" not in group.roles for group in config.role_groups)
    return tuple(model if has_drafts else replace(model, draft_parallel=None) for model in with_threads(config))


def role_configs(config: DispatchConfig, model: WorkerConfig) -> dict[str, WorkerConfig]:
    """Returns the configs of the base model's groups of roles, by group name."""
    return {role_group_name(model, each): role_config(config, model, each) for each in config.role_groups}


def role_group_name(model: WorkerConfig, group: RoleGroup) -> str:
    return f"{model.model.name} ({' and '.join(group.roles)})"


def role_config(config: DispatchConfig, model: WorkerConfig, group: RoleGroup) -> WorkerConfig:
    """Returns the config of the workers of these roles, for one base model."""
    number = [each.model for each in config.models].index(model.model)
    devices = group.devices or (model.device,)
    of_drafts = config.models[number].draft_parallel if "draft" in group.roles else None
    return replace(model, parallel=group.parallel, draft_parallel=of_drafts, device=devices[number % len(devices)])


def named_sampler_configs(model: WorkerConfig, sampling: SamplingConfig) -> Iterator[tuple[str, WorkerConfig]]:
    for number, each in enumerate(sampler_configs(model, sampling), start=1):
        yield f"{model.model.name} (sampler {number})", each


def sampler_configs(model: WorkerConfig, sampling: SamplingConfig) -> list[WorkerConfig]:
    """Returns the configs of the worker processes that only sample this model."""
    apart = replace(model, shared_directories=(), draft_parallel=None)
    if sampling.vllm is not None:
        devices = ",".join(sampling.devices) or model.device
        return [] if sampling.vllm.urls else [replace(apart, parallel=SINGLE, device=devices)]
    devices, apart = sampling.devices or (model.device,), replace(apart, parallel=sampling.parallel)
    return [replace(apart, device=devices[number % len(devices)]) for number in range(sampling.workers)]


def _check_layout(model: WorkerConfig, is_local: bool, num_devices: int | None) -> None:
    if model_directory(model.model.source) is None and not Path(model.model.source).is_file():
        return
    has_devices = model.parallel != SINGLE and is_local and not runs_on_cpu(model)
    num_own = None if num_devices is None or not has_devices else num_devices - first_device(model.device)
    served, longest = read_model(model.model), model.max_context_length
    check_layout(model.parallel, served, num_own, longest, model.dtype, model.activations, model.base_quantization)


def _check_drafts(model: WorkerConfig) -> None:
    if model.draft_parallel is not None and model_directory(model.model.source) is not None:
        check_drafts(model.draft_parallel, model.parallel, read_model(model.model))


def _check_roles(config: DispatchConfig, num_devices: int | None) -> None:
    is_local = config.pool == "local"
    try:
        for group in _all_role_configs(config).values():
            _check_layout(group, is_local, num_devices)
    except ValueError as error:
        raise ValueError(f"--role-group: {error}") from None
    if is_local:
        policies = {model.model.name: model for model in config.models}
        check_devices(num_devices, policies, _all_role_configs(config), "--role-group")


def _all_role_configs(config: DispatchConfig) -> dict[str, WorkerConfig]:
    return {name: group for model in config.models for name, group in role_configs(config, model).items()}


def _check_samplers(config: DispatchConfig, num_devices: int | None) -> None:
    sampling = config.sampling
    if sampling.parallel == SINGLE:
        return
    try:
        for model in config.models:
            _check_layout(replace(model, parallel=sampling.parallel), False, num_devices)
    except ValueError as error:
        raise ValueError(f"--sampler-parallel: {error}") from None
    if config.pool == "local":
        training = {model.model.name: model for model in config.models} | _all_role_configs(config)
        of_samplers = dict(each for model in config.models for each in named_sampler_configs(model, sampling))
        check_devices(num_devices, training, of_samplers, "--sampler-parallel", "--sampler-device")


def _configs_by_rank(model: WorkerConfig, is_local: bool) -> tuple[WorkerConfig, ...]:
    """Returns one config per rank. Ray shows each rank its own GPUs only; on this machine each rank is given a
    different one.
    """
    shares_gpus = is_local and model.parallel.num_ranks > 1 and not runs_on_cpu(model)
    return tuple(
        replace(
            model, rank=rank, is_local=is_local, device=device_of(model.device, rank) if shares_gpus else model.device
        )
        for rank in range(model.parallel.num_ranks)
    )


def _rank_configs(config: DispatchConfig) -> list[tuple[WorkerConfig, ...]]:
    groups = (
        group
        for model in config.models
        for group in (model, *role_configs(config, model).values(), *sampler_configs(model, config.sampling))
    )
    return [_configs_by_rank(group, is_local=config.pool == "local") for group in groups]


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def with_threads(config: DispatchConfig) -> tuple[WorkerConfig, ...]:
    """Returns the models' configs with a default for threads: cores / ranks that compute at the same time.

    These are the ranks of the largest group if groups take turns on devices, else all ranks.
    """
    num_ranks = [len(group) for group in _rank_configs(config)]
    together = max(num_ranks, default=1) if config.shared_devices == "turns" else sum(num_ranks)
    share = max(1, num_cores() // max(1, together))
    return tuple(replace(model, threads=model.threads or share) for model in config.models)
