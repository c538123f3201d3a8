"""ScratchDirectory: a directory whose files nobody needs once this process has ended."""

import asyncio
import shutil
import tempfile
from pathlib import Path


class ScratchDirectory:
    """directory: made when first asked for, emptied of what an earlier process left there; None = a temporary one."""

    def __init__(self, directory: Path | None) -> None:
        self._asked = directory
        self._made: Path | None = None
        self._making = asyncio.Lock()

    async def path(self) -> Path:
        """Raises OSError."""
        async with self._making:
            if self._made is None:
                self._made = await asyncio.to_thread(_make, self._asked)
            return self._made

    def close(self) -> None:
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


def _make(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="trainhouse-adapters-"))
    shutil.rmtree(directory, ignore_errors=True)
    # What could not be removed is there still.
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory
