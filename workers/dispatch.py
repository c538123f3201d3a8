"""What each verb means over the groups that train, one per base model, and the engines that sample.

Knows no HTTP, no seq_id, no futures of users. Imports neither torch nor ray.
"""

import asyncio
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from ..schemas.errors import OperationError
from ..schemas.sampling import SampleResponse
from ..schemas.training import ForwardBackwardOutput, ForwardBackwardRequest
from .config import SamplingConfig, WorkerConfig
from .engines import AdapterCopies, Engine, SamplerGroups, TrainingWorkers, Vllm, VllmAt, VllmProcess
from .footprint import check_fit, runs_on_cpu
from .group import Group, OnProgress
from .parallel.checks import check_layout, cuda_devices
from .parallel.shape import model_directory, read_model
from .parallel.spec import SINGLE
from .pools import LocalPool, Pool, PoolSpec, RayCluster, RayPool
from .shares import PassLimits
from .verbs import ModelInfo, RunInfo, RunSpec, SampleJob, Step
from .work import Item, Snapshot, Verb

_MOST_WEIGHT_RATIO = 1000


@dataclass(frozen=True)
class DispatchConfig:
    """One group per model, each of one rank, and those that only sample.

    pool: "local" = processes of this machine, "ray" = actors. ray_address: None starts a small cluster here.
    ray_gpus_per_rank: of ranks on CUDA; less than 1 when several base models share a GPU.
    slice_milliseconds: about how long sampling holds the ranks at a time.
    pass_tokens: most tokens of one pass; sequences longer than half of it may take a pass beyond it.
    tenant_weights: tenant id -> its share of the passes' tokens relative to the others; 1 for those not named.
    worker: the class built on every rank, as "module:Class".
    """

    models: tuple[WorkerConfig, ...]
    pool: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    ray_cpus_per_rank: float = 1.0
    ray_gpus_per_rank: float = 1.0
    slice_milliseconds: float = 50.0
    pass_tokens: int = 8192
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    worker: str = f"{__package__}.worker:Worker"


