"""RankMemory: what a rank has on its device, as the rank itself knows it, and how it leaves the device to others.

Models have a Residency of their own; the base's weights and the sampler's cache leave and come back as a whole.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from ...schemas.errors import OperationError
from ..models.model import BaseModel
from ..ops.memory import give_back_freed, memory_for
from ..registry.models import Models
from ..state.offload import Offload

# Seconds until it is tried once more to come back: another process may be about to leave the device.
_TRIES_AFTER = (0.2, 1.0, 3.0)


class CacheHolder(Protocol):
    """A sampler, as far as its cache is concerned."""

    def cache_bytes(self) -> int: ...

    def draft_cache_bytes(self) -> int: ...

    def held_bytes(self) -> int: ...

    def leaving(self) -> Iterator[Tensor]:
        """The cache's tensors, once what nobody needs has been dropped."""
        ...


class RankMemory:
    """on_all: does the same on all ranks, or raises on all of them."""

    def __init__(
        self,
        base: BaseModel,
        models: Models,
        sampler: CacheHolder,
        on_all: Callable[[Callable[[], None]], None],
        directory: str | None,
    ) -> None:
        """directory: see PageFile."""
        self._base, self._models, self._sampler, self._on_all = base, models, sampler, on_all
        self._weights = Offload("the base model", base.device, directory, is_frozen=True)
        self._cache = Offload("what is being sampled", base.device, directory)
        # Which are so on some rank: all ranks have to agree on it.
        self._away: set[Offload] = set()
        self._num_leaves = 0
        self._told_seconds = 0.0

    def leave(self) -> float:
        """The device, of all ranks at once; answers how many seconds moving has taken since it was left before.

        Raises OperationError (server) where one rank has no room elsewhere: what had left has come back on all of them
        then, if it could, but for models, which come when they are needed.
        """
        parts = self._weights, self._cache
        try:
            self._on_all(self._leave)
        except Exception:
            self._away.update(parts)
            self._on_all(partial(self._come_back, parts))
            self._away.clear()
            raise
        self._away.update(parts)
        self._num_leaves += 1
        before, self._told_seconds = self._told_seconds, self._moving_seconds()
        return self._told_seconds - before

    def need_base(self) -> None:
        """Its weights are on the device afterwards, on all ranks. Raises OperationError (server)."""
        self._bring(self._weights)

    def need_all(self) -> None:
        """As `need_base`, and the sampler's cache."""
        self._bring(self._weights, self._cache)
        self._cache.may_change()

    def forget_cache(self) -> None:
        """When nothing is sampled any more."""
        self._cache.forget()
        self._away.discard(self._cache)

    def by_purpose(self) -> dict[str, int]:
        """Bytes; of models by place, and how many of these there are.

        base_weights, kv_cache: wherever they are. kv_cache_of_drafts: of the cache, what drafts have that guess.
        kv_cache_held: those of samples under way; the others are prefixes and slots that wait. offloads: how often all
        has left the device; offload_moved: of the base and the cache, since the start.
        """
        cache = self._sampler.cache_bytes()
        own = {
            "base_weights": self._base.num_bytes,
            "base_weights_on_device": self._base.num_bytes - self._weights.num_bytes_away,
            "kv_cache": cache,
            "kv_cache_on_device": 0 if self._cache.is_away else cache,
            "kv_cache_of_drafts": self._sampler.draft_cache_bytes(),
            "kv_cache_held": self._sampler.held_bytes(),
            "offloads": self._num_leaves,
            "offload_moved_bytes": self._weights.moved_bytes + self._cache.moved_bytes,
            "offload_moved_milliseconds": round(1000 * self._own_seconds()),
        }
        return own | self._models.memory()

    def _moving_seconds(self) -> float:
        """Since the start, of all that comes and goes."""
        return self._own_seconds() + self._models.moving_seconds()

    def _own_seconds(self) -> float:
        return self._weights.moving_seconds + self._cache.moving_seconds

    def _leave(self) -> None:
        with memory_for("what leaves the device", "serve with a smaller --kv-cache-bytes, or fewer models"):
            self._models.leave_device()
            self._cache.leave(self._sampler.leaving())
            self._weights.leave(self._base.movable_tensors())
        give_back_freed(self._base.device)

    def _bring(self, *parts: Offload) -> None:
        if self._away.isdisjoint(parts):
            return
        tries = iter(_TRIES_AFTER)
        while True:
            try:
                self._on_all(partial(self._come_back, parts))
                break
            except OperationError:
                seconds = next(tries, None)
                if seconds is None:
                    raise
                time.sleep(seconds)
        self._away.difference_update(parts)

    def _come_back(self, parts: Sequence[Offload]) -> None:
        for part in parts:
            part.come_back()
