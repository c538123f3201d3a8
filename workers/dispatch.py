"""What each verb means over the groups that hold runs, one per base model and more for roles apart, and the engines
that sample.

Knows no HTTP, no seq_id, no futures of users. Imports neither torch nor ray.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ..schemas.errors import OperationError
from ..schemas.models import LoraConfig
from ..schemas.sampling import SampleResponse
from ..schemas.training import ForwardBackwardOutput, ForwardBackwardRequest
from .engines.engine import Engine
from .engines.groups.copies import AdapterCopies
from .engines.groups.sampler_groups import SamplerGroups
from .engines.training_workers import TrainingWorkers
from .engines.vllm.engine import Vllm
from .engines.vllm.process import VllmProcess
from .engines.vllm.server import VllmAt
from .protocol.config import DispatchConfig, WorkerConfig
from .protocol.verbs import ModelInfo, RunInfo, RunSpec, SampleJob, Step
from .scheduler.cohorts import OnProgress
from .scheduler.device_sharing import DeviceTurns
from .scheduler.fair_queue import PassLimits
from .scheduler.group import JOBS_SHRINK, Group
from .scheduler.pool_factory import name_of, named_samplers, of_policies, roles_apart, samplers, source_of
from .scheduler.quarantine import Suspects
from .scheduler.work import Item, Snapshot, Verb

_MOST_WEIGHT_RATIO = 1000


class WorkerDispatch:
    """The verbs, by run, adapter or base model. All raise OperationError, which is WorkerLost when a worker died."""

    models: Mapping[str, ModelInfo]

    def __init__(self, config: DispatchConfig) -> None:
        names = [*(model.model.name for model in config.models), *config.aliases]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"base model {sorted(repeated)[0]} is given twice: give each served name once")
        _check_weights(config.tenant_weights)
        self.models = {}
        self._config = config
        self._source = source_of(config)
        self._device_turns = DeviceTurns() if config.shared_devices == "turns" else None
        models = of_policies(config)
        self._groups = {model.model.name: self._new_group(model, model.model.name) for model in models}
        self._apart = {model.model.name: self._groups_apart(model) for model in models}  # by role
        self._engines = {model.model.name: self._new_engine(number, model) for number, model in enumerate(models)}
        # Each name that is served -> that of its groups.
        self._names = {name: name for name in self._groups} | dict(config.aliases)
        self._homes: dict[str, _Home] = {}  # by id of the run
        self._adapters: dict[str, Engine] = {}  # by id of the adapter that is sampled

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Loads every base model. Raises ValueError: no such model, a bad one, a layout that it cannot have, or not
        enough memory."""
        try:
            await self._source.open()
            for name in self._groups:
                for each in self._groups_of(name):
                    await each.start(on_progress)
                await self._engines[name].start(on_progress)
            for alias, name in self._config.aliases.items():
                on_progress(f"{alias} is served by the workers of {name}: both have the same source")
        except BaseException:
            await self.close()
            raise
        self.models = {name: replace(self._groups[own].info, name=name) for name, own in self._names.items()}

    async def close(self) -> None:
        """Ends the workers; what still waits for them fails."""
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))
        await asyncio.gather(*(group.close() for group in self._all_groups()))
        await self._source.close()

    def status(self, base_model: str, role: str | None = None) -> str | None:
        """What work on this base model waits for, in words; None when nothing waits. role: of whose runs; None: of
        those that are sampled."""
        group = self._group(base_model, role)
        is_sampled = group is self._group(base_model)
        return group.status() or (self._engine(base_model).status() if is_sampled else None)

    def is_up(self, base_model: str) -> bool:
        """Whether its workers are, but for those that only sample; else some of them are being started again."""
        return not any(group.restarting for group in self._groups_of(base_model))

    def pids(self, base_model: str) -> list[int]:
        """Process ids of the base model's ranks: of its policies, of roles apart, and then of what only samples it."""
        of_groups = [pid for group in self._groups_of(base_model) for pid in group.pids()]
        return of_groups + self._engine(base_model).pids()

    async def create_run(self, base_model: str, spec: RunSpec, tenant_id: str) -> RunInfo:
        """tenant_id: whose share of the base model's passes it takes part in."""
        # Before it is there: who gives up waiting for it has to drop it.
        is_apart = not isinstance(spec.training, LoraConfig)
        home = self._homes[spec.run_id] = _Home(self._group(base_model, spec.role), tenant_id, base_model, is_apart)
        spec = replace(spec, base_name=self._alias(base_model))
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

    async def set_target(self, run_id: str, directory: Path | None) -> None:
        """What a draft model guesses from now on: the policy that was saved there, or the bare base model. Pending
        gradients stay where they are, and the directory is not read any more behind it."""
        await self._submit_verb(run_id, "set_target", None if directory is None else str(directory))

    async def set_vocabulary(self, run_id: str, token_ids: np.ndarray) -> None:
        """What a draft model can say, before it learns. token_ids: int64 [draft_vocab_size], ascending."""
        await self._submit_verb(run_id, "set_vocabulary", token_ids)

    async def save_run(self, run_id: str, directory: Path, optimizer: bool) -> None:
        """Into an existing empty directory, as of the last step. A run with weights of its own is written while the
        workers go on with other work; an adapter takes no longer than a pass."""
        home = self._home_of_run(run_id)
        if home.has_own_weights:
            await home.submit(run_id, Snapshot(str(directory), "state" if optimizer else "weights"))
        else:
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
        engine = self._engine(home.base_model)
        if home.group is not self._group(home.base_model):
            raise OperationError(f"run {run_id} lives in {home.group.name}, which is not sampled: sample from a policy")
        await engine.copy_adapter(run_id, home.tenant_id, adapter_id)
        self._adapters[adapter_id] = engine

    async def load_adapter(self, base_model: str, adapter_id: str, directory: Path) -> None:
        engine = self._engine(base_model)
        await engine.load_adapter(adapter_id, directory)
        self._adapters[adapter_id] = engine

    async def convert_adapter(
        self, base_model: str, source: Path, lora: LoraConfig, directory: Path, tenant_id: str
    ) -> LoraConfig:
        """An adapter_model.safetensors of peft's as a checkpoint in an existing empty directory; what it adapts.

        lora: its rank and alpha. Raises OperationError (user) where it is none of this base model.
        """
        verb = Verb("convert_adapter", (str(source), lora, str(directory), *filter(None, [self._alias(base_model)])))
        return await self._group(base_model).submit(str(directory), tenant_id, verb)

    async def drop_adapter(self, adapter_id: str) -> None:
        """Unknown and lost adapters: no-op."""
        engine = self._adapters.pop(adapter_id, None)
        if engine is not None:
            await engine.drop_adapter(adapter_id)

    def has_draft(self, base_model: str, draft_id: str) -> bool:
        """Whether samples may be guessed by it; not any more once a worker died that had it."""
        return self._engine(base_model).has_draft(draft_id)

    async def load_draft(self, base_model: str, draft_id: str, directory: Path) -> None:
        """A checkpoint of a draft, for samples of this base model: see SampleJob."""
        await self._engine(base_model).load_draft(draft_id, directory)

    async def drop_draft(self, base_model: str, draft_id: str) -> None:
        """Unknown and lost drafts: no-op."""
        await self._engine(base_model).drop_draft(draft_id)

    async def sample(self, base_model: str, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """A caller that is cancelled cancels the job. on_progress: of a job that streams, as it grows."""
        return await self._engine(base_model).sample(job, on_progress)

    def cancel(self, job_id: str) -> None:
        """The job's caller gets an OperationError that says so. Unknown or finished jobs: no-op."""
        for engine in self._engines.values():
            engine.cancel(job_id)

    async def memory(self) -> dict[str, dict[str, int]]:
        """Name of a group (the served one, where it has policies) -> bytes by purpose, of those that are up."""
        groups = [group for group in self._all_groups() if not group.restarting]
        answers = await asyncio.gather(*(group.memory() for group in groups))
        of_engines = await asyncio.gather(*(engine.memory() for engine in self._engines.values()))
        memory = {group.name: answer for group, answer in zip(groups, answers, strict=True) if answer is not None}
        for each in of_engines:
            memory |= each
        return memory

    async def _submit_verb(self, run_id: str, method: str, *arguments: object) -> None:
        await self._home_of_run(run_id).submit(run_id, Verb(method, (run_id, *arguments)))

    def _group(self, base_model: str, role: str | None = None) -> Group:
        """Where runs of this role live; None: those that are sampled."""
        if base_model not in self._names:
            raise OperationError(f"base model {base_model} is not served here; served are: {', '.join(self._names)}")
        name = self._names[base_model]
        return self._apart[name].get(role, self._groups[name])

    def _alias(self, base_model: str) -> str | None:
        """The name, where the workers have another one."""
        return base_model if base_model in self._config.aliases else None

    def _groups_of(self, base_model: str) -> list[Group]:
        """That of its policies is the first."""
        group = self._group(base_model)
        return list(dict.fromkeys([group, *self._apart[group.name].values()]))

    def _all_groups(self) -> list[Group]:
        return [group for base_model in self._groups for group in self._groups_of(base_model)]

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

    def _new_group(self, model: WorkerConfig, name: str, suspect_jobs: Suspects | None = None) -> Group:
        limits = PassLimits(self._config.pass_tokens, model.adapter_slots, self._config.tenant_weights)
        config, new_pool = self._config, partial(self._source.new_pool, name)
        turns, idle_seconds = self._device_turns, config.idle_device_seconds
        return Group(model, new_pool, limits, config.slice_milliseconds, name, turns, idle_seconds, suspect_jobs)

    def _groups_apart(self, model: WorkerConfig) -> dict[str | None, Group]:
        apart: dict[str | None, Group] = {}
        for each in self._config.role_groups:
            group = self._new_group(roles_apart(self._config, model, each), name_of(model, each))
            apart |= dict.fromkeys(each.roles, group)
        return apart

    def _new_engine(self, number: int, model: WorkerConfig) -> Engine:
        """number: the model's, in the order of the config."""
        training, sampling = self._groups[model.model.name], self._config.sampling
        directory = Path(sampling.directory) / quote(model.model.name, safe="") if sampling.directory else None
        if sampling.vllm is not None and sampling.vllm.urls:
            return Vllm(training, VllmAt(sampling.vllm.urls[number], sampling.vllm.api_key), directory)
        if sampling.vllm is not None:
            return Vllm(training, VllmProcess(samplers(model, sampling)[0], sampling.vllm, directory), directory)
        # A request of which one died may come to another one.
        suspects = Suspects(JOBS_SHRINK)
        groups = [self._new_group(each, name, suspects) for name, each in named_samplers(model, sampling)]
        if not groups:
            return TrainingWorkers(training)
        return SamplerGroups(training, groups, AdapterCopies(directory))


@dataclass(frozen=True)
class _Home:
    """Where a run lives, whose it is, of which base model, and whether it has weights of its own."""

    group: Group
    tenant_id: str
    base_model: str
    has_own_weights: bool

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
