"""What lies between the matrix products of a Llama-shaped layer, in few passes over memory: norms, rotation, SwiGLU.

Every function treats each token by itself and has a gradient written by hand; the frozen weights of norms get none.
Norms and rotation compute in float32 whatever dtype comes in.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


@dataclass(frozen=True)
class RmsNorm:
    """weight [size], and eps, of a root mean square norm: Zhang and Sennrich, https://arxiv.org/abs/1910.07467."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class Rotation:
    """Tables that rotate heads of head_dim = 2 n; the second half of a head holds the imaginary parts.

    diagonal float32 [tokens, 1, 2 n]: what each element is multiplied by. from_second, from_first [tokens, 1, n]: what
    the first half takes from the second (to be subtracted), and the second from the first.
    """

    diagonal: Tensor
    from_second: Tensor
    from_first: Tensor

    def of_scaled(self, weight: Tensor) -> "Rotation":
        """The rotation of elements that are first multiplied by weight [2 n]."""
        first, second = weight.float().chunk(2)
        return Rotation(self.diagonal * weight, self.from_second * second, self.from_first * first)

    def apply(self, x: Tensor) -> Tensor:
        """float32 [tokens, heads, head_dim] -> the same, rotated."""
        (first, second), out = x.chunk(2, dim=-1), x * self.diagonal
        out_first, out_second = out.chunk(2, dim=-1)
        out_first.addcmul_(second, self.from_second, value=-1)
        out_second.addcmul_(first, self.from_first)
        return out

    def apply_transposed(self, grad: Tensor) -> Tensor:
        """The gradient of the argument of `apply`."""
        (first, second), out = grad.chunk(2, dim=-1), grad * self.diagonal
        out_first, out_second = out.chunk(2, dim=-1)
        out_first.addcmul_(second, self.from_first)
        out_second.addcmul_(first, self.from_second, value=-1)
        return out


class RotaryTable:
    """Cosines and sines of all positions seen so far, as transformers' rotary embedding makes them in float32."""

    def __init__(self, inverse_frequencies: Tensor, scale: float) -> None:
        self._frequencies = inverse_frequencies.float()
        self._scale = scale
        self._cos = self._sin = self._frequencies.new_zeros(0, len(self._frequencies))

    def at(self, positions: Tensor, longest: int) -> Rotation:
        """positions int64 [tokens], all below `longest`."""
        if longest > len(self._cos):
            self._extend(max(longest, 2 * len(self._cos)))
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        return Rotation(torch.cat((cos, cos), dim=-1), sin, sin)

    def _extend(self, length: int) -> None:
        angles = torch.arange(length, device=self._frequencies.device)[:, None].float() * self._frequencies
        self._cos, self._sin = angles.cos() * self._scale, angles.sin() * self._scale


def rms_norm(x: Tensor, norm: RmsNorm) -> Tensor:
    """x [tokens, size]"""
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, norm)  # pyright: ignore[reportReturnType]
    return _normalized(x, _inverse_rms(x, norm.eps), norm)


def add_rms_norm(x: Tensor, update: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """x + update, and the norm of that; all [tokens, size]."""
    if torch.is_grad_enabled():
        return _AddRmsNorm.apply(x, update, norm)  # pyright: ignore[reportReturnType]
    total = x + update
    return total, _normalized(total, _inverse_rms(total, norm.eps), norm)


def rotate_heads(x: Tensor, rotation: Rotation, norm: RmsNorm | None) -> Tensor:
    """x [tokens, heads, head_dim]; where there is a norm, each head goes through it first."""
    if norm is not None:
        rotation = rotation.of_scaled(norm.weight)
    eps = None if norm is None else norm.eps
    if torch.is_grad_enabled():
        return _RotateHeads.apply(x, rotation, eps)  # pyright: ignore[reportReturnType]
    return _rotated(x, rotation, None if eps is None else _inverse_rms(x, eps))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: Shazeer, https://arxiv.org/abs/2002.05202."""
    if torch.is_grad_enabled():
        return _SwiGlu.apply(gate, up)  # pyright: ignore[reportReturnType]
    return silu(gate).mul_(up)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: RmsNorm) -> Tensor:
        inverse = _inverse_rms(x, norm.eps)
        ctx.save_for_backward(x, inverse, norm.weight)
        return _normalized(x, inverse, norm)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, inverse, weight = ctx.saved_tensors
        (grad,) = grads
        return _norm_gradient(grad.float() * weight, x, inverse).to(grad.dtype), None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        total = x + update
        inverse = _inverse_rms(total, norm.eps)
        ctx.save_for_backward(total, inverse, norm.weight)
        ctx.set_materialize_grads(False)
        return total, _normalized(total, inverse, norm)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        total, inverse, weight = ctx.saved_tensors
        grad_total, grad = grads
        gradient = _norm_gradient(grad.float() * weight, total, inverse)
        if grad_total is not None:
            gradient.add_(grad_total)
        gradient = gradient.to(grad.dtype)
        return gradient, gradient, None


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Rotation, eps: float | None) -> Tensor:
        inverse = None if eps is None else _inverse_rms(x, eps)
        ctx.save_for_backward(None if eps is None else x, inverse)
        ctx.rotation = rotation
        return _rotated(x, rotation, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, inverse = ctx.saved_tensors
        (grad,) = grads
        gradient = ctx.rotation.apply_transposed(grad.float())
        if inverse is not None:
            gradient = _norm_gradient(gradient, x, inverse)
        return gradient.to(grad.dtype), None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        active = silu(gate)
        ctx.save_for_backward(gate, up, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up, active = ctx.saved_tensors
        (grad,) = grads
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, grad * active


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """float32 [..., 1]: 1 / sqrt(mean(x^2) + eps) over the last dimension."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def _normalized(x: Tensor, inverse: Tensor, norm: RmsNorm) -> Tensor:
    return (x * inverse).mul_(norm.weight).to(x.dtype)


def _rotated(x: Tensor, rotation: Rotation, inverse: Tensor | None) -> Tensor:
    out = rotation.apply(x.float())
    return (out if inverse is None else out.mul_(inverse)).to(x.dtype)


def _norm_gradient(grad: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """grad float32 [..., size] of x * inverse -> that of x, in the same memory."""
    along = torch.linalg.vecdot(grad, x.float()).unsqueeze(-1)
    along.mul_(inverse.pow(3)).mul_(-1 / x.shape[-1])
    return grad.mul_(inverse).addcmul_(x.float(), along)
