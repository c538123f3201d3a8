"""Finds the request that crashes a server, by deciding which requests may run at the same time.

After a crash the requests that were running are suspects. They are retried in ever smaller groups until the one that
crashes the server runs alone. Requests that are not suspects run alongside; if a crash had only one suspect and others
ran with it, that suspect is retried alone. Only a crash during which a request ran alone is a strike against it.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MOST_STRIKES = 3

# Each crash divides the suspects that may run together by this. Higher: fewer crashes until one runs alone. Lower: more
# suspects run at a time.
_SHRINKS = 4

# A suspect is cleared after it has run for this factor of its time before the crash, plus the margin.
_SLOWER, _MARGIN_SECONDS = 1.5, 5.0


@dataclass(eq=False)
class SuspectState:
    """The state of one request.

    num_strikes: crashes during which it was the only running request.
    max_concurrent_suspects: how many suspects may run while it does, itself included; infinite if it is not a suspect.
    began_at: loop time at which the current server process received it; None before.
    probation_seconds: how long it must run to get past the point of the crash.
    """

    num_strikes: int = 0
    max_concurrent_suspects: float = math.inf
    began_at: float | None = None
    probation_seconds: float = 0.0

    @property
    def is_suspect(self) -> bool:
        return self.max_concurrent_suspects < math.inf

    def suspect(self, num_suspects: int, now: float) -> None:
        """Makes the request a suspect.

        Args:
            num_suspects: suspects that were running at the crash.
        """
        assert self.began_at is not None
        self.max_concurrent_suspects = max(1, num_suspects // _SHRINKS)
        self.probation_seconds = _SLOWER * (now - self.began_at) + _MARGIN_SECONDS
        self.began_at = None


class Quarantine:
    """Admits the requests of one server. The name is for log messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._admitted: set[SuspectState] = set()
        self._waiting: dict[SuspectState, asyncio.Future[None]] = {}
        # While set, only this request runs, until it is past the point of the crash or has ended.
        self._alone: SuspectState | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @contextmanager
    def track(self) -> Iterator[SuspectState]:
        """Yields the state of a new request, which lasts as long as the block."""
        standing = SuspectState()
        try:
            yield standing
        finally:
            self._clear(standing)

    @asynccontextmanager
    async def admitted(self, standing: SuspectState) -> AsyncIterator[None]:
        """Waits until the request may run. Requests that need fewer others around them may be overtaken."""
        admitted = self._waiting[standing] = asyncio.get_running_loop().create_future()
        standing.began_at = None
        self._admit()
        try:
            await admitted
            yield
        finally:
            self._waiting.pop(standing, None)
            self._admitted.discard(standing)
            self._admit()

    @asynccontextmanager
    async def running(self, standing: SuspectState) -> AsyncIterator[None]:
        """Wraps the time in which the server has the request. A suspect that runs for long enough is cleared."""
        loop = asyncio.get_running_loop()
        standing.began_at = loop.time()
        passing = loop.call_later(standing.probation_seconds, self._clear, standing) if standing.is_suspect else None
        try:
            yield
        finally:
            if passing is not None:
                passing.cancel()

    def record_crash(self, standing: SuspectState) -> None:
        """Records a crash of the server. Each running request may report the same crash: the first report counts."""
        if standing not in self._admitted:
            return
        fatal = {each for each in self._admitted if each.began_at is not None}
        self._admitted -= fatal
        accused = {each for each in fatal if each.is_suspect} or fatal
        if len(fatal) == 1:
            standing.num_strikes += 1
        elif len(accused) == 1 and standing.num_strikes < MOST_STRIKES:
            [self._alone] = accused
        for each in accused:
            each.suspect(len(accused), asyncio.get_running_loop().time())
        self._log(len(fatal), accused)

    def _log(self, num_fatal: int, accused: set[SuspectState]) -> None:
        most, seconds = next(iter(accused)).max_concurrent_suspects, max(each.probation_seconds for each in accused)
        others = "no other request runs" if self._alone is not None else "other requests run alongside"
        logger.error(
            "%s crashed with %d requests: %d of them are retried, %.0f at a time, for up to %.0f s each, and %s",
            self._name, num_fatal, len(accused), most, seconds, others,
        )  # fmt: skip

    def _clear(self, standing: SuspectState) -> None:
        standing.max_concurrent_suspects = math.inf
        if self._alone is standing:
            self._alone = None
        self._admit()

    def _admit(self) -> None:
        for standing, admitted in list(self._waiting.items()):
            if self._has_room_for(standing):
                del self._waiting[standing]
                if not admitted.done():  # else its caller was cancelled
                    self._admitted.add(standing)
                    admitted.set_result(None)

    def _has_room_for(self, standing: SuspectState) -> bool:
        if self._alone is not None:
            return standing is self._alone and not self._admitted
        suspects = [each for each in self._admitted if each.is_suspect]
        together = min(each.max_concurrent_suspects for each in (standing, *suspects))
        return not standing.is_suspect or len(suspects) < together
