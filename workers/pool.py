"""The processes: starts the ranks of a group, calls methods on them, notices their death. Knows no verb.

Two pools with the same behaviour: LocalPool (forkserver children of this process, over socket pairs) and RayPool (an
actor per rank in a placement group). Messages are ours in both (see messages.py), so arrays arrive alike.

Ray ends processes that are connected to it: a driver whose head is away for a minute, by _Exit. So this process never
is: each RayPool has a child that is its driver, and a new pool a new one, which finds whatever cluster is there then.
"""

import abc
import asyncio
import contextlib
import fcntl
import gc
import importlib
import logging
import math
import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import secrets
import select
import signal
import socket
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from queue import SimpleQueue
from typing import Any

from ..schemas.errors import OperationError
from .messages import Incoming, Outgoing, Piece, decode, encode

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 5.0
_MOST_WORDS = 4096  # bytes of what a child says beside its answers


@dataclass(frozen=True)
class PoolSpec:
    """The ranks to start: `worker` ("module:Class") is built as `Class(config)` on each of `configs`, one per rank.

    threads: CPU threads of a rank's arithmetic, told to OpenMP by environment; a worker that finds its libraries
        loaded already (the forkserver preloads them) sets the same number itself.
    cpus_per_rank, gpus_per_rank: what a Ray node must have free for a rank; a LocalPool ignores them.
    """

    worker: str
    configs: tuple[object, ...]
    threads: int = 1
    cpus_per_rank: float = 1.0
    gpus_per_rank: float = 0.0


@dataclass(frozen=True)
class PerRank:
    """An argument of `Pool.call` that differs from rank to rank; every other argument goes to all ranks."""

    values: tuple[object, ...]


class WorkerDied(Exception):
    """A rank's process is gone, and with it everything that the group held in memory."""


class NoPlace(ValueError):
    """Nowhere to start the ranks now, though there may be later. The message may be told to all who wait."""


class WorkerError(Exception):
    """A verb failed in a way that its worker did not foresee. `remote_traceback` is for the log, not for the user."""

    def __init__(self, message: str, remote_traceback: str) -> None:
        super().__init__(message, remote_traceback)
        self.message = message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return self.message


