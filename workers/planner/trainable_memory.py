"""Counts a rank's bytes for what is trained, in the vectors of workers/state/trainable.py. Imports no torch."""

from dataclasses import dataclass

from .workload import Workload

_FLOAT32 = 4

# One byte, and a float32 for each block of 256.
_EIGHT_BIT = 1 + 4 / 256


@dataclass(frozen=True)
class TrainableBytes:
    """Bytes by purpose.

    weights: the fp32 masters. gradients: of a gradient window and of a running operation. optimizer: moments.
    copies: in the base model's dtype, and those of adapters that are stacked for a micro-batch.
    """

    weights: int
    gradients: int
    optimizer: float
    copies: int

    @property
    def total(self) -> int:
        return round(self.weights + self.gradients + self.optimizer + self.copies)

    def times(self, numbers: int) -> "TrainableBytes":
        return TrainableBytes(
            weights=numbers * self.weights,
            gradients=numbers * self.gradients,
            optimizer=round(numbers * self.optimizer),
            copies=numbers * self.copies,
        )


def bytes_per_number(load: Workload) -> TrainableBytes:
    """Returns the bytes for each trained number, on the ranks that have it."""
    cast = load.number_bytes if load.number_bytes < _FLOAT32 else 0
    stacked = load.number_bytes if load.training == "lora" and load.adapter_slots > 1 else 0
    return TrainableBytes(
        weights=_FLOAT32,
        gradients=2 * _FLOAT32,
        optimizer=2 * (_EIGHT_BIT if load.training == "full" and load.optimizer_states == "8bit" else _FLOAT32),
        copies=cast + stacked,
    )
