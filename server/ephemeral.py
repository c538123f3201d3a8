"""EphemeralWeights: the adapters of ephemeral samplers on disk, from which workers load them again after a crash.

Layout below state_dir/ephemeral: one directory for each adapter, with .staging-* beside them while they are written.
"""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from .checkpoints import directory_name
from .manifest import make_directory, sync_directory, sync_files

_STAGING = ".staging-"


class EphemeralWeights:
    def __init__(self, root: Path, sync: bool = False) -> None:
        """sync: whether they are to survive the death of the machine."""
        self._root = root.absolute()
        self._sync = sync

    def directory(self, adapter_id: str) -> Path:
        return self._root / directory_name(adapter_id)

    def has(self, adapter_id: str | None) -> bool:
        return adapter_id is not None and self.directory(adapter_id).is_dir()

    @asynccontextmanager
    async def writing(self, adapter_id: str) -> AsyncIterator[Path]:
        """An empty directory to write into; leaving the block puts it in the place of an earlier one."""
        staging = self._root / f"{_STAGING}{secrets.token_hex(8)}"
        try:
            await asyncio.to_thread(make_directory, staging, self._sync)
            yield staging
            await asyncio.to_thread(self._publish, staging, self.directory(adapter_id))
        finally:
            await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)

    async def remove(self, adapter_id: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self.directory(adapter_id), ignore_errors=True)

    async def sweep(self, wanted: Collection[str | None]) -> None:
        """At start: what belongs to nobody any more."""
        names = {directory_name(adapter_id) for adapter_id in wanted if adapter_id is not None}
        await asyncio.to_thread(self._sweep, names)

    def _publish(self, staging: Path, directory: Path) -> None:
        """Between the two renames there is neither: a crash there is one before the new one was answered."""
        before = staging.with_name(f"{staging.name}-before")
        if self._sync:
            sync_files(staging)
        if directory.exists():
            directory.rename(before)
        staging.rename(directory)
        if self._sync:
            sync_directory(self._root)
        shutil.rmtree(before, ignore_errors=True)

    def _sweep(self, names: Collection[str]) -> None:
        for directory in self._root.glob("*"):
            if directory.name not in names:
                shutil.rmtree(directory, ignore_errors=True)
