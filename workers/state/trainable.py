"""The trainable state of a run in flat float32 vectors, and its gradients.

Work on the whole state (clipping, AdamW, a snapshot, offloading) is one operation on its vectors. Gradients are added
to `scratch` while an operation runs, and from there to the `accumulator`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ...schemas.models import TrainingConfig
from ..ops.lanes import current_lane
from ..parallel.mesh import Mesh
from .flat_params import FlatLayout
from .moments import MOMENTS, MomentFormat
from .program import Program
from .zero import ZeroShards

# The place of a learner's vectors. On a CPU the device and the host are the same memory.
Place = Literal["device", "host", "disk"]

# Makes the views of a vector [P].
Arrange = Callable[[Tensor], Any]

SEED_MASK = (1 << 64) - 1

# The optimizer's vectors, and with the weights all trained ones; the other vectors are gradients.
MOMENT_VECTORS = ("exp_avg", "exp_avg_sq")
TRAINED_VECTORS = ("weights", *MOMENT_VECTORS)

# The vectors needed by a forward pass, sampling or a copy; by a backward pass; and by a step, which needs all.
FORWARD_VECTORS: frozenset[str] = frozenset({"weights"})
BACKWARD_VECTORS = FORWARD_VECTORS | {"scratch", "accumulator"}
STEP_VECTORS = BACKWARD_VECTORS.union(MOMENT_VECTORS)


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

    def add(self, num_tokens: int, weight_sum: float, losses: Mapping[str, float]) -> None:
        self.num_operations += 1
        self.num_tokens += num_tokens
        self.weight_sum += weight_sum
        for name, value in losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + value


class ViewedVector:
    """A vector [P] and its views, which `arrange` makes at first use."""

    def __init__(self, tensor: Tensor, arrange: Arrange) -> None:
        self.tensor = tensor
        self._arrange = arrange

    @cached_property
    def views(self) -> Any:
        return self._arrange(self.tensor)


class Trainable(ABC):
    """Holds a run's weights, and from first use scratch, accumulator, exp_avg and exp_avg_sq: float32 [P].

    The vectors are available only while the learner is on the device (see Residency), and only those that were
    requested. They are other tensors after each move, so hold the learner and not its tensors.

    training, program: which parts of the model are trained, and the kind of model. window: what the accumulator holds.
    num_steps: optimizer steps that exp_avg has seen. place: where the vectors are. base_name: the base model's name in
    files; None for the worker's name of it.
    """

    training: TrainingConfig
    base_name: str | None = None

    # Models next to each other in a micro-batch run faster if they agree in this: the adapted layers, and the rank.
    batching_key: tuple[tuple[bool, ...], int] = (), 0

    # The storage format of exp_avg and exp_avg_sq.
    moments: MomentFormat = MOMENTS["float32"]

    # The mesh of the ranks that have parts of it; None for the base model's.
    mesh: Mesh | None = None

    # Shards accumulator, exp_avg and exp_avg_sq over ranks; None if each rank keeps all of them.
    zero: ZeroShards | None = None

    def __init__(
        self, layout: FlatLayout, device: torch.device, dtype: torch.dtype, program: Program, arrange: Arrange
    ) -> None:
        """Creates a learner with zero weights on the device.

        Args:
            dtype: of products with the weights.
            arrange: makes the views of a vector that this kind of model needs.
        """
        self.layout, self.program = layout, program
        self.place: Place = "device"
        self.window = GradientWindow()
        self.num_steps = 0
        self._arrange, self._dtype = arrange, dtype
        self._cast: _Cast | None = None
        # Vectors that stayed in host memory when the learner was moved to the device.
        self._parked: dict[str, Tensor] = {}
        self._vectors = {"weights": self._viewed(torch.zeros(layout.size, device=device))}
        self._operation_open = False
        self._lane_scratch: dict[int, ViewedVector] = {}
        self._earlier_changes = 0

    @property
    def trunk_model(self) -> "Trainable | None":
        """The learner whose weights the trunk uses when this one runs; None for the base's own weights."""
        return self

    @property
    def missing_state(self) -> str | None:
        """The state that is missing for scoring anything with it, in words; None if complete."""
        return None

    def can_copy_weights_from(self, other: "Trainable") -> bool:
        """True if the other's weights can be copied into this one's."""
        return self.training == other.training and self.program is other.program

    @property
    def num_parameters(self) -> int:
        """Trained parameters on all ranks together."""
        return self.layout.num_weights

    @property
    def vector_size(self) -> int:
        """P: the parameters that this rank has, and the gaps between them."""
        return self.layout.size

    @property
    def local_weights(self) -> Tensor:
        """A view of the weights that this rank steps."""
        return self.weights if self.zero is None else self.weights[self.zero.own_range]

    @property
    def num_bytes(self) -> int:
        """Bytes of all vectors in memory, on the device or the host."""
        own = sum(vector.tensor.nbytes for vector in (*self._vectors.values(), *self._lane_scratch.values()))
        return own + self.num_parked_bytes + (self._cast.num_bytes if self._cast else 0)

    @property
    def num_parked_bytes(self) -> int:
        """Bytes of the vectors that are in host memory while the learner is on the device."""
        return sum(vector.nbytes for vector in self._parked.values())

    def is_on_device(self, name: str) -> bool:
        """True if this vector is on the device."""
        return self.place == "device" and name in self._vectors

    def has_parked(self, wanted: frozenset[str]) -> bool:
        """True if any of these vectors is in host memory while the learner is on the device."""
        return not wanted.isdisjoint(self._parked)

    @property
    def weights(self) -> Tensor:
        return self._vector("weights").tensor

    @property
    def scratch(self) -> Tensor:
        """The gradients of the running operation; meaningless between operations."""
        return self._vector("scratch").tensor

    @property
    def accumulator(self) -> Tensor:
        return self._vector("accumulator").tensor

    @property
    def exp_avg(self) -> Tensor:
        """The first moment, in the format of `moments`, like exp_avg_sq."""
        return self._vector("exp_avg").tensor

    @property
    def exp_avg_sq(self) -> Tensor:
        return self._vector("exp_avg_sq").tensor

    @property
    def has_moments(self) -> bool:
        """True if exp_avg and exp_avg_sq are allocated; otherwise they are zeros."""
        return "exp_avg" in self._vectors or "exp_avg" in self._parked

    def _vector(self, name: str) -> ViewedVector:
        assert self.place == "device", f"the model is on {self.place}: enter ModelRegistry.resident first"
        assert name not in self._parked, f"{name} is still on the host: enter ModelRegistry.resident with it"
        vector = self._vectors.get(name)
        if vector is None:
            weights = self._vectors["weights"].tensor if name == "scratch" else self.local_weights
            new = self.moments.zeros(weights) if name in MOMENT_VECTORS else torch.zeros_like(weights)
            vector = self._vectors[name] = self._viewed(new)
        return vector

    @abstractmethod
    def initialize(self) -> None:
        """Draws the weights of a new run from its seed, of which 64 bits count."""

    def tensor(self, key: Hashable) -> Tensor:
        """Returns a float32 view of a matrix of the weights."""
        return self.layout.view(self.weights, key)

    def gradient(self, key: Hashable) -> Tensor:
        """Returns the view that collects the gradient of `tensor` in this thread's lane."""
        return self.layout.view(self._gradients().tensor, key)

    def weight_views(self) -> Any:
        """Returns the weights' views in the dtype of products. If that needs a copy, the first call makes it."""
        if self._dtype == torch.float32:
            return self._vector("weights").views
        weights = self.weights
        if self._cast is None or self._cast.source is not weights:
            self._cast = _Cast(weights, self._dtype, self._arrange)
        return self._cast.views()

    def gradient_views(self) -> Any:
        """Returns the float32 views that collect the gradients in this thread's lane."""
        return self._gradients().views

    def begin_operation(self, lanes: Sequence[int] = ()) -> None:
        """Zeroes scratch, and keeps it until the operation is committed or abandoned.

        Args:
            lanes: those in which gradients are computed; each but the first has a separate vector until `join_lanes`.
        """
        self._operation_open = True
        if "scratch" in self._vectors:
            self.scratch.zero_()
        else:
            self._vector("scratch")
        self._lane_scratch = {lane: self._viewed(torch.zeros_like(self.scratch)) for lane in lanes[1:]}

    def join_lanes(self) -> None:
        """Adds the gradients of all lanes to scratch."""
        for vector in self._lane_scratch.values():
            self.scratch.add_(vector.tensor)
        self._lane_scratch = {}

    def scratch_is_finite(self) -> bool:
        low, high = torch.aminmax(self.scratch)
        return bool(torch.isfinite(low) & torch.isfinite(high))

    def commit(self, num_tokens: int = 0, weight_sum: float = 0.0, losses: Mapping[str, float] | None = None) -> None:
        """Adds a successful operation's gradients to the window.

        The window's first gradients become the accumulator without a copy. If ranks keep parts of it, the gradients are
        summed over the ranks, which all commit together.
        """
        self._operation_open = False
        if self.zero is not None:
            self._commit_part(self.zero)
        elif self.window.num_operations:
            self.accumulator.add_(self.scratch)
        else:
            self._vectors.pop("accumulator", None)
            self._vectors["accumulator"] = self._vector("scratch")
            del self._vectors["scratch"]
        self.window.add(num_tokens, weight_sum, losses or {})

    def _commit_part(self, zero: ZeroShards) -> None:
        part = zero.reduce_scatter(self._vectors.pop("scratch").tensor)
        if self.window.num_operations:
            self.accumulator.add_(part)
        else:
            self._vectors["accumulator"] = self._viewed(part)

    def abandon_operation(self) -> None:
        """Discards the gradients of a failed operation."""
        self._operation_open = False
        self._lane_scratch = {}

    def clear_window(self) -> None:
        """Discards the accumulated gradients; their memory becomes the next operation's scratch."""
        accumulator = self._vectors.pop("accumulator", None)
        self._parked.pop("accumulator", None)
        if accumulator is not None and self.zero is None and not self._operation_open:
            self._vectors["scratch"] = accumulator
        self.window = GradientWindow()

    def fill(self, name: str, fill: Callable[[Tensor], None]) -> None:
        """Sets one of the vectors. `fill` writes its values to a float32 [P]."""
        held = self._vector(name).tensor
        if self.zero is None or name == "weights":
            values = self._float32(name, held)
            fill(values)
        else:
            whole = torch.zeros(self.layout.size)
            fill(whole)
            values = whole[self.zero.own_range].to(held.device)
        if name in MOMENT_VECTORS and values is not held:
            self.moments.store(held, name, values)
        elif values is not held:
            held.copy_(values)

    def in_float32(self, name: str) -> Tensor:
        """Returns one of the live vectors [P], as a copy if it is stored in another format.

        If ranks keep parts of it, they all call it together.
        """
        found = self._float32(name, self.live_vectors()[name])
        return found if self.zero is None or name == "weights" else self.zero.whole(found)

    def _float32(self, name: str, held: Tensor) -> Tensor:
        size = self.layout.size if self.zero is None else self.zero.size
        return self.moments.to_float32(held, name, size) if name in MOMENT_VECTORS else held

    def clear_optimizer(self) -> None:
        """Resets the optimizer to its state before the first step."""
        num_changes = self.num_changes
        for name in MOMENT_VECTORS:
            self._vectors.pop(name, None)
            self._parked.pop(name, None)
        self._earlier_changes = 1 + num_changes - self._changes_here()
        self.num_steps = 0

    # Moving: Residency takes the live vectors and passes their copies in another place to `move`.

    @property
    def has_gradients(self) -> bool:
        """True if it holds gradients, of a window or of a running operation."""
        return bool(self.window.num_operations) or self._operation_open

    @property
    def num_changes(self) -> int:
        """Grows with every change of the trained vectors, in whichever place they are."""
        return self._earlier_changes + self._changes_here()

    def live_vectors(self) -> dict[str, Tensor]:
        """Returns the vectors whose content matters."""
        gradients = {"accumulator": bool(self.window.num_operations), "scratch": self._operation_open}
        names = (*TRAINED_VECTORS, *(name for name, is_live in gradients.items() if is_live))
        here = {name: vector.tensor for name, vector in self._vectors.items()} | self._parked
        return {name: here[name] for name in names if name in here}

    def move(self, vectors: Mapping[str, Tensor], place: Place, parked: Mapping[str, Tensor] | None = None) -> None:
        """Replaces the vectors by these, at `place`, and drops views of the old ones.

        Args:
            parked: vectors that stay in host memory.
        """
        num_changes = self.num_changes
        if not self.num_steps:  # they may have been cleared while it was elsewhere
            vectors = {name: vector for name, vector in vectors.items() if name not in MOMENT_VECTORS}
            parked = {name: vector for name, vector in (parked or {}).items() if name not in MOMENT_VECTORS}
        self._parked = dict(parked or {})
        kept = {id(vector.tensor): vector for vector in self._vectors.values()}
        self._vectors = {name: kept.get(id(tensor)) or self._viewed(tensor) for name, tensor in vectors.items()}
        self.place = place
        self._earlier_changes = num_changes - self._changes_here()
        if self._cast is not None and self._cast.source is not vectors.get("weights"):
            self._cast = None

    def _changes_here(self) -> int:
        here = {name: vector.tensor for name, vector in self._vectors.items()} | self._parked
        return sum(here[name]._version for name in TRAINED_VECTORS if name in here)

    def _gradients(self) -> ViewedVector:
        return self._lane_scratch.get(current_lane()) or self._vector("scratch")

    def _viewed(self, tensor: Tensor) -> ViewedVector:
        return ViewedVector(tensor, self._arrange)


class _Cast:
    """A copy of the weights in a dtype other than float32, kept up to date."""

    def __init__(self, weights: Tensor, dtype: torch.dtype, arrange: Arrange) -> None:
        self.source = weights
        self._copy = ViewedVector(weights.to(dtype), arrange)
        self._version = weights._version

    @property
    def num_bytes(self) -> int:
        return self._copy.tensor.nbytes

    def views(self) -> Any:
        if self._version != self.source._version:
            self._version = self.source._version
            self._copy.tensor.copy_(self.source)
        return self._copy.views
