"""Norms, rotations and gates between the matrix products of a layer, by torch's own operations. The kernels of a device
inherit those that they do not compute themselves."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

if TYPE_CHECKING:
    from .fused import GatedActivation, RmsNorm, Rotation


class TorchKernels:
    """Norms, rotations, gates and softmax, with their gradients. Norms and rotations compute in float32."""

    def add_rms_norm(self, x: Tensor, update: Tensor | None, norm: "RmsNorm") -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns x + update, or x if there is none, and its norm; all [tokens, size].

        The last one is for `rms_norm_gradient`, None if that computes it again.
        """
        total = x if update is None else x + update
        inverse = inverse_rms(total, norm.eps)
        return total, (total * inverse).mul_(norm.weight).to(x.dtype), inverse

    def rms_norm_gradient(
        self, grad: Tensor, x: Tensor, norm: "RmsNorm", addend: Tensor | None, inverse: Tensor | None = None
    ) -> Tensor:
        """Returns the gradient of the input x of a norm, plus the addend; all [tokens, size].

        Adds to the gradient of the norm's parameter, if it has one.
        """
        wide, inverse = grad.float(), inverse_rms(x, norm.eps) if inverse is None else inverse
        norm.add_gradient(wide, x, inverse)
        gradient = norm_gradient(wide * norm.weight, x, inverse)
        return (gradient if addend is None else gradient.add_(addend)).to(grad.dtype)

    def rotate_heads(self, x: Tensor, rotation: "Rotation", norm: "RmsNorm | None") -> tuple[Tensor, Tensor | None]:
        """Returns the heads of x [tokens, heads, size] normed, if there is a norm, and rotated.

        The last one is for `rotate_heads_gradient`, None if that computes it again.
        """
        inverse = None if norm is None else inverse_rms(x, norm.eps)
        wide = x.float() if norm is None or inverse is None else (x * inverse).mul_(norm.weight)
        return rotation.apply(wide).to(x.dtype), inverse

    def rotate_heads_gradient(
        self,
        grad: Tensor,
        x: Tensor | None,
        rotation: "Rotation",
        norm: "RmsNorm | None",
        inverse: Tensor | None = None,
    ) -> Tensor:
        """Returns the gradient of the input x of `rotate_heads`, which is needed if there is a norm."""
        gradient = rotation.apply(grad.float(), sign=-1.0)
        if norm is not None and x is not None:
            inverse = inverse_rms(x, norm.eps) if inverse is None else inverse
            norm.add_gradient(gradient, x, inverse)
            gradient = norm_gradient(gradient.mul_(norm.weight), x, inverse)
        return gradient.to(grad.dtype)

    def gated(
        self, gate: Tensor, up: Tensor, kind: "GatedActivation", has_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output of a gate; all [tokens, size].

        The last one is for `gated_gradient` if that follows, None if it computes it again.
        """
        if kind.name != "clamped":
            active = _activated(gate, kind)
            return (active * up, active) if has_gradient else (active.mul_(up), None)
        # gate * sigmoid(alpha * gate) is silu(alpha * gate) / alpha.
        active = silu(gate.clamp(max=kind.limit).mul_(kind.alpha), inplace=True)
        return active.addcmul_(active, up.clamp(-kind.limit, kind.limit)).div_(kind.alpha), None

    def gated_gradient(
        self, grad: Tensor, gate: Tensor, up: Tensor, kind: "GatedActivation", active: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of gate and up; all [tokens, size]. Without `active` they overwrite gate and up if the
        rows of both are equally far apart; with it, gate stays, since it may be a view of a saved tensor."""
        aten = torch.ops.aten
        if kind.name == "clamped":
            grad_active, is_over = up.clamp(-kind.limit, kind.limit).add_(1).mul_(grad), gate > kind.limit
            torch.mul(grad, up.abs_() <= kind.limit, out=up)
            inner = gate.clamp_(max=kind.limit).mul_(kind.alpha)
            up.mul_(silu(inner)).div_(kind.alpha)
            aten.silu_backward.grad_input(grad_active, inner, grad_input=gate).masked_fill_(is_over, 0)
            return gate, up
        if active is None:
            grad_active, grad_up, out = grad * up, torch.mul(_activated(gate, kind), grad, out=up), gate
        else:
            grad_active, grad_up = up.mul_(grad), active.mul_(grad)
            out = grad_active
        if kind.name == "silu":
            return aten.silu_backward.grad_input(grad_active, gate, grad_input=out), grad_up
        return aten.gelu_backward.grad_input(grad_active, gate, approximate="tanh", grad_input=out), grad_up

    def log_softmax(self, x: Tensor, out: Tensor) -> Tensor:
        """Returns, in `out`, which may be x, the logarithms of the softmax over each row; both [rows, n]."""
        return torch.log_softmax(x, dim=-1, out=out)

    def scaled_exponentials(self, x: Tensor, factors: Tensor) -> Tensor:
        """Replaces x [rows, n] by exp(x) times the factor of each row, [rows]."""
        return x.exp_().mul_(factors[:, None])


def inverse_rms(x: Tensor, eps: Tensor) -> Tensor:
    """Returns 1 / sqrt(mean(x^2) + eps) over the last dimension, float32 [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()


def norm_gradient(grad: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """Returns the gradient of x, given the gradient of x * inverse, float32 [..., size], which it overwrites."""
    wide = x.float()
    along = inverse.pow(3).mul_(torch.linalg.vecdot(grad, wide).unsqueeze(-1)).mul_(-1 / x.shape[-1])
    return grad.mul_(inverse).addcmul_(wide, along)


def _activated(gate: Tensor, kind: "GatedActivation") -> Tensor:
    return silu(gate) if kind.name == "silu" else gelu(gate, approximate="tanh")
