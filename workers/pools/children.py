"""Runs child processes that answer messages."""

import asyncio
import concurrent.futures
import contextlib
import fcntl
import gc
import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import threading
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from ..protocol.messages import Buffer, FrameReader, send_pieces
from ..protocol.timeouts import GRACE_SECONDS
from ..resources.allocator import single_arena_for_children

_MAX_MESSAGE_BYTES = 4096  # bytes of a child's first or last words
_SERVER_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Child:
    """The parent's side of a child process that answers each rank's messages in the order in which they were sent.

    The lifeline carries only a child's last words; when it closes, the child knows that this process is gone.
    """

    def __init__(self, preloaded: tuple[str, ...], serve: "Callable[..., None]", *arguments: object) -> None:
        """Starts the process.

        Args:
            serve: called in the child with its end of the pipe, its lifeline, and the arguments. It runs inside of
                child_process.
            preloaded: modules that it needs.
        """
        self._pipe, pipe = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair()
        self._outgoing: deque[list[Buffer]] = deque()
        self._incoming = FrameReader()
        self._answers: defaultdict[int, deque[asyncio.Future[Any]]] = defaultdict(deque)
        self.ended = asyncio.Event()
        # If the program ends without closing its pool: must happen before multiprocessing waits for its children.
        multiprocessing.util.Finalize(self, self._lifeline.close, exitpriority=0)
        try:
            with pipe, lifeline:
                self.process = _start_process(preloaded, serve, pipe, lifeline, *arguments)
        except BaseException:
            self.disconnect()
            raise

    def read_first_message(self) -> bytes:
        """Waits for the child's first message; empty if it ended instead. Only for a child without `listen`."""
        return self._pipe.recv(_MAX_MESSAGE_BYTES)

    @property
    def reason(self) -> str:
        """Returns why the child ended: in its own words if it left some, else its exit status."""
        with contextlib.suppress(OSError):
            if words := self._lifeline.recv(_MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT).decode():
                return words
        code = self.process.exitcode
        if code is not None and code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"killed by {signal.Signals(-code).name}{hint}"
        return f"it ended with exit code {code}"

    def listen(self) -> None:
        self._pipe.setblocking(False)
        asyncio.get_running_loop().add_reader(self._pipe, self._receive)

    def send(self, message: list[Buffer], answer: "asyncio.Future[Any]", rank: int = 0) -> None:
        """Sends the message, and sets `answer` to the frame that answers it, unless it is done by then."""
        self._answers[rank].append(answer)
        self._outgoing.append(list(message))
        if len(self._outgoing) == 1 and not self._send_waiting():
            asyncio.get_running_loop().add_writer(self._pipe, self._send_waiting)

    def _send_waiting(self) -> bool:
        """Sends what fits; True if nothing is left."""
        try:
            while self._outgoing:
                if not send_pieces(self._outgoing[0], self._pipe):
                    return False
                self._outgoing.popleft()
        except OSError:  # the rank is gone: Pool._child_ended notices its exit and fails the awaited answers
            self._outgoing.clear()
        asyncio.get_running_loop().remove_writer(self._pipe)
        return True

    def _receive(self) -> None:
        try:
            if (frame := self._incoming.receive(self._pipe)) is not None:
                self._take(frame)
        except (OSError, EOFError):  # as above
            asyncio.get_running_loop().remove_reader(self._pipe)

    def _take(self, frame: memoryview, rank: int = 0) -> None:
        answer = self._answers[rank].popleft()
        if not answer.done():
            answer.set_result(frame)

    def hang_up(self) -> None:
        """Closes the connection; repeating it does nothing, as after a `close` of the pool that was cancelled."""
        if self._pipe.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._pipe)
        asyncio.get_running_loop().remove_writer(self._pipe)
        self.disconnect()

    def disconnect(self) -> None:
        """Closes both sockets, which makes the child exit. Only for a child without `listen`."""
        self._pipe.close()
        self._lifeline.close()

    async def wait_or_kill(self) -> None:
        try:
            await asyncio.wait_for(self.ended.wait(), GRACE_SECONDS)
        except TimeoutError:
            self.process.kill()
            await self.ended.wait()
        self.process.close()


