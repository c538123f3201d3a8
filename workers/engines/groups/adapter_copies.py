"""The server's own copies of the adapters that sampler groups load."""

import asyncio
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from ....schemas.models import TrainingConfig
from ...protocol.calls import AdapterWeights
from ..weights import ScratchDirectory, adapter_gone_error, adapter_not_stored_error


@dataclass(frozen=True)
class AdapterCopy:
    """A version of an adapter's weights in a file.

    version: increases with each copy. file: flat float32.
    """

    training: TrainingConfig
    version: int
    file: Path

    def read(self) -> AdapterWeights:
        """Maps the file. It may be unlinked meanwhile: the bytes go from the page cache straight into the pipe."""
        return AdapterWeights(self.training, np.asarray(np.memmap(self.file, np.float32, mode="c")))


class AdapterCopies:
    """Holds one copy per adapter id, in files, so that the operating system decides how much of them stays in memory.

    directory: see ScratchDirectory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._scratch = ScratchDirectory(directory)
        self._copies: dict[str, AdapterCopy] = {}
        self._versions = count(1)

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._copies

    def get(self, adapter_id: str) -> AdapterCopy:
        """Returns the newest version. Raises OperationError if there is none."""
        if adapter_id not in self._copies:
            raise adapter_gone_error(adapter_id)
        return self._copies[adapter_id]

    async def put(self, adapter_id: str, weights: AdapterWeights) -> None:
        """Replaces the adapter's copy as soon as the new one is written. Raises OperationError."""
        version = next(self._versions)
        try:
            copy = AdapterCopy(weights.training, version, await self._scratch.path() / f"{version}.f32")
            await _write(copy.file, weights.weights)
        except OSError as error:
            raise adapter_not_stored_error(adapter_id, error) from None
        earlier, self._copies[adapter_id] = self._copies.get(adapter_id), copy
        _remove(earlier)

    def drop(self, adapter_id: str) -> None:
        """Drops the copy. Unknown ids are ignored."""
        _remove(self._copies.pop(adapter_id, None))

    def close(self) -> None:
        self._scratch.close()


async def _write(file: Path, weights: np.ndarray) -> None:
    """Writes the whole file or leaves none, even if the caller is cancelled."""
    writing = asyncio.create_task(asyncio.to_thread(_write_now, file, weights))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        writing.add_done_callback(lambda done: file.unlink() if done.exception() is None else None)
        raise


def _write_now(file: Path, weights: np.ndarray) -> None:
    try:
        weights.tofile(file)
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def _remove(copy: AdapterCopy | None) -> None:
    if copy is not None:
        copy.file.unlink(missing_ok=True)
