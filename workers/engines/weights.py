"""Weights that engines sample with: versions in files of the server's own, and in the workers of a group."""

import asyncio
import re
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar

from ...schemas.errors import OperationError
from ..protocol.calls import RunSpec
from ..protocol.methods import CREATE_RUN, DROP_ADAPTER, DROP_RUN, SAVE_RUN, Method
from ..scheduler.rank_group import RankGroup
from ..scheduler.work import MethodWork
from .in_flight import cancel_and_wait


@dataclass(eq=False)
class WeightVersion:
    """One version of an adapter, a full model or a draft. Its files never change."""

    owner: str
    """Id of the adapter or draft."""
    number: int
    """Increases with each version of any owner."""
    name: str
    """No other version has this name, in any server."""
    directory: Path
    is_current: bool = True
    num_users: int = 0


Version = TypeVar("Version", bound=WeightVersion)


class WeightStore(Generic[Version]):
    """Keeps the newest version of each owner's weights, and older ones until no request uses them."""

    def __init__(self, version_class: type[Version], directory: Path | None, keep_seconds: float = 0.0) -> None:
        """Opens nothing yet.

        Args:
            directory: created at first use, and emptied of an earlier process's files; None means a temporary one.
            keep_seconds: how long the files of a version are kept after it was unloaded.
        """
        self._version_class = version_class
        self._requested = directory
        self._keep_seconds = keep_seconds
        self._directory: Path | None = None
        self._making = asyncio.Lock()
        self._newest: dict[str, Version] = {}
        self._numbers = count(1)
        self._server_id = secrets.token_hex(4)
        self._deleting: set[asyncio.Task[None]] = set()

    def __contains__(self, owner: str) -> bool:
        return owner in self._newest

    def __iter__(self) -> Iterator[Version]:
        """Yields the newest version of each owner."""
        return iter(tuple(self._newest.values()))

    def get(self, owner: str) -> Version:
        """Returns the newest version. Raises OperationError if there is none."""
        if owner not in self._newest:
            raise OperationError(f"adapter {owner} is gone: its sampler was closed or never saved")
        return self._newest[owner]

    async def put(self, owner: str, write: Callable[[Version], Awaitable[None]]) -> Version:
        """Adds and returns the newest version, which new requests use.

        Args:
            write: writes into the version's directory, which is empty.
        Raises:
            OperationError: it cannot be written; the earlier version stays.
        """
        number = next(self._numbers)
        name = f"{owner}-v{number}-{self._server_id}"
        version: Version | None = None
        try:
            directory = await self.path() / re.sub("[^A-Za-z0-9_-]", "_", name)[-100:]
            directory.mkdir()
            version = self._version_class(owner, number, name, directory)
            await write(version)
        except BaseException as error:
            self._retire(version)
            if not isinstance(error, OSError):
                raise
            raise not_stored_error(owner, error) from None
        earlier, self._newest[owner] = self._newest.get(owner), version
        self._retire(earlier)
        return version

    @contextmanager
    def using(self, version: Version) -> Iterator[None]:
        """Keeps the version until the end of the block."""
        version.num_users += 1
        try:
            yield
        finally:
            version.num_users -= 1
            self._delete_if_unused(version)

    def drop(self, owner: str) -> None:
        """Drops the owner's weights; requests that use them keep them until they end. Unknown ids are ignored."""
        self._retire(self._newest.pop(owner, None))

    async def unload(self, version: Version) -> None:
        """Called before the files of a version are deleted."""

    async def path(self) -> Path:
        """Returns the store's directory. Raises OSError."""
        async with self._making:
            if self._directory is None:
                self._directory = await asyncio.to_thread(_make, self._requested)
            return self._directory

    async def close(self) -> None:
        await cancel_and_wait(self._deleting)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _retire(self, version: Version | None) -> None:
        if version is not None:
            version.is_current = False
            self._delete_if_unused(version)

    def _delete_if_unused(self, version: Version) -> None:
        if not version.is_current and not version.num_users:
            task = asyncio.create_task(self._delete(version))
            self._deleting.add(task)
            task.add_done_callback(self._deleting.discard)

    async def _delete(self, version: Version) -> None:
        await self.unload(version)
        await asyncio.sleep(self._keep_seconds)
        await asyncio.to_thread(shutil.rmtree, version.directory, ignore_errors=True)


def _make(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="trainhouse-adapters-"))
    shutil.rmtree(directory, ignore_errors=True)
    # Files that could not be removed may be left.
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def not_stored_error(owner: str, error: Exception) -> OperationError:
    return OperationError(f"adapter {owner} cannot be kept for sampling: {error}", "server")


class LoadedCopy:
    """A copy of weights in a process, which loses it when it ends: loaded once after each start of the process."""

    def __init__(self) -> None:
        self.start: int | None = None
        """The start of the process that has the copy; None before the first load."""
        self._lock = asyncio.Lock()

    async def load(self, start: int, load: Callable[[], Awaitable[None]]) -> None:
        """Calls `load` unless the process has the copy; concurrent callers share the call."""
        if self.start == start:
            return
        async with self._lock:
            if self.start != start:
                await load()
                self.start = start


@dataclass
class WeightTransferStats:
    """Counts the transfers of fully trained weights into a sampler since the start."""

    num: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self.num += 1
        self.num_bytes += num_bytes
        self.seconds += seconds

    def memory(self) -> dict[str, int]:
        return {
            "num_pushes": self.num,
            "pushed_weights_bytes": self.num_bytes,
            "pushed_weights_milliseconds": round(1000 * self.seconds),
        }


async def load_weights(group: RankGroup, method: Method[None], weights_id: str, directory: Path) -> None:
    """Loads an adapter or draft into the group's workers, whose crash loses it. Raises OperationError."""
    await group.submit(MethodWork(weights_id, "", method, (weights_id, str(directory)), creates=weights_id))


async def save_untrained(group: RankGroup, spec: RunSpec, directory: Path) -> None:
    """Writes a run as it is created into an existing empty directory. Raises OperationError."""
    run_id = spec.run_id
    await group.submit(MethodWork(run_id, "", CREATE_RUN, (spec,), creates=run_id))
    await group.submit(MethodWork(run_id, "", SAVE_RUN, (run_id, str(directory), False)))
    await group.submit(MethodWork(run_id, "", DROP_RUN, (run_id,), drops=run_id))


async def drop_weights(group: RankGroup, weights_id: str) -> None:
    """Drops an adapter or draft. Unknown and lost ones are ignored. Raises OperationError."""
    if not group.forget_lost(weights_id):
        await group.submit(MethodWork(weights_id, "", DROP_ADAPTER, (weights_id,), drops=weights_id))
