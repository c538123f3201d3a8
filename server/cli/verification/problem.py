"""The problems that verify reports, and their repairs."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from ...files.directories import remove_tree

UNTIL_ITS_END = "this is reported until its session ends"


@dataclass(frozen=True)
class Repair:
    """A repair that --repair makes.

    does: shown before the repair, as in "run with --repair, which ...".
    work: makes the repair and returns what it did; raises OperationError, ObjectStoreError or OSError if it cannot.
    """

    does: str
    work: Callable[[], Awaitable[str]]


@dataclass(frozen=True)
class Problem:
    """A problem that verify found.

    path: of a checkpoint, a file or a directory, or a URL.
    meaning: what is wrong, and the consequence.
    remedy: what to do if there is no repair, or it fails.
    """

    path: str
    meaning: str
    remedy: str
    repair: Repair | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.meaning}"


async def remove(path: Path) -> str:
    await asyncio.to_thread(remove_tree, path)
    return "removed"
