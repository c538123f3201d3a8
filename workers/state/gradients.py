"""The gradients of a model's operations: `scratch` while one runs, and their sum since the last step, `accumulator`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..resources.threads import current_lane
from .vectors import StateVectors, ViewedVector
from .zero import ZeroShards


@dataclass
class GradientWindow:
    """Sums over the operations accumulated since the last step.

    num_tokens: tokens that carry a loss. weight_sum: their summed weights. losses: loss sums by name. refused: why an
    operation of the window contributed nothing, None when all did.
    """

    num_operations: int = 0
    num_tokens: int = 0
    weight_sum: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    refused: str | None = None


class Gradients:
    """Adds an operation's gradients to scratch, and from there, if it succeeds, to the accumulator: float32 [P], or
    parts of these.

    window: what the accumulator holds.
    """

    def __init__(self, vectors: StateVectors, size: int, zero: ZeroShards | None) -> None:
        """Starts without gradients of `size` numbers.

        Args:
            zero: shards the accumulator over ranks, and scratch if they sum gradients in the backward pass.
        """
        self.window = GradientWindow()
        self._vectors, self._zero = vectors, zero
        self._size = size if zero is None else zero.size
        self._scratch_size = self._size if zero is not None and zero.sums_in_backward else size
        self._operation_is_open = False
        # The first lane uses scratch.
        self._other_lanes: dict[int, ViewedVector] = {}

    @property
    def scratch(self) -> Tensor:
        """The gradients of the running operation; meaningless between operations."""
        return (self._vectors.get("scratch") or self._allocate("scratch", self._scratch_size)).tensor

    @property
    def accumulator(self) -> Tensor:
        """The summed gradients of the window, or this rank's part of them."""
        if (vector := self._vectors.get("accumulator")) is None:
            vector = self._allocate("accumulator", self._size)
        return vector.tensor

    @property
    def is_empty(self) -> bool:
        """True if there are no gradients, neither of a window nor of a running operation."""
        return not (self.window.num_operations or self._operation_is_open)

    def live_vectors(self) -> tuple[str, ...]:
        """Returns the names of the vectors whose content matters."""
        window = ("accumulator",) if self.window.num_operations else ()
        return (*window, "scratch") if self._operation_is_open else window

    def of_lane(self) -> ViewedVector:
        """Returns the vector that collects the gradients of this thread's lane."""
        own = self._other_lanes.get(current_lane()) if self._other_lanes else None
        return own or self._vectors.get("scratch") or self._allocate("scratch", self._scratch_size)

    def begin_operation(self, lanes: Sequence[int] = ()) -> None:
        """Zeroes scratch, and keeps it until the operation is committed or abandoned.

        Args:
            lanes: those in which gradients are computed; each but the first has a separate vector until `join_lanes`.
        """
        self._operation_is_open = True
        if (vector := self._vectors.get("scratch")) is not None:
            vector.tensor.zero_()
        else:
            vector = self._allocate("scratch", self._scratch_size)
        self._other_lanes = {lane: self._vectors.viewed(torch.zeros_like(vector.tensor)) for lane in lanes[1:]}

    def join_lanes(self) -> None:
        """Adds the gradients of all lanes to scratch."""
        for vector in self._other_lanes.values():
            self.scratch.add_(vector.tensor)
        self._other_lanes = {}

    def are_finite(self) -> bool:
        """True if the running operation's gradients are finite."""
        low, high = torch.aminmax(self.scratch)
        return bool(torch.isfinite(low) & torch.isfinite(high))

    def commit(self, num_tokens: int = 0, weight_sum: float = 0.0, losses: Mapping[str, float] | None = None) -> None:
        """Adds a successful operation's gradients to the window.

        The window's first gradients become the accumulator without a copy. If ranks keep parts of it, they all commit
        together, and gradients that are not yet summed over them are.
        """
        self._operation_is_open = False
        if self._zero is not None:
            self._commit_part(self._zero)
        elif self.window.num_operations:
            self.accumulator.add_(self.scratch)
        else:
            self._vectors.rename("scratch", "accumulator")
        window = self.window
        window.num_operations += 1
        window.num_tokens += num_tokens
        window.weight_sum += weight_sum
        for name, value in (losses or {}).items():
            window.losses[name] = window.losses.get(name, 0.0) + value

    def _commit_part(self, zero: ZeroShards) -> None:
        scratch = self._vectors.take("scratch")
        part = zero.finish_sum(scratch) if zero.sums_in_backward else zero.reduce_scatter(scratch)
        if self.window.num_operations:
            self.accumulator.add_(part)
        else:
            self._vectors.set("accumulator", part)

    def abandon_operation(self) -> None:
        """Discards the gradients of a failed operation."""
        self._operation_is_open = False
        self._other_lanes = {}
        if self._zero is not None:
            self._vectors.discard("scratch")

    def clear_window(self) -> None:
        """Discards the accumulated gradients; their memory becomes the next operation's scratch."""
        if self._zero is None and not self._operation_is_open and self._vectors.is_on_device("accumulator"):
            self._vectors.rename("accumulator", "scratch")
        self._vectors.discard("accumulator")
        self.window = GradientWindow()

    def _allocate(self, name: str, size: int) -> ViewedVector:
        return self._vectors.set(name, torch.zeros(size, device=self._vectors.weights.device))
