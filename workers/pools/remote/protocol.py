"""Defines the messages between a server and the process that keeps workers, over one secure channel for each group.

A call is one message with the frames for all ranks, so either every rank of a group receives it or none does.
"""

import ast
import asyncio
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ....schemas import errors, models, sampling, training
from ...protocol import calls as verbs
from ...protocol import messages
from ...protocol.messages import Buffer, decode, encode
from ...protocol.parallel_spec import ParallelSpec
from ...protocol.shared_fs import SharedFileProbe
from ...protocol.worker_config import AttachClaim, RoleGroup, ServedModel, WorkerConfig
from ..base import RankAnswer, WorkerError
from .secure_channel import SecureConnection

_ALIGNMENT = 64
_MODULES = (errors, models, sampling, training, messages, verbs, sys.modules[__name__])
"""Modules whose types are sent."""
_OTHERS: tuple[type, ...] = (
    RankAnswer,
    AttachClaim,
    SharedFileProbe,
    ParallelSpec,
    RoleGroup,
    ServedModel,
    WorkerConfig,
    WorkerError,
)
"""Further types that are sent; WorkerConfig is listed because its fields are knobs, which are sent by name."""
_WORKER = Path(__file__).parents[2] / "worker" / "worker.py"


# Messages from a server


@dataclass(frozen=True)
class Describe:
    """Requests a WorkersDescription."""


@dataclass(frozen=True)
class AttachRequest:
    """Binds the connection to a group. Answered by Attached as soon as its ranks are up, or by AttachRefused.

    knobs: as described when the server started; if they have changed since, the server must not use the workers.
    """

    group: str
    claim: AttachClaim
    knobs: Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """Calls a method as Pool.call_all does, with one frame for all ranks or one for each; answered by CallAnswered with
    a frame of each rank.
    """

    number: int
    method: str
    hang_seconds: float


@dataclass(frozen=True)
class Kill:
    """Kills the ranks at once."""

    reason: str


# Messages to a server


@dataclass(frozen=True)
class WorkersDescription:
    """Describes the kept workers.

    knobs: the settings of the server's configuration that the workers were built with, by name.
    groups: names of the groups.
    """

    knobs: Mapping[str, Any]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Attached:
    pids: list[int]


@dataclass(frozen=True)
class AttachRefused:
    """Refuses to attach for now; a later attempt may succeed."""

    reason: str


@dataclass(frozen=True)
class CallAnswered:
    number: int


@dataclass(frozen=True)
class RanksDied:
    """Reports that the group's ranks died, or that another server has taken them over."""

    reason: str


class Channel:
    """A channel that sends and receives messages, each with raw frames after it, in order."""

    def __init__(self, sealed: SecureConnection) -> None:
        self._sealed = sealed
        self._unsent: asyncio.Queue[list[Buffer] | None] = asyncio.Queue()
        self._sending = asyncio.create_task(self._send())

    def send(self, words: object, frames: Sequence[list[Buffer]] = ()) -> None:
        """Queues a message; if the connection breaks, `receive` raises."""
        pieces: list[Buffer] = []
        for frame in (encode(words), *frames):
            size = sum(memoryview(piece).nbytes for piece in frame)
            pieces += [*frame, bytes(-size % _ALIGNMENT)]
        self._unsent.put_nowait(pieces)

    async def receive(self) -> tuple[Any, list[memoryview]]:
        """Receives the next message with its frames.

        Raises:
            OSError, EOFError: one side has closed the connection.
        """
        message, frames = await self._sealed.receive(), []
        while message:
            size = messages.frame_size(message)
            frames.append(message[:size])
            message = message[size + -size % _ALIGNMENT :]
        return decode(frames[0]), frames[1:]

    def hang_up(self) -> None:
        """Closes the connection after everything queued is sent."""
        self._unsent.put_nowait(None)

    async def close(self, seconds: float = 0.0) -> None:
        """Closes the channel, when no task is in `receive` any more.

        Args:
            seconds: time to send what is still queued.
        """
        self.hang_up()
        await asyncio.wait({self._sending}, timeout=seconds)
        self._sending.cancel()
        await asyncio.wait({self._sending})
        self._sealed.close()

    async def _send(self) -> None:
        try:
            while (pieces := await self._unsent.get()) is not None:
                await self._sealed.send(pieces)
        except OSError:
            pass
        finally:
            self._sealed.hang_up()


@cache
def protocol_fingerprint() -> str:
    """Returns a hash of the types that are sent and of the worker's methods.

    It differs between versions of trainhouse that would not understand each other.
    """
    described = repr([_described(kind) for kind in _types()] + _verbs())
    # Validators in annotations are functions, whose addresses differ from process to process.
    described = re.sub(r" at 0x[0-9a-f]+", "", described)
    return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def _types() -> Iterator[type]:
    for module in _MODULES:
        for _, kind in sorted(inspect.getmembers(module, inspect.isclass)):
            if kind.__module__ == module.__name__:
                yield kind
    yield from _OTHERS


def _described(kind: type) -> tuple[object, ...]:
    """Describes a type: an exception is sent as its constructor's arguments, everything else as its fields."""
    arguments = str(inspect.signature(kind)) if issubclass(kind, Exception) else None
    return kind.__name__, inspect.get_annotations(kind), [str(base) for base in kind.__bases__], arguments


def _verbs() -> list[tuple[str, ...]]:
    """Returns the worker's public methods, read from its source, because importing it loads torch."""
    tree = ast.parse(_WORKER.read_text())
    [worker] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Worker"]
    return [
        (verb.name, ast.unparse(verb.args), ast.unparse(verb.returns) if verb.returns else "")
        for verb in worker.body
        if isinstance(verb, ast.FunctionDef) and not verb.name.startswith("_")
    ]
