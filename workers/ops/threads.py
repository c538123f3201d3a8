"""Threads: how many of them share the work of a forward pass on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Multiplications of one product that are worth waking up the other threads for, in a pass that runs on one.
_WORTH_ALL = 4_000_000

# What one thread does in a layer while the others sleep: that many microseconds at the most.
_MOST_ALONE = 2500.0

# About what a core needs to read a number from memory, and for how many tokens a product takes no longer than that.
_MICROSECONDS_PER_NUMBER, _TOKENS_PER_READING = 4e-4, 20


class Threads:
    """A step of decoding is hundreds of short operations: shared by threads, each waits for the others to wake up.

    alone: whether one thread does everything but what is large now. most: how many there are.
    """

    def __init__(self, device: torch.device) -> None:
        self.alone = False
        self.most = torch.get_num_threads() if device.type == "cpu" else 1

    def set_for(self, num_weights: float, num_tokens: int, num_cached: int) -> None:
        """Of a pass. num_weights: of a product; num_tokens: of the packed row; num_cached: numbers that a layer reads
        from the key/value cache."""
        if self.most > 1:
            readings = num_weights * max(1, num_tokens / _TOKENS_PER_READING) + num_cached
            self.alone = readings * _MICROSECONDS_PER_NUMBER < _MOST_ALONE
            torch.set_num_threads(1 if self.alone else self.most)

    def are_worth(self, num_multiplications: int) -> bool:
        """Whether a product is to be made `together`."""
        return self.alone and num_multiplications > _WORTH_ALL

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, all threads work, in a pass that otherwise runs on one."""
        torch.set_num_threads(self.most)
        try:
            yield
        finally:
            torch.set_num_threads(1)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Afterwards there are as many threads as before."""
        try:
            yield
        finally:
            self.alone = False
            if self.most > 1:
                torch.set_num_threads(self.most)
