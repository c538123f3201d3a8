"""Adapter: one LoRA adapter, a flat float32 vector with a named view per matrix.

Whatever concerns an adapter as a whole (clipping, AdamW, a snapshot, saving) is one operation on its vectors. Gradients
go to its `scratch` while an operation runs, and from there to its `accumulator`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...schemas.models import LoraConfig
from ..model import BaseModel
from .pair import LoraPair

# Views start at multiples of 64 bytes; the gaps hold zeros, whose gradient and update are zero.
_ALIGNMENT = 16

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Target:
    """A linear layer that an adapter adapts. name: its path in the causal LM, such as model.layers.0.mlp.up_proj."""

    name: str
    in_features: int
    out_features: int

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2]


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

    pairs: by target name. window: what the accumulator holds. num_steps: optimizer steps that exp_avg has seen.
    """

    def __init__(self, lora: LoraConfig, targets: Sequence[Target], base: BaseModel, unembed_name: str) -> None:
        self.lora = lora
        self.targets = tuple(targets)
        self._places, size = _layout(self.targets, lora.rank)
        self.weights = torch.zeros(size, device=base.device)
        self._cast = _Cast(self, base.dtype)
        self.window = Window()
        self.num_steps = 0
        self._unembed_name = unembed_name
        self._vectors: dict[str, Tensor] = {}
        self._gradients: dict[str, tuple[Tensor, Tensor]] = {}
        self.pairs = {target.name: LoraPair(self, target) for target in self.targets}

    @property
    def unembed(self) -> LoraPair | None:
        return self.pairs.get(self._unembed_name)

    @property
    def num_parameters(self) -> int:
        return sum(self.lora.rank * (t.in_features + t.out_features) for t in self.targets)

    @property
    def num_bytes(self) -> int:
        """Bytes of all vectors that are allocated."""
        return self.weights.nbytes + self._cast.num_bytes + sum(vector.nbytes for vector in self._vectors.values())

    @property
    def scratch(self) -> Tensor:
        return self._vector("scratch")

    @property
    def accumulator(self) -> Tensor:
        return self._vector("accumulator")

    @property
    def exp_avg(self) -> Tensor:
        return self._vector("exp_avg")

    @property
    def exp_avg_sq(self) -> Tensor:
        return self._vector("exp_avg_sq")

    def _vector(self, name: str) -> Tensor:
        vector = self._vectors.get(name)
        if vector is None:
            vector = self._vectors[name] = torch.zeros_like(self.weights)
        return vector

    def gradients(self, name: str) -> tuple[Tensor, Tensor]:
        """The views of scratch that take the gradients of A and B of the target `name`."""
        if not self._gradients:
            self._gradients = {target.name: self.views(self.scratch, target) for target in self.targets}
        return self._gradients[name]

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """A and B of the target `name` in the base's dtype, for products."""
        return self._cast.factors(name)

    def begin_operation(self) -> None:
        self.scratch.zero_()

    def scratch_is_finite(self) -> bool:
        low, high = torch.aminmax(self.scratch)
        return bool(torch.isfinite(low) & torch.isfinite(high))

    def commit(self, num_tokens: int = 0, weight_sum: float = 0.0, losses: Mapping[str, float] | None = None) -> None:
        """The operation succeeded: its gradients join the window."""
        self.accumulator.add_(self.scratch)
        self.window.add(num_tokens, weight_sum, losses or {})

    def clear_window(self) -> None:
        """Discards the accumulated gradients."""
        if self.window.num_operations:
            self.accumulator.zero_()
        self.window = Window()

    def clear_optimizer(self) -> None:
        """As before the first step."""
        self._vectors.pop("exp_avg", None)
        self._vectors.pop("exp_avg_sq", None)
        self.num_steps = 0

    def initialize(self) -> None:
        """A as PEFT draws it, B zero. Drawn on the CPU in the targets' order, so any device gives the same numbers.

        Of a seed, 64 bits count.
        """
        self.weights.zero_()
        generator = torch.Generator().manual_seed((self.lora.seed or 0) & _SEED_MASK)
        for pair in self.pairs.values():
            drawn = torch.empty(pair.a.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            pair.a.copy_(drawn)

    def named_views(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector [P] as the matrices it holds, by their names in PEFT's files."""
        named = {}
        for target in self.targets:
            a, b = self.views(vector, target)
            named[f"base_model.model.{target.name}.lora_A.weight"] = a
            named[f"base_model.model.{target.name}.lora_B.weight"] = b
        return named

    def views(self, vector: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank] in a vector [P]. B lies transposed: its gradient is then twice as fast."""
        rank = self.lora.rank
        a_start, b_start = self._places[target.name]
        a = vector[a_start : a_start + rank * target.in_features].view(rank, target.in_features)
        b = vector[b_start : b_start + rank * target.out_features].view(rank, target.out_features)
        return a, b.t()


class _Cast:
    """An adapter's matrices in the dtype of its base: the weights themselves in float32, else a copy kept current."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype) -> None:
        self._weights = adapter.weights
        self._vector = adapter.weights if dtype == torch.float32 else adapter.weights.to(dtype)
        self._version = adapter.weights._version
        self._factors = {target.name: adapter.views(self._vector, target) for target in adapter.targets}

    @property
    def num_bytes(self) -> int:
        """Of the copy."""
        return 0 if self._vector is self._weights else self._vector.nbytes

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        if self._version != self._weights._version:
            self._version = self._weights._version
            if self._vector is not self._weights:
                self._vector.copy_(self._weights)
        return self._factors[name]


def _layout(targets: Sequence[Target], rank: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Where A and B of each target start in the flat vector, and its size."""
    places, size = {}, 0
    for target in targets:
        b_start = size + _aligned(rank * target.in_features)
        places[target.name] = (size, b_start)
        size = b_start + _aligned(rank * target.out_features)
    return places, size


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
