"""LogitRoom: how many guesses are scored at a time: as many as there is room for their logits, however large the
vocabulary is.

Whole rows, and not tiles of the vocabulary with a running maximum and sum: those would have each product three times,
once for the sums, once for what min(p, q) adds up to, and once for the gradients (docs/performance.md has both).
"""

from dataclasses import dataclass

import torch

_FLOAT32 = 4
_ON_CPU = 64 << 20
# A chunk reads the whole output head: of fewer guesses a GPU would read for longer than it computes.
_ON_GPU = 256 << 20


@dataclass(frozen=True)
class LogitRoom:
    """num_guesses: at most. num_bytes: of a tensor with their logits, at most, where those from one place fit; about
    five such tensors exist at a time."""

    num_guesses: int
    num_bytes: int = _ON_CPU

    @staticmethod
    def on(device: torch.device, num_guesses: int) -> "LogitRoom":
        return LogitRoom(num_guesses, _ON_CPU if device.type == "cpu" else _ON_GPU)

    def rows_of(self, depth: int, num_logits: int) -> int:
        """depth: guesses of a row. num_logits: of a row, in the tensor that has most."""
        return max(1, min(self.num_guesses // depth, self.num_bytes // (_FLOAT32 * num_logits)))
