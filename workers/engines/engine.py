"""The interface between the dispatch and the engines that sample a base model; and the engine without own workers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from ...schemas.sampling import SampleResponse
from ..protocol.calls import SampleJob
from ..protocol.methods import COPY_ADAPTER, LOAD_ADAPTER, LOAD_DRAFT
from ..scheduler.rank_group import RankGroup
from ..scheduler.work import MethodWork, OnProgress
from .weights import drop_weights, load_weights


class Engine(ABC):
    """Samples one base model, with or without one of the adapters it holds. Every method may raise OperationError.

    The dispatch starts the group that trains the model before the engine, and closes it after the engine.
    """

    groups: Sequence[RankGroup] = ()
    """The groups of ranks that only sample."""

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Raises ValueError with the reason if the engine does not start."""
        for group in self.groups:
            await group.start(on_progress)

    @abstractmethod
    async def close(self) -> None: ...

    def status(self) -> str | None:
        """Returns why sampling waits, in words; None if it waits for nothing but the training group."""
        return next((status for group in self.groups if (status := group.status())), None)

    def pids(self) -> list[int]:
        """Returns the ids of its processes, without those of the training workers."""
        return [pid for group in self.groups for pid in group.supervisor.pids]

    async def memory(self) -> dict[str, dict[str, int]]:
        """Returns bytes by purpose, for each of its own running processes by name."""
        return {}

    @abstractmethod
    async def copy_adapter(self, run_id: str, tenant_id: str, adapter_id: str) -> None:
        """Copies the run's weights after its previous operations. A repeated id replaces the older version."""

    @abstractmethod
    async def load_adapter(self, adapter_id: str, directory: Path) -> None:
        """Loads the weights of a checkpoint. The directory may be deleted afterwards."""

    @abstractmethod
    def has_weights(self, weights_id: str) -> bool:
        """True if requests can use the adapter or draft without loading it first."""

    @abstractmethod
    async def drop_adapter(self, adapter_id: str) -> None:
        """Drops the adapter. Unknown and lost adapters are ignored."""

    @abstractmethod
    async def load_draft(self, draft_id: str, directory: Path) -> None:
        """Loads a draft's checkpoint. The directory may be deleted afterwards. A crash of a worker loses the draft."""

    @abstractmethod
    async def drop_draft(self, draft_id: str) -> None:
        """Drops the draft. Unknown and lost drafts are ignored."""

    @abstractmethod
    async def sample(self, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """Samples the job.

        Args:
            on_progress: receives the new tokens of a job that streams, each token once.
        """

    @abstractmethod
    def cancel(self, job_id: str) -> None:
        """Fails the job with an OperationError. Unknown and finished jobs are ignored."""


class TrainingWorkersEngine(Engine):
    """Samples where adapters are trained, in turn with training. A worker's crash loses adapters as it loses runs."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    async def close(self) -> None:
        pass

    async def copy_adapter(self, run_id: str, tenant_id: str, adapter_id: str) -> None:
        await self._group.submit(MethodWork(run_id, tenant_id, COPY_ADAPTER, (run_id, adapter_id), creates=adapter_id))

    async def load_adapter(self, adapter_id: str, directory: Path) -> None:
        await load_weights(self._group, LOAD_ADAPTER, adapter_id, directory)

    def has_weights(self, weights_id: str) -> bool:
        return weights_id in self._group.scheduler.held

    async def drop_adapter(self, adapter_id: str) -> None:
        await drop_weights(self._group, adapter_id)

    async def load_draft(self, draft_id: str, directory: Path) -> None:
        await load_weights(self._group, LOAD_DRAFT, draft_id, directory)

    async def drop_draft(self, draft_id: str) -> None:
        await drop_weights(self._group, draft_id)

    async def sample(self, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        return await self._group.sample(job, on_progress)

    def cancel(self, job_id: str) -> None:
        self._group.cancel(job_id)
