"""Makes directories that are either complete or absent: written as a sibling .staging-* directory, then renamed.

`sync` makes them survive a crash of the machine; they survive a crash of the process anyway.
"""

import os
import re
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

STAGING = ".staging-"


def staging_path(directory: Path) -> Path:
    """Returns an unused staging name. A directory of such a name at the next start was never finished."""
    return directory / f"{STAGING}{secrets.token_hex(8)}"


def move_into_place(staging: Path, place: Path, *, root: Path | None = None) -> None:
    """Publishes a staging directory by one rename. Raises OSError.

    Args:
        root: if given, the entries from this directory down to `place` are synced.
    """
    staging.rename(place)
    if root is not None:
        for above in place.parents:
            sync_directory(above)
            if above == root:
                break


def make_directory(directory: Path, sync: bool, mode: int = 0o777) -> None:
    """Makes the directory and its missing parents; `sync` makes them survive a crash of the machine. Raises OSError."""
    missing = [one for one in (directory, *directory.parents) if not one.exists()]
    directory.mkdir(mode, parents=True, exist_ok=True)
    if sync:
        for one in missing:
            sync_directory(one.parent)


def sync_files(directory: Path) -> None:
    """Syncs the files directly in the directory, and the directory itself."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep_runs(root: Path, live: Collection[str]) -> None:
    """Deletes the directories of runs that are not live, and what was never finished in the others. Blocking."""
    names = {directory_name(run_id) for run_id in live}
    for directory in root.glob("*"):
        if directory.name not in names:
            shutil.rmtree(directory, ignore_errors=True)
    for staging in root.glob(f"*/{STAGING}*"):
        shutil.rmtree(staging, ignore_errors=True)


def directory_name(run_id: str) -> str:
    """Returns a name for the run's directory. Not every file system allows the colons of a run id."""
    assert re.fullmatch(r"[A-Za-z0-9_-]+(:[A-Za-z0-9_-]+)*", run_id), run_id
    return run_id.replace(":", "_")
