"""Children of this process that answer messages, and the pools whose messages go through them."""

import abc
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..ops.allocator import one_arena_for_those_started
from ..protocol.messages import Incoming, Outgoing, Piece
from .base import GRACE_SECONDS, Answer, Pool, PoolSpec, answer_in, settle
from .shell import let_waiting_threads_sleep

_MOST_WORDS = 4096  # bytes of what a child says beside its answers
_OF_THE_SERVER = (signal.SIGINT, signal.SIGTERM)


class ChildrenPool(Pool):
    """One whose messages go through children of this process, which end when it does, however it ends."""

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec)
        self._children: list[Child] = []

    def _watch(self, child: "Child") -> None:
        self._children.append(child)
        child.listen()
        asyncio.get_running_loop().add_reader(child.process.sentinel, self._child_ended, child)

    @abc.abstractmethod
    def _send(self, rank: int, message: list[Piece], answer: "asyncio.Future[Answer]") -> None:
        """Sets `answer` (unless it is done by then) to what the rank answers to the message; None builds the worker."""

    async def _answers_to(self, messages: Sequence[list[Piece]], method: str, hang_seconds: float) -> list[Answer]:
        expected = [self._expect() for _ in messages]
        for rank, message in enumerate(messages):
            self._send(rank, message, expected[rank])
        with self._killed_after(hang_seconds, method):
            await self._all_or_none(expected, method)
            return [await answer for answer in expected]

    async def _all_or_none(self, expected: "list[asyncio.Future[Answer]]", method: str) -> None:
        """When one rank fails, others may wait for it without end: they have little time to answer, or are killed."""
        pending = set(expected) if len(expected) > 1 else set()
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            error = next((error for answer in done if (error := answer.result().error) is not None), None)
            if error is not None and pending:
                _, late = await asyncio.wait(pending, timeout=GRACE_SECONDS)
                if late:
                    self.kill(f"{method} failed on one of its ranks, the others waited for it: {error}")
                return

    async def _stop_ranks(self) -> None:
        for child in self._children:
            child.hang_up()
        await asyncio.gather(*(child.wait_or_kill() for child in self._children))
        self._children = []

    def _kill_ranks(self) -> None:
        for child in self._children:
            child.process.kill()

    def _child_ended(self, child: "Child") -> None:
        asyncio.get_running_loop().remove_reader(child.process.sentinel)
        child.ended.set()
        self._died(child.reason)


class Child:
    """This side of a child of this process, which answers messages, in the order in which they were sent.

    The lifeline carries nothing but a child's last words: its closing tells the child that we are gone.
    """

    def __init__(self, preloaded: tuple[str, ...], serve: "Callable[..., None]", *arguments: object) -> None:
        """serve: called in the child, with its end of the pipe, its lifeline, and the arguments. preloaded: modules
        that it needs."""
        self._pipe, pipe = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair()
        self._outgoing: deque[Outgoing] = deque()
        self._incoming = Incoming()
        self._answers: deque[asyncio.Future[Answer]] = deque()
        self.ended = asyncio.Event()
        # At the end of a program that did not close its pool, before multiprocessing waits for its children.
        multiprocessing.util.Finalize(self, self._lifeline.close, exitpriority=0)
        try:
            with pipe, lifeline:
                self.process = _start_process(preloaded, serve, pipe, lifeline, *arguments)
        except BaseException:
            self.let_go()
            raise

    def first_words(self) -> bytes:
        """Waits for them; nothing when the child ended instead. For whoever does not listen."""
        return self._pipe.recv(_MOST_WORDS)

    def last_words(self) -> str:
        """Of a child that ended and told why."""
        with contextlib.suppress(OSError):
            return self._lifeline.recv(_MOST_WORDS, socket.MSG_DONTWAIT).decode()
        return ""

    @property
    def reason(self) -> str:
        """Why it ended, of one that has: in its own words, where it left some."""
        return self.last_words() or _exit_reason(self.process.exitcode)

    def listen(self) -> None:
        self._pipe.setblocking(False)
        asyncio.get_running_loop().add_reader(self._pipe, self._receive)

    def send(self, message: list[Piece], answer: "asyncio.Future[Answer]") -> None:
        self._answers.append(answer)
        self._begin_to_send(message)

    def _begin_to_send(self, message: list[Piece]) -> None:
        self._outgoing.append(Outgoing(message))
        if len(self._outgoing) == 1 and not self._send_waiting():
            asyncio.get_running_loop().add_writer(self._pipe, self._send_rest)

    def _send_waiting(self) -> bool:
        """Whether nothing is left to be sent."""
        try:
            while self._outgoing and self._outgoing[0].send(self._pipe):
                self._outgoing.popleft()
        except OSError:  # the rank is gone: its end is noticed, and tells those who wait for answers
            self._outgoing.clear()
        return not self._outgoing

    def _send_rest(self) -> None:
        if self._send_waiting():
            asyncio.get_running_loop().remove_writer(self._pipe)

    def _receive(self) -> None:
        try:
            if (frame := self._incoming.receive(self._pipe)) is not None:
                self._take(frame)
        except (OSError, EOFError):  # as above
            asyncio.get_running_loop().remove_reader(self._pipe)

    def _take(self, frame: memoryview) -> None:
        settle(self._answers.popleft(), answer_in(frame))

    def hang_up(self) -> None:
        """Again, where whoever closed the pool first was cancelled over it: no-op."""
        if self._pipe.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._pipe)
        asyncio.get_running_loop().remove_writer(self._pipe)
        self.let_go()

    def let_go(self) -> None:
        """The child ends of it. For whoever does not listen."""
        self._pipe.close()
        self._lifeline.close()

    async def wait_or_kill(self) -> None:
        try:
            await asyncio.wait_for(self.ended.wait(), GRACE_SECONDS)
        except TimeoutError:
            self.process.kill()
            await self.ended.wait()
        self.process.close()