class WorkerDispatch:
    """The verbs, by run, adapter or base model. All raise OperationError, which is WorkerLost when a worker died."""

    models: Mapping[str, ModelInfo]

    def __init__(self, config: DispatchConfig) -> None:
        names = [model.model.name for model in config.models]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"base model {sorted(repeated)[0]} is given twice: give each served name once")
        _check_weights(config.tenant_weights)
        self.models = {}
        self._config = config
        self._cluster = RayCluster(config.ray_address) if config.pool == "ray" else None
        models = _with_threads(config)
        self._groups = {model.model.name: self._new_group(model) for model in models}
        self._engines = {model.model.name: self._new_engine(number, model) for number, model in enumerate(models)}
        self._homes: dict[str, _Home] = {}  # by id of the run
        self._adapters: dict[str, Engine] = {}  # by id of the adapter that is sampled

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Loads every base model. Raises ValueError: no such model, a bad one, a layout that it cannot have, or not
        enough memory."""
        for model in self._config.models:
            _check_layout(model, is_local=self._cluster is None)
        copies = _copies(self._config)
        check_fit(copies)
        try:
            if self._cluster is not None:
                await self._cluster.connect(self._config.ray_cpus_per_rank * len(copies))
            for name, group in self._groups.items():
                await group.start(on_progress)
                await self._engines[name].start(on_progress)
        except BaseException:
            await self.close()
            raise
        self.models = {name: group.info for name, group in self._groups.items()}

    async def close(self) -> None:
        """Ends the workers; what still waits for them fails."""
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))
        await asyncio.gather(*(group.close() for group in self._groups.values()))
        if self._cluster is not None:
            await self._cluster.disconnect()

    def status(self, base_model: str) -> str | None:
        """What work on this base model waits for, in words; None when nothing waits."""
        return self._group(base_model).status() or self._engines[base_model].status()

    def is_up(self, base_model: str) -> bool:
        """Whether its training workers are; else they are being started again."""
        return not self._group(base_model).restarting

    def pids(self, base_model: str) -> list[int]:
        """Process ids of the base model's training ranks, and then of what only samples it."""
        return self._group(base_model).pids() + self._engines[base_model].pids()

    async def create_run(self, base_model: str, spec: RunSpec, tenant_id: str) -> RunInfo:
        """tenant_id: whose share of the base model's passes it takes part in."""
        # Before it is there: who gives up waiting for it has to drop it.
        home = self._homes[spec.run_id] = _Home(self._group(base_model), tenant_id)
        return await home.submit(spec.run_id, Verb("create_run", (spec,), creates=spec.run_id))

    async def drop_run(self, run_id: str) -> None:
        """Unknown and lost runs: no-op."""
        home = self._homes.get(run_id)
        if home is not None and not home.group.forget_lost(run_id):
            # Whoever gives up waiting for it has to ask again.
            await home.submit(run_id, Verb("drop_run", (run_id,), drops=run_id))
        self._homes.pop(run_id, None)

    async def forward_backward(self, request: ForwardBackwardRequest) -> ForwardBackwardOutput:
        return await self._home_of_run(request.model_id).submit(request.model_id, request)

    async def optim_step(self, step: Step) -> dict[str, float]:
        return await self._home_of_run(step.run_id).submit(step.run_id, step)

    async def clear_gradients(self, run_id: str) -> None:
        await self._submit_verb(run_id, "clear_gradients")

    async def save_run(self, run_id: str, directory: Path, optimizer: bool) -> None:
        await self._submit_verb(run_id, "save_run", str(directory), optimizer)

    async def load_run(self, run_id: str, directory: Path, optimizer: bool) -> None:
        await self._submit_verb(run_id, "load_run", str(directory), optimizer)

    async def snapshot_run(self, run_id: str, directory: Path) -> None:
        """The run as it is when the operations submitted before have ended, with optimizer and pending gradients.

        Into an existing empty directory, while the worker goes on with other work. Where writing fails, what is in the
        directory is of no use.
        """
        await self._home_of_run(run_id).submit(run_id, Snapshot(str(directory)))

    async def copy_adapter(self, run_id: str, adapter_id: str) -> None:
        """The run's weights as they are now, for sampling; the same id again moves its samplers forward.

        Held until `drop_adapter`; by the training workers, where they sample, until the worker dies.
        """
        home = self._home_of_run(run_id)
        engine = self._engines[home.group.name]
        await engine.copy_adapter(run_id, home.tenant_id, adapter_id)
        self._adapters[adapter_id] = engine

    async def load_adapter(self, base_model: str, adapter_id: str, directory: Path) -> None:
        engine = self._engine(base_model)
        await engine.load_adapter(adapter_id, directory)
        self._adapters[adapter_id] = engine

    async def drop_adapter(self, adapter_id: str) -> None:
        """Unknown and lost adapters: no-op."""
        engine = self._adapters.pop(adapter_id, None)
        if engine is not None:
            await engine.drop_adapter(adapter_id)

    async def sample(self, base_model: str, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """A caller that is cancelled cancels the job. on_progress: of a job that streams, as it grows."""
        return await self._engine(base_model).sample(job, on_progress)

    def cancel(self, job_id: str) -> None:
        """The job's caller gets an OperationError that says so. Unknown or finished jobs: no-op."""
        for engine in self._engines.values():
            engine.cancel(job_id)

    async def memory(self) -> dict[str, dict[str, int]]:
        """Served name -> bytes by purpose, of the groups that are up, and the same of workers that only sample."""
        groups = {name: group for name, group in self._groups.items() if not group.restarting}
        answers = await asyncio.gather(*(_Home(group).submit("memory", Verb("memory")) for group in groups.values()))
        of_engines = await asyncio.gather(*(engine.memory() for engine in self._engines.values()))
        memory = dict(zip(groups, answers, strict=True))
        for each in of_engines:
            memory |= each
        return memory

    async def _submit_verb(self, run_id: str, method: str, *arguments: object) -> None:
        await self._home_of_run(run_id).submit(run_id, Verb(method, (run_id, *arguments)))

    def _group(self, base_model: str) -> Group:
        if base_model not in self._groups:
            raise OperationError(f"base model {base_model} is not served here; served are: {', '.join(self._groups)}")
        return self._groups[base_model]

    def _engine(self, base_model: str) -> Engine:
        return self._engines[self._group(base_model).name]

    def _home_of_run(self, run_id: str) -> "_Home":
        if run_id not in self._homes:
            raise OperationError(
                f"run {run_id} is not live: it was dropped, or the server was restarted since; "
                "create a run from its last checkpoint",
                "server",
            )
        return self._homes[run_id]

    def _new_group(self, model: WorkerConfig, name: str | None = None) -> Group:
        limits = PassLimits(self._config.pass_tokens, model.adapter_slots, self._config.tenant_weights)
        return Group(model, self._new_pool, limits, self._config.slice_milliseconds, name)

    def _new_engine(self, number: int, model: WorkerConfig) -> Engine:
        """number: the model's, in the order of the config."""
        training, sampling = self._groups[model.model.name], self._config.sampling
        directory = Path(sampling.directory) / quote(model.model.name, safe="") if sampling.directory else None
        if sampling.vllm is not None and sampling.vllm.urls:
            return Vllm(training, VllmAt(sampling.vllm.urls[number], sampling.vllm.api_key), directory)
        samplers = list(_samplers(model, sampling))
        if sampling.vllm is not None:
            return Vllm(training, VllmProcess(samplers[0], sampling.vllm, directory), directory)
        if not samplers:
            return TrainingWorkers(training)
        groups = [
            self._new_group(each, f"{model.model.name} (sampler {i})") for i, each in enumerate(samplers, start=1)
        ]
        return SamplerGroups(training, groups, AdapterCopies(directory))

    def _new_pool(self, model: WorkerConfig) -> Pool:
        spec = PoolSpec(
            worker=self._config.worker,
            configs=_of_ranks(model, is_local=self._cluster is None),
            threads=model.threads,
            cpus_per_rank=self._config.ray_cpus_per_rank,
            gpus_per_rank=0.0 if runs_on_cpu(model) else self._config.ray_gpus_per_rank,
        )
        return RayPool(spec, self._cluster) if self._cluster else LocalPool(spec)


@dataclass(frozen=True)
class _Home:
    """Where a run lives, and whose it is; "": the server's."""

    group: Group
    tenant_id: str = ""

    async def submit(self, key: str, item: Item) -> Any:
        return await self.group.submit(key, self.tenant_id, item)


def _check_weights(weights: Mapping[str, float]) -> None:
    for tenant_id, weight in weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight {weight} of tenant {tenant_id} is no positive number")
    # Tenants that are not named have 1.
    lightest, heaviest = min(1.0, *weights.values(), 1.0), max(1.0, *weights.values(), 1.0)
    if heaviest > _MOST_WEIGHT_RATIO * lightest:
        raise ValueError(
            f"tenant weights go from {lightest:g} to {heaviest:g}: the heaviest may have {_MOST_WEIGHT_RATIO} times "
            "the lightest, where 1 is that of tenants not named"
        )


def _samplers(model: WorkerConfig, sampling: SamplingConfig) -> list[WorkerConfig]:
    """What our processes that only sample the model are built of."""
    alone = replace(model, parallel=SINGLE)
    if sampling.vllm is not None:
        devices = ",".join(sampling.devices) or model.device
        return [] if sampling.vllm.urls else [replace(alone, device=devices)]
    devices = sampling.devices or (model.device,)
    return [replace(alone, device=devices[number % len(devices)]) for number in range(sampling.workers)]


def _check_layout(model: WorkerConfig, is_local: bool) -> None:
    """Of a model that is on this machine already; any other is left to its ranks. Raises ValueError."""
    if model.parallel == SINGLE or model_directory(model.model.source) is None:
        return
    num_devices = cuda_devices() if is_local and not runs_on_cpu(model) else None
    check_layout(model.parallel, read_model(model.model), num_devices, model.max_context_length, model.dtype)


def _of_ranks(model: WorkerConfig, is_local: bool) -> tuple[WorkerConfig, ...]:
    """Ray lets each rank see its own GPUs alone; on this machine each takes another one."""
    shares_gpus = is_local and model.parallel.num_ranks > 1 and not runs_on_cpu(model)
    return tuple(
        replace(
            model, rank=rank, is_local=is_local, device=_device_of(model.device, rank) if shares_gpus else model.device
        )
        for rank in range(model.parallel.num_ranks)
    )


def _device_of(device: str, rank: int) -> str:
    """Those from the one named on: "cuda:2" -> "cuda:3" of rank 1."""
    _, _, first = device.partition(":")
    return f"cuda:{int(first or 0) + rank}"


def _copies(config: DispatchConfig) -> list[WorkerConfig]:
    """One for each process that holds a base model."""
    return [
        copy
        for model in config.models
        for copy in (*_of_ranks(model, is_local=config.pool == "local"), *_samplers(model, config.sampling))
    ]


def _with_threads(config: DispatchConfig) -> tuple[WorkerConfig, ...]:
    """Threads per rank = cores / ranks, over all of them: they compute at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // max(1, len(_copies(config))))
    return tuple(replace(model, threads=model.threads or share) for model in config.models)
