"""Engine: what the dispatch asks of whatever samples a base model."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ...schemas.errors import OperationError
from ...schemas.sampling import SampleResponse
from ..protocol.verbs import SampleJob
from ..scheduler.cohorts import OnProgress


class Engine(Protocol):
    """Samples one base model, bare and with the adapters that it was given. Every verb raises OperationError.

    The group that trains the model is started before the engine and closed after it, by the dispatch.
    """

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Raises ValueError with the reason when it does not come up."""
        ...

    async def close(self) -> None: ...

    def status(self) -> str | None:
        """What sampling waits for, in words; None when nothing waits but in the training group."""
        ...

    def pids(self) -> list[int]:
        """Of the processes that it has beside the training workers."""
        ...

    async def copy_adapter(self, run_id: str, tenant_id: str, adapter_id: str) -> None:
        """The weights of the run as of its last step, in its order; the same id again is a newer version."""
        ...

    async def load_adapter(self, adapter_id: str, directory: Path) -> None:
        """A checkpoint's weights; what becomes of the directory afterwards does not matter."""
        ...

    async def drop_adapter(self, adapter_id: str) -> None:
        """Unknown and lost adapters: no-op."""
        ...

    def has_draft(self, draft_id: str) -> bool:
        """Whether requests may be guessed by it as they are."""
        ...

    async def load_draft(self, draft_id: str, directory: Path) -> None:
        """A draft's checkpoint; what becomes of the directory afterwards does not matter. It is lost with a worker."""
        ...

    async def drop_draft(self, draft_id: str) -> None:
        """Unknown and lost ones: no-op."""
        ...

    async def sample(self, job: SampleJob, on_progress: OnProgress | None = None) -> SampleResponse:
        """on_progress: told what the samples of a job that streams grow by, each token once."""
        ...

    def cancel(self, job_id: str) -> None:
        """The job's caller gets an OperationError that says so. Unknown or finished jobs: no-op."""
        ...

    async def memory(self) -> dict[str, dict[str, int]]:
        """Name -> bytes by purpose, of its own processes that are up."""
        ...


def gone(adapter_id: str) -> OperationError:
    """What a request is told whose adapter is not there."""
    return OperationError(f"adapter {adapter_id} is gone: its sampler was closed or never saved")


def not_kept(adapter_id: str, error: OSError) -> OperationError:
    return OperationError(f"adapter {adapter_id} cannot be kept for sampling: {error}", "server")
