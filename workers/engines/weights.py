"""Holds weights for engines: in the workers of a group, and in files of the server's own."""

import asyncio
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...schemas.errors import OperationError
from ..protocol.methods import DROP_ADAPTER, Method
from ..scheduler.rank_group import RankGroup
from ..scheduler.work import MethodWork


async def load_weights(group: RankGroup, method: Method[None], weights_id: str, directory: Path) -> None:
    """Loads an adapter or draft into the group's workers, whose crash loses it. Raises OperationError."""
    await group.submit(MethodWork(weights_id, "", method, (weights_id, str(directory)), creates=weights_id))


async def drop_weights(group: RankGroup, weights_id: str) -> None:
    """Drops an adapter or draft. Unknown and lost ones are ignored. Raises OperationError."""
    if not group.forget_lost(weights_id):
        await group.submit(MethodWork(weights_id, "", DROP_ADAPTER, (weights_id,), drops=weights_id))


@dataclass
class WeightTransferStats:
    """Counts the transfers of fully trained weights into a sampler since the start."""

    num: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self.num += 1
        self.num_bytes += num_bytes
        self.seconds += seconds

    def memory(self) -> dict[str, int]:
        return {
            "num_pushes": self.num,
            "pushed_weights_bytes": self.num_bytes,
            "pushed_weights_milliseconds": round(1000 * self.seconds),
        }


class ScratchDirectory:
    """A directory for files that are useless after this process has ended.

    directory: created at first use, and emptied of an earlier process's files; None means a temporary one.
    """

    def __init__(self, directory: Path | None) -> None:
        self._requested = directory
        self._directory: Path | None = None
        self._making = asyncio.Lock()

    async def path(self) -> Path:
        """Creates the directory if necessary. Raises OSError."""
        async with self._making:
            if self._directory is None:
                self._directory = await asyncio.to_thread(_make, self._requested)
            return self._directory

    def close(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def _make(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="trainhouse-adapters-"))
    shutil.rmtree(directory, ignore_errors=True)
    # Files that could not be removed may be left.
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def adapter_gone_error(adapter_id: str) -> OperationError:
    """Returns the error of a request whose adapter does not exist."""
    return OperationError(f"adapter {adapter_id} is gone: its sampler was closed or never saved")


def adapter_not_stored_error(adapter_id: str, error: Exception) -> OperationError:
    return OperationError(f"adapter {adapter_id} cannot be kept for sampling: {error}", "server")