async def started(preloaded: tuple[str, ...], serve: "Callable[..., None]", *arguments: object) -> Child:
    """A new child. The first one takes as long as its imports, for which a program that ends does not wait."""
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
    let_waiting_threads_sleep()  # the forkserver loads OpenMP, and its children have what it read
    context = multiprocessing.get_context("forkserver")
    os.environ["TRAINHOUSE_FORKSERVER_DIRECTORY"] = multiprocessing.util.get_temp_dir()
    # The first start pays for these imports, the next one forks a process that has them.
    context.set_forkserver_preload([f"{__package__}.forkserver", __name__, *preloaded])
    # Daemonic: at exit multiprocessing terminates it instead of waiting for it.
    process = context.Process(target=_run_child, args=(serve, *arguments), daemon=True)
    # The forkserver, which may be started here.
    with one_arena_for_those_started(), _empty_main(), _signals_blocked():
        process.start()
    return process


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """In this thread, from which the forkserver has it: SIGTERM for good, since its end, of the one that systemd sends
    to all processes of a service, would read as that of all its children; SIGINT until it can end of it without a
    traceback."""
    multiprocessing.resource_tracker.ensure_running()  # the forkserver's start would, and unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_SERVER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _empty_main() -> Iterator[None]:
    """Without it multiprocessing would run this program's main script a second time, in the child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run_child(serve: "Callable[..., None]", pipe: socket.socket, lifeline: socket.socket, *arguments: object) -> None:
    """The child's main function."""
    # What the forkserver has imported stays, in memory that both have as long as no collection touches it.
    gc.freeze()
    gc.enable()
    os.environ.pop("MALLOC_ARENA_MAX", None)  # this process has it; what it starts is not concerned
    ignore_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # what it starts shall hear of it
    if sys.platform == "linux":
        kill_on_hang_up(lifeline, os.getpid())
    threading.Thread(target=_exit_on_hang_up, args=(lifeline,), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        serve(pipe, lifeline, *arguments)
    os._exit(0)


def ignore_signals() -> None:
    """Ctrl-C belongs to the server, and so does SIGTERM, which systemd sends to both."""
    for number in _OF_THE_SERVER:
        signal.signal(number, signal.SIG_IGN)


def kill_on_hang_up(lifeline: socket.socket, process: int) -> None:
    """By the kernel: a thread does not run in a process that is stopped, or in which another one holds the interpreter.

    process: its id, or that of a process group with a minus before it.

    Nothing ever happens on the lifeline but its end, so the signal that tells of what happens may be SIGKILL.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, process)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _exit_on_hang_up(lifeline: socket.socket) -> None:
    # Not recv: while a thread is in that, the kernel sends no signal, and a process may be stopped meanwhile.
    select.select([lifeline], [], [])
    # Not sys.exit: the main thread may be deep in a verb, and tearing down torch at exit can abort.
    os._exit(0)


def _exit_reason(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        hint = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-exit_code).name}{hint}"
    return f"it ended with exit code {exit_code}"
