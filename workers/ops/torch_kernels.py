"""What is between the matrix products of a layer, by torch's own operations: the kernels of a device inherit what they
do not compute themselves."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

if TYPE_CHECKING:
    from .fused import Gate, RmsNorm, Rotation


class TorchKernels:
    """Norms, rotations, gates and softmax, with their gradients. Norms and rotations compute in float32."""

    def add_rms_norm(self, x: Tensor, update: Tensor | None, norm: "RmsNorm") -> tuple[Tensor, Tensor]:
        """Returns x + update, or x if there is none, and its norm; all [tokens, size]."""
        total = x if update is None else x + update
        return total, _normalized(total, norm).to(x.dtype)

    def rms_norm_gradient(self, grad: Tensor, x: Tensor, norm: "RmsNorm", addend: Tensor | None) -> Tensor:
        """Returns the gradient of the input x of a norm, plus the addend; all [tokens, size].

        Adds to the gradient of the norm's parameter, if it has one.
        """
        wide, inverse = grad.float(), inverse_rms(x, norm.eps)
        norm.add_gradient(wide, x, inverse)
        gradient = norm_gradient(wide * norm.weight, x, inverse)
        return (gradient if addend is None else gradient.add_(addend)).to(grad.dtype)

    def rotate_heads(self, x: Tensor, rotation: "Rotation", norm: "RmsNorm | None") -> Tensor:
        """Returns the heads of x [tokens, heads, size] normed, if there is a norm, and rotated."""
        wide = x.float() if norm is None else _normalized(x, norm)
        return rotation.apply(wide).to(x.dtype)

    def rotate_heads_gradient(
        self, grad: Tensor, x: Tensor | None, rotation: "Rotation", norm: "RmsNorm | None"
    ) -> Tensor:
        """Returns the gradient of the input x of `rotate_heads`, which is needed if there is a norm."""
        gradient = rotation.apply(grad.float(), sign=-1.0)
        if norm is not None and x is not None:
            inverse = inverse_rms(x, norm.eps)
            norm.add_gradient(gradient, x, inverse)
            gradient = norm_gradient(gradient.mul_(norm.weight), x, inverse)
        return gradient.to(grad.dtype)

    def gated(self, gate: Tensor, up: Tensor, kind: "Gate") -> Tensor:
        """Returns the output of a gate; all [tokens, size]."""
        if kind.name == "silu":
            return silu(gate).mul_(up)
        if kind.name == "gelu":
            return gelu(gate, approximate="tanh").mul_(up)
        # gate * sigmoid(alpha * gate) is silu(alpha * gate) / alpha.
        active = silu(gate.clamp(max=kind.limit).mul_(kind.alpha), inplace=True)
        return active.addcmul_(active, up.clamp(-kind.limit, kind.limit)).div_(kind.alpha)

    def gated_gradient(self, grad: Tensor, gate: Tensor, up: Tensor, kind: "Gate") -> tuple[Tensor, Tensor]:
        """Returns the gradients of gate and up; all [tokens, size]. They overwrite gate and up if the rows of both are
        equally far apart."""
        if kind.name == "silu":
            grad_active = grad * up
            torch.mul(silu(gate), grad, out=up)
            torch.ops.aten.silu_backward.grad_input(grad_active, gate, grad_input=gate)
        elif kind.name == "gelu":
            grad_active = grad * up
            torch.mul(gelu(gate, approximate="tanh"), grad, out=up)
            torch.ops.aten.gelu_backward.grad_input(grad_active, gate, approximate="tanh", grad_input=gate)
        else:
            grad_active, is_over = up.clamp(-kind.limit, kind.limit).add_(1).mul_(grad), gate > kind.limit
            torch.mul(grad, up.abs_() <= kind.limit, out=up)
            inner = gate.clamp_(max=kind.limit).mul_(kind.alpha)
            up.mul_(silu(inner)).div_(kind.alpha)
            torch.ops.aten.silu_backward.grad_input(grad_active, inner, grad_input=gate).masked_fill_(is_over, 0)
        return gate, up

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


def _normalized(x: Tensor, norm: "RmsNorm") -> Tensor:
    return (x * inverse_rms(x, norm.eps)).mul_(norm.weight)
