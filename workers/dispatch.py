"""Routes each operation on a run, adapter or base model to the rank group or sampling engine that executes it.

Each base model has one group, plus groups for roles with ranks of their own, plus its sampling engine. Knows no HTTP,
no seq_id and no user-facing futures. Imports neither torch nor ray.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import numpy as np

from ..schemas.errors import OperationError
from ..schemas.models import LoraConfig, Utilization
from ..schemas.sampling import SampleResponse
from ..schemas.training import ForwardBackwardOutput, ForwardBackwardRequest
from .engines.engine import Engine, TrainingWorkersEngine
from .engines.sampler_groups import SamplerGroups
from .protocol.calls import AdapterFile, ModelInfo, OptimizerStep, RunInfo, RunSpec, SampleJob, SavedContents
from .protocol.methods import (
    CLEAR_GRADIENTS,
    CONVERT_ADAPTER,
    CREATE_RUN,
    DROP_RUN,
    LOAD_RUN,
    MEMORY,
    SAVE_RUN,
    SET_TARGET,
    SET_VOCABULARY,
    UTILIZATION,
    VOCABULARY,
    Method,
)
from .protocol.plugins import plugin_rows
from .protocol.worker_config import DispatchConfig, WorkerConfig
from .scheduler.quarantine import SUSPECT_SHRINK_FACTOR, Suspects
from .scheduler.queue import PassLimits
from .scheduler.rank_group import RankGroup
from .scheduler.supervision.device_sharing import DeviceScheduler
from .scheduler.supervision.pool_factory import (
    PoolFactory,
    named_sampler_configs,
    policy_configs,
    role_config,
    role_group_name,
)
from .scheduler.work import CallSize, MethodWork, OnProgress, PassWork, SnapshotWork, StepWork

T = TypeVar("T")

_MAX_WEIGHT_RATIO = 1000


class WorkerDispatch:
    """Executes operations by run, adapter or base model. Every method may raise OperationError."""

    def __init__(self, config: DispatchConfig) -> None:
        names = [*(model.model.name for model in config.models), *config.aliases]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"base model {sorted(repeated)[0]} is given twice: give each served name once")
        _check_weights(config.tenant_weights)
        self.models: Mapping[str, ModelInfo] = {}
        self._config = config
        self._pool_factory = PoolFactory(config)
        new = _Builder(config, self._pool_factory, partial(self.save_run, optimizer=False))
        self._own = {
            model.model.name: new.base_model(number, model) for number, model in enumerate(policy_configs(config))
        }
        self._engines = [own.engine for own in self._own.values()]
        self._training_groups = [group for own in self._own.values() for group in own.groups]
        # By served name, of which several may name one base model.
        self._served = self._own | {alias: self._own[name] for alias, name in config.aliases.items()}
        self._locations: dict[str, _RunLocation] = {}  # by run id
        self._adapters: dict[str, Engine] = {}  # by adapter id

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Loads every base model.

        Raises:
            ValueError: a model is missing or unusable, its layout is impossible, or memory does not suffice.
        """
        try:
            await self._pool_factory.open()
            for own in self._own.values():
                for group in own.groups:
                    await group.start(on_progress)
                await own.engine.start(on_progress)
            for alias, name in self._config.aliases.items():
                on_progress(f"{alias} is served by the workers of {name}: both have the same source")
        except BaseException:
            await self.close()
            raise
        self.models = {name: replace(served.group.supervisor.info, name=name) for name, served in self._served.items()}

    async def close(self) -> None:
        """Stops the workers; operations still waiting for them fail."""
        await asyncio.gather(*(engine.close() for engine in self._engines))
        await asyncio.gather(*(group.close() for group in self._training_groups))
        await self._pool_factory.close()

    @property
    def groups(self) -> list[RankGroup]:
        """Returns all groups: of base models, of roles, and those that only sample."""
        return [*self._training_groups, *(group for engine in self._engines for group in engine.groups)]

    def status(self, base_model: str, role: str | None = None) -> str | None:
        """Describes for the user why work on this base model is waiting; None if nothing waits.

        Args:
            role: selects the group that holds runs of this role; None selects the group that is sampled.
        """
        served = self._base_model(base_model)
        group = served.group_of(role)
        return group.status() or (served.engine.status() if group is served.group else None)

    def is_up(self, base_model: str) -> bool:
        """True unless some worker of the base model is restarting; workers that only sample do not count."""
        return not any(group.supervisor.is_restarting for group in self._base_model(base_model).groups)

    def pids(self, base_model: str) -> list[int]:
        """Returns the process ids of the base model's ranks: of its own group, of groups of roles, then of samplers."""
        served = self._base_model(base_model)
        return [pid for group in served.groups for pid in group.supervisor.pids] + served.engine.pids()

    async def create_run(self, base_model: str, spec: RunSpec, tenant_id: str) -> RunInfo:
        """Creates the run on the workers; `tenant_id` decides whose share of the base model's passes it uses."""
        # Registered before it exists, so that a caller that stops waiting can still drop it.
        has_own_weights = not isinstance(spec.training, LoraConfig)
        served = self._base_model(base_model)
        location = _RunLocation(served.group_of(spec.role), tenant_id, served, has_own_weights)
        self._locations[spec.run_id] = location
        spec = replace(spec, base_name=base_model if base_model in self._config.aliases else None)
        return await location.group.submit(MethodWork(spec.run_id, tenant_id, CREATE_RUN, (spec,), creates=spec.run_id))

    async def drop_run(self, run_id: str, *, keeps_suspicion: bool = False) -> None:
        """Frees the run; does nothing if it is unknown or lost. If it is a suspect, `keeps_suspicion` leaves it one."""
        location = self._locations.get(run_id)
        if location is not None and not location.group.forget_lost(run_id, keeps_suspicion=keeps_suspicion):
            # If the caller stops waiting, the run stays registered and the caller must drop it again.
            await location.group.submit(MethodWork(run_id, location.tenant_id, DROP_RUN, (run_id,), drops=run_id))
        self._locations.pop(run_id, None)

    async def forward_backward(
        self,
        request: ForwardBackwardRequest,
        on_begin: Callable[[CallSize], None] | None = None,
        position: float | None = None,
    ) -> ForwardBackwardOutput:
        """Computes losses and gradients; `on_begin` and `position` are those of a PassWork."""
        location = self._location(request.model_id)
        work = PassWork(request.model_id, location.tenant_id, request, on_begin=on_begin, position=position)
        return await location.group.submit(work)

    async def optim_step(
        self, step: OptimizerStep, on_begin: Callable[[CallSize], None] | None = None
    ) -> dict[str, float]:
        """Takes a step; `on_begin` is called when the ranks are sent it, with how much is sent together."""
        location = self._location(step.run_id)
        return await location.group.submit(StepWork(step.run_id, location.tenant_id, step, on_begin=on_begin))

    async def clear_gradients(self, run_id: str) -> None:
        await self._call_worker(CLEAR_GRADIENTS, run_id)

    async def set_target(self, run_id: str, directory: Path | None) -> None:
        """Sets the target that a draft learns to predict: the policy saved in `directory`, or the base model if None.

        Pending gradients stay. The directory is not read after this returns.
        """
        await self._call_worker(SET_TARGET, run_id, None if directory is None else str(directory))

    async def set_vocabulary(self, run_id: str, token_ids: np.ndarray) -> None:
        """Sets the tokens that a draft model can propose, before its training starts.

        Args:
            token_ids: int64 [draft_vocab_size], ascending.
        """
        await self._call_worker(SET_VOCABULARY, run_id, token_ids)

    async def vocabulary(self, run_id: str) -> np.ndarray:
        """Returns the tokens that a draft model can propose. Raises OperationError if they were not chosen."""
        return await self._call_worker(VOCABULARY, run_id)

    async def save_run(self, run_id: str, directory: Path, optimizer: bool) -> None:
        """Writes the run as of its last optimizer step into an existing empty directory.

        A run with its own full weights is written while the workers do other work; saving an adapter blocks them no
        longer than a pass.
        """
        if self._location(run_id).has_own_weights:
            await self._write(run_id, directory, "state" if optimizer else "weights")
        else:
            await self._call_worker(SAVE_RUN, run_id, str(directory), optimizer)

    async def load_run(self, run_id: str, directory: Path, optimizer: bool) -> None:
        await self._call_worker(LOAD_RUN, run_id, str(directory), optimizer)

    async def snapshot_run(self, run_id: str, directory: Path) -> None:
        """Writes the run with its optimizer state and pending gradients, as of the operations submitted before this
        call.

        The worker writes into an existing empty directory while it does other work. If writing fails, the directory's
        contents are useless.
        """
        await self._write(run_id, directory, "all")

    async def copy_adapter(self, run_id: str, adapter_id: str) -> None:
        """Copies the run's current weights for sampling; reusing an id moves that sampler to the new weights.

        The copy is held until `drop_adapter`. If the training workers sample, it is also lost when their worker dies.
        """
        location = self._location(run_id)
        group, engine = location.group, location.base_model.engine
        if group is not location.base_model.group:
            raise OperationError(f"run {run_id} is in {group.name}, which does not sample: sample from a policy")
        await engine.copy_adapter(run_id, location.tenant_id, adapter_id)
        self._adapters[adapter_id] = engine

    async def load_adapter(self, base_model: str, adapter_id: str, directory: Path) -> None:
        engine = self._base_model(base_model).engine
        await engine.load_adapter(adapter_id, directory)
        self._adapters[adapter_id] = engine

    async def convert_adapter(
        self, base_model: str, source: AdapterFile, lora: LoraConfig, directory: Path, tenant_id: str
    ) -> LoraConfig:
        """Converts an adapter of peft into a checkpoint in an existing empty directory; returns what it adapts.

        Args:
            lora: the adapter's rank and alpha.
        Raises:
            OperationError: category "user", if the file does not fit this base model.
        """
        aliases = [base_model] if base_model in self._config.aliases else []
        call = MethodWork(str(directory), tenant_id, CONVERT_ADAPTER, (source, lora, str(directory), *aliases))
        return await self._base_model(base_model).group.submit(call)

    async def drop_adapter(self, adapter_id: str) -> None:
        """Frees the adapter; does nothing if it is unknown or lost."""
        if (engine := self._adapters.pop(adapter_id, None)) is not None:
            await engine.drop_adapter(adapter_id)

    def has_weights(self, base_model: str, weights_id: str) -> bool:
        """True if samples may use this adapter or draft model; turns False when a worker that held it dies."""
        return self._base_model(base_model).engine.has_weights(weights_id)

    async def load_draft(self, base_model: str, draft_id: str, directory: Path) -> None:
        """Loads a draft model's checkpoint for samples of this base model; see SampleJob."""
        await self._base_model(base_model).engine.load_draft(draft_id, directory)

    async def drop_draft(self, base_model: str, draft_id: str) -> None:
        """Frees the draft model; does nothing if it is unknown or lost."""
        await self._base_model(base_model).engine.drop_draft(draft_id)

    async def sample(self, base_model: str, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """Samples; cancelling the caller cancels the job.

        Args:
            on_progress: called with new tokens as they are generated, if the job streams.
        """
        return await self._base_model(base_model).engine.sample(job, on_progress)

    def cancel(self, job_id: str) -> None:
        """Cancels the job: its caller gets an OperationError that says so. Ignores unknown and finished jobs."""
        for engine in self._engines:
            engine.cancel(job_id)

    async def memory(self) -> dict[str, dict[str, int]]:
        """Returns bytes by purpose for every group that is up, by its name, which for policies is the served one."""
        groups = [group for group in self._training_groups if not group.supervisor.is_restarting]
        answers = await asyncio.gather(*(group.ask(MEMORY) for group in groups))
        of_engines = await asyncio.gather(*(engine.memory() for engine in self._engines))
        memory = {group.name: answer for group, answer in zip(groups, answers, strict=True) if answer is not None}
        for of_engine in of_engines:
            memory |= of_engine
        return memory

    async def utilization(self) -> dict[str, Utilization]:
        """Returns the use of their devices for every group that is up, by the names of `memory`."""
        groups = [group for group in self.groups if not group.supervisor.is_restarting]
        answers = await asyncio.gather(*(group.ask(UTILIZATION) for group in groups))
        return {group.name: answer for group, answer in zip(groups, answers, strict=True) if answer is not None}

    async def _call_worker(self, method: Method[T], run_id: str, *arguments: object) -> T:
        location = self._location(run_id)
        return await location.group.submit(MethodWork(run_id, location.tenant_id, method, (run_id, *arguments)))

    async def _write(self, run_id: str, directory: Path, contents: SavedContents) -> None:
        location = self._location(run_id)
        await location.group.submit(SnapshotWork(run_id, location.tenant_id, str(directory), contents))

    def _base_model(self, name: str) -> "_ModelGroups":
        if name not in self._served:
            raise OperationError(f"base model {name} is not served here; served are: {', '.join(self._served)}")
        return self._served[name]

    def _location(self, run_id: str) -> "_RunLocation":
        if run_id not in self._locations:
            raise OperationError(
                f"run {run_id} is not live: it was dropped, or the server was restarted since; "
                "create a run from its last checkpoint",
                "server",
            )
        return self._locations[run_id]


@dataclass(frozen=True)
class _ModelGroups:
    """The groups and the engine that execute the work on a base model."""

    group: RankGroup
    """The group of its policies."""
    role_groups: Mapping[str, RankGroup]
    """Groups that hold the runs of certain roles, by role."""
    engine: Engine

    @property
    def groups(self) -> list[RankGroup]:
        """Returns the groups that train; the one of its policies is first."""
        return list(dict.fromkeys([self.group, *self.role_groups.values()]))

    def group_of(self, role: str | None) -> RankGroup:
        """Returns the group that holds runs of this role; None selects the group that is sampled."""
        return self.group if role is None else self.role_groups.get(role, self.group)


@dataclass(frozen=True)
class _RunLocation:
    group: RankGroup
    tenant_id: str
    base_model: _ModelGroups
    has_own_weights: bool


class _Builder:
    """Builds the groups and engines of base models from the configuration."""

    def __init__(
        self, config: DispatchConfig, pool_factory: PoolFactory, save_weights: Callable[[str, Path], Awaitable[None]]
    ) -> None:
        self._config = config
        self._pool_factory = pool_factory
        self._save_weights = save_weights
        self._device_scheduler = DeviceScheduler() if config.shared_devices == "turns" else None

    def base_model(self, number: int, model: WorkerConfig) -> _ModelGroups:
        """Builds what executes the base model's work; `number` is its position in the config."""
        group = self._group(model, model.model.name)
        role_groups: dict[str, RankGroup] = {}
        for roles in self._config.role_groups:
            of_roles = self._group(role_config(self._config, model, roles), role_group_name(model, roles))
            role_groups |= dict.fromkeys(roles.roles, of_roles)
        return _ModelGroups(group, role_groups, self._engine(number, model, group))

    def _group(self, model: WorkerConfig, name: str, suspect_jobs: Suspects | None = None) -> RankGroup:
        limits = PassLimits(self._config.pass_tokens, model.adapter_slots, self._config.tenant_weights)
        config, new_pool = self._config, partial(self._pool_factory.new_pool, name)
        devices, idle_seconds = self._device_scheduler, config.idle_device_seconds
        return RankGroup(model, new_pool, limits, config.slice_milliseconds, name, devices, idle_seconds, suspect_jobs)

    def _engine(self, number: int, model: WorkerConfig, training: RankGroup) -> Engine:
        sampling = self._config.sampling
        directory = Path(sampling.directory) / quote(model.model.name, safe="") if sampling.directory else None
        if sampling.vllm is not None:
            if (new_engine := plugin_rows("workers.engines.vllm.engine", "ENGINES").get("vllm")) is None:
                raise ValueError("sampler vllm needs workers/engines/vllm, which this installation lacks: use native")
            return new_engine(number, model, sampling, training, self._save_weights, directory)
        # A request that killed one sampler may be retried on another one, so they share their suspects.
        suspects = Suspects(SUSPECT_SHRINK_FACTOR)
        groups = [self._group(sampler, name, suspects) for name, sampler in named_sampler_configs(model, sampling)]
        if not groups:
            return TrainingWorkersEngine(training)
        return SamplerGroups(training, groups, directory)


def _check_weights(weights: Mapping[str, float]) -> None:
    for tenant_id, weight in weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight {weight} of tenant {tenant_id} must be positive and finite")
    # Tenants that are not named have weight 1.
    lightest, heaviest = min(1.0, *weights.values(), 1.0), max(1.0, *weights.values(), 1.0)
    if heaviest > _MAX_WEIGHT_RATIO * lightest:
        raise ValueError(
            f"tenant weights range from {lightest:g} to {heaviest:g}: the heaviest may be {_MAX_WEIGHT_RATIO} times "
            "the lightest at most (a tenant that is not named has weight 1)"
        )
