"""Budget: the bytes that several caches have together: a model's, and those of the drafts that guess it."""

from collections.abc import Iterator
from itertools import count
from operator import itemgetter
from typing import Protocol
from weakref import WeakValueDictionary

from torch import Tensor


class Spender(Protocol):
    """A cache, as far as its bytes are concerned."""

    def num_bytes(self) -> int: ...

    def slot_bytes(self) -> int: ...

    def held_bytes(self) -> int: ...

    def tensors(self) -> Iterator[Tensor]: ...

    def oldest_prefix(self) -> int | None:
        """When it was last of use, by the budget's clock; None where there is none."""
        ...

    def drop_oldest_prefix(self) -> None: ...

    def shrink(self) -> None:
        """Gives up slots that nobody uses."""
        ...


class Budget:
    """num_bytes: that all may have. Those that nobody else keeps leave it. clock: counts uses of prefixes."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.clock, self._numbers = count(), count()
        # In the order in which they came: ranks that sample together are to drop the same.
        self._spenders: WeakValueDictionary[int, Spender] = WeakValueDictionary()

    def join(self, spender: Spender) -> None:
        self._spenders[next(self._numbers)] = spender

    def used_bytes(self) -> int:
        return sum(each.num_bytes() for each in self._all())

    def slot_bytes(self) -> int:
        return sum(each.slot_bytes() for each in self._all())

    def held_bytes(self) -> int:
        """Of the slots in use."""
        return sum(each.held_bytes() for each in self._all())

    def free_bytes(self) -> int:
        return self.num_bytes - self.used_bytes()

    def drop_prefixes(self, num_bytes: int) -> None:
        """The least recently used of all, until so much is free or none is left."""
        while self.free_bytes() < num_bytes:
            by_age = [(age, each) for each in self._all() if (age := each.oldest_prefix()) is not None]
            if not by_age:
                return
            min(by_age, key=itemgetter(0))[1].drop_oldest_prefix()

    def shrink(self, num_bytes: int) -> None:
        """Gives up slots that nobody uses, until there is room."""
        for each in self._all():
            if self.free_bytes() >= num_bytes:
                return
            each.shrink()

    def tensors(self) -> Iterator[Tensor]:
        for each in self._all():
            yield from each.tensors()

    def _all(self) -> list[Spender]:
        return list(self._spenders.values())
