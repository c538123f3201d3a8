"""The bytes that several KV caches share: a model's cache and those of its draft models."""

from collections.abc import Iterator
from itertools import count
from operator import itemgetter
from typing import Protocol
from weakref import WeakValueDictionary

from torch import Tensor


class BudgetedCache(Protocol):
    """A cache that shares the budget."""

    def num_bytes(self) -> int: ...

    def slot_bytes(self) -> int: ...

    def held_bytes(self) -> int: ...

    def tensors(self) -> Iterator[Tensor]: ...

    def oldest_prefix(self) -> int | None:
        """Returns the clock's value at the last use of its oldest prefix; None if it has no prefix."""
        ...

    def drop_oldest_prefix(self) -> None: ...

    def free_unused_slots(self) -> None:
        """Frees unused slots."""
        ...


class CacheBudget:
    """Shares `num_bytes` among the caches that joined. Holds them weakly: a cache leaves when its owner drops it.

    clock: orders the uses of prefixes over all caches.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.clock, self._numbers = count(), count()
        # In the order of joining, so that ranks that sample together drop the same prefixes.
        self._spenders: WeakValueDictionary[int, BudgetedCache] = WeakValueDictionary()

    def join(self, spender: BudgetedCache) -> None:
        self._spenders[next(self._numbers)] = spender

    def used_bytes(self) -> int:
        return sum(each.num_bytes() for each in self._all())

    def slot_bytes(self) -> int:
        return sum(each.slot_bytes() for each in self._all())

    def held_bytes(self) -> int:
        """Returns the bytes of the slots in use."""
        return sum(each.held_bytes() for each in self._all())

    def free_bytes(self) -> int:
        return self.num_bytes - self.used_bytes()

    def drop_prefixes(self, num_bytes: int) -> None:
        """Drops the least recently used prefixes of all caches until `num_bytes` are free or none is left."""
        while self.free_bytes() < num_bytes:
            by_age = [(age, each) for each in self._all() if (age := each.oldest_prefix()) is not None]
            if not by_age:
                return
            min(by_age, key=itemgetter(0))[1].drop_oldest_prefix()

    def shrink(self, num_bytes: int) -> None:
        """Frees unused slots until `num_bytes` are free."""
        for each in self._all():
            if self.free_bytes() >= num_bytes:
                return
            each.free_unused_slots()

    def tensors(self) -> Iterator[Tensor]:
        for each in self._all():
            yield from each.tensors()

    def _all(self) -> list[BudgetedCache]:
        return list(self._spenders.values())
