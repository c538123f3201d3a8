"""Saves the states of runs, now or in the background."""

from functools import partial
from pathlib import Path

from ..checkpoint import TrainedState, save
from ..parallel.mesh import Mesh
from ..protocol.calls import Failure, SavedContents
from ..state.optim import all_reduce_gradients, keep_on_first_rank
from ..state.trainable import Trainable
from ..state.vectors import FORWARD_VECTORS, STEP_VECTORS
from .agreement import RankAgreement
from .rank_models import RankModels
from .snapshot_writer import SnapshotWriter


class RunSaver:
    """Makes the ranks write their parts of a run together; a snapshot has ended when all of them have."""

    def __init__(
        self, models: RankModels, writer: SnapshotWriter, mesh: Mesh, agreement: RankAgreement, base_name: str
    ) -> None:
        self._models, self._writer, self._base_name = models, writer, base_name
        self._mesh, self._agreement = mesh, agreement
        # Snapshot -> outcomes of the ranks that have ended it.
        self._ended: dict[int, list[Failure | None]] = {}

    def save(self, run_id: str, directory: Path, optimizer: bool) -> None:
        """Writes the run as of its last optimizer step; returns when it is written."""
        with self._models.resident(run_id, STEP_VECTORS if optimizer else FORWARD_VECTORS) as model:
            state = TrainedState.without_gradients(model, self._mesh, optimizer=optimizer)
            self._agreement.on_all(partial(save, state, directory, base_name=self._base_name))

    def begin(self, snapshot_id: int, run_id: str, directory: Path, contents: SavedContents) -> None:
        """Begins to write the run as it is now; see `take_ended`."""
        with self._models.resident(run_id, FORWARD_VECTORS if contents == "weights" else STEP_VECTORS) as model:
            if contents == "all" and model.gradients.window.num_operations:
                all_reduce_gradients([model], self._mesh)
            try:
                state = _contents(model, contents, self._mesh)
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


def _contents(model: Trainable, contents: SavedContents, mesh: Mesh) -> TrainedState:
    if contents == "all":
        return TrainedState.with_window(model, mesh)
    return TrainedState.without_gradients(model, mesh, optimizer=contents == "state")
