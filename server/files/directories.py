"""Makes directories that are either complete or absent: written as a sibling .staging-* directory, then renamed.

`sync` makes them survive a crash of the machine; they survive a crash of the process anyway.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

STAGING = ".staging-"


def staging_path(directory: Path) -> Path:
    """Returns an unused staging name. A directory of such a name at the next start was never finished."""
    return directory / f"{STAGING}{secrets.token_hex(8)}"


def move_into_place(staging: Path, place: Path, *, root: Path | None = None) -> None:
    """Publishes a staging directory by one rename, and syncs the entries from `root` down to it. Raises OSError."""
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


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError if it is not a regular one: opening a FIFO may wait forever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def sync_files(directory: Path) -> None:
    """Syncs the files directly in the directory, and the directory itself."""
    for path in directory.iterdir():
        with open_regular(path) as file:
            os.fsync(file.fileno())
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_tree(path: Path, ignore_errors: bool = False) -> None:
    """Deletes a directory and everything in it, or the file of this name. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
        return
    # shutil.rmtree opens what it deletes, and opening a FIFO waits for a writer, perhaps forever.
    with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
        path.unlink()


def sweep_runs(root: Path, live: Collection[str]) -> None:
    """Deletes the directories of runs that are not live, and what was never finished in the others. Blocking."""
    names = {directory_name(run_id) for run_id in live}
    for directory in root.glob("*"):
        if directory.name not in names:
            remove_tree(directory, ignore_errors=True)
    for staging in root.glob(f"*/{STAGING}*"):
        remove_tree(staging, ignore_errors=True)


def directory_name(run_id: str) -> str:
    """Returns a name for the run's directory. Not every file system allows the colons of a run id."""
    assert re.fullmatch(r"[A-Za-z0-9_-]+(:[A-Za-z0-9_-]+)*", run_id), run_id
    return run_id.replace(":", "_")


def files_in(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
