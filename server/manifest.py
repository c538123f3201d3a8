"""Manifests: the files of a directory by size and hash. A directory that matches its manifest is whole."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .directories import sync_directory

MANIFEST = "manifest.json"

_READ_BYTES = 1 << 20


def seal(directory: Path, about: Mapping[str, object], *, sync: bool = True) -> int:
    """Writes the manifest of what is there, and whatever else is to be said; returns the bytes of the files.

    sync: whether all of it is to survive the death of the machine.
    """
    files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    listed = {name: {"size_bytes": path.stat().st_size, "sha256": _hash(path, sync)} for name, path in files.items()}
    with (directory / MANIFEST).open("w") as file:
        json.dump({**about, "files": listed}, file, indent=1)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    if sync:
        sync_directory(directory)
    return sum(path.stat().st_size for path in files.values())


def read_manifest(directory: Path) -> dict[str, Any]:
    return json.loads((directory / MANIFEST).read_text())


def listed_files(directory: Path) -> list[str]:
    return list(read_manifest(directory)["files"])


def check(directory: Path, *, hashes: bool = True) -> None:
    """Raises ValueError with what is missing or differs. Without hashes only in size."""
    try:
        for name, listed in read_manifest(directory)["files"].items():
            check_file(directory / name, listed, hashes=hashes)
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{directory} is not whole: {error}") from error


def check_file(path: Path, listed: Mapping[str, Any], *, hashes: bool = True) -> None:
    """listed: what the manifest says of it. Raises ValueError where it differs, OSError where it is not there."""
    same_size = path.stat().st_size == listed["size_bytes"]
    if not same_size or (hashes and _hash(path, sync=False) != listed["sha256"]):
        raise ValueError(f"{path} is not as its manifest says")


def _hash(path: Path, sync: bool) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()
