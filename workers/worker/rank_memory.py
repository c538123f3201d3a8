"""Accounts for a rank's memory by purpose, and offloads the rank from its device.

Models have their own Residency; the base model's weights and the sampler's cache are offloaded and reloaded as a whole.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from ...schemas.errors import OperationError
from ..models.model import BaseModel
from ..resources.memory import release_freed_memory, reporting_out_of_memory
from ..state.offload import Offload
from ..state.residency import Residency

# Pauses between attempts to reload: another process may be about to leave the device.
_RETRY_SECONDS = (0.2, 1.0, 3.0)


class CacheHolder(Protocol):
    """The part of a sampler that concerns its cache."""

    def cache_bytes(self) -> int: ...

    def draft_cache_bytes(self) -> int: ...

    def held_bytes(self) -> int: ...

    def offloadable_tensors(self) -> Iterator[Tensor]:
        """Drops what is unused and yields the cache's tensors."""
        ...


class RankMemory:
    """Moves the rank's base model, cache and models between device and host memory.

    Collective: `on_all` runs a step on all ranks, or raises on all of them.
    """

    def __init__(
        self,
        base: BaseModel,
        residency: Residency,
        sampler: CacheHolder,
        on_all: Callable[[Callable[[], None]], None],
        directory: str | None,
    ) -> None:
        """Wraps the rank's parts; for `directory` see PageFile."""
        self._base, self._residency, self._sampler, self._on_all = base, residency, sampler, on_all
        self._weights = Offload("the base model", base.device, directory, is_frozen=True)
        self._cache = Offload("the sampler's cache", base.device, directory)
        self.offloaded: set[Offload] = set()
        """Parts that are offloaded on some rank; all ranks agree on this set."""
        self._num_leaves = 0
        self._reported_seconds = 0.0

    def offload(self) -> float:
        """Offloads all ranks from their devices; returns the seconds that moving has taken since the previous call.

        Raises:
            OperationError: (server) some rank has no room elsewhere. Parts that had left are reloaded on all ranks if
                possible; models are reloaded when they are needed.
        """
        parts = self._weights, self._cache
        try:
            self._on_all(self._leave)
        except Exception:
            self.offloaded.update(parts)
            self._on_all(partial(self._reload, parts))
            self.offloaded.clear()
            raise
        self.offloaded.update(parts)
        self._num_leaves += 1
        before, self._reported_seconds = self._reported_seconds, self._moving_seconds()
        return self._reported_seconds - before

    def ensure_base(self) -> None:
        """Reloads the base model's weights on all ranks, if offloaded. Raises OperationError (server)."""
        if self._weights in self.offloaded:
            self._bring(self._weights)

    def ensure_all(self) -> None:
        """Reloads the base model's weights and the sampler's cache. Raises as `ensure_base`."""
        if self.offloaded:
            self._bring(self._weights, self._cache)
        self._cache.discard_copy()

    def forget_cache(self) -> None:
        """Drops the cache's offloaded contents, when nothing is sampled any more."""
        self._cache.forget()
        self.offloaded.discard(self._cache)

    def by_purpose(self) -> dict[str, int]:
        """Returns bytes by purpose; for models by place, with their numbers.

        base_weights, kv_cache: on the device or offloaded.
        kv_cache_of_drafts: the part of the cache that draft models use.
        kv_cache_held: used by samples under way; the rest is prefix cache and idle slots.
        offloads: how often the rank was offloaded.
        offload_moved_bytes, offload_moved_milliseconds: of the base model and the cache, since the start.
        """
        cache = self._sampler.cache_bytes()
        own = {
            "base_weights": self._base.weights.num_bytes,
            "base_weights_on_device": self._base.weights.num_bytes - self._weights.num_offloaded_bytes,
            "kv_cache": cache,
            "kv_cache_on_device": 0 if self._cache.is_offloaded else cache,
            "kv_cache_of_drafts": self._sampler.draft_cache_bytes(),
            "kv_cache_held": self._sampler.held_bytes(),
            "offloads": self._num_leaves,
            "offload_moved_bytes": self._weights.moved_bytes + self._cache.moved_bytes,
            "offload_moved_milliseconds": round(1000 * self._own_seconds()),
        }
        return own | self._residency.memory()

    def _moving_seconds(self) -> float:
        return self._own_seconds() + self._residency.moving_seconds

    def _own_seconds(self) -> float:
        return self._weights.moving_seconds + self._cache.moving_seconds

    def _leave(self) -> None:
        with reporting_out_of_memory(
            "offloading from the device", "serve with a smaller --kv-cache-bytes, or fewer models"
        ):
            self._residency.leave_device()
            self._cache.offload(self._sampler.offloadable_tensors())
            self._weights.offload(self._base.weights.movable_tensors())
        release_freed_memory(self._base.device)

    def _bring(self, *parts: Offload) -> None:
        tries = iter(_RETRY_SECONDS)
        while True:
            try:
                self._on_all(partial(self._reload, parts))
                break
            except OperationError:
                seconds = next(tries, None)
                if seconds is None:
                    raise
                time.sleep(seconds)
        self.offloaded.difference_update(parts)

    def _reload(self, parts: Sequence[Offload]) -> None:
        for part in parts:
            part.reload()
