"""Stores the adapters of ephemeral samplers on disk, so that workers can reload them after a crash.

Layout of state_dir/ephemeral: ADAPTER/NUMBER, where the highest number is current, and .staging-* next to the adapters
during a write. The previous number is kept until the next write, because a worker may still be reading it. Earlier
versions wrote no manifest.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from ..files.directories import (
    STAGING,
    directory_name,
    make_directory,
    move_into_place,
    remove_tree,
    staging_path,
    sweep_runs,
)
from ..files.manifest import MANIFEST, ManifestMismatch, check_directory, write_manifest


class EphemeralWeights:
    def __init__(self, root: Path, sync: bool = False) -> None:
        """sync: weights survive a power failure."""
        self._root = root.absolute()
        self._sync = sync
        self._migrate_layout()

    def directory(self, adapter_id: str) -> Path:
        """Returns the directory of the adapter's newest weights; if it has none, a path without weights."""
        of_adapter = self._adapter_directory(adapter_id)
        numbers = _numbers(of_adapter)
        return of_adapter / str(numbers[-1]) if numbers else of_adapter

    async def find(self, adapter_id: str) -> Path:
        """Returns the directory of the adapter's newest weights. Raises ManifestMismatch if they are damaged."""
        while True:
            directory = self.directory(adapter_id)
            try:
                await asyncio.to_thread(check_weights, directory)
            except ManifestMismatch:
                if self.directory(adapter_id) == directory:  # else it was replaced, and may have been deleted
                    raise
            else:
                return directory

    def has(self, adapter_id: str | None) -> bool:
        return adapter_id is not None and bool(_numbers(self._adapter_directory(adapter_id)))

    @asynccontextmanager
    async def writing(self, adapter_id: str) -> AsyncIterator[Path]:
        """Yields an empty directory, which is published as the adapter's newest weights at the end of the block."""
        staging = staging_path(self._root)
        try:
            await asyncio.to_thread(make_directory, staging, self._sync)
            yield staging
            await asyncio.to_thread(self._publish, staging, self._adapter_directory(adapter_id))
        finally:
            await asyncio.to_thread(remove_tree, staging, ignore_errors=True)

    async def remove(self, adapter_id: str) -> None:
        await asyncio.to_thread(remove_tree, self._adapter_directory(adapter_id), ignore_errors=True)

    async def remove_all_but(self, wanted: Collection[str | None]) -> None:
        """Deletes everything but the wanted adapters, staging directories included. Called at server start."""
        await asyncio.to_thread(sweep_runs, self._root, set(filter(None, wanted)))

    def _adapter_directory(self, adapter_id: str) -> Path:
        return self._root / directory_name(adapter_id)

    def _migrate_layout(self) -> None:
        """Migrates the layout of earlier releases, which had the files in ADAPTER itself, to ADAPTER/0."""
        for of_adapter in list(self._root.glob("*")):
            is_staging = of_adapter.name.startswith(STAGING)
            if not is_staging and not _numbers(of_adapter) and any(path.is_file() for path in of_adapter.glob("*")):
                staging = staging_path(self._root)
                of_adapter.rename(staging)
                of_adapter.mkdir()
                staging.rename(of_adapter / "0")

    def _publish(self, staging: Path, of_adapter: Path) -> None:
        """Publishes the staged weights with one rename, so that readers find weights at every moment."""
        write_manifest(staging, {}, sync=self._sync)
        of_adapter.mkdir(exist_ok=True)
        earlier = _numbers(of_adapter)
        place = of_adapter / str(earlier[-1] + 1 if earlier else 0)
        move_into_place(staging, place, root=self._root if self._sync else None)
        for number in earlier[:-1]:
            remove_tree(of_adapter / str(number), ignore_errors=True)


def check_weights(directory: Path) -> None:
    """Raises ManifestMismatch if the weights are gone, or do not match their manifest, if they have one."""
    if (directory / MANIFEST).exists() or not any(directory.glob("*")):
        check_directory(directory)


def _numbers(of_adapter: Path) -> list[int]:
    return sorted(int(path.name) for path in of_adapter.glob("[0-9]*"))
