"""Cache: checkpoints that lie elsewhere, as directories here. The longest unused go when there are too many bytes."""

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .directories import STAGING, staging_in

_SPARED_SECONDS = 60.0
"""Since its last use: a download may be about to open it. What is open stays readable."""


class Cache:
    """root: its own alone. Every method but `held` blocks."""

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root = root
        self._most_bytes = most_bytes
        self._num_holders: Counter[Path] = Counter()
        # Between looking whether somebody holds one and taking it away nobody may begin to.
        self._lock = threading.Lock()

    def path(self, url: str) -> Path:
        """Where the directory at this URL is or would be. A URL never means another checkpoint than it once did."""
        return self._root / hashlib.sha256(url.encode()).hexdigest()[:32]

    @contextmanager
    def held(self, path: Path) -> Iterator[None]:
        """It stays meanwhile."""
        with self._lock:
            self._num_holders[path] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holders -= Counter((path,))

    def sweep(self) -> None:
        """At start."""
        for staging in self._root.glob(f"{STAGING}*"):
            shutil.rmtree(staging, ignore_errors=True)

    def used(self, path: Path) -> None:
        """Now; and makes room."""
        os.utime(path)
        entries = sorted(filter(None, map(_entry, self._root.glob("[0-9a-f]*"))), key=lambda entry: entry.used_at)
        excess = sum(entry.num_bytes for entry in entries) - self._most_bytes
        for entry in entries:
            is_spared = entry.used_at >= time.time() - _SPARED_SECONDS
            if excess > 0 and not is_spared and self._take_away(entry.path):
                excess -= entry.num_bytes

    def _take_away(self, path: Path) -> bool:
        """Unless somebody holds it."""
        aside = staging_in(self._root)
        with self._lock:
            if self._num_holders[path]:
                return False
            with contextlib.suppress(FileNotFoundError):  # somebody else makes room, too
                path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        return True


@dataclass(frozen=True)
class _Entry:
    path: Path
    used_at: float
    num_bytes: int


def _entry(path: Path) -> _Entry | None:
    try:
        return _Entry(path, path.stat().st_mtime, sum(file.stat().st_size for file in path.rglob("*")))
    except FileNotFoundError:  # somebody else makes room, too
        return None
