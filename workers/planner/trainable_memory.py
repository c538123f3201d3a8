"""Counts what is trained on a rank, in the vectors of workers/state/trainable.py: numbers, and bytes of each.

Imports no torch.
"""

from collections import Counter
from dataclasses import dataclass

from ..protocol.parallel_spec import ParallelSpec
from ..shapes.layouts.parameters import parameters
from ..shapes.model_shape import ModelShape
from ..shapes.parts import Layer
from .workload import Workload

# In flat vectors each matrix starts at a multiple of this many numbers.
_ALIGNMENT = 16

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


def adapter_size(shape: ModelShape, spec: ParallelSpec, lora_rank: int) -> int:
    """Returns the size of one flat vector of an adapter: this rank's parts of its matrices."""
    return sum(number * _adapter_size(layer, spec, lora_rank) for layer, number in Counter(shape.layers).items())


def _adapter_size(layer: Layer, spec: ParallelSpec, lora_rank: int) -> int:
    pairs = (pair for part in layer.parts for pair in part.adapter_pairs(spec))
    return sum(aligned(lora_rank * features) for pair in pairs for features in pair)


def full_size(shape: ModelShape, spec: ParallelSpec) -> int:
    """Returns the size of one flat vector of a fully fine-tuned model: what a rank keeps of each parameter."""
    return sum(each.count * aligned(each.kept // each.count) for each in parameters(shape, spec))


def value_head_size(shape: ModelShape) -> int:
    """Returns the size of a critic's head, its weight and its bias, in a flat vector."""
    return aligned(shape.hidden) + aligned(1)


def aligned(size: int) -> int:
    """Returns the numbers that a matrix of this size takes in a flat vector."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
