"""Linear layers that add, for each token of a packed row, the term of its segment's adapter."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models.activation_checkpointing import ForwardContext
from ..models.model import BaseModel
from ..ops.frozen.quantized import FrozenWeight, JoinedWeight, dequantized
from ..ops.linear import Product, add_product, to_product_layout
from .batch_plan import BatchPlan, LinearSite, SiteTerms
from .lora_experts import ExpertPlan


class LoraLinear(nn.Module):
    """A frozen linear layer plus, on each active segment, its adapter's low-rank term."""

    weight: FrozenWeight
    bias: Tensor | None

    def __init__(self, weight: FrozenWeight, bias: Tensor | None, site: LinearSite, active: "ActivePlan") -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.site, self.active = site, active

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [1, tokens, in] or [tokens, in] to the same shape with `out` features."""
        active, plan = self.active, self.active.here.plan
        rows = x if x.dim() == 2 else x.flatten(0, -2)
        if torch.is_grad_enabled():
            terms = None if plan is None else plan.terms(self.site, len(rows))
            anchor = None if terms is None else active.anchor
            y: Any = _AdaptedProduct.apply(rows, anchor, self.weight, self.bias, terms, active.product)
        else:
            y = active.product(rows, dequantized(self.weight), self.bias)
            if plan is not None:
                plan.add_terms(self.site, y, rows)
        return y if x.dim() == 2 else y.unflatten(0, x.shape[:-1])


class MergedLoraLinear(LoraLinear):
    """Several LoraLinears of one input as one product, which returns the concatenated outputs of all.

    Their weights become views of the merged one, so nothing is stored twice and each still works by itself. Packed ones
    stay as they are, and are joined when they are dequantized.
    """

    def __init__(self, linears: Sequence[LoraLinear]) -> None:
        sites = [linear.site for linear in linears]
        site = LinearSite(sum((site.names for site in sites), ()), sum((site.out_features for site in sites), ()))
        # Tensors but no parameters: those of the module tree stay those of the linears.
        super().__init__(*_merge(linears), site, linears[0].active)

    @property
    def out_features(self) -> tuple[int, ...]:
        """The output features of each linear, in order: the sizes to split the last dimension into."""
        return self.site.out_features


class ActivePlan:
    """Holds what all LoraLinears of a base share: the active plan, and the product with frozen weights."""

    def __init__(self, base: BaseModel) -> None:
        self.here = _ThreadPlan()
        # A leaf that makes the outputs of adapted layers require a gradient, because autograd does not see the
        # adapters' matrices.
        self.anchor = torch.zeros((), device=base.device, requires_grad=True)
        self.product = base.product

    @property
    def experts(self) -> ExpertPlan | None:
        """The part of the active plan for sparse layers."""
        plan = self.here.plan
        return None if plan is None else plan.experts

    @contextmanager
    def activated(self, plan: BatchPlan | None) -> Iterator[None]:
        """Makes `plan` the active one on this thread while inside."""
        before, self.here.plan = self.here.plan, plan
        try:
            yield
        finally:
            self.here.plan = before

    def captured_context(self) -> ForwardContext:
        """Returns a context manager factory that activates the current plan on any thread."""
        return partial(self.activated, self.here.plan)


class _ThreadPlan(threading.local):
    """The active plan of this thread, since each lane has a plan of its own."""

    plan: BatchPlan | None = None


class _AdaptedProduct(torch.autograd.Function):
    """Computes x W^T + bias + terms.

    backward adds to the adapters' scratch gradients, and to the `grad` of W and bias if they have one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor | None,
        weight: FrozenWeight,
        bias: Tensor | None,
        terms: SiteTerms | None,
        product: Product,
    ) -> Tensor:
        ctx.terms, ctx.product, ctx.weight, ctx.bias, ctx.shrunk = terms, product, weight, bias, []
        ctx.save_for_backward(x if terms is not None or weight.requires_grad else None)
        addend = None
        if terms is not None:
            for group, a, _ in terms.groups:
                own_x = x if group.is_whole else x[group.rows]
                ctx.shrunk.append(group.matmul.times(own_x, a.mT).mul_(group.matmul.scale))
            if terms.is_long and isinstance(weight, Tensor):
                return product(x, terms.added_to(weight), bias)
            group, _, layers = terms.groups[0]
            if group.is_whole and len(layers) == 1:
                addend = group.matmul.times(ctx.shrunk[0], layers[0].b)
            else:
                addend = terms.expand(x, ctx.shrunk)
        return product(x, weight if isinstance(weight, Tensor) else weight.dequantize(), bias, addend)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, terms, weight, (x,) = grads[0].contiguous(), ctx.terms, ctx.weight, ctx.saved_tensors
        if weight.requires_grad:
            add_product(weight.grad, grad, x)
        if ctx.bias is not None and ctx.bias.requires_grad:
            ctx.bias.grad.add_(grad.sum(0, dtype=torch.float32))
        wants_x, grad_x = ctx.needs_input_grad[0], None
        if terms is not None:
            adds_to_weight = terms.is_long and isinstance(weight, Tensor)
            if wants_x and not terms.groups[0].group.is_whole:
                grad_x = terms.new(grad, x.shape[1])
            for (group, a, layers), shrunk in zip(terms.groups, ctx.shrunk, strict=True):
                matmul, rows = group.matmul, group.rows
                own_x, own_grad = (x, grad) if group.is_whole else (x[rows], grad[rows])
                if len(layers) == 1:
                    grad_shrunk = matmul.times(own_grad, layers[0].b.mT).mul_(matmul.scale)
                    parts = [(own_grad, shrunk, grad_shrunk)]
                else:
                    grad_shrunk = torch.empty_like(shrunk)
                    parts = [(own_grad[:, c], shrunk[:, r], grad_shrunk[:, r]) for _, r, c, _ in layers]
                    for layer, (grad_y, _, grad_z) in zip(layers, parts, strict=True):
                        matmul.times(grad_y, layer.b.mT, out=grad_z).mul_(matmul.scale)
                for layer, (grad_y, z, grad_z) in zip(layers, parts, strict=True):
                    grad_a, grad_b = zip(*(views[layer.name] for views in group.gradients), strict=True)
                    matmul.add_outer(grad_a, grad_z, own_x)
                    matmul.add_outer(grad_b, z, grad_y)
                if grad_x is not None:
                    matmul.times(grad_shrunk, a, out=grad_x[rows])
                elif wants_x and not adds_to_weight:
                    grad_x = matmul.times(grad_shrunk, a)
            if wants_x and adds_to_weight:
                weight = terms.added_to(weight)
        if wants_x:
            weight = weight if isinstance(weight, Tensor) else weight.dequantize()
            grad_x = ctx.product(grad, weight.t(), None, grad_x)
        return grad_x, None, None, None, None, None


def _merge(linears: Sequence[LoraLinear]) -> tuple[FrozenWeight, Tensor | None]:
    """Returns all weights as one, and all biases; missing biases are zeros if any layer has one."""
    tensors = [linear.weight for linear in linears if isinstance(linear.weight, Tensor)]
    is_plain = len(tensors) == len(linears)
    weight = _merge_parameters(tensors) if is_plain else JoinedWeight([linear.weight for linear in linears])
    given = [linear.bias for linear in linears if linear.bias is not None]
    if not given:
        return weight, None
    biases = [given[0].new_zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias for linear in linears]
    return weight, _merge_parameters(biases)


def _merge_parameters(parameters: list[Tensor]) -> Tensor:
    merged = torch.cat([parameter.detach() for parameter in parameters])
    merged = to_product_layout(merged) if merged.dim() == 2 else merged
    for parameter, part in zip(parameters, merged.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return merged
