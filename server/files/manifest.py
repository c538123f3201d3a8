"""Writes and checks manifests, which list the files of a directory by size and hash.

A directory that matches its manifest is complete.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...schemas.bounds import load_json
from .directories import open_regular, read_regular, sync_directory

MANIFEST = "manifest.json"
DAMAGED_MANIFEST = f"{MANIFEST} is damaged: it is not the JSON of a manifest"

_READ_BYTES = 1 << 20


class ManifestMismatch(ValueError):
    """A directory does not match its manifest. `reason` says why, without the directory's name."""

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(f"{directory} is incomplete or damaged: {reason}")
        self.reason = reason


def write_manifest(directory: Path, entries: Mapping[str, object], *, sync: bool = True) -> int:
    """Writes a manifest of the directory's files with these entries; `sync` makes all survive a crash of the machine.
    Returns the bytes of the files."""
    files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    listed = {name: {"size_bytes": path.stat().st_size, "sha256": _hash(path, sync)} for name, path in files.items()}
    with (directory / MANIFEST).open("w") as file:
        json.dump({**entries, "files": listed}, file, indent=1)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    if sync:
        for parent in {directory, *(path.parent for path in files.values())}:
            sync_directory(parent)
    return sum(path.stat().st_size for path in files.values())


def read_manifest(directory: Path) -> dict[str, Any]:
    return load_json(read_regular(directory / MANIFEST))


def listed_files(directory: Path) -> list[str]:
    return list(read_manifest(directory)["files"])


def check_directory(directory: Path, *, hashes: bool = True) -> None:
    """Raises ManifestMismatch if a file is missing or differs; without `hashes` only sizes are compared."""
    name = MANIFEST
    try:
        for name, listed in read_manifest(directory)["files"].items():
            check_file(directory / name, listed, hashes=hashes)
    except FileNotFoundError as error:
        raise ManifestMismatch(directory, f"{name} is missing" if directory.exists() else "it is missing") from error
    except OSError as error:
        raise ManifestMismatch(directory, f"{name} cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ManifestMismatch(directory, DAMAGED_MANIFEST) from error
    except ValueError as error:
        raise ManifestMismatch(directory, str(error)) from error


def check_file(path: Path, listed: Mapping[str, Any], *, hashes: bool = True) -> None:
    """Raises ValueError if the file differs from its entry in the manifest, OSError if it cannot be read."""
    check_size(path.name, path.stat().st_size, listed)
    if hashes and _hash(path, sync=False) != listed["sha256"]:
        raise ValueError(f"{path.name} does not match its manifest (its hash differs)")


def check_size(name: str, size_bytes: int | None, listed: Mapping[str, Any]) -> None:
    if size_bytes != listed["size_bytes"]:
        raise ValueError(f"{name} does not match its manifest ({size_bytes} bytes, not {listed['size_bytes']})")


def _hash(path: Path, sync: bool) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()
