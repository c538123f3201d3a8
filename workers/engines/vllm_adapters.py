"""VllmAdapters: versions of adapters in directories that vLLM reads, each under a name of its own.

A name never changes its weights, so vLLM's prefix cache stays right, and a request keeps the version it began with.
"""

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from ...schemas.errors import OperationError
from .vllm_api import VllmApi


@dataclass(eq=False)
class _Version:
    """num_users: requests under way. loaded_in: the start of vLLM that has it, -1 = none."""

    name: str
    directory: Path
    num_users: int = 0
    is_current: bool = True
    loaded_in: int = -1
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class VllmAdapters:
    """By adapter id. directory: made if need be, and emptied of an earlier process's; None = a temporary one."""

    def __init__(self, api: VllmApi, directory: Path | None) -> None:
        self._api = api
        self._directory = directory
        self._is_ready = False
        self._current: dict[str, _Version] = {}
        self._numbers = count(1)
        self._discarding: set[asyncio.Task[None]] = set()

    async def put(self, adapter_id: str, write: Callable[[Path], Awaitable[None]]) -> None:
        """The newest version of it, written by `write` into an empty directory: for all requests from now on."""
        number = next(self._numbers)
        name = f"{adapter_id}-v{number}"
        version = _Version(name, self._prepared() / f"{number}-{re.sub('[^A-Za-z0-9_-]', '_', adapter_id)[-80:]}")
        version.directory.mkdir()
        try:
            await write(version.directory)
        except BaseException:
            shutil.rmtree(version.directory, ignore_errors=True)
            raise
        earlier, self._current[adapter_id] = self._current.get(adapter_id), version
        self._retire(earlier)

    def drop(self, adapter_id: str) -> None:
        """Unknown ids are ignored. Requests under way keep it to their end."""
        self._retire(self._current.pop(adapter_id, None))

    @asynccontextmanager
    async def in_use(self, adapter_id: str, start: int) -> AsyncIterator[str]:
        """Inside, vLLM has the newest version under this name. start: the number of vLLM's. Raises as VllmApi."""
        version = self._current.get(adapter_id)
        if version is None:
            raise OperationError(f"adapter {adapter_id} is gone: its sampler was closed or never saved")
        version.num_users += 1
        try:
            async with version.loading:
                if version.loaded_in != start:
                    await self._api.load_adapter(version.name, version.directory)
                    version.loaded_in = start
            yield version.name
        finally:
            version.num_users -= 1
            self._discard_unused(version)

    def forget(self, adapter_id: str) -> None:
        """vLLM does not have it any more."""
        if version := self._current.get(adapter_id):
            version.loaded_in = -1

    async def close(self) -> None:
        for task in self._discarding:
            task.cancel()
        await asyncio.gather(*self._discarding, return_exceptions=True)
        if self._is_ready and self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _retire(self, version: _Version | None) -> None:
        if version is not None:
            version.is_current = False
            self._discard_unused(version)

    def _discard_unused(self, version: _Version) -> None:
        if not version.is_current and not version.num_users:
            task = asyncio.create_task(self._discard(version))
            self._discarding.add(task)
            task.add_done_callback(self._discarding.discard)

    async def _discard(self, version: _Version) -> None:
        if version.loaded_in >= 0:
            await self._api.unload_adapter(version.name)
        await asyncio.to_thread(shutil.rmtree, version.directory, ignore_errors=True)

    def _prepared(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="trainhouse-adapters-"))
        if not self._is_ready:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory.mkdir(mode=0o700, parents=True)
            self._is_ready = True
        return self._directory


async def link_files(source: Path, target: Path) -> None:
    """A checkpoint's files in another directory, of which nothing is lost when the first one goes."""
    try:
        await asyncio.to_thread(shutil.copytree, source, target, copy_function=_link, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise OperationError(f"checkpoint {source} cannot be read: {error}", "server") from None


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links, or another one
        shutil.copyfile(source, target)
