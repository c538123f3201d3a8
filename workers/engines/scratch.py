"""ScratchDirectory: a directory whose files nobody needs once this process has ended."""

import shutil
import tempfile
from pathlib import Path


class ScratchDirectory:
    """directory: made when first asked for, emptied of what an earlier process left there; None = a temporary one."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._is_ready = False

    def path(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="trainhouse-adapters-"))
        if not self._is_ready:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory.mkdir(mode=0o700, parents=True)
            self._is_ready = True
        return self._directory

    def close(self) -> None:
        if self._is_ready and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
