"""Decoding in a process of its own: parsers of JSON and protobuf keep the interpreter to themselves, for seconds where
a body is large, and all others would wait. One process decodes one body, with bounds to its memory and time.

`main` is what runs there.
"""

import asyncio
import gc
import os
import pickle
import resource
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from ..schemas.codec import decompress
from ..schemas.errors import RequestError
from ..workers.messages import Incoming, Outgoing, decode, encode

Decoded = TypeVar("Decoded")

_AT_ONCE = ThreadPoolExecutor(2, thread_name_prefix="decode-apart")
"""So many such processes there are at most; threads of their own, since those that wait are nobody else's."""

_FIXED_BYTES = 512 << 20
_BYTES_PER_BYTE = 10
_PROCESSOR_SECONDS = 120
_NICENESS = 5


async def decode_apart(decoder: Callable[[bytes], Decoded], body: bytes, encoding: str | None, limit: int) -> Decoded:
    """The body decompressed, of `limit` bytes at most, and decoded. Both ways only what can be pickled goes.

    Raises RequestError: what `decoder` raises, or 413 where it takes too much memory or time.
    """
    work = _Work(decoder, encoding, limit, pickle.PickleBuffer(body))
    answer = await asyncio.get_running_loop().run_in_executor(_AT_ONCE, _done_apart, work)
    if isinstance(answer, Exception):
        raise answer
    return answer  # pyright: ignore[reportReturnType]


class _Work(NamedTuple):
    decoder: Callable[[bytes], object]
    encoding: str | None
    limit: int
    body: pickle.PickleBuffer | memoryview

    @property
    def num_bytes(self) -> int:
        return memoryview(self.body).nbytes


def _done_apart(work: _Work) -> object:
    """What comes of it, or the exception."""
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(number)]
    # What its parsers print when memory runs out would be the client's to put into our log.
    process = subprocess.Popen(command, pass_fds=[number], start_new_session=True, stderr=subprocess.DEVNULL)
    with ours, process:
        theirs.close()
        try:
            Outgoing(encode(work)).send(ours)
            frame = Incoming().receive(ours)
        except (EOFError, OSError):
            return _too_much(work.num_bytes)
        finally:
            process.kill()
    assert frame is not None, "the pipe blocks"
    return decode(frame)


def _too_much(num_bytes: int) -> RequestError:
    return RequestError(
        f"to decode the body of {num_bytes} bytes took too much memory or time: send less in one request, or protobuf",
        413,
    )


def main() -> None:
    """Decodes the one body that comes through the pipe."""
    os.nice(_NICENESS)
    gc.disable()
    with socket.socket(fileno=int(sys.argv[1])) as pipe:
        frame = Incoming().receive(pipe)
        assert frame is not None, "the pipe blocks"
        Outgoing(encode(_decoded(frame))).send(pipe)


def _decoded(frame: memoryview) -> object:
    work = decode(frame)
    assert isinstance(work, _Work)
    try:
        whole = decompress(bytes(work.body), work.encoding, work.limit)
        most_bytes = _FIXED_BYTES + _BYTES_PER_BYTE * len(whole)
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_SECONDS, _PROCESSOR_SECONDS))
        return work.decoder(whole)
    except RequestError as error:
        return error
    except MemoryError:
        return _too_much(work.num_bytes)
    except Exception:
        return RuntimeError(traceback.format_exc())
