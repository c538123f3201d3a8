"""A rank that runs functions of tests in its process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from typing import Any

from trainhouse.workers.models.model import BaseModel
from trainhouse.workers.parallel.mesh import Mesh
from trainhouse.workers.protocol.worker_config import WorkerConfig
from trainhouse.workers.registry.model_registry import ModelRegistry
from trainhouse.workers.sampler.multi_model import MultiModelSampler
from trainhouse.workers.training.pass_runner import PassRunner
from trainhouse.workers.worker.rank_memory import RankMemory
from trainhouse.workers.worker.worker import Worker

PROBE = "trainhouse.tests.workers.parallel.probe_worker:ProbeWorker"


class ProbeWorker(Worker):
    """The parts of a rank, for the functions that tests run on it. It must be alone in its process."""

    def run_probe(self, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Calls a function with this worker and these arguments. An object of a class is made with this worker when the
        class, or the first of its methods, is called, and kept for other methods.

        Args:
            name: see `probe_name`.
        """
        module, _, path = name.partition(":")
        owner, _, method = path.partition(".")
        function = getattr(import_module(module), owner)
        if not isinstance(function, type):
            return function(self, *arguments, **named)
        probes = vars(self).setdefault("_probes", {})
        if function not in probes:
            probes[function] = function(self)
        return getattr(probes[function], method)(*arguments, **named) if method else None

    def surround(self, verb: str, context: Callable[[], AbstractContextManager[object]]) -> None:
        """Enters a new context for each call of the verb from now on."""
        run = getattr(self, verb)

        def inside(*arguments: Any) -> Any:
            with context():
                return run(*arguments)

        setattr(self, verb, inside)

    @property
    def config(self) -> WorkerConfig:
        return self._config

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def base(self) -> BaseModel:
        return self._base

    @property
    def models(self) -> ModelRegistry:
        return self._models

    @property
    def sampler(self) -> MultiModelSampler:
        return self._sampler

    @property
    def rank_memory(self) -> RankMemory:
        return self._memory

    @property
    def passes(self) -> PassRunner:
        return self._passes

    def cut_micro_batches(self, most_tokens: int) -> None:
        """Limits micro-batches to this many tokens, except for longer single sequences."""
        config = replace(self._config, micro_batch_tokens=most_tokens)
        self._passes = PassRunner(self._base, self._models, self._limits, config, self._mesh)


def probe_name(function: Callable[..., Any]) -> str:
    """Returns module and name of a function or class of tests. Ranks import it by this name, though pytest may have
    imported it by another one."""
    module = function.__module__
    return f"trainhouse.{module[module.index('tests.') :]}:{function.__qualname__}"
