"""AdapterCopies: the server's own copies of the adapters that it gives to workers that only sample."""

import asyncio
import shutil
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from ...schemas.errors import OperationError
from ...schemas.models import LoraConfig
from ..verbs import AdapterWeights


@dataclass(frozen=True)
class AdapterCopy:
    """version: of the adapter, ever higher. file: its weights."""

    lora: LoraConfig
    version: int
    file: Path

    def read(self) -> AdapterWeights:
        """Maps the file, which may be unlinked meanwhile: what is sent on goes from the page cache to the pipe."""
        return AdapterWeights(self.lora, np.asarray(np.memmap(self.file, np.float32, mode="c")))


class AdapterCopies:
    """By adapter id. They live in files, so that the system decides how much of them stays in memory.

    directory: made if need be, and emptied of what an earlier process left there; None = a temporary one.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._is_ready = False
        self._copies: dict[str, AdapterCopy] = {}
        self._versions = count(1)

    def get(self, adapter_id: str) -> AdapterCopy:
        """The newest version. Raises OperationError."""
        if adapter_id not in self._copies:
            raise OperationError(f"adapter {adapter_id} is gone: its sampler was closed or never saved")
        return self._copies[adapter_id]

    async def put(self, adapter_id: str, weights: AdapterWeights) -> None:
        """A newer version of it, once it is written."""
        version = next(self._versions)
        copy = AdapterCopy(weights.lora, version, self._prepared() / f"{version}.f32")
        await asyncio.to_thread(weights.weights.tofile, copy.file)
        earlier, self._copies[adapter_id] = self._copies.get(adapter_id), copy
        _remove(earlier)

    def drop(self, adapter_id: str) -> None:
        """Unknown ids are ignored."""
        _remove(self._copies.pop(adapter_id, None))

    def close(self) -> None:
        if self._is_ready and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _prepared(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="trainhouse-adapters-"))
        if not self._is_ready:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory.mkdir(mode=0o700, parents=True)
            self._is_ready = True
        return self._directory


def _remove(copy: AdapterCopy | None) -> None:
    if copy is not None:
        copy.file.unlink(missing_ok=True)
