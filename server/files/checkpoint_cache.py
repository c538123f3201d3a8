"""Caches remote checkpoints as local directories. The least recently used are evicted when they exceed a size limit."""

import contextlib
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .directories import STAGING, remove_tree, staging_path

_SPARED_SECONDS = 60.0
"""Entries used this recently are not evicted, since a download may be about to open them. Open files stay readable."""


class CheckpointCache:
    """A size-limited cache in `root`, which nothing else may use. Every method but `hold` and `is_held` blocks."""

    def __init__(self, root: Path, most_bytes: int) -> None:
        self._root = root
        self._most_bytes = most_bytes
        self._num_holders: Counter[Path] = Counter()
        # An entry must not become held between the check of its holders and its eviction.
        self._lock = threading.Lock()

    def path(self, url: str) -> Path:
        """Returns where the directory of this URL is or would be cached. A URL always means the same checkpoint."""
        return self._root / hashlib.sha256(url.encode()).hexdigest()[:32]

    @contextmanager
    def hold(self, path: Path) -> Iterator[None]:
        """Keeps the entry from being evicted while the block runs."""
        with self._lock:
            self._num_holders[path] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holders -= Counter((path,))

    def is_held(self, path: Path) -> bool:
        with self._lock:
            return self._num_holders[path] > 0

    def sweep(self) -> None:
        for staging in self._root.glob(f"{STAGING}*"):
            remove_tree(staging, ignore_errors=True)

    def touch(self, path: Path) -> None:
        """Marks the entry as just used, and evicts others if the cache is too large."""
        os.utime(path)
        entries = sorted(filter(None, map(_entry, self._root.glob("[0-9a-f]*"))), key=lambda entry: entry.used_at)
        excess = sum(entry.num_bytes for entry in entries) - self._most_bytes
        for entry in entries:
            is_spared = entry.used_at >= time.time() - _SPARED_SECONDS
            if excess > 0 and not is_spared and self._evict(entry.path):
                excess -= entry.num_bytes

    def _evict(self, path: Path) -> bool:
        """Evicts the entry unless it is held. True if it is gone."""
        aside = staging_path(self._root)
        with self._lock:
            if self._num_holders[path]:
                return False
            with contextlib.suppress(FileNotFoundError):  # another thread has just evicted it
                path.rename(aside)
        remove_tree(aside, ignore_errors=True)
        return True


@dataclass(frozen=True)
class _Entry:
    path: Path
    used_at: float
    num_bytes: int


def _entry(path: Path) -> _Entry | None:
    try:
        return _Entry(path, path.stat().st_mtime, sum(file.stat().st_size for file in path.rglob("*")))
    except FileNotFoundError:  # another thread has just evicted it
        return None
