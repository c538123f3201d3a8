"""Functions of the tokens of a sequence in order, for which a state of fixed size stands for the earlier tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .attention import AttendingPacking, Packing


@dataclass(frozen=True)
class StateKind:
    """A recurrent state of a layer, as a cache stores it; shape is that of one sequence's state."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Recurrence(Protocol):
    """A function of the tokens of a sequence in order; its state stands for the earlier tokens."""

    @property
    def state(self) -> StateKind: ...

    def scan(self, inputs: Sequence[Tensor], packing: Packing, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Computes a packed row. Its output has a gradient if gradients are enabled; then there is no `initial`.

        Args:
            inputs: each [tokens, ...].
            initial: the states before the row, [sequences, *shape]; None for zeros.
        Returns:
            the output [tokens, ...], and the states after the row, [sequences, *shape], without gradients.
        """
        ...

    def step(self, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor:
        """Computes one more token of each of n sequences, without gradients. Returns the output [n, ...].

        Args:
            inputs: each [n, ...].
            states: [num_slots, *shape], updated in place.
            slots: the slot of each sequence, int64 [n], all different.
        """
        ...


def recur(op: Recurrence, inputs: Sequence[Tensor], packing: Packing | AttendingPacking) -> Tensor:
    """Returns the output of a recurrence over a packed row, [tokens, ...]; inputs are each [tokens, ...]."""
    if isinstance(packing, Packing):
        return op.scan(inputs, packing)[0]
    return packing.recur(op, inputs)
