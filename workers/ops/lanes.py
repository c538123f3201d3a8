"""Lanes: parts of a pass side by side on the CPU, each on a thread of its own with its share of the cores.

Two halves that run beside each other end sooner than two threads that meet after every product of the whole: nobody
waits for the other, neither for a core that somebody else took nor while Python finds the next product.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

# Python runs in one thread at a time: more lanes would wait for it.
_MOST_LANES = 4

_own = threading.local()


def current_lane() -> int:
    """The number of the lane that this thread runs; 0 outside of lanes, too."""
    return getattr(_own, "lane", 0)


class Lanes:
    """num_lanes: the most that run side by side; 1 on other devices than the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._num_threads = torch.get_num_threads()
        self.num_lanes = min(self._num_threads, _MOST_LANES) if device.type == "cpu" else 1
        self._others = _started(self.num_lanes - 1)

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Each in the lane of its place, the first on this thread.

        Returns when all have ended; raises what the first of those that failed raised.
        """
        if len(works) == 1:
            works[0]()
            return
        shares = [self._num_threads // len(works) + (i < self._num_threads % len(works)) for i in range(len(works))]
        others: list[Future[None]] = []
        try:
            for lane in range(1, len(works)):
                others.append(self._others.submit(_run_in, lane, shares[lane], works[lane]))
            torch.set_num_threads(shares[0])
            works[0]()
        finally:
            wait(others)
            torch.set_num_threads(self._num_threads)
        _raise_first(others)


def _started(num_threads: int) -> ThreadPoolExecutor:
    """All of its threads are there: one that could not be started later would leave its work for another pass."""
    # Torch gives a thread that asks for the first time a number of its own, which must not be after we have set one.
    executor = ThreadPoolExecutor(max(1, num_threads), "lane", initializer=torch.get_num_threads)
    all_there = threading.Barrier(num_threads + 1)
    for _ in range(num_threads):
        executor.submit(all_there.wait)
    all_there.wait()
    return executor


def _run_in(lane: int, num_threads: int, work: Callable[[], None]) -> None:
    _own.lane = lane
    torch.set_num_threads(num_threads)
    work()


def _raise_first(others: list[Future[None]]) -> None:
    """Leaves no cycle of an error and the frame in its traceback, which would hold the tensors of the lane."""
    try:
        while others:
            others.pop(0).result()
    finally:
        others.clear()
