"""Runs ranks in processes of this machine."""

import asyncio
import socket

from ..protocol.messages import Buffer, FrameReader, FrameWriter
from .base import PoolSpec, RankAnswer
from .children import ChildrenPool, child_process, start_child
from .worker_host import WorkerHost


class LocalPool(ChildrenPool):
    """A pool that runs each rank in a forkserver child."""

    async def _start_ranks(self) -> None:
        for rank in range(len(self.spec.configs)):
            preloaded = (self.spec.worker.partition(":")[0],)
            self._watch(await start_child(preloaded, _serve_rank, self.spec, rank))

    def _send(self, rank: int, message: list[Buffer], answer: "asyncio.Future[RankAnswer]") -> None:
        self._children[rank].send(message, answer)


def _serve_rank(pipe: socket.socket, lifeline: socket.socket, spec: PoolSpec, rank: int) -> None:
    with child_process(lifeline):
        host, incoming = WorkerHost(spec, rank), FrameReader()
        while (frame := incoming.receive(pipe)) is not None:
            FrameWriter(host.answer(frame)).send(pipe)
            del frame  # it may hold a model's weights, and the next frame may take long to arrive
