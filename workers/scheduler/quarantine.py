"""Finds the work that crashes a worker or a server, among all that was in the crashed call.

The rule is the same for operations of runs, sampling jobs and requests to a server. Everything in the call is suspect,
until it gets past the point of the crash. Suspect runs are retried alone at once, sampling jobs and requests in ever
smaller groups and at last alone. A crash is a strike only against work that was alone in the call (counted by
server/journal/strikes.py), and work with MAX_STRIKES is not retried.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MAX_STRIKES = 3

# After a crash, a quarter of its suspects may run together: a trade-off between more crashes and less batching.
SUSPECT_SHRINK_FACTOR = 4

# For suspects that are never retried; and for those whose position is unknown, so that passing it cannot be seen.
_REMEMBERED_SECONDS, _UNKNOWN_SECONDS = 3600.0, 300.0

# A suspect request is cleared after it has run for this factor of its time before the crash, plus the margin.
_SLOWER, _MARGIN_SECONDS = 1.5, 5.0


@dataclass(frozen=True)
class _Accusation:
    position: float | None
    max_together: int
    at: float


class Suspects(dict[str, _Accusation]):
    """The suspects among runs, sampling jobs or requests, by key; `pop` forgets one that has ended.

    shrinks: after a crash, only one in `shrinks` of its suspects (at least one) may run together next time; if
        infinite, each runs alone at once.
    remembered_seconds: a suspect that does not return for so long is forgotten.

    Positions say how far a key has progressed, and stay comparable over crashes. None means unknown.
    """

    def __init__(self, shrinks: float = math.inf, remembered_seconds: float = _REMEMBERED_SECONDS) -> None:
        super().__init__()
        self._shrinks = shrinks
        self._remembered_seconds = remembered_seconds

    def accuse(self, positions: Mapping[str, float | None]) -> None:
        """Makes every key a suspect that must get past its position."""
        now = time.monotonic()
        for key, earlier in list(self.items()):
            if now - earlier.at >= self._remembered_seconds:
                del self[key]
        max_together = max(1, int(len(positions) // self._shrinks))
        self.update({key: _Accusation(position, max_together, now) for key, position in positions.items()})

    def max_together(self, keys: Iterable[str]) -> float:
        """Returns how many suspects may run together if these keys are among them."""
        return min((self[key].max_together for key in keys if key in self), default=math.inf)

    def position(self, key: str) -> float | None:
        """Returns the position that the key must get past; None if that is unknown, or it is no suspect."""
        return self[key].position if key in self else None

    def record_progress(self, key: str, position: float | None) -> None:
        """Clears the suspect if this position is past the one at which it was accused."""
        accusation = self[key]
        if position is None or accusation.position is None:
            is_past = time.monotonic() - accusation.at > _UNKNOWN_SECONDS
        else:
            is_past = position >= accusation.position
        if is_past:
            del self[key]


class Quarantine:
    """Admits the requests of a server that schedules them itself. The name is for log messages.

    Other requests run alongside suspects, so a crash with suspects accuses only these. If there was one, and others ran
    with it, that one is retried alone.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # A position is the time in the server. Requests that end are cleared, however long they wait.
        self._suspects = Suspects(SUSPECT_SHRINK_FACTOR, remembered_seconds=math.inf)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        # The loop time at which the server received each request; None before.
        self._admitted: dict[str, float | None] = {}
        # While set, only this request runs, until it is past the point of the crash or has ended.
        self._alone: str | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def admitted(self, key: str) -> AsyncIterator[None]:
        """Waits until the request may run. Requests that need fewer others around them may be overtaken."""
        admitted = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._admit()
        try:
            await admitted
            yield
        finally:
            self._waiting.pop(key, None)
            self._admitted.pop(key, None)
            self._admit()

    @contextmanager
    def running(self, key: str) -> Iterator[None]:
        """Wraps the time in which the server has the request. A suspect that runs for long enough is cleared."""
        loop = asyncio.get_running_loop()
        self._admitted[key] = loop.time()
        seconds = self._suspects.position(key)
        probation = None if seconds is None else loop.call_later(seconds, self.clear, key)
        try:
            yield
        finally:
            if probation is not None:
                probation.cancel()

    def record_crash(self, key: str) -> bool:
        """Records a crash of the server; True if only this request was running.

        Each running request may report the same crash: the first report counts.
        """
        if key not in self._admitted:
            return False
        now = asyncio.get_running_loop().time()
        fatal = {each: now - began for each, began in self._admitted.items() if began is not None}
        accused = [each for each in fatal if each in self._suspects] or list(fatal)
        for each in fatal:
            del self._admitted[each]
        self._suspects.accuse({each: _SLOWER * fatal[each] + _MARGIN_SECONDS for each in accused})
        if len(accused) == 1 < len(fatal):
            [self._alone] = accused
        self._log(len(fatal), accused)
        return len(fatal) == 1

    def clear(self, key: str) -> None:
        """Clears a request that has ended, or is past the point of the crash."""
        self._suspects.pop(key, None)
        if self._alone == key:
            self._alone = None
        self._admit()

    def _log(self, num_fatal: int, accused: Collection[str]) -> None:
        seconds = max(self._suspects.position(each) or 0 for each in accused)
        others = "no other request runs" if self._alone is not None else "other requests run alongside"
        logger.error(
            "%s crashed with %d requests: %d of them are retried, %.0f at a time, for up to %.0f s each, and %s",
            self._name, num_fatal, len(accused), self._suspects.max_together(accused), seconds, others,
        )  # fmt: skip

    def _admit(self) -> None:
        for key, admitted in list(self._waiting.items()):
            if self._has_room_for(key):
                del self._waiting[key]
                if not admitted.done():  # else its caller was cancelled
                    self._admitted[key] = None
                    admitted.set_result(None)

    def _has_room_for(self, key: str) -> bool:
        if self._alone is not None:
            return key == self._alone and not self._admitted
        if key not in self._suspects:
            return True
        num_suspects = sum(each in self._suspects for each in self._admitted)
        return num_suspects < self._suspects.max_together([key, *self._admitted])
