"""InTurn: a sampler for each set of weights: the base model's, with all adapters, and each model's own."""

from contextlib import ExitStack
from dataclasses import replace

from ...schemas.errors import OperationError
from ..config import WorkerConfig
from ..learner import FORWARD
from ..model import BaseModel
from ..models import Models
from ..operation import ModelLimits
from ..parallel.mesh import Mesh
from ..verbs import Failure, Slice, SliceResult
from .cache import Cache
from .namespaces import Namespaces
from .native import NativeSampler


class InTurn:
    """One rank's samplers, which share the cache. A slice goes to all that have jobs, in parts."""

    def __init__(
        self, base: BaseModel, models: Models, limits: ModelLimits, config: WorkerConfig, mesh: Mesh | None = None
    ) -> None:
        """mesh: None = there is one rank."""
        self._base, self._models, self._limits, self._config = base, models, limits, config
        self._mesh = mesh or Mesh()
        self._cache = Cache.of(base, config)
        self._namespaces = Namespaces(models)
        self._of_base = self._new_sampler()
        self._of_models: dict[str, NativeSampler] = {}

    def slice(self, work: Slice) -> SliceResult:
        """As NativeSampler."""
        for request in work.join:
            if request.adapter_id is not None and self._models.runs_alone(request.adapter_id):
                self._of_models.setdefault(request.adapter_id, self._new_sampler())
        turns = self._turns()
        if not turns:
            return self._of_base.slice(work)
        try:
            return self._slice_in_turn(work, turns)
        except Exception:
            # The caller fails all jobs.
            self.forget_all()
            raise

    def _slice_in_turn(self, work: Slice, turns: list[str]) -> SliceResult:
        each = work.budget_milliseconds / (1 + len(turns))
        result = self._of_base.slice(self._part(work, None, each))
        for model_id in turns:
            result = _joined(result, self._slice_of(model_id, self._part(work, model_id, each)))
            if not self._of_models[model_id].has_jobs:
                del self._of_models[model_id]
        return result

    def _slice_of(self, model_id: str, work: Slice) -> SliceResult:
        sampler = self._of_models[model_id]
        if model_id not in self._models:
            return sampler.slice(work)  # which tells so
        with ExitStack() as held:
            failure = self._bring(model_id, held)
            if failure is not None:
                return sampler.refused(work, failure)
            with self._models.in_force([self._models.get(model_id)]):
                return sampler.slice(work)

    def _bring(self, model_id: str, held: ExitStack) -> Failure | None:
        """To the device, on all ranks; or why not."""
        own = None
        try:
            held.enter_context(self._models.resident([model_id], FORWARD))
        except OperationError as error:
            own = Failure(error.message, error.category)
        [failure] = self._mesh.found([own])
        return failure

    def forget_all(self) -> None:
        """As NativeSampler."""
        self._of_base.forget_all()
        self._of_models.clear()

    def cache_bytes(self) -> int:
        """Of the budget: slots in use, slots that wait for use, and prefixes."""
        return self._cache.num_bytes()

    def held_bytes(self) -> int:
        """Of the slots in use."""
        return self._cache.held_bytes()

    def _turns(self) -> list[str]:
        """Of models with weights of their own, those of which some rank has jobs: all ranks take the same turns."""
        if not self._models.has_full:
            wanted = set(self._of_models)
        else:
            wanted = {model_id for of_rank in self._mesh.exchange(list(self._of_models)) for model_id in of_rank}
        for model_id in wanted:
            self._of_models.setdefault(model_id, self._new_sampler())
        return sorted(wanted)

    def _part(self, work: Slice, model_id: str | None, milliseconds: float) -> Slice:
        """Of who joins, the model's; None = what no model's own sampler has."""
        joining = (
            request
            for request in work.join
            if (request.adapter_id if request.adapter_id in self._of_models else None) == model_id
        )
        return replace(work, join=tuple(joining), budget_milliseconds=milliseconds)

    def _new_sampler(self) -> NativeSampler:
        return NativeSampler(
            self._base, self._models, self._limits, self._config, self._mesh, self._cache, self._namespaces
        )


def _joined(one: SliceResult, other: SliceResult) -> SliceResult:
    return SliceResult(one.finished | other.finished, one.num_active + other.num_active, one.progress | other.progress)
