"""Strikes: crashes of workers for which one operation, sampling request or rebuild alone can be the cause.

`Scheduler.worker_died` (workers/scheduler) decides that work was alone in the fatal call, and says so in WorkerLost;
suspects run alone until they are past the point of the crash (quarantine.py there). Here strikes are counted and
journaled, and the work is given up at MAX_STRIKES.
"""

import logging
from collections.abc import Awaitable, Callable

from ...schemas.errors import OperationError, RequestError
from ...workers.protocol.calls import WorkerLost
from ...workers.scheduler.quarantine import MAX_STRIKES

logger = logging.getLogger(__name__)

STRIKE = "strike"
"""Kind of a journal entry saying that a worker crashed while running only this operation or sampling request."""

REBUILD_STRIKE = "rebuild_strike"
"""Kind of a journal entry saying that a worker crashed while rebuilding a run.

Its seq_id is that of the snapshot from which the run was being rebuilt, or -1 if there was none.
"""

STRIKES = (STRIKE, REBUILD_STRIKE)


class PoisonOperation(OperationError):
    """The operation was given up, since workers crashed running it."""


class Strikes:
    """Counts the strikes against one piece of work, which is named by the noun phrase `work`.

    num: strikes so far, also those of an earlier process. record: makes one strike durable, and may raise RequestError;
    None if the work is not resumed after a restart.
    """

    def __init__(self, work: str, record: Callable[[], Awaitable[None]] | None = None, num: int = 0) -> None:
        self.num = num
        self.record = record
        self._work = work

    @property
    def are_too_many(self) -> bool:
        return self.num >= MAX_STRIKES

    def check(self) -> None:
        """Raises PoisonOperation if there are too many strikes; call it before each attempt."""
        if self.are_too_many:
            raise PoisonOperation(
                f"the worker died {MAX_STRIKES} times while running only {self._work}: it will not be retried", "user"
            )

    async def add(self, lost: WorkerLost) -> None:
        """Counts the crash, and makes it durable if possible. Raises PoisonOperation if it was the last one allowed.

        Crashes during which other work was running are not counted, since that may have been the cause.
        """
        if not lost.alone:
            return
        self.num += 1
        if self.record is not None:
            try:
                await self.record()
            except RequestError as error:
                logger.error("cannot journal a strike against %s: %s", self._work, error)
        self.check()

    def forget(self) -> None:
        self.num = 0
