"""Stores directories at fsspec URLs (s3://, hf://, file://, ...), each complete or absent.

The manifest is written last and removed first; a directory without one does not count. At hf:// each change of a
directory is one commit.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec

from ...workers.models.hub import check_hub_url, is_hub_url, open_options, plain_error
from .manifest import MANIFEST, listed_files
from .remote_directory import KEY_PARTS, RemoteDirectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_THREADS = 8
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError, KeyError, TypeError)
"""Errors that a retry would not fix, such as a missing bucket, missing rights or a damaged manifest."""


class ObjectStoreError(Exception):
    """Raised if a directory at a URL could not be read or written. The message names the URL and the reason."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.reason = reason


def check_url(url: str) -> None:
    """Raises ValueError, with the remedy, if checkpoints cannot be stored at this URL."""
    parts = urlsplit(url)
    if parts.password:
        raise ValueError(
            f"{parts.scheme}://{parts.hostname} has a password in its URL, which listings and logs would show: give it "
            f"in the environment, such as FSSPEC_{parts.scheme.upper()}_PASSWORD"
        )
    if parts.scheme == "memory":
        raise ValueError(f"{url} is the memory of this process and is lost when it ends: use another URL")
    try:
        fsspec.get_filesystem_class(parts.scheme or "file")
    except ValueError:
        raise ValueError(f"{url}: fsspec does not support {parts.scheme}://") from None
    except ImportError as error:
        extra = "pip install 'trainhouse[s3]'" if parts.scheme == "s3" else str(error)
        raise ValueError(f"{url} needs a package that is not installed: {extra}") from None
    if is_hub_url(url):
        check_hub_url(url)


def key_of(directory: str) -> str:
    """Returns the key (see KEY_PARTS) of a checkpoint's directory, a path or a URL."""
    return "/".join(PurePosixPath(directory).parts[-KEY_PARTS:])


class ObjectStore:
    """Transfers directories to and from URLs, and retries errors that may be temporary, after pauses.

    It has its own threads, so that an unresponsive store blocks nothing else.

    quiet_urls: URLs below which failed attempts are only logged at level DEBUG, since the caller retries and reports.
    """

    def __init__(self, pauses_seconds: tuple[float, ...], quiet_urls: Collection[str] = ()) -> None:
        self._pauses_seconds = pauses_seconds
        self._quiet = tuple(quiet_urls)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="object-store")
        self._waiting: set[asyncio.Task[Any] | None] = set()
        self._is_closed = False

    async def upload(self, source: Path, url: str) -> None:
        """Uploads a directory that has a manifest. Raises ObjectStoreError."""
        names = [*await asyncio.to_thread(listed_files, source), MANIFEST]
        for batch in [names] if is_hub_url(url) else [[name] for name in names]:
            await self._try(url, lambda at, batch=batch: at.put(source, batch))

    async def holds(self, url: str, source: Path) -> bool:
        """True if the URL has a complete copy of the local directory. Raises ObjectStoreError."""
        return await self._try(url, lambda at: at.holds(source))

    async def download(self, url: str, target: Path) -> None:
        """Downloads into an existing directory and checks each file against the manifest. Raises ObjectStoreError."""
        manifest = await self.manifest(url)
        for name, listed in manifest["files"].items():
            await self._try(url, lambda at, name=name, listed=listed: at.get(name, listed, target / name))
        await asyncio.to_thread((target / MANIFEST).write_text, json.dumps(manifest, indent=1))

    async def copy(self, source: str, target: str, entries: Mapping[str, object]) -> int:
        """Copies within one object store, without a download, with further entries for the manifest. Returns the bytes
        of the files. Raises ObjectStoreError."""
        files = (await self.manifest(source))["files"]
        for name in files:
            await self._try(target, lambda at, name=name: at.copy(_open_directory(source), name))
        manifest = json.dumps({**entries, "files": files}, indent=1).encode()
        await self._try(target, lambda at: at.write(MANIFEST, manifest))
        return sum(listed["size_bytes"] for listed in files.values())

    async def manifest(self, url: str) -> dict[str, Any]:
        """Returns the manifest. Raises ObjectStoreError if there is none."""
        return await self._try(url, lambda at: at.manifest())

    async def check(self, url: str) -> dict[str, Any]:
        """Returns the manifest after comparing sizes. Raises ObjectStoreError if a file is missing or differs."""
        return await self._try(url, lambda at: at.check())

    async def remove(self, url: str) -> None:
        """Removes the directory, complete or not; it need not exist. Raises ObjectStoreError."""
        await self._try(url, lambda at: at.remove())

    async def list(self, root: str) -> Mapping[str, Set[str]]:
        """Returns the file names of every directory below `root`, by key. Raises ObjectStoreError."""
        return await self._try(root, lambda at: at.list())

    def close(self) -> None:
        """Cancels all current and later callers. Threads that are in the middle of a transfer are not waited for."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for task in self._waiting:
            if task is not None:
                task.cancel()

    async def _try(self, url: str, work: Callable[[RemoteDirectory], T]) -> T:
        if self._is_closed:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        self._waiting.add(task)
        try:
            return await self._retry(url, work)
        finally:
            self._waiting.discard(task)

    async def _retry(self, url: str, work: Callable[[RemoteDirectory], T]) -> T:
        loop = asyncio.get_running_loop()
        for pause_seconds in (*self._pauses_seconds, None):
            try:
                return await loop.run_in_executor(self._threads, lambda: work(_open_directory(url)))
            except Exception as raised:  # each of fsspec's backends raises its own types
                error = plain_error(raised) if is_hub_url(url) else raised
                if pause_seconds is None or isinstance(error, _FINAL):
                    raise ObjectStoreError(url, str(error) or type(error).__name__) from error
                level = logging.DEBUG if url.startswith(self._quiet) else logging.WARNING
                logger.log(level, "%s: %s; retrying in %g s", url, error, pause_seconds)
            await asyncio.sleep(pause_seconds)
        raise AssertionError


def _open_directory(url: str) -> RemoteDirectory:
    is_local = urlsplit(url).scheme in ("", "file", "local")
    files, path = fsspec.core.url_to_fs(url, **open_options(url), **({"auto_mkdir": True} if is_local else {}))
    if not is_hub_url(url):
        return RemoteDirectory(files, path.rstrip("/"))
    from .hub_directory import HubDirectory  # its import of huggingface_hub takes half a second

    return HubDirectory(files, path.rstrip("/"))
