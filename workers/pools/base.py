"""Defines the pool: the ranks of a group, independent of how they are started and reached. Knows no verb.

All pools carry the same messages (see messages.py), so arrays arrive alike.
"""

import abc
import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..protocol.log_lines import LogSettings, log_remote_failure
from ..protocol.messages import Buffer, decode, encode
from ..protocol.timeouts import GRACE_SECONDS
from .children import Child

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
    """An argument of `Pool.broadcast` that differs from rank to rank; every other argument goes to all ranks."""

    values: tuple[object, ...]


class WorkerDied(Exception):
    """A rank's process is gone, and with it everything that the group held in memory.

    Those who wait for work of the group get WorkerLost from `Scheduler.worker_died`.
    """

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


Answer = asyncio.Future["memoryview | WorkerDied"]
"""Resolves to the frame of a rank's answer, or to the death of the ranks."""

Send = Callable[[list[Buffer], Answer], None]
"""Sends a message to a rank, and sets the answer unless it is done by then: cancelled, or failed by a death."""

START = "start"
"""The message that builds the worker, unless there is one."""


class Pool(abc.ABC):
    """The ranks of one group. It belongs to the event loop that starts it.

    Messages go through children of this process, which end when it does, however it ends.

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
        self._children: list[Child] = []
        self._send_to: list[Send] = []
        self._awaited: set[Answer] = set()

    async def start(self, hang_seconds: float = math.inf) -> None:
        """Builds the worker on every rank.

        Args:
            hang_seconds: as in `broadcast`.
        Raises:
            ValueError: the constructor raised it or OSError (the model is bad or missing).
            PlacementError: the ranks cannot be started now.
            WorkerError: the constructor raised another exception.
            WorkerDied: a rank died.
        """
        self.death = asyncio.get_running_loop().create_future()
        try:
            await self._start_ranks()
            processes: list[RankProcess] = await self.broadcast(START, hang_seconds=hang_seconds)
            self.pids = [each.pid for each in processes]
            self.is_kept = all(each.is_kept for each in processes)
        except BaseException:
            await self.close()
            raise

    async def broadcast(
        self, method: str, *arguments: object, hang_seconds: float = math.inf, lockstep: bool = False
    ) -> list[Any]:
        """Returns the results of `worker.method(*arguments)`, by rank.

        Overlapping calls run in the order in which they began. Cancelling the caller leaves the call running and drops
        its result.

        Args:
            hang_seconds: the ranks are killed if this call, with those before it, takes longer.
            lockstep: if some ranks fail and others do not, all are killed: their states would diverge.
        Raises:
            OperationError, ValueError: as the worker raised them.
            WorkerError: the worker raised another exception.
            WorkerDied: a rank died; raised at once.
        """
        if self.death.done():
            raise self.death.result()
        num_ranks = len(self.spec.configs)
        if any(isinstance(each, PerRank) for each in arguments):
            columns = (each.values if isinstance(each, PerRank) else [each] * num_ranks for each in arguments)
            messages = [encode((method, row)) for row in zip(*columns, strict=True)]
        else:
            messages = [encode((method, arguments))] * num_ranks
        answers = await self._exchange(messages, method, hang_seconds)
        if self.death.done():
            raise self.death.result()
        self.rank_times = [answer.time for answer in answers if answer.time is not None]
        failed = [(rank, answer.error) for rank, answer in enumerate(answers) if answer.error is not None]
        for rank, error in failed:
            if isinstance(error, WorkerError):
                log_remote_failure(
                    logger, f"rank {rank} of {self.spec.worker}: {method} failed", error.remote_traceback
                )
        if failed:
            rank, error = failed[0]
            if lockstep and len(failed) < len(answers):
                raise self.kill(f"rank {rank} of {len(answers)} failed in {method}, the others did not: {error}")
            raise error
        return [answer.value for answer in answers]

    def kill(self, reason: str) -> WorkerDied:
        """Kills all ranks at once and returns their death. Kept ranks are replaced by the next pool of their group."""
        self._record_death(f"{reason}, so it was killed")
        for child in self._children:
            child.process.kill()
        return self.death.result()

    async def close(self) -> None:
        """Stops the ranks; calls under way raise WorkerDied."""
        self._record_death("it was stopped")
        for child in self._children:
            child.hang_up()
        await asyncio.gather(*(child.wait_or_kill() for child in self._children))
        self._children = []

    @abc.abstractmethod
    async def _start_ranks(self) -> None:
        """Starts the children, and adds to `_send_to`, for each rank, what sends it a message."""

    def _watch(self, child: Child) -> None:
        self._children.append(child)
        child.listen()
        asyncio.get_running_loop().add_reader(child.process.sentinel, self._child_ended, child)

    def _child_ended(self, child: Child) -> None:
        asyncio.get_running_loop().remove_reader(child.process.sentinel)
        child.ended.set()
        self._record_death(child.reason)

    async def _exchange(self, messages: Sequence[list[Buffer]], method: str, hang_seconds: float) -> "list[RankAnswer]":
        """Sends the messages and returns the ranks' answers. Kills the ranks if they hang."""
        loop = asyncio.get_running_loop()
        awaited: list[Answer] = [loop.create_future() for _ in messages]
        self._awaited.update(awaited)
        for send, message, answer in zip(self._send_to, messages, awaited, strict=True):
            send(message, answer)
        reason = f"it hung: {method} had no answer after {hang_seconds:.0f} s"
        timer = None if hang_seconds == math.inf else loop.call_later(hang_seconds, self.kill, reason)
        try:
            if len(awaited) > 1:
                return await self._all_or_none(awaited, method)
            return [decode_answer(await awaited[0])]
        finally:
            if timer is not None:
                timer.cancel()
            self._awaited.difference_update(awaited)

    async def _all_or_none(self, awaited: "list[Answer]", method: str) -> "list[RankAnswer]":
        """Kills the ranks if one failed and others do not answer soon: they may wait forever for it in a collective."""
        answers: dict[Answer, RankAnswer] = {}
        pending = set(awaited)
        error: Exception | None = None
        while pending:
            if error is None:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            else:
                done, pending = await asyncio.wait(pending, timeout=GRACE_SECONDS)
                if pending:
                    raise self.kill(f"{method} failed on one of its ranks, the others waited for it: {error}")
            for answer in done:
                answers[answer] = decode_answer(answer.result())
                error = error or answers[answer].error
        return [answers[answer] for answer in awaited]

    def _record_death(self, reason: str) -> None:
        if self.death.done():
            return
        death = WorkerDied(reason)
        self.death.set_result(death)
        # Answers of the other ranks fail too: a rank that waits for a dead one in a collective would never answer.
        for answer in self._awaited:
            if not answer.done():
                answer.set_result(death)


@dataclass(frozen=True)
class RankProcess:
    """Answers START.

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


def decode_answer(frame: memoryview | WorkerDied) -> RankAnswer:
    """Decodes the answer in a frame; arrays keep the frame's memory. Raises WorkerDied if it is a death."""
    if isinstance(frame, WorkerDied):
        raise frame
    try:
        answer: Any = decode(frame)
    except Exception as error:  # for example a type that this process cannot build; the caller receives the error
        return RankAnswer(error=error)
    return answer
