"""The gated norm of groups of features: Dao and Gu, Transformers are SSMs (2024), https://arxiv.org/abs/2405.21060."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..fused import RmsNorm
from ..kernels import inverse_rms, norm_gradient


def gated_group_norm(x: Tensor, gate: Tensor, norm: RmsNorm, gates_first: bool) -> Tensor:
    """Returns norm(x silu(gate)), or norm(x) silu(gate), computed in float32.

    Args:
        x: [tokens, groups, size]; each group has a norm of its own. gate: of the same shape.
        norm: its weight is [groups * size].
    Returns:
        [tokens, groups * size].
    """
    return _GatedNorm.apply(x, gate, norm, gates_first)  # pyright: ignore[reportReturnType]


class _GatedNorm(torch.autograd.Function):
    """Keeps the inputs; backward computes the rest again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, norm: RmsNorm, gates_first: bool) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.norm, ctx.gates_first = norm, gates_first
        weight, active = norm.weight.view(x.shape[1:]), silu(gate.float())
        wide = active.mul_(x) if gates_first else x.float()
        out = (wide * inverse_rms(wide, norm.eps)).mul_(weight)
        return (out if gates_first else out.mul_(active)).to(x.dtype).flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, gate), norm = ctx.saved_tensors, ctx.norm
        weight, grad = norm.weight.view(x.shape[1:]), grads[0].reshape(x.shape).float()
        wide, wide_gate = x.float(), gate.float()
        active = silu(wide_gate)
        gated = wide * active if ctx.gates_first else wide
        inverse = inverse_rms(gated, norm.eps)
        of_norm = grad if ctx.gates_first else grad * active
        if norm.parameter.grad is not None:
            norm.parameter.grad.add_((of_norm * gated).mul_(inverse).sum(0).flatten())
        of_gated = norm_gradient(of_norm * weight, gated, inverse)
        if ctx.gates_first:
            of_active, of_x = of_gated * wide, of_gated * active
        else:
            of_active, of_x = (wide * inverse).mul_(weight).mul_(grad), of_gated
        of_gate = torch.ops.aten.silu_backward(of_active, wide_gate)
        return of_x.to(x.dtype), of_gate.to(gate.dtype), None, None
