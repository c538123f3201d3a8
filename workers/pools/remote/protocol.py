"""What a server and the process that keeps workers say to each other, over a sealed connection for each group.

A call is one message, with what is for each rank: so either all ranks of a group hear of it, or none.
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
from ...protocol import messages, verbs
from ...protocol.config import Claim, RoleGroup, ServedModel, WorkerConfig
from ...protocol.messages import Piece, decode, encode
from ...protocol.parallel_spec import ParallelSpec
from ...protocol.shared_fs import Landmark
from ..base import Answer, WorkerError
from .secure_channel import Sealed

_ALIGNMENT = 64
_MODULES = (errors, models, sampling, training, messages, verbs, sys.modules[__name__])
"""Of types that cross."""
_OTHERS: tuple[type, ...] = (Answer, Claim, Landmark, ParallelSpec, RoleGroup, ServedModel, WorkerConfig, WorkerError)
"""WorkerConfig's fields are knobs, which cross by name."""
_WORKER = Path(__file__).parents[2] / "worker" / "worker.py"


# What a server says


@dataclass(frozen=True)
class Describe:
    """Answered by a Description."""


@dataclass(frozen=True)
class Attach:
    """From now on the connection is of this group. Answered by Attached as soon as its ranks are up, or by NotNow.

    knobs: as they were described when the server started; where they are others now, it would take the workers for what
    they are not.
    """

    group: str
    claim: Claim
    knobs: Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """As Pool.answers: with the frame for all ranks, or one for each. Answered by Answered, with a frame of each."""

    number: int
    method: str
    hang_seconds: float


@dataclass(frozen=True)
class Kill:
    """The ranks, at once."""

    reason: str


# What is answered


@dataclass(frozen=True)
class Description:
    """knobs: by name, those of the server's configuration that are the workers'. groups: their names."""

    knobs: Mapping[str, Any]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Attached:
    pids: list[int]


@dataclass(frozen=True)
class NotNow:
    """There may be a place later."""

    reason: str


@dataclass(frozen=True)
class Answered:
    number: int


@dataclass(frozen=True)
class Died:
    """The ranks of the group; or they are another server's now."""

    reason: str


class Line:
    """Says things, with frames beside them, one after the other; hears them on the other side."""

    def __init__(self, sealed: Sealed) -> None:
        self._sealed = sealed
        self._unsent: asyncio.Queue[list[Piece] | None] = asyncio.Queue()
        self._sending = asyncio.create_task(self._send())

    def say(self, words: object, frames: Sequence[list[Piece]] = ()) -> None:
        """What breaks the connection is heard of by `hear`."""
        pieces: list[Piece] = []
        for frame in (encode(words), *frames):
            size = sum(memoryview(piece).nbytes for piece in frame)
            pieces += [*frame, bytes(-size % _ALIGNMENT)]
        self._unsent.put_nowait(pieces)

    async def hear(self) -> tuple[Any, list[memoryview]]:
        """Raises OSError, and EOFError when one of the two has hung up."""
        message, frames = await self._sealed.receive(), []
        while message:
            size = messages.size_of(message)
            frames.append(message[:size])
            message = message[size + -size % _ALIGNMENT :]
        return decode(frames[0]), frames[1:]

    def hang_up(self) -> None:
        """Once all is said."""
        self._unsent.put_nowait(None)

    async def close(self, seconds: float = 0.0) -> None:
        """When nobody hears any more. seconds: for what is not said yet."""
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
def fingerprint() -> str:
    """Of the types that cross and of the verbs: of one trainhouse and another it differs where they would not
    understand each other."""
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
    """An exception crosses as the arguments of its constructor, all else by its fields."""
    arguments = str(inspect.signature(kind)) if issubclass(kind, Exception) else None
    return kind.__name__, inspect.get_annotations(kind), [str(base) for base in kind.__bases__], arguments


def _verbs() -> list[tuple[str, ...]]:
    """Those of a worker, whose module is read: to import it loads torch."""
    tree = ast.parse(_WORKER.read_text())
    [worker] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Worker"]
    return [
        (verb.name, ast.unparse(verb.args), ast.unparse(verb.returns) if verb.returns else "")
        for verb in worker.body
        if isinstance(verb, ast.FunctionDef) and not verb.name.startswith("_")
    ]
