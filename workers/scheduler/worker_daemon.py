"""Keeps rank groups that outlive the servers that use them; one server is attached at a time.

When a rank dies, its whole group is restarted here; the attached server is notified and attaches again when the group
is up. A newly attached server clears the state that the previous one left in the ranks.
"""

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Callable, Mapping
from typing import Any

from ...schemas.version import VERSION
from ..pools.base import PlacementError, Pool, WorkerDied, WorkerError
from ..pools.remote.protocol import (
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
from ..pools.remote.secure_channel import ClosedSilently, SecureConnection, keep_alive
from ..protocol.messages import encode
from ..protocol.worker_config import AttachClaim, ServedModel, WorkerConfig
from .backoff import RestartBackoff
from .loading import failure_reason, load
from .ranks import Ranks
from .timeouts import CallTimeouts

logger = logging.getLogger(__name__)

_PLACE_SECONDS = 2.0
_LAST_WORDS_SECONDS = 2.0
_MOST_STRANGERS = 256
"""Most connections at a time that have not authenticated yet; authentication is quick for real servers."""
_FULL_SECONDS = 0.1
"""Pause before the next accept, after the system had no resources for one."""


class WorkerDaemon:
    """Serves the groups to servers that connect.

    knobs: the settings with which the groups were built, which servers compare with their own.
    """

    def __init__(self, groups: "Mapping[str, KeptGroup]", knobs: Mapping[str, Any], secret: bytes) -> None:
        self._groups = groups
        self._secret = secret
        self._description = WorkersDescription(knobs, tuple(groups))
        self._visits: set[_Session] = set()
        self._newest_epoch = -1
        self._strangers: dict[socket.socket, None] = {}  # in order of arrival
        self._received: set[asyncio.Task[None]] = set()

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Loads all groups.

        Raises:
            ValueError: a group does not start; the message says why.
        """
        for group in self._groups.values():
            await group.start(on_progress)

    async def serve(self, listener: socket.socket) -> None:
        """Accepts servers, also while groups are still starting, until cancelled.

        Args:
            listener: a listening, non-blocking socket.
        """
        try:
            while True:
                connection = await self._accept(listener)
                self._strangers[connection] = None
                receiving = asyncio.create_task(self._serve_connection(connection))
                self._received.add(receiving)
                receiving.add_done_callback(self._received.discard)
                await asyncio.sleep(0)  # a flood of connections must not starve other tasks
        finally:
            for visit in tuple(self._visits):
                visit.end("its workers were stopped")
            for receiving in self._received:
                receiving.cancel()
            if self._received:
                await asyncio.wait(self._received)

    async def close(self) -> None:
        await asyncio.gather(*(group.close() for group in self._groups.values()))

    async def _accept(self, listener: socket.socket) -> socket.socket:
        """Accepts a connection, despite any failures. If too many are unauthenticated, the oldest of them is closed."""
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                logger.warning("connections to the workers cannot be accepted for now: %s", error)
                self._close_oldest_stranger()
                await asyncio.sleep(_FULL_SECONDS)
                continue
            if len(self._strangers) >= _MOST_STRANGERS:
                logger.warning(
                    "%d connections to the workers are not authenticated: closing the oldest", _MOST_STRANGERS
                )
                self._close_oldest_stranger()
            return connection

    def _close_oldest_stranger(self) -> None:
        if self._strangers:
            longest = next(iter(self._strangers))
            del self._strangers[longest]
            with contextlib.suppress(OSError):  # it has disconnected
                longest.shutdown(socket.SHUT_RDWR)

    async def _authenticate(self, connection: socket.socket) -> SecureConnection:
        try:
            keep_alive(connection)
            return await SecureConnection.accept_as_server(connection, self._secret)
        finally:
            self._strangers.pop(connection, None)

    async def _serve_connection(self, connection: socket.socket) -> None:
        line: Channel | None = None
        try:
            line = Channel(await self._authenticate(connection))
            line.send((protocol_fingerprint(), VERSION))
            await self._serve(line)
        except ClosedSilently as error:
            logger.debug("a connection to the workers was a probe: %s", error)
        except (OSError, EOFError) as error:
            if line is None:
                logger.warning("a connection to the workers is refused: %s", error)
        finally:
            if line is not None:
                await line.close(_LAST_WORDS_SECONDS)
            connection.close()

    async def _serve(self, line: Channel) -> None:
        words, _ = await line.receive()
        if isinstance(words, Describe):
            line.send(self._description)
        elif isinstance(words, AttachRequest):
            await self._attach(line, words)

    async def _attach(self, line: Channel, attach: AttachRequest) -> None:
        if (reason := self._refusal(attach)) is not None:
            logger.warning("a server is refused: %s", reason)
            line.send(AttachRefused(reason))
            return
        self._displace_others(attach)
        visit = _Session(line, attach, self._groups[attach.group])
        self._visits.add(visit)
        try:
            await visit.run()
        finally:
            self._visits.discard(visit)

    def _refusal(self, attach: AttachRequest) -> str | None:
        """Returns why the server may not attach, or None.

        Its settings must equal those of the workers. A newer lease epoch displaces an older one; without epochs, the
        server that is attached stays.
        """
        claim, others = (
            attach.claim,
            {visit.claim for visit in self._visits if visit.claim.holder != attach.claim.holder},
        )
        if changes := _changes(attach.knobs, self._description.knobs):
            return (
                f"they were restarted with {changes}: restart this server too, or the workers with their old settings"
            )
        if attach.group not in self._groups:
            return f"{attach.group} is not among them: they serve {', '.join(self._groups)}"
        if claim.epoch is not None and claim.epoch < self._newest_epoch:
            return (
                f"a server with lease epoch {self._newest_epoch} has used them, and this server's lease has epoch "
                f"{claim.epoch}: if the database was restored or replaced, restart the workers"
            )
        if any(_is_not_older(other, claim) for other in others):
            return "another server is attached to them: stop that server, or start separate workers for this one"
        return None

    def _displace_others(self, attach: AttachRequest) -> None:
        if attach.claim.epoch is not None:
            self._newest_epoch = attach.claim.epoch
        for visit in tuple(self._visits):
            if visit.claim.holder != attach.claim.holder:
                visit.end(f"a server with lease epoch {attach.claim.epoch} has taken over the workers")
            elif visit.group.name == attach.group:
                visit.end("this server has attached again")


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changed = [name for name in before if now.get(name) != before[name]]
    return " and ".join(f"{name} {_shown(now.get(name))} instead of {_shown(before[name])}" for name in changed)


def _shown(value: object) -> str:
    return ", ".join(map(_shown_one, value)) or "none" if isinstance(value, tuple) else str(value)


def _shown_one(value: object) -> str:
    return f"{value.name}={value.source}" if isinstance(value, ServedModel) else str(value)


def _is_not_older(other: AttachClaim, claim: AttachClaim) -> bool:
    return other.epoch is None or claim.epoch is None or other.epoch >= claim.epoch


class KeptGroup:
    """The ranks of one group, restarted when they die.

    calls: calls that they have not answered yet.
    """

    def __init__(self, name: str, config: WorkerConfig, new_pool: Callable[[], Pool]) -> None:
        self.name = name
        self.calls: set[asyncio.Task[None]] = set()
        self._config = config
        self._new_pool = new_pool
        self._pool: Pool | None = None
        self._ranks: Ranks | None = None
        self._trouble: str | None = None
        self._changed = asyncio.Event()
        self._backoff = RestartBackoff()
        self._keeping: asyncio.Task[None] | None = None

    async def start(self, on_progress: Callable[[str], None]) -> None:
        """Loads the group.

        Raises:
            ValueError: it does not start; the message says why.
        """
        on_progress(f"loading {self.name} from {self._config.model.source} ...")
        pool = await load(self._config, self.name, lambda: self._open(math.inf), on_progress)
        on_progress(f"{self.name} is ready: {_processes(pool)}")
        self._keeping = asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        if self._ranks is not None:
            await self._ranks.close()

    async def pool(self) -> Pool:
        """Returns the pool as soon as it is up and has answered all calls.

        Raises:
            PlacementError: it does not restart, or hangs in a call, for now.
        """
        while self._pool is None or self.calls:
            if self._trouble is not None:
                raise PlacementError(self._trouble)
            await (self._answered() if self.calls else self._changed.wait())
        return self._pool

    async def _answered(self) -> None:
        """Waits until some call is answered. Raises PlacementError if none is within hang_seconds."""
        done, pending = await asyncio.wait(self.calls, timeout=self._config.hang_seconds)
        if not done:
            methods = ", ".join(sorted({calling.get_name() for calling in pending}))
            raise PlacementError(
                f"{self.name} waits for {methods}, which was begun for a server that has disconnected since"
            )

    async def _keep(self) -> None:
        while True:
            assert self._pool is not None and self._ranks is not None, "it was started"
            death = await asyncio.shield(self._pool.death)
            logger.error("%s: %s", self.name, death)
            self._change(None, None)
            await self._ranks.close()
            while self._pool is None:
                await asyncio.sleep(_PLACE_SECONDS if self._trouble else self._backoff.next_delay())
                await self._try_to_open()

    async def _try_to_open(self) -> None:
        try:
            pool = await self._open(CallTimeouts(self._config).loading_seconds)
        except (WorkerDied, WorkerError, ValueError, OSError, EOFError) as error:
            trouble = f"{self.name} does not restart: {failure_reason(error, self._config)}"
            if trouble != self._trouble:
                logger.error("%s", trouble)
            self._change(None, trouble)
        else:
            logger.warning("%s is back: %s", self.name, _processes(pool))

    async def _open(self, hang_seconds: float) -> Pool:
        pool = self._new_pool()
        self._ranks = Ranks(pool, self._config.parallel)
        await self._ranks.start(hang_seconds)
        self._backoff.started()
        self._change(pool, None)
        return pool

    def _change(self, pool: Pool | None, trouble: str | None) -> None:
        self._pool, self._trouble = pool, trouble
        self._changed.set()
        self._changed = asyncio.Event()


class _Session:
    """The session of one server with one group, from its attach request until one side closes the connection."""

    def __init__(self, line: Channel, attach: AttachRequest, group: KeptGroup) -> None:
        self.claim = attach.claim
        self.group = group
        self._line = line
        self._has_ended = False
        self._pool: Pool | None = None

    async def run(self) -> None:
        welcoming = asyncio.create_task(self._welcome())
        try:
            while True:
                words, frames = await self._line.receive()
                if self._has_ended:
                    return
                match words:
                    case Call():
                        self._begin(words, frames)
                    case Kill(reason) if self._pool is not None:
                        self._pool.kill(reason)
        finally:
            self._has_ended = True
            welcoming.cancel()
            await asyncio.wait({welcoming})

    def end(self, reason: str) -> None:
        """Ends the session; anything the server sends from now on is ignored."""
        if not self._has_ended:
            logger.warning("%s: %s", self.group.name, reason)
            self._end(reason)

    async def _welcome(self) -> None:
        try:
            pool = self._pool = await self.group.pool()
        except PlacementError as error:
            self._line.send(AttachRefused(str(error)))
            self._line.hang_up()
            return
        self._line.send(Attached(pool.pids))
        death = await asyncio.shield(pool.death)  # which the group logs
        self._end(death.reason)

    def _end(self, reason: str) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._line.send(RanksDied(reason))
            self._line.hang_up()

    def _begin(self, call: Call, frames: list[memoryview]) -> None:
        """Starts the call; it is not cancelled when the server disconnects, because ranks must finish what all of them
        began.
        """
        calling = asyncio.create_task(self._call(call, frames), name=call.method)
        self.group.calls.add(calling)
        calling.add_done_callback(self.group.calls.discard)

    async def _call(self, call: Call, frames: list[memoryview]) -> None:
        pool = self._pool
        assert pool is not None, "a server calls once it is attached"
        of_ranks = frames if len(frames) > 1 else frames * len(pool.pids)
        try:
            answers = await pool.relay([[frame] for frame in of_ranks], call.method, call.hang_seconds)
        except WorkerDied:
            return  # `_welcome` reports it to the server
        if not self._has_ended:
            self._line.send(CallAnswered(call.number), [encode(answer) for answer in answers])


def _processes(pool: Pool) -> str:
    return f"process{'es' if len(pool.pids) > 1 else ''} {', '.join(map(str, pool.pids))}"
