"""Threads: how many of them share the products of a forward pass on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..model import BaseModel

# What a product of one layer must take, in microseconds, for another thread to be worth waking up.
_WORTH_A_THREAD = 150.0

# About what a core needs to read a weight from memory, and for how many tokens the product takes no longer than that.
_MICROSECONDS_PER_WEIGHT, _TOKENS_PER_READING = 4e-4, 20


class Threads:
    """A step of decoding is many short products: with several threads each waits for the others to wake up."""

    def __init__(self, base: BaseModel) -> None:
        linears = [module.weight.numel() for module in base.trunk.modules() if isinstance(module, nn.Linear)]
        self._most = torch.get_num_threads() if base.device.type == "cpu" else 1
        self._weights_per_product = sum(linears) / max(1, len(linears))

    def set_for(self, num_tokens: int) -> None:
        """Of a row of so many tokens."""
        if self._most > 1:
            torch.set_num_threads(self.number_for(num_tokens))

    def number_for(self, num_tokens: int) -> int:
        microseconds = self._weights_per_product * _MICROSECONDS_PER_WEIGHT * max(1, num_tokens / _TOKENS_PER_READING)
        return min(self._most, max(1, int(microseconds / _WORTH_A_THREAD)))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Afterwards there are as many threads as before."""
        try:
            yield
        finally:
            if self._most > 1:
                torch.set_num_threads(self._most)
