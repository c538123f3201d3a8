"""The problems that verify reports, and their repairs."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from ...files.directories import remove_tree

UNTIL_ITS_END = "this is reported until its session ends"


@dataclass(frozen=True)
class Repair:
    """A repair that --repair makes."""

    does: str
    """Shown before the repair, as in "run with --repair, which ..."."""
    work: Callable[[], Awaitable[object]]
    """Raises OperationError, ObjectStoreError or OSError if it cannot be made."""
    done: str
    """Shown after the repair."""


@dataclass(frozen=True)
class Problem:
    """A problem that verify found."""

    path: str
    """A checkpoint, a file, a directory or a URL."""
    meaning: str
    """The fault and its consequence."""
    remedy: str
    """Advice if there is no repair, or it fails."""
    repair: Repair | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.meaning}"


def removal(path: Path) -> Repair:
    return Repair("removes it", lambda: asyncio.to_thread(remove_tree, path), "removed")
