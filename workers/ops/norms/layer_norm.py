"""Layer norms, by torch's kernels, with gradients of their weights and biases in float32."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..fused import RmsNorm


class LayerNorm(RmsNorm):
    """A norm that subtracts the mean: Ba, Kiros and Hinton, https://arxiv.org/abs/1607.06450.

    bias: [size], None if it has none.
    """

    def __init__(self, parameter: Tensor, eps: Tensor, adds_one: bool = False, bias: Tensor | None = None) -> None:
        super().__init__(parameter, eps, adds_one)
        self.bias = bias

    def add(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Like RmsNorm.add, also for the heads of x [tokens, heads, size]."""
        total = x if update is None else x + update
        if torch.is_grad_enabled():
            return total, _LayerNorm.apply(total, self)  # pyright: ignore[reportReturnType]
        return total, _normalized(total, self)[0]

    def add_bias_gradient(self, grad: Tensor) -> None:
        """Adds to the bias's gradient, if it has one, given the gradient of the norm's output [..., size]."""
        if self.bias is not None and self.bias.grad is not None:
            self.bias.grad.add_(grad.flatten(0, -2).sum(0))


class HeadLayerNorms(LayerNorm):
    """A norm over each head, with the weight of that head, [size], in a parameter of its own. It has no bias."""

    def __init__(self, parameters: Sequence[Tensor], eps: Tensor) -> None:
        self._parameters = parameters
        super().__init__(parameters[0], eps)

    def refresh(self) -> None:
        self.weight = torch.stack([each.detach() for each in self._parameters])

    def add_gradient(self, grad: Tensor, x: Tensor, inverse: Tensor) -> None:
        for parameter, of_head in zip(self._parameters, (grad * x).mul_(inverse).sum(0), strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(of_head)


def _normalized(x: Tensor, norm: LayerNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the norm, and the mean and the inverse standard deviation, float32 [..., 1]."""
    out, mean, inverse = torch.native_layer_norm(x.float(), x.shape[-1:], None, None, norm.eps_number)
    out = out.mul_(norm.weight) if norm.bias is None else out.mul_(norm.weight).add_(norm.bias)
    return out.to(x.dtype), mean, inverse


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
        norm.add_bias_gradient(grad)
        gradient, *_ = torch.ops.aten.native_layer_norm_backward(
            grad * norm.weight, wide, x.shape[-1:], mean, inverse, None, None, [True, False, False]
        )
        return gradient.to(x.dtype), None
