"""Completions: which sampling requests of one client of a sampler have ended, for who waits for many at once."""

import asyncio
import secrets
from collections import deque
from itertools import islice

from sqlalchemy.exc import SQLAlchemyError

from ...schemas.futures import FutureCompletion
from .futures import Ended, Futures

CLONE_SEQ_IDS = 1_000_000_000
"""Clone n of a sampling client numbers its requests from n times this."""

MOST_AT_ONCE = 1000
"""Completions in one answer."""

_EPOCH_BITS, _NUMBER_BITS = 20, 32
"""Of a cursor, which JSON carries as a float of 53 bits."""


class Completions:
    """By sampler and clone, from when a client first asks; `ended` tells of what ends."""

    def __init__(self, futures: Futures) -> None:
        self._futures = futures
        self._logs: dict[tuple[str, int], CompletionLog] = {}

    def ended(self, sampler_id: str, ended: Ended) -> None:
        if log := self._logs.get((sampler_id, _clone_of(ended.request_id))):
            log.add(ended)

    async def log(self, sampler_id: str, clone: int) -> "CompletionLog":
        """With all that has ended, also before an earlier process died, and has not been seen."""
        log = self._logs.get((sampler_id, clone))
        if log is None:
            log = self._logs[sampler_id, clone] = CompletionLog()
            log.filling = asyncio.create_task(self._fill(log, sampler_id, clone))
        try:
            await asyncio.shield(log.filling)
        except SQLAlchemyError:
            if self._logs.get((sampler_id, clone)) is log:
                del self._logs[sampler_id, clone]  # whoever asks next tries anew
            raise
        return log

    def forget(self, sampler_id: str) -> None:
        """Its session has ended."""
        for key in [key for key in self._logs if key[0] == sampler_id]:
            del self._logs[key]

    async def _fill(self, log: "CompletionLog", sampler_id: str, clone: int) -> None:
        for number, ended in enumerate(await self._futures.ended(f"{sampler_id}:")):
            if _clone_of(ended.request_id) == clone:
                log.add(ended)
            if number % MOST_AT_ONCE == 0:
                await asyncio.sleep(0)


class CompletionLog:
    """Entries are numbered from 1. A cursor is the number of the last one seen, with a number of the log's own in front
    of it: one of an earlier process has seen nothing here. Seen entries are let go.
    """

    def __init__(self) -> None:
        self.filling: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.grown = asyncio.Event()
        self._epoch = secrets.randbelow((1 << _EPOCH_BITS) - 1) + 1
        self._unseen: deque[FutureCompletion] = deque()
        self._num_seen = 0
        self._filled: set[str] = set()

    @property
    def cursor(self) -> int:
        """Of what `unseen` tells now."""
        return (self._epoch << _NUMBER_BITS) + self._num_seen + min(len(self._unseen), MOST_AT_ONCE)

    def add(self, ended: Ended) -> None:
        """Known ones, while the log is being filled: no-op."""
        if self.filling.done():
            self._filled.clear()
        elif ended.request_id in self._filled:
            return
        else:
            self._filled.add(ended.request_id)
        self._unseen.append(
            FutureCompletion(
                state="failed" if ended.is_error else "finished",
                request_id=ended.request_id,
                response_payload_uncompressed_size=None if ended.is_error else ended.num_bytes,
            )
        )
        self.grown.set()

    def see(self, cursor: int) -> None:
        """Lets go of entries up to `cursor`."""
        epoch, number = cursor >> _NUMBER_BITS, cursor & ((1 << _NUMBER_BITS) - 1)
        while epoch == self._epoch and self._num_seen < number and self._unseen:
            self._unseen.popleft()
            self._num_seen += 1
        if not self._unseen:
            self.grown.clear()

    def unseen(self) -> tuple[FutureCompletion, ...]:
        """The first MOST_AT_ONCE; a client that has seen these is told of the others at once."""
        return tuple(islice(self._unseen, MOST_AT_ONCE))


def _clone_of(request_id: str) -> int:
    return int(request_id.rpartition(":")[2]) // CLONE_SEQ_IDS
