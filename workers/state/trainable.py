"""Learner: what a run learns, in flat float32 vectors, and the gradients on their way to it.

Whatever concerns it as a whole (clipping, AdamW, a snapshot, paging) is one operation on its vectors. Gradients go to
its `scratch` while an operation runs, and from there to its `accumulator`.
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
from .flat_params import Layout
from .moments import MOMENTS, Moments
from .program import Program
from .zero import Zero

# Where a learner's vectors are. On a CPU the device and the host are the same memory.
Place = Literal["device", "host", "disk"]

# What makes views of a vector [P].
Arrange = Callable[[Tensor], Any]

SEED_MASK = (1 << 64) - 1

# What the optimizer keeps, and with it what has been learned; the other vectors are gradients.
ADAMW = ("exp_avg", "exp_avg_sq")
LEARNED = ("weights", *ADAMW)

# Vectors that work on it needs: a forward pass, sampling or a copy; a backward pass; a step, which needs all.
FORWARD: frozenset[str] = frozenset({"weights"})
BACKWARD = FORWARD | {"scratch", "accumulator"}
STEP = BACKWARD.union(ADAMW)


@dataclass
class Window:
    """What has been accumulated since the last step.

    num_tokens: tokens that carry a loss. weight_sum: their summed weights. losses: loss sums by name.
    refused: why an operation of the window contributed nothing, None when all did.
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


class Vector:
    """A vector [P] and views of it, made when they are first asked for. arrange: makes them."""

    def __init__(self, tensor: Tensor, arrange: Arrange) -> None:
        self.tensor = tensor
        self._arrange = arrange

    @cached_property
    def views(self) -> Any:
        return self._arrange(self.tensor)