class Pool(abc.ABC):
    """The ranks of one group. Belongs to the event loop that starts it.

    death: resolves, with the reason, as soon as any rank is gone; from then on every call raises that reason.
    pids: the ranks' process ids, on their own machines.
    """

    death: "asyncio.Future[WorkerDied]"
    pids: list[int]

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.pids = []
        self._expected: set[asyncio.Future[_Answer]] = set()

    async def start(self, hang_seconds: float = math.inf) -> None:
        """Builds the worker on every rank. hang_seconds: as in `call`.

        Raises ValueError when its constructor raised that or OSError (a bad model, or none), NoPlace, WorkerError for
        other exceptions, WorkerDied.
        """
        self.death = asyncio.get_running_loop().create_future()
        try:
            await self._start_ranks()
            answers = await self._gather([encode(None)] * len(self.spec.configs), "start", hang_seconds)
            self.pids = _raised(answers)
        except BaseException:
            await self.close()
            raise

    async def call(self, method: str, *arguments: object, hang_seconds: float = math.inf) -> list[Any]:
        """The results of `worker.method(*arguments)`, by rank. When they take longer than hang_seconds, with those of
        the calls before, the ranks are killed.

        Raises OperationError and ValueError as the worker raised them, WorkerError for any other exception, and
        WorkerDied at once when a rank dies. Calls that overlap are made in the order in which they began. A caller that
        is cancelled leaves the call running; its result is dropped.
        """
        return _raised(await self.answers(method, *arguments, hang_seconds=hang_seconds))

    async def answers(self, method: str, *arguments: object, hang_seconds: float = math.inf) -> list[Any]:
        """As `call`, with what a rank raised in the place of its result; raises WorkerDied alone."""
        if any(isinstance(each, PerRank) for each in arguments):
            messages = [encode((method, row)) for row in self._by_rank(arguments)]
        else:
            messages = [encode((method, arguments))] * len(self.spec.configs)
        return await self._gather(messages, method, hang_seconds)

    def kill(self, reason: str) -> WorkerDied:
        """All ranks, at once; returns their death."""
        self._died(f"{reason}, so it was killed")
        self._kill_ranks()
        return self.death.result()

    async def close(self) -> None:
        """Ends the ranks. Calls under way raise WorkerDied."""
        self._died("it was stopped")
        await self._stop_ranks()

    @abc.abstractmethod
    async def _start_ranks(self) -> None: ...

    @abc.abstractmethod
    def _send(self, rank: int, message: list[Piece], answer: "asyncio.Future[_Answer]") -> None:
        """Sets `answer` (unless it is done by then) to what the rank answers to the message; None builds the worker."""

    @abc.abstractmethod
    async def _stop_ranks(self) -> None: ...

    @abc.abstractmethod
    def _kill_ranks(self) -> None:
        """Those that do not listen, too; returns at once."""

    def _by_rank(self, arguments: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
        for rank in range(len(self.spec.configs)):
            yield tuple(each.values[rank] if isinstance(each, PerRank) else each for each in arguments)

    async def _gather(self, messages: Sequence[list[Piece]], method: str, hang_seconds: float) -> list[Any]:
        if self.death.done():
            raise self.death.result()
        expected = [self._expect() for _ in messages]
        for rank, message in enumerate(messages):
            self._send(rank, message, expected[rank])
        with self._killed_after(hang_seconds, method):
            await self._all_or_none(expected, method)
            answers = [await answer for answer in expected]
        if self.death.done():
            raise self.death.result()
        for rank, answer in enumerate(answers):
            if answer.error is not None:
                self._log(answer.error, rank, method)
        return [answer.value if answer.error is None else answer.error for answer in answers]

    async def _all_or_none(self, expected: "list[asyncio.Future[_Answer]]", method: str) -> None:
        """When one rank fails, others may wait for it without end: they have little time to answer, or are killed."""
        pending = set(expected) if len(expected) > 1 else set()
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            errors = [answer.result().error for answer in done]
            error = next((error for error in errors if isinstance(error, WorkerError)), None)
            if error is not None and pending:
                _, late = await asyncio.wait(pending, timeout=_GRACE_SECONDS)
                if late:
                    self.kill(f"{method} failed on one of its ranks, the others waited for it: {error}")
                return

    @contextlib.contextmanager
    def _killed_after(self, seconds: float, method: str) -> Iterator[None]:
        """The ranks, unless the block ends before."""
        if seconds == math.inf:
            yield
            return
        reason = f"it hung: {method} had no answer after {seconds:.0f} s"
        timer = asyncio.get_running_loop().call_later(seconds, self.kill, reason)
        try:
            yield
        finally:
            timer.cancel()

    def _expect(self) -> "asyncio.Future[_Answer]":
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._expected.add(answer)
        answer.add_done_callback(self._expected.discard)
        return answer

    def _log(self, error: Exception, rank: int, method: str) -> None:
        if isinstance(error, WorkerError):
            logger.error("rank %d of %s: %s failed\n%s", rank, self.spec.worker, method, error.remote_traceback)

    def _died(self, reason: str) -> None:
        if self.death.done():
            return
        self.death.set_result(WorkerDied(f"the worker died: {reason}"))
        # Of the other ranks, too: one that waits for a dead one in a collective would never answer.
        for answer in tuple(self._expected):
            _settle(answer, _Answer(error=self.death.result()))


def _raised(answers: list[Any]) -> list[Any]:
    """Raises the first error among them."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


@dataclass(frozen=True)
class _Answer:
    value: object = None
    error: Exception | None = None


def _settle(answer: "asyncio.Future[_Answer]", value: _Answer) -> None:
    """One that is done was cancelled with its caller, or knows already of a death."""
    if not answer.done():
        answer.set_result(value)


def _answer_in(frame: memoryview) -> _Answer:
    try:
        answer: Any = decode(frame)
    except Exception as error:  # of a type, say, that this process cannot build: its caller hears of it
        return _Answer(error=error)
    return answer


class _Shell:
    """What stands around a worker in its own process: builds it, calls it, and turns its errors into values."""

    def __init__(self, spec: PoolSpec, rank: int) -> None:
        self._spec = spec
        self._rank = rank
        self._worker: object = None

    def answer(self, frame: memoryview) -> list[Piece]:
        """The message None builds the worker and is answered by the process id."""
        try:
            message: Any = decode(frame)
            return encode(_Answer(self._build() if message is None else self._call(*message)))
        except OperationError as error:
            return encode(_Answer(error=error))
        except ValueError as error:
            return encode(_Answer(error=_plain(error)))
        except Exception as error:
            summary = f"{type(error).__name__}: {error}"
            return encode(_Answer(error=WorkerError(summary, traceback.format_exc())))

    def _build(self) -> int:
        module, _, name = self._spec.worker.partition(":")
        os.environ["OMP_NUM_THREADS"] = str(self._spec.threads)
        _let_waiting_threads_sleep()
        try:
            self._worker = getattr(importlib.import_module(module), name)(self._spec.configs[self._rank])
        except OSError as error:
            raise ValueError(str(error)) from error  # an unreadable model is as good as a bad one
        # What is there now stays: collections of garbage need not look at it again, which takes them long.
        gc.collect()
        gc.freeze()
        return os.getpid()

    def _call(self, method: str, arguments: tuple[object, ...]) -> object:
        return getattr(self._worker, method)(*arguments)


def _plain(error: ValueError) -> ValueError:
    """Subclasses have constructors of their own and may not survive pickling."""
    plain = ValueError(str(error))
    plain.add_note(traceback.format_exc())
    return plain


class _ChildrenPool(Pool):
    """One whose messages go through children of this process, which end when it does, however it ends."""

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec)
        self._children: list[_Child] = []

    async def _start_child(self, serve: "Callable[..., None]", *arguments: object) -> None:
        child = await asyncio.to_thread(_Child, self._preloaded(), serve, *arguments)
        self._children.append(child)
        child.listen()
        asyncio.get_running_loop().add_reader(child.process.sentinel, self._child_ended, child)

    @abc.abstractmethod
    def _preloaded(self) -> tuple[str, ...]:
        """Modules that its children need."""

    async def _stop_ranks(self) -> None:
        for child in self._children:
            child.hang_up()
        await asyncio.gather(*(child.wait_or_kill() for child in self._children))
        self._children = []

    def _kill_ranks(self) -> None:
        for child in self._children:
            child.process.kill()

    def _child_ended(self, child: "_Child") -> None:
        asyncio.get_running_loop().remove_reader(child.process.sentinel)
        child.ended.set()
        self._died(child.last_words() or _exit_reason(child.process.exitcode))


class LocalPool(_ChildrenPool):
    """One forkserver child per rank."""

    async def _start_ranks(self) -> None:
        for rank in range(len(self.spec.configs)):
            await self._start_child(_serve_rank, self.spec, rank)

    def _send(self, rank: int, message: list[Piece], answer: "asyncio.Future[_Answer]") -> None:
        self._children[rank].send(message, answer)

    def _preloaded(self) -> tuple[str, ...]:
        return (self.spec.worker.partition(":")[0],)


class _Child:
    """This side of a child of this process, which answers messages in the order in which they were sent.

    The lifeline carries nothing but a child's last words: its closing tells the child that we are gone.
    """

    def __init__(self, preloaded: tuple[str, ...], serve: "Callable[..., None]", *arguments: object) -> None:
        """serve: called in the child, with its end of the pipe, its lifeline, and the arguments."""
        self._pipe, pipe = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair()
        self._outgoing: deque[Outgoing] = deque()
        self._incoming = Incoming()
        self._answers: deque[asyncio.Future[_Answer]] = deque()
        self.ended = asyncio.Event()
        # At the end of a program that did not close its pool, before multiprocessing waits for its children.
        multiprocessing.util.Finalize(self, self._lifeline.close, exitpriority=0)
        with pipe, lifeline:
            self.process = _start_process(preloaded, serve, pipe, lifeline, *arguments)

    def first_words(self) -> bytes:
        """Waits for them; nothing when the child ended instead. For whoever does not listen."""
        return self._pipe.recv(_MOST_WORDS)

    def last_words(self) -> str:
        """Of a child that ended and told why."""
        with contextlib.suppress(OSError):
            return self._lifeline.recv(_MOST_WORDS, socket.MSG_DONTWAIT).decode()
        return ""

    def listen(self) -> None:
        self._pipe.setblocking(False)
        asyncio.get_running_loop().add_reader(self._pipe, self._receive)

    def send(self, message: list[Piece], answer: "asyncio.Future[_Answer]") -> None:
        self._answers.append(answer)
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
                _settle(self._answers.popleft(), _answer_in(frame))
        except (OSError, EOFError):  # as above
            asyncio.get_running_loop().remove_reader(self._pipe)

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
            await asyncio.wait_for(self.ended.wait(), _GRACE_SECONDS)
        except TimeoutError:
            self.process.kill()
            await self.ended.wait()
        self.process.close()


def _let_waiting_threads_sleep() -> None:
    """OpenMP reads this once, when it is loaded. Spinning threads keep the core from whoever has work for them: beside
    one busy process they made a training step nine times slower, and on quiet cores no faster (docs/performance.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _start_process(preloaded: tuple[str, ...], serve: "Callable[..., None]", *arguments: object) -> Any:
    _let_waiting_threads_sleep()  # the forkserver loads OpenMP, and its children have what it read
    context = multiprocessing.get_context("forkserver")
    os.environ["TRAINHOUSE_FORKSERVER_DIRECTORY"] = multiprocessing.util.get_temp_dir()
    # The first start pays for these imports, the next one forks a process that has them.
    context.set_forkserver_preload([f"{__package__}.forkserver", __name__, *preloaded])
    # Daemonic: at exit multiprocessing terminates it instead of waiting for it.
    process = context.Process(target=_run_child, args=(serve, *arguments), daemon=True)
    with _empty_main(), _sigterm_blocked():
        process.start()
    return process


@contextlib.contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """In this thread, from which the forkserver has it for good: its end, of the SIGTERM that systemd sends to all
    processes of a service, would read as that of all its children."""
    multiprocessing.resource_tracker.ensure_running()  # the forkserver's start would, and unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
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
    _ignore_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # what it starts shall hear of it
    if sys.platform == "linux":
        _kill_on_hang_up(lifeline, os.getpid())
    threading.Thread(target=_exit_on_hang_up, args=(lifeline,), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        serve(pipe, lifeline, *arguments)
    os._exit(0)


def _ignore_signals() -> None:
    """Ctrl-C belongs to the server, and so does SIGTERM, which systemd sends to both."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _serve_rank(pipe: socket.socket, _: socket.socket, spec: PoolSpec, rank: int) -> None:
    shell, incoming = _Shell(spec, rank), Incoming()
    while (frame := incoming.receive(pipe)) is not None:
        Outgoing(shell.answer(frame)).send(pipe)


def _kill_on_hang_up(lifeline: socket.socket, process: int) -> None:
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


class RayCluster:
    """A Ray cluster on which RayPools have their actors, between `connect` and `disconnect`.

    address: of an existing one ("auto", "host:6379", "ray://..."); None starts a small one on this machine, and another
    one when a process of it ends.
    """

    def __init__(self, address: str | None = None, object_store_bytes: int = 256 << 20) -> None:
        self.address = address or ""
        self.environment = _ray_environment(address)
        self._is_ours = address is None
        self._object_store_bytes = object_store_bytes
        self._holder: _Child | None = None
        self._keeper: threading.Thread | None = None
        self._stopping = threading.Event()

    async def connect(self, num_cpus: float) -> None:
        """num_cpus: what a cluster of our own must offer. Raises ValueError when that does not start."""
        if self._is_ours:
            await asyncio.to_thread(self._start, math.ceil(num_cpus))
            self._keeper = threading.Thread(target=self._keep, args=(math.ceil(num_cpus),), daemon=True)
            self._keeper.start()

    async def disconnect(self) -> None:
        if self._keeper is not None and self._holder is not None:
            self._stopping.set()
            self._holder.let_go()
            await asyncio.to_thread(self._keeper.join)

    def _start(self, num_cpus: int) -> None:
        directory = multiprocessing.util.get_temp_dir()
        self._holder = _Child((), _hold_cluster, self.environment, num_cpus, self._object_store_bytes, directory)
        self.address = self._holder.first_words().decode()
        if not self.address:
            raise ValueError("no Ray cluster could be started on this machine: the log has Ray's reason")

    def _keep(self, num_cpus: int) -> None:
        while True:
            assert self._holder is not None, "started before this thread"
            self._holder.process.join()
            with contextlib.suppress(ProcessLookupError):  # none of them outlived the holder
                os.killpg(self._holder.process.pid, signal.SIGKILL)
            self._holder.let_go()
            if self._stopping.wait(1):
                return
            logger.error("a process of the Ray cluster on this machine ended: another cluster is started")
            with contextlib.suppress(ValueError):  # its end is waited for above
                self._start(num_cpus)
            if self._stopping.is_set():  # `disconnect` has let go of the one before
                self._holder.let_go()


class RayPool(_ChildrenPool):
    """One actor per rank, in a placement group of its own, on a cluster that is connected as the pool starts.

    Ray ends the actors when their driver, a child of this process, is gone; also those that do not listen.
    """

    def __init__(self, spec: PoolSpec, cluster: RayCluster, placement_timeout_seconds: float = 60.0) -> None:
        super().__init__(spec)
        self._cluster = cluster
        self._placement_timeout_seconds = placement_timeout_seconds

    async def _start_ranks(self) -> None:
        drive = _Drive(self.spec, self._cluster.address, self._cluster.environment, self._placement_timeout_seconds)
        await self._start_child(_drive_ray, drive)

    def _send(self, rank: int, message: list[Piece], answer: "asyncio.Future[_Answer]") -> None:
        """The driver takes messages for ranks in turn, as they are sent."""
        self._children[0].send(message, answer)

    def _preloaded(self) -> tuple[str, ...]:
        return ()


def _ray_environment(address: str | None) -> dict[str, str]:
    """Of the processes that import Ray, which reads it then."""
    environment = {"RAY_USAGE_STATS_ENABLED": "0"}
    if address is None:
        # Otherwise Ray leaves one in the user's home.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    if address is None or address.startswith("127."):
        # An open Ray port runs anyone's code, so a cluster of our own stays on loopback (Ray's switch for it is named
        # after the systems on which it is the default).
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return environment


def _hold_cluster(
    pipe: socket.socket,
    lifeline: socket.socket,
    environment: dict[str, str],
    num_cpus: int,
    object_store_bytes: int,
    directory: str,
) -> None:
    """Tells the address. The cluster ends with the first of its processes that ends.

    Ray's own way, processes that end with those that started them, leaves its agents for a minute, in which they want
    to tell a head that is gone that their raylet is. So all that it starts here is one process group, and ends as one;
    but for the actors, each a group of its own, which end without their raylet.
    """
    os.setpgid(0, 0)
    if sys.platform == "linux":
        _kill_on_hang_up(lifeline, -os.getpid())
    os.environ.update(environment)
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=object_store_bytes,
        _temp_dir=directory,
    )
    _ignore_signals()
    pipe.sendall(ray.get_runtime_context().gcs_address.encode())
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)


@dataclass(frozen=True)
class _Drive:
    """What a driver has to do: `spec` on the cluster at `address`."""

    spec: PoolSpec
    address: str
    environment: dict[str, str]
    placement_timeout_seconds: float


def _drive_ray(pipe: socket.socket, lifeline: socket.socket, drive: _Drive) -> None:
    """The driver: hands messages to the ranks in turn, and answers in that order. It ends when it loses one of them."""
    os.environ.update(drive.environment)
    try:
        _connect(drive.address)
        actors = _start_actors(drive.spec, drive.placement_timeout_seconds)
    except ValueError as error:
        _refuse(pipe, error)
        return
    watches = [actor.wait_forever.options(concurrency_group="watch").remote() for actor in actors]
    threading.Thread(target=_watch, args=(watches, lifeline), daemon=True).start()
    answers: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_send_answers, args=(answers, pipe), daemon=True).start()
    incoming = Incoming()
    for actor in cycle(actors):
        answers.put(actor.answer_frame.remote(bytes(incoming.receive(pipe) or b"")))


def _refuse(pipe: socket.socket, error: ValueError) -> None:
    incoming = Incoming()
    while incoming.receive(pipe) is not None:
        Outgoing(encode(_Answer(error=error))).send(pipe)


def _watch(watches: list[Any], lifeline: socket.socket) -> None:
    import ray

    ray.wait(watches)
    lifeline.sendall(b"its Ray actor is gone: it ended unexpectedly (out of memory?), or its node did")
    os._exit(1)


def _send_answers(answers: "SimpleQueue[Any]", pipe: socket.socket) -> None:
    import ray
    from ray.exceptions import RayActorError

    while True:
        try:
            frame: list[Piece] = [ray.get(answers.get())]
        except RayActorError:  # the watch tells
            return
        except Exception as error:  # Ray lost the message or the answer
            frame = encode(_Answer(error=WorkerError(f"{type(error).__name__}: {error}", traceback.format_exc())))
        Outgoing(frame).send(pipe)


def _connect(address: str) -> None:
    import ray

    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise NoPlace(f"the Ray cluster at {address} cannot be reached: {error}") from error
    _ignore_signals()  # Ray has a handler of its own


def _knock(address: str) -> None:
    """Raises OSError where nobody listens, for which Ray would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()


def _start_actors(spec: PoolSpec, placement_timeout_seconds: float) -> list[Any]:
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # Ray takes no empty bundle.
    bundle = {"CPU": spec.cpus_per_rank or 0.001}
    if spec.gpus_per_rank:
        bundle["GPU"] = spec.gpus_per_rank
    placement = placement_group([bundle] * len(spec.configs), strategy="PACK")
    if not placement.wait(placement_timeout_seconds):
        raise NoPlace(
            f"the Ray cluster has no room for {len(spec.configs)} ranks of {bundle} each "
            f"(waited {placement_timeout_seconds:.0f} s; free: {ray.available_resources()}): "
            "add nodes or ask for less"
        )
    decorate: Any = ray.remote
    # A second thread, in which `wait_forever` stays for as long as the process lives.
    actor_class = decorate(concurrency_groups={"watch": 1})(_RayShell)
    return [
        actor_class.options(
            num_cpus=spec.cpus_per_rank,
            num_gpus=spec.gpus_per_rank,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank),
        ).remote(spec, rank)
        for rank in range(len(spec.configs))
    ]


class _RayShell(_Shell):
    def answer_frame(self, frame: bytes) -> bytes:
        # Ray's memory is shared and read-only; what arrives is to be written to.
        return b"".join(self.answer(memoryview(bytearray(frame))))

    def wait_forever(self) -> None:
        threading.Event().wait()
