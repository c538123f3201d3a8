"""Loads checkpoints and snapshots into runs, and saves the states of runs, now or in the background."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..checkpoint import TrainedState, read_new_model, read_saved, save
from ..parallel.mesh import Mesh
from ..protocol.calls import Failure, SavedContents
from ..registry.model_registry import ModelRegistry
from ..resources.memory import reporting_out_of_memory
from ..state.optim import all_reduce_gradients, keep_on_first_rank
from ..state.vectors import FORWARD_VECTORS, STEP_VECTORS
from ..training.pass_runner import PassRunner
from .agreement import RankAgreement
from .rank_models import RankModels
from .snapshot_writer import SnapshotWriter


class RunFiles:
    """Makes the ranks read a run together, and each write its part of one. A snapshot ends when all have written it."""

    def __init__(
        self,
        registry: ModelRegistry,
        models: RankModels,
        passes: PassRunner,
        mesh: Mesh,
        agreement: RankAgreement,
        writer: SnapshotWriter,
        after_load: Sequence[Callable[[str, Path], None]],
    ) -> None:
        """after_load: called with the run and the directory of each trained run."""
        self._registry, self._models, self._passes = registry, models, passes
        self._mesh, self._agreement, self._after_load = mesh, agreement, after_load
        self._writer = writer
        # Snapshot -> outcomes of the ranks that have ended it.
        self._ended: dict[int, list[Failure | None]] = {}

    def load(self, run_id: str, directory: Path, optimizer: bool) -> None:
        """Replaces the run's state, see Worker.load_run. Parts of passes of the run are forgotten."""
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

    def save(self, run_id: str, directory: Path, optimizer: bool) -> None:
        """Writes the run as of its last optimizer step; returns when it is written."""
        with self._models.resident(run_id, STEP_VECTORS if optimizer else FORWARD_VECTORS) as model:
            state = TrainedState.without_gradients(model, self._mesh, optimizer=optimizer)
            self._agreement.on_all(partial(save, state, directory, base_name=self._writer.base_name))

    def begin(self, snapshot_id: int, run_id: str, directory: Path, contents: SavedContents) -> None:
        """Begins to write the run as it is now; see `take_ended`."""
        with self._models.resident(run_id, FORWARD_VECTORS if contents == "weights" else STEP_VECTORS) as model:
            if contents == "all" and model.gradients.window.num_operations:
                all_reduce_gradients([model], self._mesh)
            try:
                if contents == "all":
                    state = TrainedState.with_window(model, self._mesh)
                else:
                    state = TrainedState.without_gradients(model, self._mesh, optimizer=contents == "state")
                self._agreement.on_all(partial(self._writer.begin, snapshot_id, state, directory))
            except Exception:
                self._writer.forget(snapshot_id)
                raise
            finally:
                if contents == "all":
                    # Keeps the sum over ranks unchanged.
                    keep_on_first_rank(model, self._mesh)

    def take_ended(self) -> dict[int, Failure | None]:
        """Returns the snapshots that have ended on all ranks since the last call: None if the files are written."""
        for of_rank in self._mesh.all_gather_object(self._writer.take_ended()):
            for snapshot_id, failure in of_rank.items():
                self._ended.setdefault(snapshot_id, []).append(failure)
        ended = [one for one, of_ranks in self._ended.items() if len(of_ranks) == self._mesh.spec.num_ranks]
        return {one: next((each for each in self._ended.pop(one) if each is not None), None) for one in ended}

    def wait(self) -> None:
        """Waits until none is being written and forgets them."""
        self._writer.wait()
        self._ended.clear()
