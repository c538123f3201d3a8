"""Runs ranks in processes of this machine."""

import socket

from ..protocol.messages import FrameReader, send_pieces
from .base import Pool, PoolSpec
from .children import child_process, start_child
from .worker_host import WorkerHost


class LocalPool(Pool):
    """A pool that runs each rank in a forkserver child."""

    async def _start_ranks(self) -> None:
        for rank in range(len(self.spec.configs)):
            preloaded = (self.spec.worker.partition(":")[0],)
            child = await start_child(preloaded, _serve_rank, self.spec, rank)
            self._watch(child)
            self._send_to.append(child.send)


def _serve_rank(pipe: socket.socket, lifeline: socket.socket, spec: PoolSpec, rank: int) -> None:
    with child_process(lifeline):
        host, incoming = WorkerHost(spec, rank), FrameReader()
        while (frame := incoming.receive(pipe)) is not None:
            send_pieces(host.answer(frame), pipe)
            del frame  # it may hold a model's weights, and the next frame may take long to arrive
