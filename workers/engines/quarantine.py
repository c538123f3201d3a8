"""Company: which requests run at the same time on a server that may die of one of them.

After a death those that were there are suspected: they run again in ever smaller company of each other, until the one
that the server dies of is alone. Others run beside them meanwhile; where the only suspect dies among such, it is alone
next time. Only deaths of a request that was alone are strikes against it.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MOST_STRIKES = 3

# Of the suspects at a death, how many may be together next time: fewer deaths until one is alone, or more at a time.
_SHRINKS = 4

# Times as long as it ran before the death, and so many seconds more, a suspect runs until it is none any more.
_SLOWER, _MARGIN_SECONDS = 1.5, 5.0


@dataclass(eq=False)
class Standing:
    """Of one request. most_together: so many suspects may run while it does, itself included; infinite = it is none.

    began_at: when it came to the server that is up, None before. suspected_seconds: it takes to come past the place at
    which the server died.
    """

    num_strikes: int = 0
    most_together: float = math.inf
    began_at: float | None = None
    suspected_seconds: float = 0.0

    @property
    def is_suspect(self) -> bool:
        return self.most_together < math.inf

    def suspect(self, num_together: int, now: float) -> None:
        """num_together: suspects that were there at the death."""
        assert self.began_at is not None
        self.most_together = max(1, num_together // _SHRINKS)
        self.suspected_seconds = _SLOWER * (now - self.began_at) + _MARGIN_SECONDS
        self.began_at = None


class Company:
    """Of one server, which messages call by its name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._there: set[Standing] = set()
        self._waiting: dict[Standing, asyncio.Future[None]] = {}
        # Nobody else runs until it has come past the place at which the server died, or ended.
        self._alone: Standing | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def standing(self) -> Iterator[Standing]:
        """Of a request that lasts as long as the block."""
        standing = Standing()
        try:
            yield standing
        finally:
            self._clear(standing)

    @asynccontextmanager
    async def joined(self, standing: Standing) -> AsyncIterator[None]:
        """Waits until it may run; who waits for less company is passed by others."""
        admitted = self._waiting[standing] = asyncio.get_running_loop().create_future()
        standing.began_at = None
        self._admit()
        try:
            await admitted
            yield
        finally:
            self._waiting.pop(standing, None)
            self._there.discard(standing)
            self._admit()

    @asynccontextmanager
    async def running(self, standing: Standing) -> AsyncIterator[None]:
        """While the server has the request. One that gets far enough is no suspect any more."""
        loop = asyncio.get_running_loop()
        standing.began_at = loop.time()
        passing = loop.call_later(standing.suspected_seconds, self._clear, standing) if standing.is_suspect else None
        try:
            yield
        finally:
            if passing is not None:
                passing.cancel()

    def died(self, standing: Standing) -> None:
        """The server died, which each of those that are there may tell: the first one is heard."""
        if standing not in self._there:
            return
        fatal = {each for each in self._there if each.began_at is not None}
        self._there -= fatal
        accused = {each for each in fatal if each.is_suspect} or fatal
        if len(fatal) == 1:
            standing.num_strikes += 1
        elif len(accused) == 1 and standing.num_strikes < MOST_STRIKES:
            [self._alone] = accused
        for each in accused:
            each.suspect(len(accused), asyncio.get_running_loop().time())
        self._log(len(fatal), accused)

    def _log(self, num_fatal: int, accused: set[Standing]) -> None:
        most, seconds = next(iter(accused)).most_together, max(each.suspected_seconds for each in accused)
        others = "nothing else runs" if self._alone is not None else "others run beside them"
        logger.error(
            "%s died, %d requests were there: %d of them, %.0f at a time, are tried for up to %.0f s each, and %s",
            self._name, num_fatal, len(accused), most, seconds, others,
        )  # fmt: skip

    def _clear(self, standing: Standing) -> None:
        standing.most_together = math.inf
        if self._alone is standing:
            self._alone = None
        self._admit()

    def _admit(self) -> None:
        for standing, admitted in list(self._waiting.items()):
            if self._has_room_for(standing):
                del self._waiting[standing]
                if not admitted.done():  # else its caller went away
                    self._there.add(standing)
                    admitted.set_result(None)

    def _has_room_for(self, standing: Standing) -> bool:
        if self._alone is not None:
            return standing is self._alone and not self._there
        suspects = [each for each in self._there if each.is_suspect]
        together = min(each.most_together for each in (standing, *suspects))
        return not standing.is_suspect or len(suspects) < together
