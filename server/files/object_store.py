"""Places: directories at URLs of fsspec (s3://, hf://, file://, ...), each whole or nothing.

The manifest is written last and removed first: a directory without one is nothing.
"""

import asyncio
import json
import logging
import posixpath
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec

from .manifest import MANIFEST, NO_MANIFEST, check_file, check_size, listed_files

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEY_PARTS = 3
"""RUN/KIND/NAME.VERSION: where a checkpoint lies, below every place alike."""

_NUM_THREADS = 8
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, KeyError, TypeError)
"""What another try would not mend: no such bucket, no right to it, a manifest that is none."""


class PlaceError(Exception):
    """A directory at a URL could not be read or written; the message names the URL and the reason."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.reason = reason


def check_url(url: str) -> None:
    """Raises ValueError with the remedy where no directory can be at such a URL."""
    parts = urlsplit(url)
    if parts.password:
        raise ValueError(
            f"{parts.scheme}://{parts.hostname} has a password in its URL, which listings and logs would show: give it "
            f"in the environment, such as FSSPEC_{parts.scheme.upper()}_PASSWORD"
        )
    if parts.scheme == "memory":
        raise ValueError(f"{url} is the memory of this process, and what is there ends with it: name another place")
    try:
        fsspec.get_filesystem_class(parts.scheme or "file")
    except ValueError:
        raise ValueError(f"{url}: fsspec knows no {parts.scheme}://") from None
    except ImportError as error:
        extra = "pip install 'trainhouse[s3]'" if parts.scheme == "s3" else str(error)
        raise ValueError(f"{url} needs a package that is not installed: {extra}") from None


def key_of(directory: str) -> str:
    """Of a checkpoint's directory, a path or a URL."""
    return "/".join(PurePosixPath(directory).parts[-KEY_PARTS:])


class Places:
    """Carries directories to and from URLs; what may be a passing trouble is tried again with pauses.

    The work has threads of its own: a place that hangs holds up nothing else.
    """

    def __init__(self, pauses_seconds: tuple[float, ...], quiet: Collection[str] = ()) -> None:
        """quiet: URLs below which trouble is told by whoever tries once more after that."""
        self._pauses_seconds = pauses_seconds
        self._quiet = tuple(quiet)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="places")
        self._waiting: set[asyncio.Task[Any] | None] = set()
        self._is_closed = False

    async def upload(self, source: Path, url: str) -> None:
        """A directory with a manifest. Raises PlaceError."""
        for name in [*await asyncio.to_thread(listed_files, source), MANIFEST]:
            await self._try(url, lambda at, name=name: at.put(source / name, name))

    async def download(self, url: str, target: Path) -> None:
        """Into a directory that is there, each file as the manifest says. Raises PlaceError."""
        manifest = await self.manifest(url)
        for name, listed in manifest["files"].items():
            await self._try(url, lambda at, name=name, listed=listed: at.get(name, listed, target / name))
        await asyncio.to_thread((target / MANIFEST).write_text, json.dumps(manifest, indent=1))

    async def copy(self, source: str, target: str, about: Mapping[str, object]) -> int:
        """Within one place, without its bytes coming here. about: of the copy's manifest. Returns the files' bytes."""
        files = (await self.manifest(source))["files"]
        for name in files:
            await self._try(target, lambda at, name=name: at.copy(source, name))
        await self._try(target, lambda at: at.write(MANIFEST, json.dumps({**about, "files": files}, indent=1).encode()))
        return sum(listed["size_bytes"] for listed in files.values())

    async def manifest(self, url: str) -> dict[str, Any]:
        """Raises PlaceError where there is none."""
        return await self._try(url, _At.manifest)

    async def check(self, url: str) -> dict[str, Any]:
        """Its manifest. Raises PlaceError where a file is missing or of another size; its bytes are not read."""
        return await self._try(url, _At.check)

    async def remove(self, url: str) -> None:
        """Whole, half or not there. Raises PlaceError."""
        await self._try(url, _At.remove)

    async def list(self, root: str) -> Mapping[str, Set[str]]:
        """Key -> the names of its files, of everything below a place. Raises PlaceError."""
        return await self._try(root, _At.list)

    def close(self) -> None:
        """Whoever waits for a URL is cancelled, now or later. A thread in the midst of something is not waited for."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for task in self._waiting:
            if task is not None:
                task.cancel()

    async def _try(self, url: str, work: "Callable[[_At], T]") -> T:
        if self._is_closed:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        self._waiting.add(task)
        try:
            return await self._try_again(url, work)
        finally:
            self._waiting.discard(task)

    async def _try_again(self, url: str, work: "Callable[[_At], T]") -> T:
        for pause_seconds in (*self._pauses_seconds, None):
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(_at(url)))
            except Exception as error:  # each of fsspec's packages raises its own
                if pause_seconds is None or isinstance(error, _FINAL):
                    raise PlaceError(url, str(error) or type(error).__name__) from error
                level = logging.DEBUG if url.startswith(self._quiet) else logging.WARNING
                logger.log(level, "%s: %s; trying again in %g s", url, error, pause_seconds)
            await asyncio.sleep(pause_seconds)
        raise AssertionError


@dataclass(frozen=True)
class _At:
    """A directory in a file system of fsspec. Blocking."""

    files: fsspec.AbstractFileSystem
    path: str

    def put(self, source: Path, name: str) -> None:
        self.files.put_file(str(source), self.file(name))
        arrived = self.files.size(self.file(name))
        if arrived != source.stat().st_size:
            raise OSError(f"of the {source.stat().st_size} bytes of {name} {arrived} have arrived")

    def get(self, name: str, listed: Mapping[str, Any], target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self.files.get_file(self.file(name), str(target))
        check_file(target, listed)

    def copy(self, source: str, name: str) -> None:
        self.files.cp_file(_at(source).file(name), self.file(name))

    def write(self, name: str, content: bytes) -> None:
        self.files.pipe_file(self.file(name), content)

    def manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads(self.files.cat_file(self.file(MANIFEST)))
            names = list(manifest["files"])
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{MANIFEST} is missing") from error
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(NO_MANIFEST) from error
        for name in names:
            if not PurePosixPath(name).parts or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"its manifest names {name!r}, which is outside of it")
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


def _at(url: str) -> _At:
    """Listings are never remembered: others may write there, too."""
    is_local = urlsplit(url).scheme in ("", "file", "local")
    files, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **({"auto_mkdir": True} if is_local else {}))
    return _At(files, path.rstrip("/"))
