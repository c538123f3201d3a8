"""The KV caches of draft models, shared by all samplers that use these."""

from weakref import WeakKeyDictionary

from ...models.model import BaseModel
from ...sampler.cache.cache import CacheBudget, KVCache, size_of_config
from ..model.draft_model import DraftModel


class DraftCaches:
    """Holds one cache per draft, which is freed with the draft."""

    def __init__(self, base: BaseModel, budget: CacheBudget) -> None:
        self._bytes_per_value, self._budget = base.dtype.itemsize, budget
        self._caches: WeakKeyDictionary[DraftModel, KVCache] = WeakKeyDictionary()

    def of(self, draft: DraftModel) -> KVCache:
        """Returns the draft's cache. A token's entry depends on the next token too (num_ahead in PrefixCache)."""
        if draft not in self._caches:
            size = size_of_config(draft.shape.config, self._bytes_per_value)
            self._caches[draft] = KVCache(size, self._budget, num_ahead=1)
        return self._caches[draft]

    def clear(self) -> None:
        self._caches.clear()
