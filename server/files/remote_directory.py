"""Blocking operations on a directory in an fsspec file system."""

import json
import posixpath
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from ...schemas.bounds import load_json
from .manifest import DAMAGED_MANIFEST, MANIFEST, check_file, check_size, read_manifest

KEY_PARTS = 3
"""A checkpoint's key has three parts, RUN/KIND/NAME.VERSION, at every place."""


@dataclass(frozen=True)
class RemoteDirectory:
    """A directory; `files` has no cached listings, since other processes may write there."""

    files: fsspec.AbstractFileSystem
    path: str

    def put(self, source: Path, names: Sequence[str]) -> None:
        """Uploads these files of a local directory."""
        for name in names:
            self.files.put_file(str(source / name), self.file(name))
            arrived, expected = self.files.size(self.file(name)), (source / name).stat().st_size
            if arrived != expected:
                raise OSError(f"{arrived} of the {expected} bytes of {name} were stored")

    def holds(self, source: Path) -> bool:
        return self.manifest() == read_manifest(source)

    def get(self, name: str, listed: Mapping[str, Any], target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self.fetch(name, target)
        check_file(target, listed)

    def fetch(self, name: str, target: Path) -> None:
        self.files.get_file(self.file(name), str(target))

    def copy(self, source: "RemoteDirectory", name: str) -> None:
        self.files.cp_file(source.file(name), self.file(name))

    def write(self, name: str, content: bytes) -> None:
        self.files.pipe_file(self.file(name), content)

    def manifest(self) -> dict[str, Any]:
        try:
            manifest = load_json(self.files.cat_file(self.file(MANIFEST)))
            names = list(manifest["files"])
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{MANIFEST} is missing") from error
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(DAMAGED_MANIFEST) from error
        for name in names:
            if not PurePosixPath(name).parts or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"its manifest names {name!r}, which is outside the directory")
        return manifest

    def check(self) -> dict[str, Any]:
        manifest = self.manifest()
        for name, listed in manifest["files"].items():
            try:
                size_bytes = self.files.size(self.file(name))
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{name} is missing") from error
            check_size(name, size_bytes, listed)
        return manifest

    def remove(self) -> None:
        if self.files.exists(self.file(MANIFEST)):
            self.files.rm_file(self.file(MANIFEST))
        if self.files.find(self.path):
            self.files.rm(self.path, recursive=True)

    def list(self) -> Mapping[str, Set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for path in self.files.find(self.path):
            parts = PurePosixPath(posixpath.relpath(path, self.path)).parts
            if len(parts) > KEY_PARTS:
                found["/".join(parts[:KEY_PARTS])].add("/".join(parts[KEY_PARTS:]))
        return found

    def file(self, name: str) -> str:
        return f"{self.path}/{name}"
