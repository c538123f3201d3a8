"""Holds the parts of the server that operations use, and acts on runs in the workers."""

from dataclasses import dataclass, field, replace

from ...schemas.errors import OperationError
from ...workers.dispatch import WorkerDispatch
from ...workers.protocol.calls import RunInfo
from ..checkpoints.checkpoints import Checkpoints, hiding_directory_as
from ..journal.recordings import Recordings
from ..journal.snapshot_store import RunSnapshot
from ..sampling.samplers import Samplers
from ..store import CheckpointRecord, RunRecord, Store
from ..tenants.sessions import Sessions
from .evaluation_data import EvaluationData
from .features import Features
from .pinned_checkpoints import PinnedCheckpoints


@dataclass(frozen=True)
class OperationContext:
    """The parts of the server that operations use; infos: what the workers report about live runs, by run id."""

    dispatch: WorkerDispatch
    store: Store
    sessions: Sessions
    checkpoints: Checkpoints
    samplers: Samplers
    recordings: Recordings
    pinned_checkpoints: PinnedCheckpoints
    features: Features
    evaluation_data: EvaluationData
    infos: dict[str, RunInfo] = field(default_factory=dict)

    async def stored_record(self, run: RunRecord) -> RunRecord:
        """Returns the record of a created run as the store has it, with the defaults that the workers filled in."""
        stored = await self.store.runs.get(run.run_id)
        assert stored is not None
        kept = {"training": stored.training, "target_path": stored.target_path, "schedules": stored.schedules}
        return replace(run, **kept)

    async def clear_gradients(self, run: RunRecord, seq_id: int) -> None:
        """Clears the gradients of the operations before this seq_id."""
        await self.dispatch.clear_gradients(run.run_id)
        await self.features.release_holds_before(run, seq_id, were_used=False)

    async def drop(self, run: RunRecord) -> None:
        """Drops the run, which is over, from the workers. Raises OperationError."""
        if not self.sessions.is_open(run.session_id):
            # The run's last operation may have created one more sampler.
            await self.samplers.end_session(run.session_id)
        self.infos.pop(run.run_id, None)
        await self.features.end_run(run)
        await self.evaluation_data.end_run(run)
        await self.dispatch.drop_run(run.run_id)

    async def restore(self, run: RunRecord, snapshot: RunSnapshot) -> None:
        """Loads a snapshot into a run that has been created, and the target of a draft. Raises OperationError."""
        directory = snapshot.directory
        with hiding_directory_as(f"snapshot {directory.name}", directory):
            await self.dispatch.load_run(run.run_id, directory, optimizer=True)
        if snapshot.target is not None:
            target = self.pinned_checkpoints.target(run.run_id, snapshot.target)
            with hiding_directory_as("its target", target):
                await self.dispatch.set_target(run.run_id, target)

    async def find_checkpoint(self, path: str) -> CheckpointRecord:
        """Returns the checkpoint without an access check, for a tenant whose access was checked before."""
        checkpoint = await self.checkpoints.find(path)
        if checkpoint is None:
            raise OperationError(f"checkpoint {path} is gone")
        return checkpoint
