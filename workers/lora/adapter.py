"""Adapter: one LoRA adapter, a flat float32 vector with a named view per matrix.

Whatever concerns an adapter as a whole (clipping, AdamW, a snapshot, saving, paging) is one operation on its vectors.
Gradients go to its `scratch` while an operation runs, and from there to its `accumulator`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from ...schemas.models import LoraConfig
from ..lanes import current_lane
from ..model import BaseModel
from ..parallel.mesh import Mesh
from ..parallel.split import Split
from .pair import LoraPair

# Views start at multiples of 64 bytes; the gaps hold zeros, whose gradient and update are zero.
_ALIGNMENT = 16

_SEED_MASK = (1 << 64) - 1

# Where an adapter's vectors are. On a CPU the device and the host are the same memory.
Place = Literal["device", "host", "disk"]

# What an adapter has learned; its other vectors are gradients.
LEARNED = ("weights", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Target:
    """A linear layer that an adapter adapts. name: its path in the causal LM, such as model.layers.0.mlp.up_proj.

    in_split, out_split: how its inputs or outputs are shared out, where ranks have parts of it. num_experts: where it
    is one of each expert of a sparse layer, model.layers.0.mlp.experts.up_proj, each with a pair of matrices of its
    own. expert_split: how experts are shared out.
    """

    name: str
    in_features: int
    out_features: int
    in_split: Split | None = None
    out_split: Split | None = None
    num_experts: int | None = None
    expert_split: Split | None = None

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def own_in(self) -> int:
        """Input features on this rank."""
        return self.in_split.own_size if self.in_split else self.in_features

    @property
    def own_out(self) -> int:
        """Output features on this rank."""
        return self.out_split.own_size if self.out_split else self.out_features

    @property
    def num_own(self) -> int:
        """Pairs of matrices on this rank: of a plain layer one."""
        return self.expert_split.own_size if self.expert_split else self.num_experts or 1

    @property
    def num_weights(self) -> int:
        """By rank of the adapter, on all ranks."""
        return (self.num_experts or 1) * (self.in_features + self.out_features)

    @property
    def sides(self) -> tuple["Side", "Side"]:
        """A and B^T."""
        return Side(self, "lora_A", self.in_split, self.own_in), Side(self, "lora_B", self.out_split, self.own_out)

    def whole(self) -> "Target":
        """As on a rank that has all of it."""
        return replace(self, in_split=None, out_split=None, expert_split=None)


@dataclass(frozen=True)
class Side:
    """A [rank, in], or B^T [rank, out], of a target; of one with experts, those of its experts one below the other.

    kind: its name in PEFT's files. split: of its features.
    """

    target: Target
    kind: Literal["lora_A", "lora_B"]
    split: Split | None
    own_features: int

    @property
    def axes(self) -> tuple[str, ...]:
        """Along which ranks have different parts of it."""
        return tuple(split.axis for split in (self.target.expert_split, self.split) if split)

    def part(self, whole: Tensor) -> Tensor:
        """[experts * rank, features] -> this rank's part of it."""
        if self.split:
            whole = self.split.part(whole, 1)
        if not self.target.expert_split:
            return whole
        by_expert = whole.view(self.target.num_experts or 1, -1, whole.shape[1])
        return self.target.expert_split.part(by_expert, 0).flatten(0, 1)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Of the parts of all ranks along `axes`, in their order."""
        num = self.split.size if self.split else 1
        rows = [parts[i : i + num] for i in range(0, len(parts), num)]
        return torch.cat([self.split.whole(each, 1) if self.split else each[0] for each in rows])

    def named(self, matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
        """This rank's part as the matrices of PEFT's files: B as [out, rank], and each expert's by itself."""
        by_expert = matrix.view(self.target.num_own, -1, matrix.shape[1])
        for name, each in zip(self._names(), by_expert.unbind(), strict=True):
            yield name, each if self.kind == "lora_A" else each.t()

    def _names(self) -> Iterator[str]:
        path = f"base_model.model.{self.target.name}"
        if self.target.num_experts is None:
            yield f"{path}.{self.kind}.weight"
            return
        experts, _, linear = path.rpartition(".")
        split, num_own = self.target.expert_split, self.target.num_own
        first = split.index * num_own if split else 0
        for number in range(first, first + num_own):
            yield f"{experts}.{number}.{linear}.{self.kind}.weight"


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


class Layout:
    """Where A and B of each target lie in the flat vectors [size] of an adapter.

    regions: by the axes along which ranks have different parts of a matrix (none, for many), where all such lie.
    """

    def __init__(self, targets: Sequence[Target], rank: int) -> None:
        self.targets = tuple(targets)
        self.size = 0
        self.regions: dict[tuple[str, ...], slice] = {}
        self._rank = rank
        self._starts: dict[tuple[str, str], int] = {}
        sides = [side for target in targets for side in target.sides]
        for axes in sorted({side.axes for side in sides}):
            first = self.size
            for side in sides:
                if side.axes == axes:
                    self._place(side)
            self.regions[axes] = slice(first, self.size)

    def views(self, vector: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B^T [rank, out] in a vector [P], of experts [experts * rank, ...]. B lies transposed: its
        gradient is then twice as fast."""
        a, b = target.sides
        return self._view(vector, a), self._view(vector, b)

    def named_views(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector [P] as the matrices it holds, by their names in PEFT's files."""
        return {
            name: matrix
            for target in self.targets
            for side in target.sides
            for name, matrix in side.named(self._view(vector, side))
        }

    def copy_parts(self, vector: Tensor, matrices: Mapping[str, Tensor]) -> None:
        """Into a vector [P] this rank's parts of whole matrices, by those names."""
        for target in self.targets:
            for side, dim in zip(target.sides, (1, 0), strict=True):
                for name, own in side.named(self._view(vector, side)):
                    own.copy_(side.split.part(matrices[name], dim) if side.split else matrices[name])

    @cached_property
    def whole(self) -> "Layout":
        """As on a rank that has all of every matrix; this one, where it has."""
        return Layout([each.whole() for each in self.targets], self._rank) if any(self.regions) else self

    def whole_vector(self, vector: Tensor, mesh: Mesh) -> Tensor:
        """Of a vector [P] of each rank, which all of them give at once: as `whole` has it. The same one where a rank
        has all."""
        if self.whole is self:
            return vector
        result = vector.new_zeros(self.whole.size)
        for axes, region in self.regions.items():
            vectors = mesh.along(*axes).joined(vector[region][None]).unbind() if axes else (vector[region],)
            for target in self.targets:
                for own, whole in zip(target.sides, target.whole().sides, strict=True):
                    if own.axes == axes:
                        parts = [self._view(each, own, region.start) for each in vectors]
                        self.whole._view(result, whole).copy_(own.whole(parts))
        return result

    def _place(self, side: Side) -> None:
        self._starts[side.target.name, side.kind] = self.size
        self.size += _aligned(side.target.num_own * self._rank * side.own_features)

    def _view(self, vector: Tensor, side: Side, first: int = 0) -> Tensor:
        """first: where the vector begins, of one that is a part."""
        start, features = self._starts[side.target.name, side.kind] - first, side.own_features
        shape = (side.target.num_own * self._rank, features)
        return vector.as_strided(shape, (features, 1), vector.storage_offset() + start)


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


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
