"""Versions of adapters and of full models, in directories that vLLM reads, each under a unique name.

The weights behind a name never change, even if several of our servers use one vLLM. So vLLM's prefix cache stays valid,
and a request keeps the version it began with. A full model takes the place of the base model's weights.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from ....schemas.adapters.adapter_files import write_for_vllm
from ....schemas.adapters.vllm_form import VllmForm
from ....schemas.errors import OperationError
from ...protocol.timeouts import VLLM_UNLOAD_SECONDS
from ...scheduler.rank_group import RankGroup
from ..weights import LoadedCopy, WeightStore, WeightVersion, drop_weights
from .api import VllmApi

Weights = TypeVar("Weights")

READS_ON_SECONDS = 5.0
"""The time that files are kept: vLLM may still start a cancelled request, and crashes if its files are missing."""


@dataclass(eq=False)
class VllmVersion(WeightVersion):
    """One version of an adapter, a full model or a draft."""

    refusal: str | None = None
    """The reason why vLLM cannot load it; None if it can, or has not tried."""
    in_vllm: LoadedCopy = field(default_factory=LoadedCopy)
    """The adapter in vLLM, which counts its starts (VllmServer.num_starts)."""
    in_training: LoadedCopy = field(default_factory=LoadedCopy)
    """The weights in the training group, which counts its crashes."""

    @cached_property
    def is_full(self) -> bool:
        """True if it is a full model."""
        return bool(full_weight_files(self.directory))


def full_weight_files(directory: Path) -> list[Path]:
    """Returns the files with a full model's weights; none if the directory has an adapter."""
    return list(directory.glob("model*.safetensors"))


def weights_under(version: VllmVersion | None) -> VllmVersion | None:
    """Returns the full model whose weights vLLM must have to sample with the version; None for the base model's."""
    return version if version is not None and version.is_full else None


class Turns(Generic[Weights]):
    """Turns of requests at the weights of one vLLM, which has one model's weights at a time.

    Requests for the same weights run together. Others wait until these have ended, and so do new ones meanwhile.
    """

    def __init__(self) -> None:
        self._weights: Weights | None = None
        self._num_running = self._num_waiting = 0
        self._all_ended: asyncio.Future[None] | None = None

    @asynccontextmanager
    async def turn(self, choose: Callable[[], Weights]) -> AsyncIterator[None]:
        """Waits for the turn of the weights, which lasts to the end of the block.

        Args:
            choose: returns the weights, and is called again after waiting, because there may be newer ones. What it
                raises ends the wait. Nothing else runs between its last call and the block.
        """
        await self._enter(choose)
        try:
            yield
        finally:
            self._num_running -= 1
            self._wake()

    async def _enter(self, choose: Callable[[], Weights]) -> None:
        weights, has_waited = choose(), False
        try:
            # A request that arrives while others wait must wait too, or they would wait forever.
            while (self._num_waiting and not has_waited) or (self._num_running and self._weights != weights):
                self._num_waiting += not has_waited
                has_waited = True
                self._all_ended = self._all_ended or asyncio.get_running_loop().create_future()
                await asyncio.shield(self._all_ended)
                weights = choose()
        except BaseException:
            self._num_waiting -= has_waited
            self._wake()
            raise
        self._num_waiting -= has_waited
        self._num_running += 1
        self._weights = weights

    def _wake(self) -> None:
        if not self._num_running and self._all_ended is not None:
            self._all_ended.set_result(None)
            self._all_ended = None


class VllmAdapters(WeightStore[VllmVersion]):
    """The versions of adapters and full models. vLLM loads them to sample, the training group to score prompts."""

    def __init__(self, api: VllmApi, training: RankGroup, directory: Path | None) -> None:
        super().__init__(VllmVersion, directory, READS_ON_SECONDS)
        self._api = api
        self._training = training
        self._turns: Turns[VllmVersion | None] = Turns()

    @asynccontextmanager
    async def in_use(self, adapter_id: str | None) -> AsyncIterator[VllmVersion | None]:
        """Yields the newest version, which is kept until the end of the block; None for the base model.

        Waits while vLLM samples with other weights than those under it. Raises OperationError.
        """
        if adapter_id is None:
            async with self._turns.turn(lambda: None):
                yield None
            return
        async with self._turns.turn(lambda: weights_under(self.get(adapter_id))):
            version = self.get(adapter_id)
            with self.using(version):
                yield version

    async def close(self) -> None:
        """Unloads the versions from vLLM: a server at a URL outlives us."""
        unloading = asyncio.gather(*(self._unload_from_vllm(version) for version in self))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(unloading, VLLM_UNLOAD_SECONDS)
        await super().close()

    async def unload(self, version: VllmVersion) -> None:
        await self._unload_from_vllm(version)
        if version.in_training.start is not None:
            with contextlib.suppress(OperationError):  # the server is shutting down
                await drop_weights(self._training, version.name)

    async def _unload_from_vllm(self, version: VllmVersion) -> None:
        if version.in_vllm.start is not None:
            await self._api.unload_adapter(version.name)


async def link_files(source: Path, form: VllmForm | None, version: VllmVersion) -> None:
    """Links a checkpoint's files into the version's directory, so that the checkpoint may be deleted.

    Files in another form than the one that vLLM reads are rewritten there; None for drafts, which it reads as they are.
    Optimizer states are left out: vLLM would take them for weights.
    """
    try:
        ignored = shutil.ignore_patterns("optimizer*", "window*")
        await asyncio.to_thread(
            shutil.copytree, source, version.directory, copy_function=_link, dirs_exist_ok=True, ignore=ignored
        )
        if form is not None:
            await asyncio.to_thread(write_for_vllm, version.directory, form)
    except (OSError, shutil.Error) as error:
        raise OperationError(f"checkpoint {source} cannot be read: {error}", "server") from None


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # no hard links here, or another file system
        shutil.copyfile(source, target)
