"""Defines the pool: the ranks of a group, independent of how they are started and reached. Knows no verb.

All pools carry the same messages (see messages.py), so arrays arrive alike.
"""

import abc
import asyncio
import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..protocol.log_lines import LogSettings, log_remote_failure
from ..protocol.messages import Buffer, decode, encode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolSpec:
    """The ranks to start: `worker` ("module:Class") is built as `Class(config)` for each of `configs`, one per rank.

    threads: CPU threads of a rank's arithmetic, set for OpenMP by environment. A worker whose libraries are loaded
        already (the forkserver preloads them) must set the number itself.
    cpus_per_rank, gpus_per_rank: free resources that a Ray node needs for a rank; a LocalPool ignores them.
    blocks: sizes of blocks of neighbouring ranks that should share a node, largest first; the last is 1.
    log: how ranks log to standard error.
    """

    worker: str
    configs: tuple[object, ...]
    threads: int = 1
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0
    blocks: tuple[int, ...] = (1,)
    log: LogSettings = field(default_factory=LogSettings)


@dataclass(frozen=True)
class PerRank:
    """An argument of `Pool.call` that differs from rank to rank; every other argument goes to all ranks."""

    values: tuple[object, ...]


class WorkerDied(Exception):
    """A rank's process is gone, and with it everything that the group held in memory."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the worker died: {self.reason}"


class PlacementError(ValueError):
    """The ranks cannot be started now, but perhaps later. The message may be shown to every user who waits."""


class WorkerError(Exception):
    """A method failed in a way that its worker did not foresee. `remote_traceback` is for the log, not for the user."""

    def __init__(self, message: str, remote_traceback: str) -> None:
        super().__init__(message, remote_traceback)
        self.message = message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return self.message


class Pool(abc.ABC):
    """The ranks of one group. It belongs to the event loop that starts it.

    death: resolves, with the reason, as soon as any rank is gone; from then on every call raises that reason.
    pids: the ranks' process ids, on their own machines.
    is_kept: true if an earlier server started the ranks and they hold its state.
    rank_times: of the last call that was answered, by rank; empty if it failed.
    """

    death: "asyncio.Future[WorkerDied]"
    pids: list[int]
    is_kept: bool
    rank_times: "Sequence[RankTime]"

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.pids = []
        self.rank_times = ()
        self._expected: set[asyncio.Future[RankAnswer]] = set()

    async def start(self, hang_seconds: float = math.inf) -> None:
        """Builds the worker on every rank.

        Args:
            hang_seconds: as in `call`.
        Raises:
            ValueError: the constructor raised it or OSError (the model is bad or missing).
            PlacementError: the ranks cannot be started now.
            WorkerError: the constructor raised another exception.
            WorkerDied: a rank died.
        """
        self.death = asyncio.get_running_loop().create_future()
        try:
            await self._start_ranks()
            processes = raise_first(await self._gather([encode(None)] * len(self.spec.configs), "start", hang_seconds))
            self.pids = [each.pid for each in processes]
            self.is_kept = all(each.is_kept for each in processes)
        except BaseException:
            await self.close()
            raise

    async def call(self, method: str, *arguments: object, hang_seconds: float = math.inf) -> list[Any]:
        """Returns the results of `worker.method(*arguments)`, by rank.

        Overlapping calls run in the order in which they began. Cancelling the caller leaves the call running and drops
        its result.

        Args:
            hang_seconds: the ranks are killed if this call, with those before it, takes longer.
        Raises:
            OperationError, ValueError: as the worker raised them.
            WorkerError: the worker raised another exception.
            WorkerDied: a rank died; raised at once.
        """
        return raise_first(await self.call_all(method, *arguments, hang_seconds=hang_seconds))

    async def call_all(self, method: str, *arguments: object, hang_seconds: float = math.inf) -> list[Any]:
        """Calls like `call`, but returns a rank's exception in place of its result; raises only WorkerDied."""
        if any(isinstance(each, PerRank) for each in arguments):
            messages = [encode((method, row)) for row in self._by_rank(arguments)]
        else:
            messages = [encode((method, arguments))] * len(self.spec.configs)
        return await self._gather(messages, method, hang_seconds)

    def kill(self, reason: str) -> WorkerDied:
        """Kills all ranks at once and returns their death. Kept ranks are replaced by the next pool of their group."""
        self._record_death(f"{reason}, so it was killed")
        self._kill_ranks()
        return self.death.result()

    async def close(self) -> None:
        """Stops the ranks; calls under way raise WorkerDied."""
        self._record_death("it was stopped")
        await self._stop_ranks()

    @abc.abstractmethod
    async def _start_ranks(self) -> None: ...

    @abc.abstractmethod
    async def _answers_to(
        self, messages: Sequence[list[Buffer]], method: str, hang_seconds: float
    ) -> "list[RankAnswer]": ...

    @abc.abstractmethod
    async def _stop_ranks(self) -> None: ...

    @abc.abstractmethod
    def _kill_ranks(self) -> None:
        """Kills all ranks, or what connects them to this server, even if they do not respond; returns at once."""

    def _by_rank(self, arguments: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
        for rank in range(len(self.spec.configs)):
            yield tuple(each.values[rank] if isinstance(each, PerRank) else each for each in arguments)

    async def _gather(self, messages: Sequence[list[Buffer]], method: str, hang_seconds: float) -> list[Any]:
        """Returns the ranks' results of encoded messages, or their exceptions. Raises WorkerDied."""
        if self.death.done():
            raise self.death.result()
        answers = await self._answers_to(messages, method, hang_seconds)
        if self.death.done():
            raise self.death.result()
        self.rank_times = [answer.time for answer in answers if answer.time is not None]
        for rank, answer in enumerate(answers):
            if answer.error is not None:
                self._log(answer.error, rank, method)
        return [answer.value if answer.error is None else answer.error for answer in answers]

    @contextlib.contextmanager
    def _killed_after(self, seconds: float, method: str) -> Iterator[None]:
        """Kills the ranks unless the block ends in time."""
        if seconds == math.inf:
            yield
            return
        reason = f"it hung: {method} had no answer after {seconds:.0f} s"
        timer = asyncio.get_running_loop().call_later(seconds, self.kill, reason)
        try:
            yield
        finally:
            timer.cancel()

    def _expect(self) -> "asyncio.Future[RankAnswer]":
        answer: asyncio.Future[RankAnswer] = asyncio.get_running_loop().create_future()
        self._expected.add(answer)
        answer.add_done_callback(self._expected.discard)
        return answer

    def _log(self, error: Exception, rank: int, method: str) -> None:
        if isinstance(error, WorkerError):
            log_remote_failure(logger, f"rank {rank} of {self.spec.worker}: {method} failed", error.remote_traceback)

    def _record_death(self, reason: str) -> None:
        if self.death.done():
            return
        self.death.set_result(WorkerDied(reason))
        # Answers of the other ranks fail too: a rank that waits for a dead one in a collective would never answer.
        for answer in tuple(self._expected):
            set_answer(answer, RankAnswer(error=self.death.result()))


def raise_first(answers: list[Any]) -> list[Any]:
    """Raises the first error among them."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


@dataclass(frozen=True)
class RankProcess:
    """Answers the message that builds a worker.

    is_kept: true if an earlier server has built it.
    """

    pid: int
    is_kept: bool


@dataclass(frozen=True)
class RankTime:
    """The time of a call on a rank. began_at: by the clock of its machine, in seconds since 1970."""

    began_at: float
    seconds: float


@dataclass(frozen=True)
class RankAnswer:
    value: object = None
    error: Exception | None = None
    time: RankTime | None = None


def set_answer(answer: "asyncio.Future[RankAnswer]", value: RankAnswer) -> None:
    """Sets the answer, unless it is done already: cancelled with its caller, or failed by a death."""
    if not answer.done():
        answer.set_result(value)


def decode_answer(frame: memoryview) -> RankAnswer:
    """Decodes the answer in a frame; arrays keep the frame's memory."""
    try:
        answer: Any = decode(frame)
    except Exception as error:  # for example a type that this process cannot build; the caller receives the error
        return RankAnswer(error=error)
    return answer
