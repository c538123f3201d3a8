"""Pool: the ranks of a group, however they are started and reached. Knows no verb.

Messages are ours (see messages.py) whatever carries them, so arrays arrive alike.
"""

import abc
import asyncio
import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..messages import Piece, encode

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""For ranks that are to answer, or to end, by themselves."""


@dataclass(frozen=True)
class PoolSpec:
    """The ranks to start: `worker` ("module:Class") is built as `Class(config)` on each of `configs`, one per rank.

    threads: CPU threads of a rank's arithmetic, told to OpenMP by environment; a worker that finds its libraries
        loaded already (the forkserver preloads them) sets the same number itself.
    cpus_per_rank, gpus_per_rank: what a Ray node must have free for a rank; a LocalPool ignores them.
    """

    worker: str
    configs: tuple[object, ...]
    threads: int = 1
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0


@dataclass(frozen=True)
class PerRank:
    """An argument of `Pool.call` that differs from rank to rank; every other argument goes to all ranks."""

    values: tuple[object, ...]


class WorkerDied(Exception):
    """A rank's process is gone, and with it everything that the group held in memory."""


class NoPlace(ValueError):
    """Nowhere to start the ranks now, though there may be later. The message may be told to all who wait."""


class WorkerError(Exception):
    """A verb failed in a way that its worker did not foresee. `remote_traceback` is for the log, not for the user."""

    def __init__(self, message: str, remote_traceback: str) -> None:
        super().__init__(message, remote_traceback)
        self.message = message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return self.message


class Pool(abc.ABC):
    """The ranks of one group. Belongs to the event loop that starts it.

    death: resolves, with the reason, as soon as any rank is gone; from then on every call raises that reason.
    pids: the ranks' process ids, on their own machines.
    """

    death: "asyncio.Future[WorkerDied]"
    pids: list[int]

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.pids = []
        self._expected: set[asyncio.Future[Answer]] = set()

    async def start(self, hang_seconds: float = math.inf) -> None:
        """Builds the worker on every rank. hang_seconds: as in `call`.

        Raises ValueError when its constructor raised that or OSError (a bad model, or none), NoPlace, WorkerError for
        other exceptions, WorkerDied.
        """
        self.death = asyncio.get_running_loop().create_future()
        try:
            await self._start_ranks()
            answers = await self._gather([encode(None)] * len(self.spec.configs), "start", hang_seconds)
            self.pids = raised(answers)
        except BaseException:
            await self.close()
            raise

    async def call(self, method: str, *arguments: object, hang_seconds: float = math.inf) -> list[Any]:
        """The results of `worker.method(*arguments)`, by rank. When they take longer than hang_seconds, with those of
        the calls before, the ranks are killed.

        Raises OperationError and ValueError as the worker raised them, WorkerError for any other exception, and
        WorkerDied at once when a rank dies. Calls that overlap are made in the order in which they began. A caller that
        is cancelled leaves the call running; its result is dropped.
        """
        return raised(await self.answers(method, *arguments, hang_seconds=hang_seconds))

    async def answers(self, method: str, *arguments: object, hang_seconds: float = math.inf) -> list[Any]:
        """As `call`, with what a rank raised in the place of its result; raises WorkerDied alone."""
        if any(isinstance(each, PerRank) for each in arguments):
            messages = [encode((method, row)) for row in self._by_rank(arguments)]
        else:
            messages = [encode((method, arguments))] * len(self.spec.configs)
        return await self._gather(messages, method, hang_seconds)

    def kill(self, reason: str) -> WorkerDied:
        """All ranks, at once; returns their death."""
        self._died(f"{reason}, so it was killed")
        self._kill_ranks()
        return self.death.result()

    async def close(self) -> None:
        """Ends the ranks. Calls under way raise WorkerDied."""
        self._died("it was stopped")
        await self._stop_ranks()

    @abc.abstractmethod
    async def _start_ranks(self) -> None: ...

    @abc.abstractmethod
    def _send(self, rank: int, message: list[Piece], answer: "asyncio.Future[Answer]") -> None:
        """Sets `answer` (unless it is done by then) to what the rank answers to the message; None builds the worker."""

    @abc.abstractmethod
    async def _stop_ranks(self) -> None: ...

    @abc.abstractmethod
    def _kill_ranks(self) -> None:
        """Those that do not listen, too; returns at once."""

    def _by_rank(self, arguments: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
        for rank in range(len(self.spec.configs)):
            yield tuple(each.values[rank] if isinstance(each, PerRank) else each for each in arguments)

    async def _gather(self, messages: Sequence[list[Piece]], method: str, hang_seconds: float) -> list[Any]:
        if self.death.done():
            raise self.death.result()
        expected = [self._expect() for _ in messages]
        for rank, message in enumerate(messages):
            self._send(rank, message, expected[rank])
        with self._killed_after(hang_seconds, method):
            await self._all_or_none(expected, method)
            answers = [await answer for answer in expected]
        if self.death.done():
            raise self.death.result()
        for rank, answer in enumerate(answers):
            if answer.error is not None:
                self._log(answer.error, rank, method)
        return [answer.value if answer.error is None else answer.error for answer in answers]

    async def _all_or_none(self, expected: "list[asyncio.Future[Answer]]", method: str) -> None:
        """When one rank fails, others may wait for it without end: they have little time to answer, or are killed."""
        pending = set(expected) if len(expected) > 1 else set()
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            errors = [answer.result().error for answer in done]
            error = next((error for error in errors if isinstance(error, WorkerError)), None)
            if error is not None and pending:
                _, late = await asyncio.wait(pending, timeout=GRACE_SECONDS)
                if late:
                    self.kill(f"{method} failed on one of its ranks, the others waited for it: {error}")
                return

    @contextlib.contextmanager
    def _killed_after(self, seconds: float, method: str) -> Iterator[None]:
        """The ranks, unless the block ends before."""
        if seconds == math.inf:
            yield
            return
        reason = f"it hung: {method} had no answer after {seconds:.0f} s"
        timer = asyncio.get_running_loop().call_later(seconds, self.kill, reason)
        try:
            yield
        finally:
            timer.cancel()

    def _expect(self) -> "asyncio.Future[Answer]":
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._expected.add(answer)
        answer.add_done_callback(self._expected.discard)
        return answer

    def _log(self, error: Exception, rank: int, method: str) -> None:
        if isinstance(error, WorkerError):
            logger.error("rank %d of %s: %s failed\n%s", rank, self.spec.worker, method, error.remote_traceback)

    def _died(self, reason: str) -> None:
        if self.death.done():
            return
        self.death.set_result(WorkerDied(f"the worker died: {reason}"))
        # Of the other ranks, too: one that waits for a dead one in a collective would never answer.
        for answer in tuple(self._expected):
            settle(answer, Answer(error=self.death.result()))


def raised(answers: list[Any]) -> list[Any]:
    """Raises the first error among them."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


@dataclass(frozen=True)
class Answer:
    value: object = None
    error: Exception | None = None


def settle(answer: "asyncio.Future[Answer]", value: Answer) -> None:
    """One that is done was cancelled with its caller, or knows already of a death."""
    if not answer.done():
        answer.set_result(value)
