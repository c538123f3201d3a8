"""Many LoRA adapters on one frozen base: which linears they target, their weights and gradients, and the linear layer
that applies to each token of a packed row the adapter of its segment.

An adapter is one flat float32 vector with a named view per matrix, so that whatever concerns it as a whole (clipping,
AdamW, a snapshot, saving) is one operation. Gradients go to its `scratch` while an operation runs, and from there to
its `accumulator`. The output head's pair is applied by `head`.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..schemas.errors import OperationError
from ..schemas.models import LoraConfig
from .model import BaseModel

ATTENTION_LINEARS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
MLP_LINEARS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})

# A linear layer as a function of x, weight and bias.
Product = Callable[..., Tensor]

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


class LoraPair:
    """The two matrices of one target: y += scale * (x A^T) B^T.

    a [rank, in], b [out, rank]: float32 views of the adapter's weights.
    """

    def __init__(self, adapter: "Adapter", target: Target) -> None:
        self.a, self.b = adapter.views(adapter.weights, target)
        self.scale = adapter.lora.alpha / adapter.lora.rank
        # Weak: the adapter holds its pairs, and a cycle would keep a dropped one in memory until Python looks for it.
        self._adapter: Adapter = weakref.proxy(adapter)
        self._name = target.name

    @property
    def a_grad(self) -> Tensor:
        """float32 [rank, in]: the view of the adapter's scratch."""
        return self._adapter.gradients(self._name)[0]

    @property
    def b_grad(self) -> Tensor:
        """float32 [out, rank]: the view of the adapter's scratch."""
        return self._adapter.gradients(self._name)[1]

    def down(self, x: Tensor) -> Tensor:
        """x [tokens, in] -> x A^T [tokens, rank]. x has the base's dtype, here as in the other products."""
        a, _ = self._adapter.factors(self._name)
        return x @ a.t()

    def add_up(self, y: Tensor, reduced: Tensor) -> None:
        """y [tokens, out] += scale * reduced B^T."""
        _, b = self._adapter.factors(self._name)
        y.addmm_(reduced, b.t(), alpha=self.scale)

    def backward(self, grad: Tensor, x: Tensor, reduced: Tensor, grad_x: Tensor | None) -> None:
        """Adds to the gradients of A and B, and to that of x where there is one.

        grad [tokens, out] is the gradient of y, x and reduced are as in `add_up`, grad_x [tokens, in].
        """
        a, b = self._adapter.factors(self._name)
        grad_reduced = (grad @ b).mul_(self.scale)
        _add_product(self.a_grad, grad_reduced.t(), x, 1.0)
        _add_product(self.b_grad.t(), reduced.t(), grad, self.scale)
        if grad_x is not None:
            grad_x.addmm_(grad_reduced, a)


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


@dataclass(frozen=True)
class Segment:
    """Tokens start:stop of the packed row run with this adapter; None = the bare base."""

    start: int
    stop: int
    adapter: Adapter | None


