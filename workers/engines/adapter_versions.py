"""The versions of an adapter that a sampler group holds, with the number of requests that use each.

A LoRA adapter is overwritten in place, even while requests use it. The weights of a fully trained model do not change
while a request uses them: a newer version is loaded into a second place, or replaces a version that no request uses.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...schemas.errors import OperationError
from ...schemas.models import FullConfig, TrainingConfig
from ..protocol.calls import AdapterWeights
from ..protocol.methods import DROP_ADAPTER, IMPORT_ADAPTER
from ..scheduler.rank_group import RankGroup
from ..scheduler.work import MethodWork
from .in_flight import cancel_and_wait
from .weights import WeightStore, WeightTransferStats, WeightVersion

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class AdapterCopy(WeightVersion):
    """The server's own copy of an adapter: the operating system decides how much of it stays in memory."""

    training: TrainingConfig | None = None

    @property
    def is_full(self) -> bool:
        """True if it is a fully trained model, whose weights must not change while requests use them."""
        return isinstance(self.training, FullConfig)

    @property
    def file(self) -> Path:
        """Flat float32."""
        return self.directory / "weights.f32"

    async def write(self, weights: AdapterWeights) -> None:
        self.training = weights.training
        await asyncio.to_thread(weights.weights.tofile, self.file)

    def read(self) -> AdapterWeights:
        """Maps the file. It may be unlinked meanwhile: the bytes go from the page cache straight into the pipe."""
        assert self.training is not None
        return AdapterWeights(self.training, np.asarray(np.memmap(self.file, np.float32, mode="c")))


@dataclass(eq=False)
class GroupAdapterVersion:
    """One version of an adapter, in a worker."""

    worker_id: str
    crash_epoch: int
    """The group's count of crashes when it was loaded. A later crash has lost it."""
    copy: AdapterCopy | None = None
    """The copy that it was loaded from; None if it is not fully loaded."""
    num_users: int = 0

    @property
    def is_fixed(self) -> bool:
        return self.copy is not None and self.copy.is_full and self.num_users > 0


class GroupAdapter:
    """One adapter in one group: at most two versions. New requests use the newer one."""

    def __init__(
        self, adapter_id: str, group: RankGroup, copies: WeightStore[AdapterCopy], pushes: WeightTransferStats
    ) -> None:
        self._adapter_id = adapter_id
        self._group, self._copies, self._pushes = group, copies, pushes
        self._worker_ids = (adapter_id, f"{adapter_id}@2")
        self._versions: list[GroupAdapterVersion] = []
        self._lock = asyncio.Lock()
        self._next_end: asyncio.Future[None] | None = None
        self._moving: set[asyncio.Task[None]] = set()
        # The newest one for which there was no room next to the versions in use.
        self._without_room: AdapterCopy | None = None

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[GroupAdapterVersion]:
        """Yields the newest version, loaded into the group if necessary.

        Loading may have to wait until requests that use older versions end. If the version stays, it does not change
        until the end of the block. Raises OperationError.
        """
        version = await self._newest()
        version.num_users += 1
        try:
            yield version
        finally:
            version.num_users -= 1
            if not version.num_users:
                self._ended(version)

    async def update(self) -> None:
        """Loads the newest version if the group has room for it now, and drops versions that no request uses.

        A failure is logged: the next request that wants the version tries again.
        """
        try:
            async with self._lock:
                if self._loaded_versions() and self._adapter_id in self._copies:
                    newest = await self._load_newest()
                    for version in self._loaded_versions():
                        if version is not newest and not version.num_users:
                            await self._drop(version)
        except OperationError as error:
            logger.warning(
                "%s could not load the newest version of adapter %s: %s", self._group.name, self._adapter_id, error
            )
        finally:
            self._wake()  # a waiting caller may no longer have a request to wait for

    async def drop(self) -> None:
        """Drops all versions; requests that use them fail. Raises OperationError."""
        await cancel_and_wait(self._moving)
        async with self._lock:
            for version in self._loaded_versions():
                await self._drop(version)
            for worker_id in self._worker_ids:
                self._group.forget_lost(worker_id)
        self._wake()

    async def close(self) -> None:
        await cancel_and_wait(self._moving)

    async def _newest(self) -> GroupAdapterVersion:
        while True:
            self._copies.get(self._adapter_id)
            async with self._lock:
                version = await self._load_newest()
            if version is not None:
                return version
            self._next_end = self._next_end or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._next_end)

    async def _load_newest(self) -> GroupAdapterVersion | None:
        """Returns the newest version after loading it; None while requests leave no room for it."""
        copy, there = self._copies.get(self._adapter_id), self._loaded_versions()
        newest = next((each for each in there if each.copy is copy), None)
        if newest is not None:
            return newest
        replaced = next((each for each in there if not each.is_fixed), None)
        if replaced is not None:
            await self._push(copy, replaced)
            return replaced
        return await self._push_second(copy)

    async def _push_second(self, copy: AdapterCopy) -> GroupAdapterVersion | None:
        there = self._loaded_versions()
        free = [worker_id for worker_id in self._worker_ids if worker_id not in [each.worker_id for each in there]]
        if not free or (there and copy is self._without_room):
            return None
        version = GroupAdapterVersion(free[0], self._group.supervisor.num_deaths)
        self._versions = [*there, version]
        try:
            await self._push(copy, version)
        except OperationError as error:
            self._versions.remove(version)
            if not there or self._group.supervisor.num_deaths != version.crash_epoch:
                raise
            self._without_room = copy
            logger.warning(
                "%s has no room for version %d of the weights of %s next to the versions in use: it loads when the"
                " requests that use them have ended (%s)", self._group.name, copy.number, self._adapter_id, error,
            )  # fmt: skip
            return None
        return version

    async def _push(self, copy: AdapterCopy, version: GroupAdapterVersion) -> None:
        """Overwrites the version with the copy. Raises OperationError."""
        version.copy = None
        weights, started = copy.read(), time.monotonic()
        worker_id = version.worker_id
        call = MethodWork(self._adapter_id, "", IMPORT_ADAPTER, (worker_id, weights), creates=worker_id)
        await self._group.submit(call)
        version.copy = copy
        if copy.is_full:
            seconds, num_bytes = time.monotonic() - started, weights.weights.nbytes
            self._pushes.add(num_bytes, seconds)
            logger.info(
                "%s has version %d of the weights of %s: %d bytes in %.3f s",
                self._group.name, copy.number, self._adapter_id, num_bytes, seconds,
            )  # fmt: skip

    def _ended(self, version: GroupAdapterVersion) -> None:
        self._wake()
        is_newest = self._adapter_id not in self._copies or self._copies.get(self._adapter_id) is version.copy
        if version in self._loaded_versions() and not is_newest:
            moving = asyncio.create_task(self.update())
            self._moving.add(moving)
            moving.add_done_callback(self._moving.discard)

    def _wake(self) -> None:
        ended, self._next_end = self._next_end, None
        if ended is not None:
            ended.set_result(None)

    async def _drop(self, version: GroupAdapterVersion) -> None:
        worker_id = version.worker_id
        await self._group.submit(MethodWork(self._adapter_id, "", DROP_ADAPTER, (worker_id,), drops=worker_id))
        if version in self._versions:
            self._versions.remove(version)

    def _loaded_versions(self) -> list[GroupAdapterVersion]:
        """Returns the versions that no crash has lost."""
        return [each for each in self._versions if each.crash_epoch == self._group.supervisor.num_deaths]
