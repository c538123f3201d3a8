"""The training workers as a sampling engine: one base model for both; adapters are sampled where they are trained."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ...schemas.sampling import SampleResponse
from ..protocol.calls import SampleJob
from ..protocol.methods import COPY_ADAPTER, LOAD_ADAPTER, LOAD_DRAFT
from ..scheduler.rank_group import RankGroup
from ..scheduler.work import MethodWork, OnProgress
from .weights import drop_weights, load_weights


class TrainingWorkersEngine:
    """Sampling takes turns with training. A crash of a worker loses adapters as it loses runs."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    @property
    def groups(self) -> Sequence[RankGroup]:
        return ()

    async def start(self, on_progress: Callable[[str], None]) -> None:
        pass

    async def close(self) -> None:
        pass

    def status(self) -> str | None:
        return None

    def pids(self) -> list[int]:
        return []

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

    async def memory(self) -> dict[str, dict[str, int]]:
        return {}
