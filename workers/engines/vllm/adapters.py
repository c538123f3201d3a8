"""Versions of adapters and of full models, in directories that vLLM reads, each under a unique name.

The weights behind a name never change, even if several of our servers use one vLLM. So vLLM's prefix cache stays valid,
and a request keeps the version it began with. A full model takes the place of the base model's weights.
"""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from ....schemas.adapters.adapter_files import write_for_vllm
from ....schemas.adapters.vllm_form import VllmForm
from ....schemas.errors import OperationError
from ...protocol.methods import LOAD_ADAPTER
from ...protocol.timeouts import VLLM_UNLOAD_SECONDS
from ...scheduler.rank_group import RankGroup
from ..in_flight import cancel_and_wait
from ..weights import ScratchDirectory, adapter_gone_error, adapter_not_stored_error, drop_weights, load_weights
from .adapter_version import VllmAdapterVersion, full_weight_files, weights_under
from .api import VllmApi
from .turns import Turns

READS_ON_SECONDS = 5.0
"""The time that files are kept: vLLM may still start a cancelled request, and crashes if its files are missing."""


class VllmAdapters:
    """Holds versions by adapter id. vLLM loads them to sample, the training group to score prompts.

    directory: created at first use, and emptied of an earlier process's files; None means a temporary one.
    """

    def __init__(self, api: VllmApi, training: RankGroup, directory: Path | None) -> None:
        self._api = api
        self._training = training
        self._scratch = ScratchDirectory(directory)
        self._turns: Turns[VllmAdapterVersion | None] = Turns()
        self._current: dict[str, VllmAdapterVersion] = {}
        self._numbers = count(1)
        self._server_id = secrets.token_hex(4)
        self._discarding: set[asyncio.Task[None]] = set()

    async def put(self, adapter_id: str, write: Callable[[Path], Awaitable[None]]) -> VllmAdapterVersion:
        """Adds and returns the newest version, which new requests use. `write` writes it into an empty directory."""
        number = next(self._numbers)
        name = f"{adapter_id}-v{number}-{self._server_id}"
        try:
            directory = await self._scratch.path() / re.sub("[^A-Za-z0-9_-]", "_", name)[-100:]
            version = VllmAdapterVersion(adapter_id, number, name, directory)
            version.directory.mkdir()
        except OSError as error:
            raise adapter_not_stored_error(adapter_id, error) from None
        try:
            await write(version.directory)
        except BaseException:
            shutil.rmtree(version.directory, ignore_errors=True)
            raise
        version.is_full = bool(full_weight_files(version.directory))
        earlier, self._current[adapter_id] = self._current.get(adapter_id), version
        self._retire(earlier)
        return version

    def num_full_besides(self, adapter_id: str) -> int:
        """Returns how many other adapters are full models."""
        return sum(each.is_full for name, each in self._current.items() if name != adapter_id)

    def drop(self, adapter_id: str) -> None:
        """Drops the adapter. Requests that use it keep it until they end. Unknown ids are ignored."""
        self._retire(self._current.pop(adapter_id, None))

    @asynccontextmanager
    async def in_use(self, adapter_id: str | None) -> AsyncIterator[VllmAdapterVersion | None]:
        """Yields the newest version, which is kept until the end of the block; None for the base model.

        Waits while vLLM samples with other weights than those under it. Raises OperationError.
        """
        async with self._turns.turn(lambda: weights_under(self._newest(adapter_id))):
            version = self._newest(adapter_id)
            if version is None:
                yield None
                return
            version.num_users += 1
            try:
                yield version
            finally:
                version.num_users -= 1
                self._discard_unused(version)

    async def load_into_vllm(self, version: VllmAdapterVersion, start: int) -> None:
        """Loads the version of an adapter into vLLM, unless it has it. Raises what VllmApi raises.

        Args:
            start: VllmServer.num_starts of the vLLM that must have it.
        """
        if version.vllm_epoch == start:
            return
        async with version.vllm_lock:
            if version.vllm_epoch != start:
                await self._api.load_adapter(version.name, version.directory)
                version.vllm_epoch = start

    async def load_into_training(self, version: VllmAdapterVersion) -> None:
        """Loads the version into the training group, in turn with passes and saves. vLLM does not wait for this.

        Raises OperationError.
        """
        async with version.training_lock:
            num_deaths = self._training.supervisor.num_deaths
            if version.training_crash_epoch != num_deaths:
                await load_weights(self._training, LOAD_ADAPTER, version.name, version.directory)
                version.training_crash_epoch = num_deaths

    async def close(self) -> None:
        """Unloads the versions from vLLM: a server at a URL outlives us."""
        await cancel_and_wait(self._discarding)
        unloading = asyncio.gather(*(self._unload(version) for version in self._current.values()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(unloading, VLLM_UNLOAD_SECONDS)
        self._scratch.close()

    def _newest(self, adapter_id: str | None) -> VllmAdapterVersion | None:
        if adapter_id is None:
            return None
        if adapter_id not in self._current:
            raise adapter_gone_error(adapter_id)
        return self._current[adapter_id]

    def _retire(self, version: VllmAdapterVersion | None) -> None:
        if version is not None:
            version.is_current = False
            self._discard_unused(version)

    def _discard_unused(self, version: VllmAdapterVersion) -> None:
        if not version.is_current and not version.num_users:
            task = asyncio.create_task(self._discard(version))
            self._discarding.add(task)
            task.add_done_callback(self._discarding.discard)

    async def _discard(self, version: VllmAdapterVersion) -> None:
        await self._unload(version)
        if version.training_crash_epoch is not None:
            with contextlib.suppress(OperationError):  # the server is shutting down
                await drop_weights(self._training, version.name)
        await asyncio.sleep(READS_ON_SECONDS)
        await asyncio.to_thread(shutil.rmtree, version.directory, ignore_errors=True)

    async def _unload(self, version: VllmAdapterVersion) -> None:
        if version.vllm_epoch is not None:
            await self._api.unload_adapter(version.name)


async def link_files(source: Path, form: VllmForm | None, target: Path) -> None:
    """Links a checkpoint's files into another directory, so that the checkpoint may be deleted.

    Files in another form than the one that vLLM reads are rewritten there; None for drafts, which it reads as they are.
    Optimizer states are left out: vLLM would
    take them for weights.
    """
    try:
        ignored = shutil.ignore_patterns("optimizer*", "window*")
        await asyncio.to_thread(
            shutil.copytree, source, target, copy_function=_link, dirs_exist_ok=True, ignore=ignored
        )
        if form is not None:
            await asyncio.to_thread(write_for_vllm, target, form)
    except (OSError, shutil.Error) as error:
        raise OperationError(f"checkpoint {source} cannot be read: {error}", "server") from None


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # no hard links here, or another file system
        shutil.copyfile(source, target)
