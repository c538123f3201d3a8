"""The linear layer that applies to each token of a packed row the adapter of its segment."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
        self.active = active
        self.site = Site((name,), (base.out_features,))

    def forward(self, x: Tensor) -> Tensor:
        """x [1, tokens, in] or [tokens, in] -> the same with out features."""
        return self.active.apply(self.site, x, self.weight, self.bias)


class MergedLoraLinear(nn.Module):
    """Several LoraLinears of one input as one product.

    Their weights become views of the merged one, so nothing is held twice and each still works by itself.
    """

    def __init__(self, linears: Sequence[LoraLinear]) -> None:
        super().__init__()
        sites = [linear.site for linear in linears]
        self.active = linears[0].active
        self.site = Site(sum((site.names for site in sites), ()), sum((site.out_features for site in sites), ()))
        # Not registered: the parameters of the module tree stay those of the linears.
        self._merged = _merge(linears)

    @property
    def out_features(self) -> tuple[int, ...]:
        """Of each linear, in order: how to split the output's last dimension."""
        return self.site.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x [1, tokens, in] or [tokens, in] -> the same with the out features of all linears, one after the other."""
        weight, bias = self._merged
        return self.active.apply(self.site, x, weight, bias)


@dataclass(frozen=True)
class Site:
    """Linear layers of one input whose outputs lie side by side."""

    names: tuple[str, ...]
    out_features: tuple[int, ...]

    def columns(self) -> Iterator[slice]:
        """Where the output of each lies."""
        stops = tuple(accumulate(self.out_features))
        return (slice(stop - size, stop) for stop, size in zip(stops, self.out_features, strict=True))


class Active:
    """What every LoraLinear of a base shares: the segments applied now, and how products with frozen weights are made.

    anchor: a leaf that makes the outputs of adapted layers require a gradient, their own leaves not being autograd's.
    """

    def __init__(self, base: BaseModel) -> None:
        self.segments: tuple[Segment, ...] = ()
        self.anchor = torch.zeros((), device=base.device, requires_grad=True)
        self.product = frozen_product(base)

    def apply(self, site: "Site", x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias plus the adapters' terms, for x [1, tokens, in] or [tokens, in]."""
        rows = x.flatten(0, -2)
        parts = self._parts(site)
        assert not parts or len(rows) == self.segments[-1].stop, (
            f"{site.names[0]}: {len(rows)} tokens, but the segments end at {self.segments[-1].stop}"
        )
        return self._product(rows, weight, bias, parts).unflatten(0, x.shape[:-1])

    def _product(self, rows: Tensor, weight: Tensor, bias: Tensor | None, parts: "list[_Part]") -> Tensor:
        if not torch.is_grad_enabled():
            y = self.product(rows, weight, bias)
            _add_parts(y, rows, parts)
            return y
        y = _LoraProduct.apply(rows, self.anchor if parts else None, weight, bias, parts, self.product)
        assert isinstance(y, Tensor)
        return y

    def _parts(self, site: "Site") -> "list[_Part]":
        return [
            _Part(slice(segment.start, segment.stop), columns, segment.adapter.pairs[name])
            for segment in self.segments
            if segment.adapter is not None
            for name, columns in zip(site.names, site.columns(), strict=True)
            if name in segment.adapter.pairs
        ]


@dataclass(frozen=True)
class _Part:
    """Rows of a packed row, and the columns of a site's output, with the pair that is applied there."""

    rows: slice
    columns: slice
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
        # Gradients of A need the input; that of the input does not.
        ctx.save_for_backward(x if parts else None, weight)
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
            part.pair.backward(grad[part.rows, part.columns], x[part.rows], reduced, into)
        return grad_x, None, None, None, None, None


def _add_parts(y: Tensor, x: Tensor, parts: list[_Part]) -> list[Tensor]:
    """y += the parts' low-rank terms of x; returns x A^T of each part."""
    all_reduced = []
    for part in parts:
        reduced = part.pair.down(x[part.rows])
        part.pair.add_up(y[part.rows, part.columns], reduced)
        all_reduced.append(reduced)
    return all_reduced


def _merge(linears: Sequence[LoraLinear]) -> tuple[Tensor, Tensor | None]:
    """The weights of all in one tensor, and the biases; absent ones are zeros where others have one."""
    weight = _merge_parameters([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [
        linear.weight.new_zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias for linear in linears
    ]
    return weight, _merge_parameters(biases)


def _merge_parameters(parameters: list[Tensor]) -> Tensor:
    merged = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, merged.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return merged


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
