"""Caches base models from URLs of fsspec (s3://, hf://, ...) as directories of this machine.

Each content of a URL, identified by the names, sizes and tags of its files, is downloaded once: into a staging
directory that is renamed when complete. A lock on the URL excludes other processes of this machine. Imports no torch.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from ...schemas.bounds import load_json
from ..protocol.worker_config import DownloadOrigin, WorkerConfig
from ..resources.machine import cache_directory, gigabytes
from .hub import content_hash, fetch_rest, has_hash, is_hub_url, open_options, plain_error

logger = logging.getLogger(__name__)

T = TypeVar("T")
ReportProgress = Callable[[str], None]

_CONFIG, _WEIGHTS = "config.json", ".safetensors"
_SUFFIXES = (_WEIGHTS, ".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of the files that are downloaded; others, such as pickled weights and programs, are not."""
_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "updated")
"""Fields of file systems that identify a file's content; the first one present is used."""
_NUM_THREADS = 8
_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0)
_PERMANENT_ERRORS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    ValueError,
    TypeError,
)
"""Errors that a retry would not fix."""
_STAGING = ".staging-"


class ModelUnavailableError(ValueError):
    """Raised when a URL has no base model that can be downloaded.

    The message names the URL, the reason and the remedy.
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")


class ModelUnreachableError(ModelUnavailableError):
    """Raised when the failure looks temporary, so a retry may help."""


class ModelChangedError(ModelUnavailableError):
    """Raised when the URL has other content than before."""


@dataclass(frozen=True)
class RemoteFile:
    name: str
    num_bytes: int
    tag: str

    @property
    def has_weights(self) -> bool:
        return self.name.endswith(_WEIGHTS)


@dataclass(frozen=True)
class Listing:
    """The files of a base model at a URL, sorted by name."""

    url: str
    files: tuple[RemoteFile, ...]

    @cached_property
    def version(self) -> str:
        return _digest(json.dumps([astuple(file) for file in self.files]))

    @property
    def origin(self) -> DownloadOrigin:
        return DownloadOrigin(self.url, self.version)


class ModelCache:
    """A cache directory that any number of processes of this machine may share. Every method blocks.

    ROOT/URL/VERSION is a whole model, ROOT/URL/VERSION.small one without its weights; URL is a hash. `root` defaults to
    `default_root`.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self._root = default_root() if root is None else Path(root).expanduser()

    def newest(self, url: str) -> DownloadOrigin:
        """Returns the version now at the URL, or while that is unreachable, the one downloaded last.

        Raises ModelUnavailableError.
        """
        try:
            return listing(url).origin
        except ModelUnreachableError as error:
            there = [path for path in self._directory_of(url).glob("*") if not path.name.startswith(".")]
            if not there:
                raise
            last = max(there, key=lambda path: path.stat().st_mtime)
            logger.warning("%s; serving the copy downloaded before: %s", error, last)
            return DownloadOrigin(url, last.name.partition(".")[0])

    def fetch(self, origin: DownloadOrigin, say: ReportProgress, weights: bool = True) -> Path:
        """Returns the directory of this version. Downloads it if it is missing, otherwise does not contact the URL.

        Args:
            weights: False leaves out the files with weights.
        Raises:
            ModelUnavailableError: files that were downloaded before the failure are kept for the next attempt.
        """
        place = self._directory_of(origin.url) / (origin.version if weights else f"{origin.version}.small")
        if not place.is_dir():
            with self._locked(origin.url):
                if not place.is_dir():  # else another process has downloaded it meanwhile
                    self._download(origin, place, say, weights)
        with suppress(OSError):  # a cache of another user can still be read
            os.utime(place)
        return place

    def _directory_of(self, url: str) -> Path:
        return self._root / _digest(url.rstrip("/"))

    @contextmanager
    def _locked(self, url: str) -> Iterator[None]:
        """Holds the lock of a URL, which the system releases if this process dies."""
        try:
            self._directory_of(url).mkdir(parents=True, exist_ok=True)
            with (self._directory_of(url) / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            reason = f"{self._root} cannot be written to ({error.strerror or error})"
            raise ModelUnavailableError(
                url, f"{reason}: fix that, or name another directory with --model-cache"
            ) from error

    def _download(self, origin: DownloadOrigin, place: Path, say: ReportProgress, weights: bool) -> None:
        url = origin.url
        files = [file for file in _unchanged_listing(origin).files if weights or not file.has_weights]
        staging = place.with_name(f"{_STAGING}{place.name}")
        self._drop_other_staging(staging)
        staging.mkdir(exist_ok=True)
        missing = [file for file in files if not (staging / file.name).is_file()]
        size = sum(file.num_bytes for file in missing)
        _check_room(url, staging, size)
        say(f"downloading {url} ({len(missing)} files, {gigabytes(size)}) to {place} ...")
        started = time.monotonic()
        _fetch_all(url, missing, staging)
        self._check_still(origin, staging)
        (staging / ".url").write_text(f"{url}\n")
        _sync(staging)
        staging.rename(place)
        _sync(place.parent)
        say(f"{url} downloaded in {time.monotonic() - started:.1f} s")

    def _check_still(self, origin: DownloadOrigin, staging: Path) -> None:
        """Raises ModelChangedError if the files changed during the download, which may then mix several contents."""
        try:
            _unchanged_listing(origin)
        except ModelChangedError:
            shutil.rmtree(staging)
            raise

    def _drop_other_staging(self, staging: Path) -> None:
        """Deletes staging directories of other versions. The lock is held, so no other process uses them."""
        for other in staging.parent.glob(f"{_STAGING}*"):
            if other != staging and other.name.removesuffix(".small") != staging.name.removesuffix(".small"):
                shutil.rmtree(other, ignore_errors=True)


def default_root() -> Path:
    return cache_directory() / "models"


def with_local_model(config: WorkerConfig) -> WorkerConfig:
    """Returns a rank's config with its base model in a local directory. Raises ModelUnavailableError."""
    model = config.model
    if model.origin is None:
        return config
    here = ModelCache(config.model_cache).fetch(model.origin, logger.info)
    return replace(config, model=replace(model, source=str(here)))


def listing(url: str) -> Listing:
    """Returns the files of the model at a URL.

    Raises:
        ModelUnavailableError: there is no base model.
        ModelUnreachableError: that may be temporary.
    """
    found = _with_retries(url, lambda files, path: files.ls(path, detail=True))
    remote = sorted(_remote_files(found), key=lambda file: file.name)
    if not any(file.name == _CONFIG for file in remote):
        names = ", ".join(sorted(_name(info) for info in found)[:5]) or "nothing"
        raise ModelUnavailableError(
            url, f"there is no {_CONFIG} (but {names}): name the prefix right above the model's files"
        )
    if not any(file.has_weights for file in remote):
        raise ModelUnavailableError(
            url, f"there are no {_WEIGHTS} weights: store the model's release in that format there"
        )
    return Listing(url, tuple(remote))


def read_config(url: str) -> Mapping[str, object]:
    """Returns the config.json of the base model at a URL, or at a URL of the file itself, and reads nothing else.

    Raises ModelUnavailableError.
    """
    if not url.endswith(".json"):
        url = f"{url.rstrip('/')}/{_CONFIG}"
    try:
        config = load_json(_with_retries(url, lambda files, path: files.cat_file(path)))
    except ValueError as error:
        if isinstance(error, ModelUnavailableError):
            raise
        raise ModelUnavailableError(url, f"it is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelUnavailableError(url, "it is not the config of a model: expected an object")
    return config


def _remote_files(found: list[dict[str, Any]]) -> Iterator[RemoteFile]:
    for info in found:
        if info["type"] == "file" and (name := _name(info)).endswith(_SUFFIXES):
            yield RemoteFile(name, int(info["size"]), _tag(info))


def _tag(info: dict[str, Any]) -> str:
    if "blob_id" in info:
        return content_hash(info)
    return next((str(info[key]) for key in _TAGS if info.get(key) is not None), "")


def _name(info: dict[str, Any]) -> str:
    return str(info["name"]).rstrip("/").rpartition("/")[2]


def _unchanged_listing(origin: DownloadOrigin) -> Listing:
    """Returns the listing of this version.

    Raises:
        ModelChangedError: the URL has another version now.
        ModelUnavailableError: see `listing`.
    """
    now = listing(origin.url)
    if now.version != origin.version:
        raise ModelChangedError(origin.url, "its files have changed since the version to load was chosen: start again")
    return now


def _check_room(url: str, directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise ModelUnavailableError(
            url,
            f"it takes {gigabytes(num_bytes)}, but {directory.parent} has only {gigabytes(free)} free: free some space,"
            " or name another directory with --model-cache",
        )


def _fetch_all(url: str, files: list[RemoteFile], directory: Path) -> None:
    threads = ThreadPoolExecutor(_NUM_THREADS, "model-download")
    try:
        # Largest first: if one were last, the other threads would be idle while it downloads.
        for _ in threads.map(
            lambda file: _fetch(url, file, directory), sorted(files, key=lambda file: -file.num_bytes)
        ):
            pass
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _fetch(url: str, file: RemoteFile, directory: Path) -> None:
    """Downloads a file, which gets its name when it is complete."""
    arriving = directory / f".{file.name}"
    if is_hub_url(url):
        _with_retries(url, lambda files, path: fetch_rest(files, f"{path}/{file.name}", arriving))
    else:
        _with_retries(url, lambda files, path: files.get_file(f"{path}/{file.name}", str(arriving)))
    arrived = arriving.stat().st_size
    if is_hub_url(url) and not has_hash(arriving, file.tag):
        arriving.unlink()
        raise ModelUnavailableError(url, f"{file.name} arrived with another hash than the hub reports: start again")
    if arrived != file.num_bytes:
        raise ModelUnavailableError(
            url, f"expected {file.num_bytes} bytes of {file.name}, but received {arrived}: start again"
        )
    _sync(arriving)
    arriving.rename(directory / file.name)


def _with_retries(url: str, work: Callable[[fsspec.AbstractFileSystem, str], T]) -> T:
    """Calls `work`, and retries with pauses after errors that may be temporary. Raises ModelUnavailableError."""
    for pause_seconds in (*_PAUSES_SECONDS, None):
        try:
            # Listings are not cached, because others may write there.
            files, path = fsspec.core.url_to_fs(url, **open_options(url))
            return work(files, path.rstrip("/"))
        except Exception as raised:  # each of fsspec's packages raises its own
            error = plain_error(raised) if is_hub_url(url) else raised
            if isinstance(error, _PERMANENT_ERRORS) or _lacks_credentials(error):
                raise ModelUnavailableError(url, str(error) if is_hub_url(url) else _reason(error)) from error
            if pause_seconds is None:
                raise ModelUnreachableError(url, str(error) or type(error).__name__) from error
            logger.warning("%s: %s; trying again in %g s", url, error, pause_seconds)
        time.sleep(pause_seconds)
    raise AssertionError


def _lacks_credentials(error: Exception) -> bool:
    """True if credentials are missing. Compares the name, since the packages that raise it need not be installed."""
    return "credentials" in type(error).__name__.lower()


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no such bucket or prefix ({error}): name one that exists"
    if isinstance(error, PermissionError) or _lacks_credentials(error):
        return (
            f"access is refused ({error}): give credentials as its package takes them, for s3:// AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, ~/.aws, or the machine's role"
        )
    if isinstance(error, ImportError):
        return f"a package is missing ({error}): for s3:// pip install 'trainhouse[s3]'"
    return str(error) or type(error).__name__


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
