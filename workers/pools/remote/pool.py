"""Attaches to ranks that another process keeps: they exist before this server attaches and stay when it leaves.

The other side is scheduler/worker_daemon.py.
"""

import asyncio
import math
import socket
from collections.abc import Sequence
from itertools import count

from ....schemas.version import VERSION
from ...protocol.messages import Buffer
from ...protocol.worker_config import KeptWorkersAddress
from ..base import GRACE_SECONDS, PlacementError, Pool, PoolSpec, RankAnswer, WorkerDied, decode_answer, set_answer
from .protocol import (
    Attached,
    AttachRefused,
    AttachRequest,
    Call,
    CallAnswered,
    Channel,
    Describe,
    Kill,
    RanksDied,
    WorkersDescription,
    protocol_fingerprint,
)
from .secure_channel import AuthenticationFailed, SecureConnection, keep_alive

_CONNECT_SECONDS = 5.0
_DESCRIBE_SECONDS = 10.0
_LEAVING_SECONDS = 1.0


class RemotePool(Pool):
    """The kept ranks of one group.

    `start` attaches to them: their model is loaded, and they may hold what an earlier server has left. `close` leaves
    them as they are.
    """

    is_kept = True

    def __init__(self, spec: PoolSpec, group: str, at: KeptWorkersAddress) -> None:
        super().__init__(spec)
        self._group = group
        self._at = at
        self._channel: Channel | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[RankAnswer]] = {}
        self._numbers = count()

    def kill(self, reason: str) -> WorkerDied:
        self._open_channel().send(Kill(reason))
        return super().kill(reason)

    async def _start_ranks(self) -> None:
        self._channel = await _connect(self._at)
        self._channel.send(AttachRequest(self._group, self._at.claim, self._at.knobs))

    async def _build(self, hang_seconds: float) -> list[int]:
        seconds = None if hang_seconds == math.inf else hang_seconds
        try:
            words, _ = await asyncio.wait_for(self._open_channel().receive(), seconds)
        except (OSError, EOFError, TimeoutError) as error:
            raise PlacementError(f"the workers at {self._at.address} do not answer: {error or 'they hang'}") from None
        if isinstance(words, AttachRefused):
            raise PlacementError(f"the workers at {self._at.address} cannot be used: {words.reason}")
        assert isinstance(words, Attached), words
        assert len(words.pids) == len(self.spec.configs), "their knobs equal those of this server"
        self._receiving = asyncio.create_task(self._hear(self._open_channel()))
        return words.pids

    async def _answers_to(self, messages: Sequence[list[Buffer]], method: str, hang_seconds: float) -> list[RankAnswer]:
        number = next(self._numbers)
        expected = self._calls[number] = self._expect()
        is_same = all(message is messages[0] for message in messages)
        self._open_channel().send(Call(number, method, hang_seconds), messages[:1] if is_same else messages)
        # The keeper enforces the same limit and must act first.
        with self._killed_after(hang_seconds + GRACE_SECONDS, method):
            answer = await expected
        if answer.error is not None:
            raise answer.error
        assert isinstance(answer.value, list), answer
        return answer.value

    async def _hear(self, line: Channel) -> None:
        try:
            while True:
                words, frames = await line.receive()
                match words:
                    case CallAnswered(number):
                        set_answer(self._calls.pop(number), RankAnswer([decode_answer(frame) for frame in frames]))
                    case RanksDied(reason):
                        self._record_death(reason)
        except (OSError, EOFError) as error:
            self._record_death(f"the connection to the workers at {self._at.address} is lost ({error})")

    async def _stop_ranks(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.wait({self._receiving})
        if self._channel is not None:
            await self._channel.close(_LEAVING_SECONDS)

    def _kill_ranks(self) -> None:
        self._open_channel().hang_up()

    def _open_channel(self) -> Channel:
        assert self._channel is not None, "called before it was started"
        return self._channel


async def describe(at: KeptWorkersAddress) -> WorkersDescription:
    """Returns the description of the kept workers.

    Raises:
        PlacementError: no one answers there now.
        ValueError: what answers cannot be used.
    """
    line = await _connect(at)
    try:
        line.send(Describe())
        words, _ = await asyncio.wait_for(line.receive(), _DESCRIBE_SECONDS)
    except (OSError, EOFError, TimeoutError) as error:
        raise PlacementError(f"the workers at {at.address} do not answer: {error or 'they hang'}") from None
    finally:
        await line.close()
    assert isinstance(words, WorkersDescription), words
    return words


async def _connect(at: KeptWorkersAddress) -> Channel:
    try:
        connection = await asyncio.to_thread(socket.create_connection, at.host_and_port, _CONNECT_SECONDS)
    except OSError as error:
        raise PlacementError(f"no workers are running at {at.address} ({error})") from None
    line: Channel | None = None
    try:
        connection.setblocking(False)
        keep_alive(connection)
        line = Channel(await SecureConnection.connect_as_client(connection, at.secret))
        (theirs, version), _ = await line.receive()
    except AuthenticationFailed as error:
        await _disconnect(line, connection)
        raise ValueError(f"the workers at {at.address} cannot be used: {error}") from None
    except (OSError, EOFError) as error:
        await _disconnect(line, connection)
        raise PlacementError(f"the workers at {at.address} cannot be used: {error}") from None
    except BaseException:
        await _disconnect(line, connection)
        raise
    if theirs != protocol_fingerprint():
        await _disconnect(line, connection)
        raise ValueError(
            f"the workers at {at.address} run trainhouse {version}, whose protocol differs from this server's "
            f"({VERSION}): restart them with the same version"
        )
    return line


async def _disconnect(line: Channel | None, connection: socket.socket) -> None:
    if line is not None:
        await line.close()
    connection.close()
