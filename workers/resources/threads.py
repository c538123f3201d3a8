"""The threads of passes on the CPU: how many share an operation, and lanes.

Lanes are parts of a pass that run in parallel, each in a thread with its share of the cores. Two halves in parallel
finish sooner than two threads that synchronize after every product of the whole: neither waits for the other, whether
for a core that another process took or while Python prepares the next product.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

# A product of more multiplications than this is worth waking up the other threads for, in a pass that runs on one.
WORTH_ALL = 4_000_000

# The longest that one thread may work on a layer alone, in microseconds.
_MAX_ALONE = 2500.0

# About the time a core takes to read a number from memory, and the number of tokens up to which a product takes no
# longer than that.
_MICROSECONDS_PER_NUMBER, _TOKENS_PER_READING = 4e-4, 20

# Python runs one thread at a time, so more lanes would wait for the interpreter.
_MAX_LANES = 4

Item = TypeVar("Item")

_own = threading.local()


class ThreadCount:
    """Sets the number of threads of a pass.

    A decode step is hundreds of short operations; if threads shared each one, they would mostly wait for each other to
    wake up. alone: whether one thread now does everything but large products, which run inside `all_threads`. most: the
    number of threads available.
    """

    def __init__(self, device: torch.device) -> None:
        self.alone = False
        self.most = torch.get_num_threads() if device.type == "cpu" else 1

    def set_for(self, num_weights: float, num_tokens: int, num_cached: int) -> None:
        """Sets the number of threads for a pass.

        Args:
            num_weights: of a product.
            num_tokens: of the packed row.
            num_cached: numbers that a layer reads from the KV cache.
        """
        if self.most > 1:
            readings = num_weights * max(1, num_tokens / _TOKENS_PER_READING) + num_cached
            self.alone = readings * _MICROSECONDS_PER_NUMBER < _MAX_ALONE
            torch.set_num_threads(1 if self.alone else self.most)

    @contextmanager
    def all_threads(self) -> Iterator[None]:
        """Uses all threads while inside, in a pass that otherwise runs on one."""
        torch.set_num_threads(self.most)
        try:
            yield
        finally:
            torch.set_num_threads(1)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the number of threads on exit."""
        try:
            yield
        finally:
            self.alone = False
            if self.most > 1:
                torch.set_num_threads(self.most)


def current_lane() -> int:
    """Returns the number of the lane that this thread runs; 0 outside of lanes too."""
    return getattr(_own, "lane", 0)


def lane_threads() -> int | None:
    """Returns the threads that the lane on this thread may use; None outside of several lanes."""
    return getattr(_own, "num_threads", None)


class Lanes:
    """Runs a function over lanes of items in parallel, at most `num_lanes` of them; 1 on devices other than the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._num_threads = torch.get_num_threads()
        self.num_lanes = min(self._num_threads, _MAX_LANES) if device.type == "cpu" else 1
        self._others = _started_executor(self.num_lanes - 1)

    def run(self, function: Callable[[Item], None], lanes: Sequence[Iterable[Item]]) -> None:
        """Calls the function with each lane's items in order, those of the first lane on this thread.

        Returns when all have finished. Raises the error of the first lane that failed.
        """
        if len(lanes) == 1:
            for item in lanes[0]:
                function(item)
            return
        shares = [self._num_threads // len(lanes) + (i < self._num_threads % len(lanes)) for i in range(len(lanes))]
        others: list[Future[None]] = []
        try:
            for lane in range(1, len(lanes)):
                others.append(self._others.submit(_run_in, lane, shares[lane], function, lanes[lane]))
            _run_in(0, shares[0], function, lanes[0])
        finally:
            wait(others)
            torch.set_num_threads(self._num_threads)
        _raise_first(others)


def _started_executor(num_threads: int) -> ThreadPoolExecutor:
    """Returns an executor whose threads have all started.

    If a thread could not be started later, its function would stay in the queue until another pass.
    """
    # Torch sets a thread's default number of threads on the first query, which must not happen after we have set one.
    executor = ThreadPoolExecutor(max(1, num_threads), "lane", initializer=torch.get_num_threads)
    all_there = threading.Barrier(num_threads + 1)
    for _ in range(num_threads):
        executor.submit(all_there.wait)
    all_there.wait()
    return executor


def _run_in(lane: int, num_threads: int, function: Callable[[Item], None], items: Iterable[Item]) -> None:
    _own.lane, _own.num_threads = lane, num_threads
    torch.set_num_threads(num_threads)
    try:
        for item in items:
            function(item)
    finally:
        _own.num_threads = None


def _raise_first(others: list[Future[None]]) -> None:
    """Raises the first error.

    It breaks the cycle between the error and the frame in its traceback, which would hold the lane's tensors.
    """
    try:
        while others:
            others.pop(0).result()
    finally:
        others.clear()
