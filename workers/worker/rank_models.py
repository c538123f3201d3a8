"""Builds, stores and lends a rank's models: on all ranks, or on none if one of them cannot."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ...schemas.errors import OperationError
from ..registry.model_registry import ModelRegistry
from ..resources.memory import reporting_out_of_memory
from ..state.trainable import Trainable
from ..state.vectors import STEP_VECTORS
from .agreement import RankAgreement
from .rank_memory import RankMemory


class RankModels:
    """The registry's models, checked by id. Its methods raise OperationError for unknown runs."""

    def __init__(self, registry: ModelRegistry, memory: RankMemory, agreement: RankAgreement) -> None:
        self._registry, self._memory, self._agreement = registry, memory, agreement

    def put(self, model_id: str, make: Callable[[], Trainable], is_copy: bool = False) -> Trainable:
        """Stores a new model; see ModelRegistry.put. If a rank cannot build it, all keep what they had."""
        return self._registry.put(model_id, self.build_with_room(model_id, make, is_copy))

    def build_with_room(self, model_id: str, make: Callable[[], Trainable], is_copy: bool) -> Trainable:
        """Builds the model after making room for it in the registry, see ModelRegistry.make_room."""

        def make_with_room() -> Trainable:
            model = make()
            self._registry.make_room(model_id, model, is_copy)
            return model

        return self.build(make_with_room)

    def build(self, make: Callable[[], Trainable]) -> Trainable:
        """Builds the model without storing it."""
        self._memory.ensure_base()
        remedy = "try again when other runs have ended, or with a lower rank if it is an adapter"
        return self._agreement.on_all(reporting_out_of_memory("the model's weights", remedy)(make))

    @contextmanager
    def resident(self, run_id: str, wanted: frozenset[str] = STEP_VECTORS) -> Iterator[Trainable]:
        """Holds the run's vectors on the device while inside."""
        self.check_run(run_id)
        with ExitStack() as held:
            (model,) = self._agreement.on_all(lambda: held.enter_context(self._registry.resident([run_id], wanted)))
            yield model

    def check_run(self, run_id: str) -> None:
        if run_id not in self._registry:
            raise OperationError(unknown_run(run_id), "server")

    def check_samples(self, run_id: str) -> None:
        self.check_run(run_id)
        program = self._registry.get(run_id).program
        if not program.samples:
            raise OperationError(f"a {program.role} cannot be sampled: sample from a policy")


def unknown_run(run_id: str) -> str:
    return f"run {run_id} is not on this worker: create it or load its checkpoint"
