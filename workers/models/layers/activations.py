"""Functions between the two products of a feed-forward part, with hand-written gradients.

A gated one takes gates and ups, another one takes ups alone. Each treats every number separately.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from ...ops.fused import geglu, swiglu
from ...ops.kernels import device_kernels_for, triton_kernels_for


@dataclass(frozen=True)
class Activation:
    """An activation of features [rows, size], whose rows may be parts of wider ones.

    value: maps gate and up, or up alone, to its output. overwrite: given the output's gradient and the same features,
    replaces these by their gradients.
    """

    value: Callable[..., Tensor]
    overwrite: Callable[..., None]
    is_gated: bool = True

    def parts(self, features: Tensor) -> tuple[Tensor, ...]:
        """Returns views of gates and ups, or of ups, in features [rows, all columns], gates first."""
        return features.chunk(2, dim=-1) if self.is_gated else (features,)


def clamped_swiglu(alpha: float, limit: float) -> Activation:
    """Returns the gate of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), where gate is at most `limit`, and up
    between -limit and limit.

    OpenAI, gpt-oss-120b and gpt-oss-20b Model Card (2025), https://arxiv.org/abs/2508.10925.
    """
    return Activation(
        partial(_clamped, alpha=alpha, limit=limit), partial(_overwrite_clamped, alpha=alpha, limit=limit)
    )


def relu2(up: Tensor) -> Tensor:
    """Returns relu(up)^2: So et al., Primer (2021), https://arxiv.org/abs/2109.08668."""
    if torch.is_grad_enabled():
        return _Relu2.apply(up)  # pyright: ignore[reportReturnType]
    return up.relu().square_()


# Functions of features without gates, by transformers' name.
UNGATED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu2": relu2,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}


class _Relu2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor) -> Tensor:
        ctx.save_for_backward(up)
        return up.relu().square_()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Overwrites the saved tensor, which nothing else reads, since backward runs once."""
        (up,) = ctx.saved_tensors
        _overwrite_relu2(grads[0], up)
        return up


def _overwrite_relu2(grad: Tensor, up: Tensor) -> None:
    up.relu_().mul_(grad).mul_(2)


def _overwrite_swiglu(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    if (kernels := device_kernels_for(gate)) is not None:
        kernels.swiglu_gradient(grad, gate, up)
        return
    of_active = grad * up
    torch.mul(silu(gate), grad, out=up)
    torch.ops.aten.silu_backward.grad_input(of_active, gate, grad_input=gate)


def _overwrite_geglu(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    if (triton := triton_kernels_for(gate)) is not None:
        triton.geglu_gradient(grad, gate, up)
        return
    of_active = grad * up
    torch.mul(gelu(gate, approximate="tanh"), grad, out=up)
    torch.ops.aten.gelu_backward.grad_input(of_active, gate, approximate="tanh", grad_input=gate)


def _clamped(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    if (triton := triton_kernels_for(gate)) is not None:
        return triton.clamped_swiglu(gate, up, alpha, limit)
    # gate * sigmoid(alpha * gate) is silu(alpha * gate) / alpha.
    active = silu(gate.clamp(max=limit).mul_(alpha), inplace=True)
    return active.addcmul_(active, up.clamp(-limit, limit)).div_(alpha)


def _overwrite_clamped(grad: Tensor, gate: Tensor, up: Tensor, alpha: float, limit: float) -> None:
    if (triton := triton_kernels_for(gate)) is not None:
        triton.clamped_swiglu_gradient(grad, gate, up, alpha, limit)
        return
    of_active, is_over = up.clamp(-limit, limit).add_(1).mul_(grad), gate > limit
    torch.mul(grad, up.abs_() <= limit, out=up)
    inner = gate.clamp_(max=limit).mul_(alpha)
    up.mul_(silu(inner)).div_(alpha)
    torch.ops.aten.silu_backward.grad_input(of_active, inner, grad_input=gate).masked_fill_(is_over, 0)


# Keyed by transformers' name.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation(swiglu, _overwrite_swiglu),
    "gelu_pytorch_tanh": Activation(geglu, _overwrite_geglu),
    "relu2": Activation(relu2, _overwrite_relu2, is_gated=False),
}