class Adapters:
    """All adapters of one base on this rank, by id. Makes every target of the base's trunk a LoraLinear."""

    def __init__(self, base: BaseModel, max_rank: int) -> None:
        self._base = base
        self._max_rank = max_rank
        self._adapters: dict[str, Adapter] = {}
        self._active = _Active(base)
        self._trunk_targets = tuple(_wrap_targets(base, self._active))
        self._unembed_target = _unembed_target(base)

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._adapters

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._adapters))

    def create(self, adapter_id: str, lora: LoraConfig) -> Adapter:
        """A freshly initialized adapter. Raises as `build`."""
        assert adapter_id not in self._adapters, f"adapter {adapter_id} exists"
        adapter = self.build(lora)
        adapter.initialize()
        self.put(adapter_id, adapter)
        return adapter

    def get(self, adapter_id: str) -> Adapter:
        """Raises KeyError."""
        try:
            return self._adapters[adapter_id]
        except KeyError:
            raise KeyError(f"no adapter {adapter_id!r} on this rank") from None

    def copy(self, source_id: str, target_id: str) -> Adapter:
        """The weights alone. An existing target is overwritten in place: who holds it sees the new weights."""
        source = self.get(source_id)
        target = self._adapters.get(target_id)
        if target is None or target.lora != source.lora:
            target = self.build(source.lora)
            self.put(target_id, target)
        target.weights.copy_(source.weights)
        return target

    def put(self, adapter_id: str, adapter: Adapter) -> None:
        """Replaces one of the same id."""
        self._adapters[adapter_id] = adapter

    def drop(self, adapter_id: str) -> None:
        """Unknown ids are ignored."""
        self._adapters.pop(adapter_id, None)

    def build(self, lora: LoraConfig) -> Adapter:
        """An adapter with zero weights and no id yet. Raises OperationError on a rank too high or nothing to train."""
        if lora.rank > self._max_rank:
            raise OperationError(
                f"rank {lora.rank} exceeds max_lora_rank {self._max_rank}: lower the rank or start the server with"
                f" --max-lora-rank {lora.rank}"
            )
        return Adapter(lora, self._targets(lora), self._base, self._unembed_target.name)

    @contextmanager
    def applied(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Inside, forward and backward of the trunk use these adapters.

        Segments are in order and end at the row's last token; none at all = the bare base.
        """
        before = self._active.segments
        self._active.segments = tuple(segments)
        try:
            yield
        finally:
            self._active.segments = before

    def _targets(self, lora: LoraConfig) -> list[Target]:
        wanted = (ATTENTION_LINEARS if lora.train_attn else set()) | (MLP_LINEARS if lora.train_mlp else set())
        targets = [target for target in self._trunk_targets if target.kind in wanted]
        if lora.train_unembed:
            targets.append(self._unembed_target)
        if not targets:
            raise OperationError(
                f"train_attn={lora.train_attn}, train_mlp={lora.train_mlp}, train_unembed={lora.train_unembed} selects"
                f" no linear layer of this model: it has {sorted({t.kind for t in self._trunk_targets})}"
                " and the output head"
            )
        return targets


class LoraLinear(nn.Module):
    """A frozen linear layer plus, on each active segment, its adapter's low-rank term."""

    def __init__(self, base: nn.Linear, name: str, active: "_Active") -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self._name = name
        self._active = active

    def forward(self, x: Tensor) -> Tensor:
        """x [1, tokens, in] or [tokens, in] -> the same with out features."""
        rows = x.flatten(0, -2)
        parts = self._active.parts(self._name)
        assert not parts or len(rows) == self._active.segments[-1].stop, (
            f"{self._name}: {len(rows)} tokens, but the segments end at {self._active.segments[-1].stop}"
        )
        return self._product(rows, parts).unflatten(0, x.shape[:-1])

    def _product(self, rows: Tensor, parts: "list[_Part]") -> Tensor:
        active = self._active
        if not torch.is_grad_enabled():
            y = active.product(rows, self.weight, self.bias)
            _add_parts(y, rows, parts)
            return y
        y = _LoraProduct.apply(rows, active.anchor if parts else None, self.weight, self.bias, parts, active.product)
        assert isinstance(y, Tensor)
        return y


class _Active:
    """What every LoraLinear of a base shares: the segments applied now, and how products with frozen weights are made.

    anchor: a leaf that makes the outputs of adapted layers require a gradient, their own leaves not being autograd's.
    """

    def __init__(self, base: BaseModel) -> None:
        self.segments: tuple[Segment, ...] = ()
        self.anchor = torch.zeros((), device=base.device, requires_grad=True)
        self.product = frozen_product(base)

    def parts(self, name: str) -> "list[_Part]":
        return [
            _Part(slice(segment.start, segment.stop), segment.adapter.pairs[name])
            for segment in self.segments
            if segment.adapter is not None and name in segment.adapter.pairs
        ]


@dataclass(frozen=True)
class _Part:
    """Rows of a packed row with the pair that one layer applies to them."""

    rows: slice
    pair: LoraPair


class _LoraProduct(torch.autograd.Function):
    """x W^T + bias + the parts' low-rank terms; backward adds to the adapters' scratch, W has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        parts: list[_Part],
        product: Product,
    ) -> Tensor:
        y = product(x, weight, bias)
        ctx.save_for_backward(x, weight)
        ctx.parts, ctx.product = parts, product
        ctx.reduced = _add_parts(y, x, parts)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = ctx.product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        for part, reduced in zip(ctx.parts, ctx.reduced, strict=True):
            into = None if grad_x is None else grad_x[part.rows]
            part.pair.backward(grad[part.rows], x[part.rows], reduced, into)
        return grad_x, None, None, None, None, None


def _add_parts(y: Tensor, x: Tensor, parts: list[_Part]) -> list[Tensor]:
    """y += the parts' low-rank terms of x; returns x A^T of each part."""
    all_reduced = []
    for part in parts:
        reduced = part.pair.down(x[part.rows])
        part.pair.add_up(y[part.rows], reduced)
        all_reduced.append(reduced)
    return all_reduced


def frozen_product(base: BaseModel) -> Product:
    """How x W^T + bias is made with the base's own weights."""
    return mkldnn_linear if _mkl_is_slow(base) else linear


def mkldnn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's linear by oneDNN, for float32 on the CPU."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _mkl_is_slow(base: BaseModel) -> bool:
    """MKL, behind torch's own linear, uses only half of the vector width of x86 processors that are not Intel's."""
    if base.device.type != "cpu" or base.dtype != torch.float32 or not torch.backends.mkl.is_available():
        return False
    processors = Path("/proc/cpuinfo")
    return processors.exists() and "GenuineIntel" not in processors.read_text() and torch.backends.mkldnn.is_available()


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """total += scale * left @ right, summed in float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right, alpha=scale)
    elif left.is_cuda:
        total.add_(torch.mm(left, right, out_dtype=torch.float32), alpha=scale)
    else:
        total.addmm_(left.float(), right.float(), alpha=scale)


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


def _wrap_targets(base: BaseModel, active: _Active) -> Iterator[Target]:
    """Replaces the targets of the trunk by LoraLinear, in the model's order."""
    inside = {id(module) for module in base.trunk.modules()}
    for name, module in list(base.model.named_modules()):
        parent_name, _, kind = name.rpartition(".")
        if not isinstance(module, nn.Linear) or id(module) not in inside or kind not in ATTENTION_LINEARS | MLP_LINEARS:
            continue
        setattr(base.model.get_submodule(parent_name), kind, LoraLinear(module, name, active))
        yield Target(name, module.in_features, module.out_features)


def _unembed_target(base: BaseModel) -> Target:
    head = base.model.get_output_embeddings()
    name = next(name for name, module in base.model.named_modules() if module is head)
    vocab_size, hidden_size = base.unembedding.shape
    return Target(name, hidden_size, vocab_size)
