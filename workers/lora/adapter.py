"""Adapter: one LoRA adapter, a flat float32 vector with a named view per matrix.

Whatever concerns an adapter as a whole (clipping, AdamW, a snapshot, saving, paging) is one operation on its vectors.
Gradients go to its `scratch` while an operation runs, and from there to its `accumulator`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from ...schemas.models import LoraConfig
from ..lanes import current_lane
from ..model import BaseModel
from .layout import Layout, Target
from .pair import LoraPair

_SEED_MASK = (1 << 64) - 1

# Where an adapter's vectors are. On a CPU the device and the host are the same memory.
Place = Literal["device", "host", "disk"]

# What an adapter has learned; its other vectors are gradients.
LEARNED = ("weights", "exp_avg", "exp_avg_sq")


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


class Adapter:
    """One adapter. weights, and on first use scratch, accumulator, exp_avg and exp_avg_sq: float32 [P].

    They are to be had only while the adapter is on the device (see Residency), and are other tensors when it comes
    back: hold the adapter, not its tensors. pairs: by target name. window: what the accumulator holds. num_steps:
    optimizer steps that exp_avg has seen. place: where it is.
    """

    def __init__(self, lora: LoraConfig, targets: Sequence[Target], base: BaseModel, unembed_name: str) -> None:
        self.lora = lora
        self.targets = tuple(targets)
        self.place: Place = "device"
        self.window = Window()
        self.num_steps = 0
        self.layout = Layout(self.targets, lora.rank)
        self._vectors = {"weights": _Vector(self.layout, torch.zeros(self.layout.size, device=base.device))}
        self._dtype = base.dtype
        self._cast: _Cast | None = None
        self._operation_open = False
        self._lane_scratch: dict[int, _Vector] = {}
        self._earlier_changes = 0
        self._unembed_name = unembed_name
        self.pairs = {target.name: LoraPair(self, target.name) for target in self.targets}

    @property
    def unembed(self) -> LoraPair | None:
        return self.pairs.get(self._unembed_name)

    @property
    def scale(self) -> float:
        return self.lora.alpha / self.lora.rank

    @property
    def num_parameters(self) -> int:
        return sum(self.lora.rank * target.num_weights for target in self.targets)

    @cached_property
    def adapts_experts(self) -> bool:
        return any(target.num_experts is not None for target in self.targets)

    @property
    def vector_size(self) -> int:
        """P: the parameters that this rank has, and the gaps between them."""
        return self.layout.size

    @property
    def num_bytes(self) -> int:
        """Bytes of all vectors in memory, the device's or the host's."""
        cast = self._cast.num_bytes if self._cast else 0
        vectors = (*self._vectors.values(), *self._lane_scratch.values())
        return cast + sum(vector.tensor.nbytes for vector in vectors)

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
        return self._vector("exp_avg").tensor

    @property
    def exp_avg_sq(self) -> Tensor:
        return self._vector("exp_avg_sq").tensor

    @property
    def has_moments(self) -> bool:
        """Whether there are exp_avg and exp_avg_sq; where there are none, they are zeros."""
        return "exp_avg" in self._vectors

    def _vector(self, name: str) -> "_Vector":
        assert self.place == "device", f"the adapter is on {self.place}: enter Adapters.resident first"
        vector = self._vectors.get(name)
        if vector is None:
            zeros = torch.zeros_like(self._vectors["weights"].tensor)
            vector = self._vectors[name] = _Vector(self.layout, zeros)
        return vector

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """A and B^T of the target `name`: float32 views of the weights."""
        return self._vector("weights").matrices[name]

    def all_gradients(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """By target: the views that take the gradients of A and B^T in this thread's lane."""
        return (self._lane_scratch.get(current_lane()) or self._vector("scratch")).matrices

    def all_factors(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """By target: A and B^T in the base's dtype, for products."""
        if self._dtype == torch.float32:
            return self._vector("weights").matrices
        weights = self.weights
        if self._cast is None or self._cast.source is not weights:
            self._cast = _Cast(self.layout, weights, self._dtype)
        return self._cast.factors()

    def begin_operation(self, lanes: Sequence[int] = ()) -> None:
        """Scratch is zeros, and is kept until the operation is committed or abandoned.

        lanes: those in which its gradients are made; each but the first has a vector of its own until `join_lanes`.
        """
        self._operation_open = True
        if "scratch" in self._vectors:
            self.scratch.zero_()
        else:
            self._vector("scratch")
        self._lane_scratch = {lane: _Vector(self.layout, torch.zeros_like(self.scratch)) for lane in lanes[1:]}

    def join_lanes(self) -> None:
        """Afterwards all gradients are in scratch."""
        for vector in self._lane_scratch.values():
            self.scratch.add_(vector.tensor)
        self._lane_scratch = {}

    def scratch_is_finite(self) -> bool:
        low, high = torch.aminmax(self.scratch)
        return bool(torch.isfinite(low) & torch.isfinite(high))

    def commit(self, num_tokens: int = 0, weight_sum: float = 0.0, losses: Mapping[str, float] | None = None) -> None:
        """The operation succeeded: its gradients join the window. The window's first become the accumulator."""
        self._operation_open = False
        if self.window.num_operations:
            self.accumulator.add_(self.scratch)
        else:
            self._vectors.pop("accumulator", None)
            self._vectors["accumulator"] = self._vector("scratch")
            del self._vectors["scratch"]
        self.window.add(num_tokens, weight_sum, losses or {})

    def abandon_operation(self) -> None:
        """The operation failed: its gradients are of no use."""
        self._operation_open = False
        self._lane_scratch = {}

    def clear_window(self) -> None:
        """Discards the accumulated gradients; their memory is the next operation's scratch."""
        accumulator = self._vectors.pop("accumulator", None)
        if accumulator is not None and not self._operation_open:
            self._vectors["scratch"] = accumulator
        self.window = Window()

    def clear_optimizer(self) -> None:
        """As before the first step."""
        for name in ("exp_avg", "exp_avg_sq"):
            vector = self._vectors.pop(name, None)
            self._earlier_changes += 1 + (vector.tensor._version if vector else 0)
        self.num_steps = 0

    def initialize(self) -> None:
        """A as PEFT draws it, B zero. Drawn on the CPU in the targets' order, so any device gives the same numbers.

        Of a seed, 64 bits count.
        """
        self.weights.zero_()
        generator = torch.Generator().manual_seed((self.lora.seed or 0) & _SEED_MASK)
        for target in self.targets:
            drawn = torch.empty((target.num_experts or 1) * self.lora.rank, target.in_features)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            a, _ = self.matrices(target.name)
            a.copy_(target.sides[0].part(drawn))

    # Moving: who moves an adapter (see Residency) takes its live vectors and gives them back elsewhere.

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
        return {name: self._vectors[name].tensor for name in names if name in self._vectors}

    def move(self, vectors: Mapping[str, Tensor], place: Place) -> None:
        """From now on these are its vectors, at `place`; whatever views there are of others are made anew."""
        num_changes = self.num_changes
        kept = {id(vector.tensor): vector for vector in self._vectors.values()}
        self._vectors = {name: kept.get(id(tensor)) or _Vector(self.layout, tensor) for name, tensor in vectors.items()}
        self.place = place
        self._earlier_changes = num_changes - self._changes_here()
        if self._cast is not None and self._cast.source is not vectors.get("weights"):
            self._cast = None

    def _changes_here(self) -> int:
        return sum(self._vectors[name].tensor._version for name in LEARNED if name in self._vectors)


class _Vector:
    """A vector [P] and its matrices by target: views, made when they are first asked for."""

    def __init__(self, layout: Layout, tensor: Tensor) -> None:
        self.tensor = tensor
        self._layout = layout
        self._matrices: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def matrices(self) -> dict[str, tuple[Tensor, Tensor]]:
        if not self._matrices:
            self._matrices = {target.name: self._layout.views(self.tensor, target) for target in self._layout.targets}
        return self._matrices


class _Cast:
    """An adapter's matrices in another dtype than float32: a copy, kept current."""

    def __init__(self, layout: Layout, weights: Tensor, dtype: torch.dtype) -> None:
        self.source = weights
        self._copy = _Vector(layout, weights.to(dtype))
        self._version = weights._version

    @property
    def num_bytes(self) -> int:
        return self._copy.tensor.nbytes

    def factors(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        if self._version != self.source._version:
            self._version = self.source._version
            self._copy.tensor.copy_(self.source)
        return self._copy.matrices
