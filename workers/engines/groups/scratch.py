"""A directory for files that are useless after this process has ended."""

import asyncio
import shutil
import tempfile
from pathlib import Path


class ScratchDirectory:
    """directory: created at first use, and emptied of an earlier process's files; None means a temporary one."""

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
