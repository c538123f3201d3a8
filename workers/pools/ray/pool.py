"""Runs ranks as actors of a Ray cluster.

Ray may end a process connected to it: a driver whose head is away for a minute is ended by _Exit. Therefore this
process never connects: each RayPool has a child that is its driver, and a new pool has a new driver, which finds the
current cluster.
"""

import asyncio
import logging
import os
import socket
import threading
import traceback
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from queue import SimpleQueue
from typing import Any

from ...protocol.messages import Buffer, FrameReader, decode, encode, send_pieces
from ...protocol.timeouts import RAY_CONNECT_SECONDS, RAY_PLACEMENT_SECONDS
from ..base import PlacementError, Pool, PoolSpec, RankAnswer, WorkerError
from ..children import Child, child_process, ignore_signals
from .actors import Attachment, KeptGroup, RanksTakenOver, attach, start_ranks, watches_of
from .cluster import RayCluster

_USE_SECONDS = 1.0
"""Interval at which a server reports that it uses kept ranks, and learns whether another one has them."""


class RayPool(Pool):
    """A pool with one actor per rank, in its own placement group, on a cluster that is connected when the pool starts.

    Ray ends the actors, even unresponsive ones, when their driver, a child of this process, is gone.
    Kept ones stay.
    """

    def __init__(
        self,
        spec: PoolSpec,
        cluster: RayCluster,
        kept: KeptGroup | None = None,
        placement_timeout_seconds: float = RAY_PLACEMENT_SECONDS,
    ) -> None:
        super().__init__(spec)
        self._cluster = cluster
        self._kept = kept
        self._placement_timeout_seconds = placement_timeout_seconds

    async def _start_ranks(self) -> None:
        address, environment = self._cluster.address, self._cluster.environment
        drive = _DriverJob(self.spec, address, environment, self._kept, self._placement_timeout_seconds)
        driver = await asyncio.to_thread(_Driver, (), _run_driver, drive)
        self._watch(driver)
        self._send_to += [partial(driver.send, rank=rank) for rank in range(len(self.spec.configs))]


class _Driver(Child):
    """Takes messages for the ranks in turn. Answers arrive in order of completion, each preceded by its rank's
    number.
    """

    _answering: int | None = None

    def _take(self, frame: memoryview, rank: int = 0) -> None:
        if self._answering is None:
            rank_of_next: Any = decode(frame)
            self._answering = rank_of_next
            return
        super()._take(frame, self._answering)
        self._answering = None


@dataclass(frozen=True)
class _DriverJob:
    spec: PoolSpec
    address: str
    environment: dict[str, str]
    kept: KeptGroup | None
    placement_timeout_seconds: float


def _run_driver(pipe: socket.socket, lifeline: socket.socket, drive: _DriverJob) -> None:
    with child_process(lifeline):
        os.environ.update(drive.environment)
        try:
            _connect(drive.address)
            attached = None if drive.kept is None else attach(drive.spec, drive.kept, drive.placement_timeout_seconds)
            actors = attached.ranks if attached else start_ranks(drive.spec, drive.placement_timeout_seconds)
        except ValueError as error:
            _answer_all_with(pipe, error, len(drive.spec.configs))
            return
        server = attached.server if attached else ""
        threading.Thread(target=_watch, args=(watches_of(actors), attached, lifeline), daemon=True).start()
        answers: list[SimpleQueue[Any]] = [SimpleQueue() for _ in actors]
        sending = threading.Lock()
        for rank, of_rank in enumerate(answers):
            threading.Thread(target=_send_answers, args=(rank, of_rank, pipe, sending), daemon=True).start()
        incoming = FrameReader()
        for actor, of_rank in cycle(zip(actors, answers, strict=True)):
            of_rank.put(actor.answer_frame.remote(server, bytes(incoming.receive(pipe) or b"")))


def _answer_all_with(pipe: socket.socket, error: ValueError, num_ranks: int) -> None:
    incoming = FrameReader()
    for rank in cycle(range(num_ranks)):
        incoming.receive(pipe)
        _send_answer(rank, encode(RankAnswer(error=error)), pipe)


def _send_answer(rank: int, frame: list[Buffer], pipe: socket.socket) -> None:
    send_pieces(encode(rank), pipe)
    send_pieces(frame, pipe)


def _watch(watches: list[Any], attached: Attachment | None, lifeline: socket.socket) -> None:
    import ray

    reason = None
    while reason is None:
        if ray.wait(watches, timeout=_USE_SECONDS if attached else None)[0]:
            reason = "its Ray actor is gone: it ended unexpectedly (out of memory?), or its node did"
        elif attached:
            reason = attached.lost_reason()
    lifeline.sendall(reason.encode())
    os._exit(1)


def _send_answers(rank: int, answers: "SimpleQueue[Any]", pipe: socket.socket, sending: threading.Lock) -> None:
    """Sends each answer as soon as it is ready: another rank may need this one's, so its own would never arrive."""
    import ray
    from ray.exceptions import RayActorError

    while True:
        try:
            frame: list[Buffer] = [ray.get(answers.get())]
        except (RayActorError, RanksTakenOver):  # the watch reports it
            return
        except Exception as error:  # Ray lost the message or the answer
            frame = encode(RankAnswer(error=WorkerError(f"{type(error).__name__}: {error}", traceback.format_exc())))
        with sending:
            _send_answer(rank, frame, pipe)


def _connect(address: str) -> None:
    import ray

    hint = ""
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if host:  # Ray would wait for minutes if no one listens
            socket.create_connection((host.strip("[]"), int(port)), timeout=RAY_CONNECT_SECONDS).close()
        hint = " (if it requires a token, set RAY_AUTH_MODE=token here and copy its token file: docs/cluster.md)"
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise PlacementError(f"the Ray cluster at {address} cannot be reached: {error}{hint}") from error
    ignore_signals()  # Ray has installed its own handler
