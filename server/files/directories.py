"""Directories that are there whole or not at all: written beside their place, as .staging-*, and moved there.

What `sync` makes survive is the death of the machine; that of the process needs nothing.
"""

import os
import re
import secrets
from pathlib import Path

STAGING = ".staging-"


def staging_in(directory: Path) -> Path:
    """A new name there; what has it at the next start was never finished."""
    return directory / f"{STAGING}{secrets.token_hex(8)}"


def move_into_place(staging: Path, place: Path, *, root: Path | None = None) -> None:
    """By one rename. root: all from this directory down to the place is to survive. Raises OSError."""
    staging.rename(place)
    if root is not None:
        for above in place.parents:
            sync_directory(above)
            if above == root:
                break


def make_directory(directory: Path, sync: bool, mode: int = 0o777) -> None:
    """And those above it that are missing. sync: whether they survive. Raises OSError."""
    missing = [one for one in (directory, *directory.parents) if not one.exists()]
    directory.mkdir(mode, parents=True, exist_ok=True)
    if sync:
        for one in missing:
            sync_directory(one.parent)


def sync_files(directory: Path) -> None:
    """What is directly in it, and that it is."""
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


def directory_name(run_id: str) -> str:
    """Run ids are made of our session ids and numbers; a colon is not for every file system."""
    assert re.fullmatch(r"[A-Za-z0-9_-]+(:[A-Za-z0-9_-]+)*", run_id), run_id
    return run_id.replace(":", "_")
