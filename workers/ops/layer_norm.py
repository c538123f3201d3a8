"""Layer norms without bias, by torch's kernels, with gradients of their weights in float32."""

from typing import Any

import torch
from torch import Tensor

from .fused import RmsNorm


class LayerNorm(RmsNorm):
    """A norm that subtracts the mean: Ba, Kiros and Hinton, https://arxiv.org/abs/1607.06450. It has no bias."""


def layer_norm(x: Tensor, norm: LayerNorm) -> Tensor:
    """Returns the norm of x [tokens, size] or [tokens, heads, size]."""
    if torch.is_grad_enabled():
        return _LayerNorm.apply(x, norm)  # pyright: ignore[reportReturnType]
    return _normalized(x, norm)[0]


def _normalized(x: Tensor, norm: LayerNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the norm, and the mean and the inverse standard deviation, float32 [..., 1]."""
    out, mean, inverse = torch.native_layer_norm(x.float(), x.shape[-1:], None, None, norm.eps_number)
    return out.mul_(norm.weight).to(x.dtype), mean, inverse


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: LayerNorm) -> Tensor:
        out, mean, inverse = _normalized(x, norm)
        ctx.save_for_backward(x, mean, inverse)
        ctx.norm = norm
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, mean, inverse = ctx.saved_tensors
        wide, grad, norm = x.float(), grads[0].float(), ctx.norm
        norm.add_gradient(grad, wide - mean, inverse)
        gradient, *_ = torch.ops.aten.native_layer_norm_backward(
            grad * norm.weight, wide, x.shape[-1:], mean, inverse, None, None, [True, False, False]
        )
        return gradient.to(x.dtype), None
