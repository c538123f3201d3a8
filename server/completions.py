"""Completions: which sampling requests of one client of a sampler have ended, in the order in which they ended."""

import asyncio
from collections import deque

from ..schemas.errors import RequestError
from ..schemas.futures import FutureCompletion

CLONE_SEQ_IDS = 1_000_000_000
"""Clone n of a sampling client numbers its requests from n times this."""


class CompletionLog:
    """Entries are numbered from 1; a cursor is the number of the last one seen. Seen entries are let go."""

    def __init__(self) -> None:
        self._unseen: deque[FutureCompletion] = deque()
        self._num_seen = 0
        self.grown = asyncio.Event()

    @property
    def cursor(self) -> int:
        return self._num_seen + len(self._unseen)

    def add(self, completion: FutureCompletion) -> None:
        self._unseen.append(completion)
        self.grown.set()

    def see(self, cursor: int) -> None:
        """Lets go of entries up to `cursor`. Raises RequestError 410 for a cursor of an earlier server process."""
        if cursor > self.cursor:
            raise RequestError(
                f"cursor {cursor} is beyond {self.cursor}: the server restarted since; make a new sampling client", 410
            )
        while self._num_seen < cursor:
            self._unseen.popleft()
            self._num_seen += 1
        if not self._unseen:
            self.grown.clear()

    def unseen(self) -> tuple[FutureCompletion, ...]:
        return tuple(self._unseen)
