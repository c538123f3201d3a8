"""VllmAdapters: versions of adapters in directories that vLLM reads, each under a name of its own.

A name never changes its weights, so vLLM's prefix cache stays right, and a request keeps the version it began with.
"""

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from ...schemas.errors import OperationError
from ..group import Group
from ..work import Verb
from .scratch import ScratchDirectory
from .vllm_api import VllmApi


@dataclass(eq=False)
class Version:
    """One version of an adapter. num_users: requests under way.

    vllm_start: that of the vLLM which has it; training_deaths: those before the training worker which has it; -1: none.
    """

    name: str
    directory: Path
    num_users: int = 0
    is_current: bool = True
    vllm_start: int = -1
    training_deaths: int = -1
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)


class VllmAdapters:
    """Versions by adapter id, given to vLLM, which samples them, and to the training group, which scores with them.

    directory: made if need be, and emptied of an earlier process's; None = a temporary one.
    """

    def __init__(self, api: VllmApi, training: Group, directory: Path | None) -> None:
        self._api = api
        self._training = training
        self._scratch = ScratchDirectory(directory)
        self._current: dict[str, Version] = {}
        self._numbers = count(1)
        self._discarding: set[asyncio.Task[None]] = set()

    async def put(self, adapter_id: str, write: Callable[[Path], Awaitable[None]]) -> None:
        """The newest version of it, written by `write` into an empty directory: for all requests from now on."""
        number = next(self._numbers)
        name = f"{adapter_id}-v{number}"
        version = Version(name, self._scratch.path() / f"{number}-{re.sub('[^A-Za-z0-9_-]', '_', adapter_id)[-80:]}")
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

    @contextmanager
    def in_use(self, adapter_id: str) -> Iterator[Version]:
        """The newest version, which stays until the end of the block. Raises OperationError."""
        version = self._current.get(adapter_id)
        if version is None:
            raise OperationError(f"adapter {adapter_id} is gone: its sampler was closed or never saved")
        version.num_users += 1
        try:
            yield version
        finally:
            version.num_users -= 1
            self._discard_unused(version)

    async def give_to_vllm(self, version: Version, start: int) -> None:
        """start: the number of vLLM's. Raises as VllmApi."""
        async with version.loading:
            if version.vllm_start != start:
                await self._api.load_adapter(version.name, version.directory)
                version.vllm_start = start

    async def give_to_training(self, version: Version) -> None:
        async with version.loading:
            num_deaths = self._training.num_deaths
            if version.training_deaths != num_deaths:
                verb = Verb("load_adapter", (version.name, str(version.directory)), creates=version.name)
                await self._training.submit(version.name, "", verb)
                version.training_deaths = num_deaths

    async def close(self) -> None:
        for task in self._discarding:
            task.cancel()
        await asyncio.gather(*self._discarding, return_exceptions=True)
        self._scratch.close()

    def _retire(self, version: Version | None) -> None:
        if version is not None:
            version.is_current = False
            self._discard_unused(version)

    def _discard_unused(self, version: Version) -> None:
        if not version.is_current and not version.num_users:
            task = asyncio.create_task(self._discard(version))
            self._discarding.add(task)
            task.add_done_callback(self._discarding.discard)

    async def _discard(self, version: Version) -> None:
        if version.vllm_start >= 0:
            await self._api.unload_adapter(version.name)
        if version.training_deaths >= 0 and not self._training.forget_lost(version.name):
            with contextlib.suppress(OperationError):  # at the end of the server
                verb = Verb("drop_adapter", (version.name,), drops=version.name)
                await self._training.submit(version.name, "", verb)
        await asyncio.to_thread(shutil.rmtree, version.directory, ignore_errors=True)


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
