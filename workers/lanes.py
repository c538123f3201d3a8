"""Lanes: parts of a pass side by side on the CPU, each on a thread of its own with its share of the cores.

Two halves that run beside each other end sooner than two threads that meet after every product of the whole: nobody
waits for the other, neither for a core that somebody else took nor while Python finds the next product.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

# Python runs in one thread at a time: more lanes would wait for it.
MOST_LANES = 4

_own = threading.local()


def current_lane() -> int:
    """The number of the lane that this thread runs; 0 outside of lanes, too."""
    return getattr(_own, "lane", 0)


class Lanes:
    """num_lanes: the most that run side by side; 1 on other devices than the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._num_threads = torch.get_num_threads()
        self.num_lanes = min(self._num_threads, MOST_LANES) if device.type == "cpu" else 1
        self._others = ThreadPoolExecutor(max(1, self.num_lanes - 1), thread_name_prefix="lane")

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Each in the lane of its place, the first on this thread.

        Returns when all have ended; raises what the first of those that failed raised.
        """
        if len(works) == 1:
            works[0]()
            return
        num_threads = self._num_threads // len(works)
        others = [self._others.submit(_run_in, lane, num_threads, works[lane]) for lane in range(1, len(works))]
        torch.set_num_threads(num_threads)
        try:
            works[0]()
        finally:
            errors = [other.exception() for other in others]
            torch.set_num_threads(self._num_threads)
        for error in errors:
            if error is not None:
                raise error


def _run_in(lane: int, num_threads: int, work: Callable[[], None]) -> None:
    _own.lane = lane
    # Each thread has a number of its own for torch's loops; that of the library for products is common to all.
    torch.set_num_threads(num_threads)
    work()
