"""Decides how many threads share the work of a forward pass on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# A product of more multiplications than this is worth waking up the other threads for, in a pass that runs on one.
WORTH_ALL = 4_000_000

# The longest that one thread may work on a layer alone, in microseconds.
_MAX_ALONE = 2500.0

# About the time a core takes to read a number from memory, and the number of tokens up to which a product takes no
# longer than that.
_MICROSECONDS_PER_NUMBER, _TOKENS_PER_READING = 4e-4, 20


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
