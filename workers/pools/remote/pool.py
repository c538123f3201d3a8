"""Attaches to ranks that another process keeps: they exist before this server attaches and stay when it leaves.

The other side is scheduler/keeper.py.
"""

import asyncio
import math
import socket
from collections.abc import Sequence
from itertools import count

from ....schemas.version import VERSION
from ...protocol.config import KeptAt
from ...protocol.messages import Piece
from ..base import GRACE_SECONDS, Answer, NoPlace, Pool, PoolSpec, WorkerDied, answer_in, settle
from .protocol import Answered, Attach, Attached, Call, Describe, Description, Died, Kill, Line, NotNow, fingerprint
from .secure_channel import NotSealed, Sealed, keep_alive

_CONNECT_SECONDS = 5.0
_DESCRIBE_SECONDS = 10.0
_LEAVING_SECONDS = 1.0


class RemotePool(Pool):
    """The kept ranks of one group.

    `start` attaches to them: their model is loaded, and they may hold what an earlier server has left. `close` leaves
    them as they are.
    """

    is_kept = True

    def __init__(self, spec: PoolSpec, group: str, at: KeptAt) -> None:
        super().__init__(spec)
        self._group = group
        self._at = at
        self._line: Line | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = count()

    def kill(self, reason: str) -> WorkerDied:
        self._attached().say(Kill(reason))
        return super().kill(reason)

    async def _start_ranks(self) -> None:
        self._line = await _called(self._at)
        self._line.say(Attach(self._group, self._at.claim, self._at.knobs))

    async def _build(self, hang_seconds: float) -> list[int]:
        seconds = None if hang_seconds == math.inf else hang_seconds
        try:
            words, _ = await asyncio.wait_for(self._attached().hear(), seconds)
        except (OSError, EOFError, TimeoutError) as error:
            raise NoPlace(f"the workers at {self._at.address} do not answer: {error or 'they hang'}") from None
        if isinstance(words, NotNow):
            raise NoPlace(f"the workers at {self._at.address} cannot be used: {words.reason}")
        assert isinstance(words, Attached), words
        assert len(words.pids) == len(self.spec.configs), "their knobs equal those of this server"
        self._hearing = asyncio.create_task(self._hear(self._attached()))
        return words.pids

    async def _answers_to(self, messages: Sequence[list[Piece]], method: str, hang_seconds: float) -> list[Answer]:
        number = next(self._numbers)
        expected = self._calls[number] = self._expect()
        is_same = all(message is messages[0] for message in messages)
        self._attached().say(Call(number, method, hang_seconds), messages[:1] if is_same else messages)
        # The keeper enforces the same limit and must act first.
        with self._killed_after(hang_seconds + GRACE_SECONDS, method):
            answer = await expected
        if answer.error is not None:
            raise answer.error
        assert isinstance(answer.value, list), answer
        return answer.value

    async def _hear(self, line: Line) -> None:
        try:
            while True:
                words, frames = await line.hear()
                match words:
                    case Answered(number):
                        settle(self._calls.pop(number), Answer([answer_in(frame) for frame in frames]))
                    case Died(reason):
                        self._died(reason)
        except (OSError, EOFError) as error:
            self._died(f"the connection to the workers at {self._at.address} is lost ({error})")

    async def _stop_ranks(self) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.wait({self._hearing})
        if self._line is not None:
            await self._line.close(_LEAVING_SECONDS)

    def _kill_ranks(self) -> None:
        self._attached().hang_up()

    def _attached(self) -> Line:
        assert self._line is not None, "called before it was started"
        return self._line


async def describe(at: KeptAt) -> Description:
    """Returns the description of the kept workers.

    Raises:
        NoPlace: no one answers there now.
        ValueError: what answers cannot be used.
    """
    line = await _called(at)
    try:
        line.say(Describe())
        words, _ = await asyncio.wait_for(line.hear(), _DESCRIBE_SECONDS)
    except (OSError, EOFError, TimeoutError) as error:
        raise NoPlace(f"the workers at {at.address} do not answer: {error or 'they hang'}") from None
    finally:
        await line.close()
    assert isinstance(words, Description), words
    return words


async def _called(at: KeptAt) -> Line:
    try:
        connection = await asyncio.to_thread(socket.create_connection, at.host_and_port, _CONNECT_SECONDS)
    except OSError as error:
        raise NoPlace(f"no workers are running at {at.address} ({error})") from None
    line: Line | None = None
    try:
        connection.setblocking(False)
        keep_alive(connection)
        line = Line(await Sealed.by_caller(connection, at.secret))
        (theirs, version), _ = await line.hear()
    except NotSealed as error:
        await _leave(line, connection)
        raise ValueError(f"the workers at {at.address} cannot be used: {error}") from None
    except (OSError, EOFError) as error:
        await _leave(line, connection)
        raise NoPlace(f"the workers at {at.address} cannot be used: {error}") from None
    except BaseException:
        await _leave(line, connection)
        raise
    if theirs != fingerprint():
        await _leave(line, connection)
        raise ValueError(
            f"the workers at {at.address} run trainhouse {version}, whose protocol differs from this server's "
            f"({VERSION}): restart them with the same version"
        )
    return line


async def _leave(line: Line | None, connection: socket.socket) -> None:
    if line is not None:
        await line.close()
    connection.close()
