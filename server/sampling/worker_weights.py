"""Adapters and drafts in the workers: loaded once for all that need them, again after a crash, and then dropped."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...schemas.errors import OperationError
from ...workers.protocol.calls import WorkerLost
from ..journal.strikes import Strikes

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


@dataclass(eq=False)
class _Entry:
    """Weights that are loaded, being loaded or being dropped."""

    holders: set[Hashable] = field(default_factory=set)
    """Samplers and requests."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a load or a drop."""
    loading: asyncio.Task[None] | None = None
    dropping: asyncio.TimerHandle | None = None
    """Drops the weights when they were unused for long enough."""


class WorkerWeights(ABC, Generic[Item]):
    """Loads weights, one for each id, at the first request that needs them; drops them when they have no holders."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def id_of(self, item: Item) -> str:
        """Returns the id of its weights in the workers."""

    @abstractmethod
    def name_of(self, item: Item) -> str:
        """Returns a noun phrase for messages."""

    @abstractmethod
    def is_loaded(self, item: Item) -> bool: ...

    @abstractmethod
    async def load_now(self, item: Item) -> None: ...

    @abstractmethod
    async def drop_now(self, item: Item) -> None: ...

    async def close(self) -> None:
        for entry in self._entries.values():
            _keep(entry)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hold(self, item: Item, holder: Hashable) -> None:
        """Keeps the weights until the holder releases them."""
        entry = self._entries.setdefault(self.id_of(item), _Entry())
        _keep(entry)
        entry.holders.add(holder)

    def release(self, item: Item, holder: Hashable, unused_seconds: float = 0.0) -> None:
        """Ends `hold`. Weights without holders are dropped in the background after so many seconds."""
        entry = self._entries[self.id_of(item)]
        entry.holders.discard(holder)
        if not entry.holders:
            loop = asyncio.get_running_loop()
            entry.dropping = loop.call_later(unused_seconds, lambda: self._begin(self._drop_unheld(item, entry)))

    async def load(self, item: Item) -> None:
        """Loads weights that are held, unless the workers have them; concurrent callers share one load. Retries when
        the worker crashes."""
        strikes = Strikes(f"the load of {self.name_of(item)}")
        # While they are being dropped, the workers still have them.
        while (entry := self._entries.get(self.id_of(item))) and (entry.changing.locked() or not self.is_loaded(item)):
            loading = entry.loading = entry.loading or self._begin(self._load_held(item, entry))
            try:
                # Shielded: the request may be cancelled, but the worker reads the files to the end.
                await asyncio.shield(loading)
                return
            except WorkerLost as lost:
                await strikes.add(lost)

    async def _load_held(self, item: Item, entry: _Entry) -> None:
        try:
            async with entry.changing:
                if entry.holders and not self.is_loaded(item):
                    await self.load_now(item)
        finally:
            entry.loading = None

    async def _drop_unheld(self, item: Item, entry: _Entry) -> None:
        async with entry.changing:
            if entry.holders or self._entries.get(self.id_of(item)) is not entry:
                return
            try:
                await self.drop_now(item)
            except OperationError as error:
                logger.warning("%s could not be dropped: %s", self.name_of(item), error)
            if not entry.holders:
                self._entries.pop(self.id_of(item), None)

    def _begin(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _keep(entry: _Entry) -> None:
    if entry.dropping is not None:
        entry.dropping.cancel()
        entry.dropping = None
