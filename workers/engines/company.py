"""Company: which requests run at the same time on a server that may die of one of them.

After a death those that were there are suspected: they run again in ever smaller company, until the one that the server
dies of is alone. Only deaths of a request that was alone are strikes against it.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

MOST_STRIKES = 3

# Of the company at a death, what a suspect may have next time: fewer deaths until it is alone, or more at a time.
_SHRINKS = 4


@dataclass(eq=False)
class Standing:
    """Of one request. most_together: so many may run while it does, itself included."""

    num_strikes: int = 0
    most_together: float = math.inf

    def suspect(self, num_together: int) -> None:
        """num_together: that were there at the death."""
        self.num_strikes += num_together == 1
        self.most_together = max(1, num_together // _SHRINKS)


class Company:
    """Of one server."""

    def __init__(self) -> None:
        self._there: set[Standing] = set()
        self._waiting: deque[tuple[Standing, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def joined(self, standing: Standing) -> AsyncIterator[None]:
        """Waits until it may run, in the order of arrival: who waits for smaller company gets it."""
        place = (standing, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self._admit()
        try:
            await place[1]
            yield
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
            self._there.discard(standing)
            self._admit()

    def died(self, standing: Standing) -> None:
        """The server died, which each of those that are there may tell: the first one is heard."""
        if standing in self._there:
            suspects, self._there = self._there, set()
            for each in suspects:
                each.suspect(len(suspects))

    def _admit(self) -> None:
        while self._waiting and self._has_room_for(self._waiting[0][0]):
            standing, admitted = self._waiting.popleft()
            if not admitted.done():  # else its caller went away
                self._there.add(standing)
                admitted.set_result(None)

    def _has_room_for(self, standing: Standing) -> bool:
        return len(self._there) < min(each.most_together for each in (standing, *self._there))