async def start_child(preloaded: tuple[str, ...], serve: "Callable[..., None]", *arguments: object) -> Child:
    """Starts a child.

    The first start takes as long as the child's imports; it runs in a daemon thread, for which an exiting program does
    not wait.
    """
    child: concurrent.futures.Future[Child] = concurrent.futures.Future()
    child.set_running_or_notify_cancel()

    def start() -> None:
        try:
            child.set_result(Child(preloaded, serve, *arguments))
        except BaseException as error:
            child.set_exception(error)

    threading.Thread(target=start, daemon=True).start()
    return await asyncio.wrap_future(child)


def _start_process(preloaded: tuple[str, ...], serve: "Callable[..., None]", *arguments: object) -> Any:
    set_passive_wait_policy()  # the forkserver loads OpenMP, which its children inherit configured
    context = multiprocessing.get_context("forkserver")
    os.environ["TRAINHOUSE_FORKSERVER_DIRECTORY"] = multiprocessing.util.get_temp_dir()
    # The first start pays for these imports; later starts fork a process that has them.
    context.set_forkserver_preload([f"{__package__}.forkserver", __name__, *preloaded])
    # Daemonic, so that multiprocessing terminates it at exit instead of waiting for it.
    process = context.Process(target=serve, args=arguments, daemon=True)
    # These settings are for the forkserver, which the first start launches.
    with single_arena_for_children(), _empty_main(), _signals_blocked():
        process.start()
    return process


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Blocks signals in this thread, from which the forkserver inherits the mask.

    SIGTERM stays blocked there: systemd sends it to all processes of a service, and the forkserver's death would look
    like that of all its children. SIGINT is blocked until the forkserver can end by it without a traceback.
    """
    multiprocessing.resource_tracker.ensure_running()  # the forkserver's start would, and unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SERVER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _empty_main() -> Iterator[None]:
    """Hides this program's main script, which multiprocessing would run a second time in the child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def child_process(lifeline: socket.socket) -> Iterator[None]:
    """Sets up a child, which serves inside and ends with the block: when its pipe closes, or the lifeline earlier."""
    # The forkserver's imports stay in shared memory as long as no garbage collection touches them.
    gc.freeze()
    gc.enable()
    os.environ.pop("MALLOC_ARENA_MAX", None)  # applied to this process already; its children must not inherit it
    ignore_signals()
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGTERM}
    )  # ignored, but not blocked, so that its children can receive it
    if sys.platform == "linux":
        kill_on_hang_up(lifeline, os.getpid())
    threading.Thread(target=_exit_on_hang_up, args=(lifeline,), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        yield
    os._exit(0)


def ignore_signals() -> None:
    """Ignores Ctrl-C and SIGTERM, which are for the server; systemd sends SIGTERM to both."""
    for number in _SERVER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_on_hang_up(lifeline: socket.socket, process: int) -> None:
    """Lets the kernel kill the process when the lifeline closes.

    A thread could not: it does not run in a process that is stopped, or in which another thread holds the interpreter.
    The lifeline's closing is its only event, so the signal for events can be SIGKILL.

    Args:
        process: a process id, or a negated process group id.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, process)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _exit_on_hang_up(lifeline: socket.socket) -> None:
    # Not recv: while a thread is in it the kernel sends no signal, and the process may be stopped meanwhile.
    select.select([lifeline], [], [])
    # Not sys.exit: the main thread may be deep in a verb, and tearing down torch at exit can abort.
    os._exit(0)


def set_passive_wait_policy() -> None:
    """Makes idle OpenMP threads sleep instead of spin; OpenMP reads the variable when it is loaded.

    Next to one busy process, spinning threads made a training step nine times slower, and on quiet cores no faster
    (docs/performance.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
