"""Completions: logs of ended sampling requests, for clients that wait for many requests with one call."""

import asyncio
import secrets
from collections import deque
from itertools import islice

from sqlalchemy.exc import SQLAlchemyError

from ...schemas.futures import FutureCompletion
from .futures import Futures, ResultSummary

CLONE_SEQ_IDS = 1_000_000_000
"""Clone n of a sampling client numbers its requests from n times this."""

MAX_COMPLETIONS_PER_RESPONSE = 1000
"""Maximum number of completions in one response."""

_EPOCH_BITS, _NUMBER_BITS = 20, 32
"""Widths of the two halves of a cursor, which JSON carries as a float with 53 bits of integer precision."""


class Completions:
    """Holds one log per sampler and clone, created when a client first requests it; `record` adds to the logs."""

    def __init__(self, futures: Futures) -> None:
        self._futures = futures
        self._logs: dict[tuple[str, int], CompletionLog] = {}

    def record(self, sampler_id: str, ended: ResultSummary) -> None:
        if log := self._logs.get((sampler_id, _clone_of(ended.request_id))):
            log.add(ended)

    async def log(self, sampler_id: str, clone: int) -> "CompletionLog":
        """Returns the log with every unseen ended request, including those of earlier processes.

        Raises:
            SQLAlchemyError: earlier results could not be read; the next call retries.
        """
        log = self._logs.get((sampler_id, clone))
        if log is None:
            log = self._logs[sampler_id, clone] = CompletionLog()
            log.filling = asyncio.create_task(self._fill(log, sampler_id, clone))
        try:
            await asyncio.shield(log.filling)
        except SQLAlchemyError:
            if self._logs.get((sampler_id, clone)) is log:
                del self._logs[sampler_id, clone]  # the next caller retries
            raise
        return log

    def forget(self, sampler_id: str) -> None:
        """Drops the sampler's logs, since its session has ended."""
        for key in [key for key in self._logs if key[0] == sampler_id]:
            del self._logs[key]

    async def _fill(self, log: "CompletionLog", sampler_id: str, clone: int) -> None:
        for number, ended in enumerate(await self._futures.list_summaries(f"{sampler_id}:")):
            if _clone_of(ended.request_id) == clone:
                log.add(ended)
            if number % MAX_COMPLETIONS_PER_RESPONSE == 0:
                await asyncio.sleep(0)


class CompletionLog:
    """A log whose entries are numbered from 1; entries that the client has seen are dropped.

    A cursor is the number of the last entry seen, prefixed with the log's random epoch, so that a cursor from an
    earlier process marks nothing as seen here.
    """

    def __init__(self) -> None:
        self.filling: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_unseen = asyncio.Event()
        self._epoch = secrets.randbelow((1 << _EPOCH_BITS) - 1) + 1
        self._unseen: deque[FutureCompletion] = deque()
        self._num_seen = 0
        self._filled: set[str] = set()

    @property
    def cursor(self) -> int:
        """Returns the cursor that marks everything `unseen` returns now as seen."""
        return (self._epoch << _NUMBER_BITS) + self._num_seen + min(len(self._unseen), MAX_COMPLETIONS_PER_RESPONSE)

    def add(self, ended: ResultSummary) -> None:
        """Appends an entry; while the log is being filled, entries added before are skipped."""
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
        self.has_unseen.set()

    def acknowledge(self, cursor: int) -> None:
        """Drops entries up to `cursor`."""
        epoch, number = cursor >> _NUMBER_BITS, cursor & ((1 << _NUMBER_BITS) - 1)
        while epoch == self._epoch and self._num_seen < number and self._unseen:
            self._unseen.popleft()
            self._num_seen += 1
        if not self._unseen:
            self.has_unseen.clear()

    def unseen(self) -> tuple[FutureCompletion, ...]:
        """Returns the first MAX_COMPLETIONS_PER_RESPONSE entries; once the client has seen them, the next call returns
        more without waiting.
        """
        return tuple(islice(self._unseen, MAX_COMPLETIONS_PER_RESPONSE))


def _clone_of(request_id: str) -> int:
    return int(request_id.rpartition(":")[2]) // CLONE_SEQ_IDS
