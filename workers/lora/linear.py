"""The linear layer that applies to each token of a packed row the adapter of its segment."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..model import BaseModel
from .adapter import Adapter
from .pair import LoraPair

# A linear layer as a function of x, weight and bias.
Product = Callable[..., Tensor]


@dataclass(frozen=True)
class Segment:
    """Tokens start:stop of the packed row run with this adapter; None = the bare base."""

    start: int
    stop: int
    adapter: Adapter | None


class LoraLinear(nn.Module):
    """A frozen linear layer plus, on each active segment, its adapter's low-rank term."""

    def __init__(self, base: nn.Linear, name: str, active: "Active") -> None:
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


class Active:
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
