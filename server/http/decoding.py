"""Decodes large bodies in separate processes, because parsers of JSON and protobuf hold the GIL for seconds.

Each process decodes one body, with limits on its memory and time, and runs `main`. Other work on untrusted input, which
may crash, starts its processes here as well (`start_process`, `become_expendable`).
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from ...schemas.codec import decompress
from ...schemas.errors import RequestError
from ...workers.protocol.messages import FrameReader, decode, encode, send_pieces

Decoded = TypeVar("Decoded")

_DECODER_THREADS = ThreadPoolExecutor(2, thread_name_prefix="decode-apart")
"""Bounds how many bodies are decoded at a time. Separate from the default executor, so that waiting bodies do not block
other work."""

_FIXED_BYTES = 512 << 20
_BYTES_PER_BYTE = 10
_PROCESSOR_SECONDS = 120
_GRACE_SECONDS = 5
_NICENESS = 5
_PR_SET_PDEATHSIG = 1
_RETRY_SECONDS = 5.0


async def decode_in_process(
    decoder: Callable[[bytes], Decoded], body: bytes, encoding: str | None, limit: int
) -> Decoded:
    """Returns the body, decompressed to at most `limit` bytes and decoded in a separate process.

    The decoder and its result must be picklable.

    Raises:
        RequestError: the decoder's own error, 413 if decoding takes too much memory or time, or 503 if the machine has
            no room for another process.
    """
    work = _Work(decoder, encoding, limit, pickle.PickleBuffer(body))
    answer = await asyncio.get_running_loop().run_in_executor(_DECODER_THREADS, _run_decoder_process, work)
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


def _run_decoder_process(work: _Work) -> object:
    """Returns the decoded body or the exception."""
    try:
        pipe, process = start_process(__name__)
    except OSError as error:
        return _no_room(f"no process can be started ({error.strerror})")
    with pipe, process:
        try:
            send_pieces(encode(work), pipe)
            frame = FrameReader().receive(pipe)
        except (EOFError, OSError):
            if process.wait() == -signal.SIGKILL:  # its own limits end it by other means
                return _no_room("its decoder process was killed, probably because the machine ran out of memory")
            return _too_much(work.num_bytes)
        finally:
            process.kill()
    assert frame is not None, "the pipe blocks"
    return decode(frame)


def start_process(module: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Starts a process that runs `main` of the module with the number of its pipe as argument.

    It ends with the thread that starts it. Returns our end of the pipe, and the process. Raises OSError.
    """
    with contextlib.ExitStack() as opened:
        ours, theirs = (opened.enter_context(end) for end in socket.socketpair())
        number = theirs.fileno()
        command = [sys.executable, "-P", "-c", f"from {module} import main; main()", str(number)]
        # Parsers print when memory runs out; a client could fill our log with that.
        process = subprocess.Popen(command, pass_fds=[number], start_new_session=True, stderr=subprocess.DEVNULL)
        opened.pop_all()
    theirs.close()
    return ours, process


def _no_room(reason: str) -> RequestError:
    return RequestError(f"the body cannot be decoded now: {reason}: send it again", 503, _RETRY_SECONDS)


def _too_much(num_bytes: int) -> RequestError:
    return RequestError(
        f"decoding the body of {num_bytes} bytes took too much memory or time: send less in one request, or protobuf",
        413,
    )


def become_expendable(niceness: int = _NICENESS) -> None:
    """Lets the server and its workers go first, and ends this process with the server or before it."""
    os.nice(niceness)
    if sys.platform == "linux":
        # Where the kernel groups processes by session, it compares this number with that of the server's session.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(niceness))
        # The signal is sent when the thread that started this process ends; these threads live as long as the server.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # If the machine runs out of memory, the kernel should kill this process, not the server or its workers.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold a tenant's data


def main() -> None:
    """Runs in the decoder process: decodes the one body that arrives through the pipe."""
    become_expendable()
    gc.disable()
    with socket.socket(fileno=int(sys.argv[1])) as pipe:
        frame = FrameReader().receive(pipe)
        assert frame is not None, "the pipe blocks"
        send_pieces(encode(_decoded(frame)), pipe)


def _decoded(frame: memoryview) -> object:
    work = decode(frame)
    assert isinstance(work, _Work)
    try:
        whole = decompress(bytes(work.body), work.encoding, work.limit)
        most_bytes = _FIXED_BYTES + _BYTES_PER_BYTE * len(whole)
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_SECONDS, _PROCESSOR_SECONDS + _GRACE_SECONDS))
        return work.decoder(whole)
    except RequestError as error:
        return error
    except MemoryError:
        return _too_much(work.num_bytes)
    except Exception:
        return RuntimeError(traceback.format_exc())
