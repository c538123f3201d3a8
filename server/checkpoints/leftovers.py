"""Directories of checkpoints that have no row: which are removed, which are kept, and for how long."""

import logging
import math
import time
from collections.abc import Collection
from pathlib import Path

from ..files.directories import STAGING, remove_tree
from ..files.manifest import MANIFEST, check_directory

logger = logging.getLogger(__name__)

UNLISTED_DAYS = 30
_UNLISTED = ".unlisted"
"""Marks a complete checkpoint without a row; the file's mtime is when that was first noticed."""
DELETED = ".deleted"
"""Marks a checkpoint whose row is about to be deleted, so that leftovers are not restored after a crash."""
NEW_RUN = ".new"


def remove_now(*directories: Path) -> None:
    """Removes what can be removed now. The rest (a worker may still be writing) is swept at the next start."""
    for directory in directories:
        remove_tree(directory, ignore_errors=True)


def sweep_leftovers(root: Path, found: Collection[Path], runs: Collection[str], published: Collection[str]) -> None:
    for mark in root.glob(f"*/{NEW_RUN}"):
        remove_now(mark if mark.parent.name in runs else mark.parent)
    for directory in found:
        if str(directory) in published:
            _unmark(directory / _UNLISTED)
            _unmark(directory / DELETED)
        elif directory.name.startswith(STAGING) or (directory.parent.parent.name in runs and not _must_keep(directory)):
            logger.info("removing %s: it was never published, or was deleted", directory)
            remove_now(directory)


def find_unlisted(found: Collection[Path], published: Collection[str]) -> list[Path]:
    """Returns those found that are complete, have no row and were not deleted; oldest first."""
    unlisted = [path for path in found if str(path) not in published and not path.name.startswith(STAGING)]
    kept = [path for path in unlisted if not ((path / DELETED).exists() or (path.parents[1] / NEW_RUN).exists())]
    return sorted(filter(has_complete_files, kept), key=lambda path: (path / MANIFEST).stat().st_mtime)


def set_mark(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:  # lost files or a full disk: the deletion continues
        logger.info("%s cannot be written: %s", path, error)


def _unmark(mark: Path) -> None:
    """Removes the mark of a checkpoint that has a row again."""
    try:
        if mark.exists():  # checked first, since the file system may be read-only
            mark.unlink(missing_ok=True)
    except OSError as error:
        logger.error("%s cannot be removed: %s", mark, error)


def _must_keep(unlisted: Path) -> bool:
    """True if a checkpoint without a row must be kept for now. The first call starts its UNLISTED_DAYS."""
    if (unlisted / DELETED).exists() or not has_complete_files(unlisted):
        return False
    mark = unlisted / _UNLISTED
    try:
        if not mark.exists():
            mark.touch()
        days = (time.time() - mark.stat().st_mtime) / 86400
    except OSError as error:
        logger.error("%s cannot be written: %s", mark, error)
        return True
    if days > UNLISTED_DAYS:
        return False
    logger.warning(
        "%s is complete but has no row in the database: an older database was restored, or a crash left it. "
        "`trainhouse verify --repair` restores its row if its manifest names the owner; a start in %d days removes it",
        unlisted,
        math.ceil(UNLISTED_DAYS - days),
    )
    return True


def has_complete_files(directory: Path) -> bool:
    """True if all files of the manifest have the right size. Hashes are not checked."""
    try:
        check_directory(directory, hashes=False)
    except ValueError:
        return False
    return True
