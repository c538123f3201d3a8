"""Loads checkpoints and snapshots into runs."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..checkpoint import read_new_model, read_saved
from ..parallel.mesh import Mesh
from ..registry.model_registry import ModelRegistry
from ..resources.memory import reporting_out_of_memory
from ..state.optim import keep_on_first_rank
from ..training.pass_runner import PassRunner
from .agreement import RankAgreement
from .rank_models import RankModels


class RunLoader:
    """Loads on all ranks together. Parts of passes of a loaded run are forgotten."""

    def __init__(
        self,
        registry: ModelRegistry,
        models: RankModels,
        passes: PassRunner,
        mesh: Mesh,
        agreement: RankAgreement,
        after_load: Sequence[Callable[[str, Path], None]] = (),
    ) -> None:
        """Creates the loader. `after_load` is called with the run and the directory of each trained run."""
        self._registry, self._models, self._passes = registry, models, passes
        self._mesh, self._agreement, self._after_load = mesh, agreement, after_load

    def load(self, run_id: str, directory: Path, optimizer: bool) -> None:
        """Replaces the run's state, see Worker.load_run."""
        self._models.check_run(run_id)
        if not self._registry.get(run_id).program.trains:
            self._replace(run_id, directory)
            return
        self._load_trained(run_id, directory, optimizer)
        for act in self._after_load:
            act(run_id, directory)

    def _replace(self, run_id: str, directory: Path) -> None:
        before = self._registry.get(run_id)
        read = partial(read_new_model, self._registry, directory, before.program)
        model = self._models.put(run_id, read, is_copy=not self._registry.is_exclusive(run_id))
        model.base_name = before.base_name
        self._passes.forget(run_id)

    def _load_trained(self, run_id: str, directory: Path, optimizer: bool) -> None:
        with self._models.resident(run_id) as model:
            saved = self._agreement.on_all(partial(read_saved, model, directory, optimizer=optimizer))
            self._passes.forget(run_id)
            load = reporting_out_of_memory("the checkpoint", "try again")(partial(saved.load_into, model))
            try:
                self._agreement.on_all(load)
            except Exception:
                model.gradients.window.refused = "its checkpoint was loaded only in part: load it again"
                raise
            keep_on_first_rank(model, self._mesh)
