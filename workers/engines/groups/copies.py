"""AdapterCopies: the server's own copies of the adapters that it gives to workers that only sample."""

import asyncio
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from ....schemas.models import TrainingConfig
from ...protocol.verbs import AdapterWeights
from ..engine import gone, not_kept
from .scratch import ScratchDirectory


@dataclass(frozen=True)
class AdapterCopy:
    """version: of the adapter, ever higher. file: its weights."""

    training: TrainingConfig
    version: int
    file: Path

    def read(self) -> AdapterWeights:
        """Maps the file, which may be unlinked meanwhile: what is sent on goes from the page cache to the pipe."""
        return AdapterWeights(self.training, np.asarray(np.memmap(self.file, np.float32, mode="c")))


class AdapterCopies:
    """By adapter id. They live in files, so that the system decides how much of them stays in memory.

    directory: see ScratchDirectory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._scratch = ScratchDirectory(directory)
        self._copies: dict[str, AdapterCopy] = {}
        self._versions = count(1)

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._copies

    def get(self, adapter_id: str) -> AdapterCopy:
        """The newest version. Raises OperationError."""
        if adapter_id not in self._copies:
            raise gone(adapter_id)
        return self._copies[adapter_id]

    async def put(self, adapter_id: str, weights: AdapterWeights) -> None:
        """A newer version of it, once it is written. Raises OperationError."""
        version = next(self._versions)
        try:
            copy = AdapterCopy(weights.training, version, await self._scratch.path() / f"{version}.f32")
            await _write(copy.file, weights.weights)
        except OSError as error:
            raise not_kept(adapter_id, error) from None
        earlier, self._copies[adapter_id] = self._copies.get(adapter_id), copy
        _remove(earlier)

    def drop(self, adapter_id: str) -> None:
        """Unknown ids are ignored."""
        _remove(self._copies.pop(adapter_id, None))

    def close(self) -> None:
        self._scratch.close()


async def _write(file: Path, weights: np.ndarray) -> None:
    """All of it, or nothing is left there, also when the caller goes away."""
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
