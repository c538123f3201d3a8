"""The interface between the dispatch and the engines that sample a base model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ...schemas.sampling import SampleResponse
from ..protocol.calls import SampleJob
from ..scheduler.rank_group import RankGroup
from ..scheduler.work import OnProgress


class Engine(Protocol):
    """Samples one base model, with or without one of the adapters it holds. Every method may raise OperationError.

    The dispatch starts the group that trains the model before the engine, and closes it after the engine.
    """

    @property
    def groups(self) -> Sequence[RankGroup]:
        """The groups of ranks that only sample."""
        ...

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Raises ValueError with the reason if the engine does not start."""
        ...

    async def close(self) -> None: ...

    def status(self) -> str | None:
        """Returns why sampling waits, in words; None if it waits for nothing but the training group."""
        ...

    def pids(self) -> list[int]:
        """Returns the ids of its processes, without those of the training workers."""
        ...

    async def copy_adapter(self, run_id: str, tenant_id: str, adapter_id: str) -> None:
        """Copies the run's weights after its previous operations. A repeated id replaces the older version."""
        ...

    async def load_adapter(self, adapter_id: str, directory: Path) -> None:
        """Loads the weights of a checkpoint. The directory may be deleted afterwards."""
        ...

    def has_weights(self, weights_id: str) -> bool:
        """True if requests can use the adapter or draft without loading it first."""
        ...

    async def drop_adapter(self, adapter_id: str) -> None:
        """Drops the adapter. Unknown and lost adapters are ignored."""
        ...

    async def load_draft(self, draft_id: str, directory: Path) -> None:
        """Loads a draft's checkpoint. The directory may be deleted afterwards. A crash of a worker loses the draft."""
        ...

    async def drop_draft(self, draft_id: str) -> None:
        """Drops the draft. Unknown and lost drafts are ignored."""
        ...

    async def sample(self, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """Samples the job.

        Args:
            on_progress: receives the new tokens of a job that streams, each token once.
        """
        ...

    def cancel(self, job_id: str) -> None:
        """Fails the job with an OperationError. Unknown and finished jobs are ignored."""
        ...

    async def memory(self) -> dict[str, dict[str, int]]:
        """Returns bytes by purpose, for each of its own running processes by name."""
        ...
