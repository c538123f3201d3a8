"""Strikes: deaths of workers that did nothing but one piece of work. At the last it is not tried again."""

import logging
from collections.abc import Awaitable, Callable

from ...schemas.errors import OperationError, RequestError
from ...workers.protocol.verbs import WorkerLost

logger = logging.getLogger(__name__)

MOST_STRIKES = 3

STRIKE = "strike"
"""The kind of a journal's entry that says that a worker died of an operation or a sampling request."""

REBUILD_STRIKE = "rebuild_strike"
"""That one died while it made a run again. Its seq_id is that of the snapshot from which it was to be made, or -1."""

STRIKES = (STRIKE, REBUILD_STRIKE)


class StruckOut(OperationError):
    """Workers died of it."""


class Strikes:
    """Against one piece of work. work: in words. num: those of an earlier process.

    note: makes one durable; None where nobody goes on with the work after a restart. May raise RequestError.
    """

    def __init__(self, work: str, note: Callable[[], Awaitable[None]] | None = None, num: int = 0) -> None:
        self.num = num
        self._work = work
        self._note = note

    @property
    def are_out(self) -> bool:
        return self.num >= MOST_STRIKES

    def check(self) -> None:
        """Before each try. Raises StruckOut."""
        if self.are_out:
            raise StruckOut(
                f"the worker died {MOST_STRIKES} times while it did nothing but {self._work}: it is not tried again"
            )

    async def add(self, lost: WorkerLost) -> None:
        """Durable where there is room. What did not run alone need not be the reason. Raises StruckOut."""
        if not lost.alone:
            return
        self.num += 1
        if self._note is not None:
            try:
                await self._note()
            except RequestError as error:
                logger.error("a strike is not journaled against %s: %s", self._work, error)
        self.check()

    def forget(self) -> None:
        self.num = 0