class Learner(ABC):
    """weights, and on first use scratch, accumulator, exp_avg and exp_avg_sq: float32 [P].

    They are to be had only while it is on the device (see Residency), those that were asked for, and are other tensors
    when it comes back: hold the learner, not its tensors. training, program: what of the model is learned, and which
    kind of model it is. window: what the accumulator holds. num_steps: optimizer steps that exp_avg has seen. place:
    where it is. base_name: what its files call the base model; None = the worker's name of it.
    """

    training: TrainingConfig
    base_name: str | None = None

    # What neighbours in a micro-batch had better agree in: which layers it adapts, and by which rank.
    likeness: tuple[tuple[bool, ...], int] = (), 0

    # How exp_avg and exp_avg_sq are held.
    moments: Moments = MOMENTS["float32"]

    # Of the ranks that have parts of it, None = the base model's.
    mesh: Mesh | None = None

    # Whose ranks keep a part each of accumulator, exp_avg and exp_avg_sq; None = all of them.
    zero: Zero | None = None

    def __init__(
        self, layout: Layout, device: torch.device, dtype: torch.dtype, program: Program, arrange: Arrange
    ) -> None:
        """dtype: of what products are made with. arrange: what views of a vector its kind wants."""
        self.layout, self.program = layout, program
        self.place: Place = "device"
        self.window = Window()
        self.num_steps = 0
        self._arrange, self._dtype = arrange, dtype
        self._cast: _Cast | None = None
        # Those that stayed behind when it came to the device.
        self._parked: dict[str, Tensor] = {}
        self._vectors = {"weights": self._viewed(torch.zeros(layout.size, device=device))}
        self._operation_open = False
        self._lane_scratch: dict[int, Vector] = {}
        self._earlier_changes = 0

    @property
    def of_trunk(self) -> "Learner | None":
        """Whose weights the base model has when it runs for this one: None = its own."""
        return self

    @property
    def lacking(self) -> str | None:
        """Without which nothing of it can be scored, in words."""
        return None

    def is_alike(self, other: "Learner") -> bool:
        """Whether its weights can be copied into this one's."""
        return self.training == other.training and self.program is other.program

    @property
    def num_parameters(self) -> int:
        """On all ranks together."""
        return self.layout.num_weights

    @property
    def vector_size(self) -> int:
        """P: the parameters that this rank has, and the gaps between them."""
        return self.layout.size

    @property
    def own_weights(self) -> Tensor:
        """Those that this rank steps: a view."""
        return self.weights if self.zero is None else self.weights[self.zero.own]

    @property
    def num_bytes(self) -> int:
        """Bytes of all vectors in memory, the device's or the host's."""
        own = sum(vector.tensor.nbytes for vector in (*self._vectors.values(), *self._lane_scratch.values()))
        return own + self.num_parked_bytes + (self._cast.num_bytes if self._cast else 0)

    @property
    def num_parked_bytes(self) -> int:
        """Of those vectors that are in host memory while it is on the device."""
        return sum(vector.nbytes for vector in self._parked.values())

    def has_here(self, name: str) -> bool:
        """Whether this vector is on the device."""
        return self.place == "device" and name in self._vectors

    def parks_any(self, wanted: frozenset[str]) -> bool:
        """Whether some of these vectors are."""
        return not wanted.isdisjoint(self._parked)

    @property
    def weights(self) -> Tensor:
        return self._vector("weights").tensor

    @property
    def scratch(self) -> Tensor:
        """The gradients of the operation that runs; between operations its content means nothing."""
        return self._vector("scratch").tensor

    @property
    def accumulator(self) -> Tensor:
        return self._vector("accumulator").tensor

    @property
    def exp_avg(self) -> Tensor:
        """As `moments` holds it, as exp_avg_sq."""
        return self._vector("exp_avg").tensor

    @property
    def exp_avg_sq(self) -> Tensor:
        return self._vector("exp_avg_sq").tensor

    @property
    def has_moments(self) -> bool:
        """Whether there are exp_avg and exp_avg_sq; where there are none, they are zeros."""
        return "exp_avg" in self._vectors or "exp_avg" in self._parked

    def _vector(self, name: str) -> Vector:
        assert self.place == "device", f"the model is on {self.place}: enter Models.resident first"
        assert name not in self._parked, f"{name} of the model has stayed on the host: enter Models.resident with it"
        vector = self._vectors.get(name)
        if vector is None:
            weights = self._vectors["weights"].tensor if name == "scratch" else self.own_weights
            new = self.moments.zeros(weights) if name in ADAMW else torch.zeros_like(weights)
            vector = self._vectors[name] = self._viewed(new)
        return vector

    @abstractmethod
    def initialize(self) -> None:
        """The weights of a fresh one, from its seed, of which 64 bits count."""

    def tensor(self, key: Hashable) -> Tensor:
        """Of one matrix: a float32 view of the weights."""
        return self.layout.view(self.weights, key)

    def gradient(self, key: Hashable) -> Tensor:
        """The view that takes that of `tensor` in this thread's lane."""
        return self.layout.view(self._gradients().tensor, key)

    def weight_views(self) -> Any:
        """As its kind arranges them, in the dtype of products; made, where they are a copy, on the first call."""
        if self._dtype == torch.float32:
            return self._vector("weights").views
        weights = self.weights
        if self._cast is None or self._cast.source is not weights:
            self._cast = _Cast(weights, self._dtype, self._arrange)
        return self._cast.views()

    def gradient_views(self) -> Any:
        """As its kind arranges them, float32: those that take the gradients in this thread's lane."""
        return self._gradients().views

    def begin_operation(self, lanes: Sequence[int] = ()) -> None:
        """Scratch is zeros, and is kept until the operation is committed or abandoned.

        lanes: those in which its gradients are made; each but the first has a vector of its own until `join_lanes`.
        """
        self._operation_open = True
        if "scratch" in self._vectors:
            self.scratch.zero_()
        else:
            self._vector("scratch")
        self._lane_scratch = {lane: self._viewed(torch.zeros_like(self.scratch)) for lane in lanes[1:]}

    def join_lanes(self) -> None:
        """Afterwards all gradients are in scratch."""
        for vector in self._lane_scratch.values():
            self.scratch.add_(vector.tensor)
        self._lane_scratch = {}

    def scratch_is_finite(self) -> bool:
        low, high = torch.aminmax(self.scratch)
        return bool(torch.isfinite(low) & torch.isfinite(high))

    def commit(self, num_tokens: int = 0, weight_sum: float = 0.0, losses: Mapping[str, float] | None = None) -> None:
        """The operation succeeded: its gradients join the window. The window's first become the accumulator. Where
        ranks keep parts of it, they are added up, and all ranks commit at once."""
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

    def _commit_part(self, zero: Zero) -> None:
        part = zero.summed(self._vectors.pop("scratch").tensor)
        if self.window.num_operations:
            self.accumulator.add_(part)
        else:
            self._vectors["accumulator"] = self._viewed(part)

    def abandon_operation(self) -> None:
        """The operation failed: its gradients are of no use."""
        self._operation_open = False
        self._lane_scratch = {}

    def clear_window(self) -> None:
        """Discards the accumulated gradients; their memory is the next operation's scratch."""
        accumulator = self._vectors.pop("accumulator", None)
        self._parked.pop("accumulator", None)
        if accumulator is not None and self.zero is None and not self._operation_open:
            self._vectors["scratch"] = accumulator
        self.window = Window()

    def fill(self, name: str, fill: Callable[[Tensor], None]) -> None:
        """One of the vectors. fill: writes its values to float32 [P]."""
        held = self._vector(name).tensor
        if self.zero is None or name == "weights":
            values = self._float32(name, held)
            fill(values)
        else:
            whole = torch.zeros(self.layout.size)
            fill(whole)
            values = whole[self.zero.own].to(held.device)
        if name in ADAMW and values is not held:
            self.moments.hold(held, name, values)
        elif values is not held:
            held.copy_(values)

    def in_float32(self, name: str) -> Tensor:
        """One of the live vectors [P]; a copy, where it is held otherwise. Of ranks that keep parts of it, which all of
        them ask at once."""
        found = self._float32(name, self.live()[name])
        return found if self.zero is None or name == "weights" else self.zero.whole(found)

    def _float32(self, name: str, held: Tensor) -> Tensor:
        """[P], or this rank's part."""
        size = self.layout.size if self.zero is None else self.zero.size
        return self.moments.whole(held, name, size) if name in ADAMW else held

    def clear_optimizer(self) -> None:
        """As before the first step."""
        num_changes = self.num_changes
        for name in ADAMW:
            self._vectors.pop(name, None)
            self._parked.pop(name, None)
        self._earlier_changes = 1 + num_changes - self._changes_here()
        self.num_steps = 0

    # Moving: who moves a learner (see Residency) takes its live vectors and gives them back elsewhere.

    @property
    def in_window(self) -> bool:
        """Whether it holds gradients: of a window, or of an operation under way."""
        return bool(self.window.num_operations) or self._operation_open

    @property
    def num_changes(self) -> int:
        """Grows with every change of what it has learned, wherever it is meanwhile."""
        return self._earlier_changes + self._changes_here()

    def live(self) -> dict[str, Tensor]:
        """The vectors that mean anything."""
        gradients = {"accumulator": bool(self.window.num_operations), "scratch": self._operation_open}
        names = (*LEARNED, *(name for name, is_live in gradients.items() if is_live))
        here = {name: vector.tensor for name, vector in self._vectors.items()} | self._parked
        return {name: here[name] for name in names if name in here}

    def move(self, vectors: Mapping[str, Tensor], place: Place, parked: Mapping[str, Tensor] | None = None) -> None:
        """From now on these are its vectors, at `place`; whatever views there are of others are made anew. parked:
        those that stay in host memory meanwhile."""
        num_changes = self.num_changes
        if not self.num_steps:  # they may have been cleared while it was elsewhere
            vectors = {name: vector for name, vector in vectors.items() if name not in ADAMW}
            parked = {name: vector for name, vector in (parked or {}).items() if name not in ADAMW}
        self._parked = dict(parked or {})
        kept = {id(vector.tensor): vector for vector in self._vectors.values()}
        self._vectors = {name: kept.get(id(tensor)) or self._viewed(tensor) for name, tensor in vectors.items()}
        self.place = place
        self._earlier_changes = num_changes - self._changes_here()
        if self._cast is not None and self._cast.source is not vectors.get("weights"):
            self._cast = None

    def _changes_here(self) -> int:
        here = {name: vector.tensor for name, vector in self._vectors.items()} | self._parked
        return sum(here[name]._version for name in LEARNED if name in here)

    def _gradients(self) -> Vector:
        """That take those of this thread's lane."""
        return self._lane_scratch.get(current_lane()) or self._vector("scratch")

    def _viewed(self, tensor: Tensor) -> Vector:
        return Vector(tensor, self._arrange)


class _Cast:
    """A vector of weights in another dtype than float32: a copy, kept current."""

    def __init__(self, weights: Tensor, dtype: torch.dtype, arrange: Arrange) -> None:
        self.source = weights
        self._copy = Vector(weights.to(dtype), arrange)
        self._version = weights._version

    @property
    def num_bytes(self) -> int:
        return self._copy.tensor.nbytes

    def views(self) -> Any:
        if self._version != self.source._version:
            self._version = self.source._version
            self._copy.tensor.copy_(self.source)
        return self._copy.views
