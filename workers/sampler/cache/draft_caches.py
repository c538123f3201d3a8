"""DraftCaches: where drafts have keys and values of the samples that they guess, whichever sampler draws these."""

from weakref import WeakKeyDictionary

from ...drafts.model import DraftModel
from ...models.model import BaseModel
from .budget import Budget
from .cache import Cache


class DraftCaches:
    """Those of a draft go with it."""

    def __init__(self, base: BaseModel, budget: Budget) -> None:
        self._bytes_per_value, self._budget = base.dtype.itemsize, budget
        self._caches: WeakKeyDictionary[DraftModel, Cache] = WeakKeyDictionary()

    def of(self, draft: DraftModel) -> Cache:
        """What it has at a token hangs on the one behind it, too: see Told."""
        if draft not in self._caches:
            self._caches[draft] = Cache(draft.shape.config, self._bytes_per_value, self._budget, num_ahead=1)
        return self._caches[draft]

    def clear(self) -> None:
        self._caches.clear()
