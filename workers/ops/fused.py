"""Everything between the matrix products of a Llama-shaped layer in few passes over memory: norms, rotation, gates.

Every function treats each token separately and has a hand-written gradient. The gradients of norm weights are added to
their `grad`, if they have one. Norms and rotation compute in float32 for inputs of any dtype. On a GPU they run as
Triton kernels, float32 on the CPU as kernels.c and training.c; else, and for gradients of norm weights, by torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from .kernels import Kernels, device_kernels_for, kernels_for, triton_kernels_for

if TYPE_CHECKING:
    from .triton_kernels import TritonKernels


class RmsNorm:
    """A root mean square norm: Zhang and Sennrich, https://arxiv.org/abs/1910.07467.

    weight: [size], or [heads, size] if each head has its own. eps: float32 scalar, on the weight's device.
    """

    weight: Tensor

    def __init__(self, parameter: Tensor, eps: Tensor, adds_one: bool = False, own: slice | None = None) -> None:
        """Uses the features `own` of the parameter (None for all), plus 1 if `adds_one`."""
        self.parameter, self.eps = parameter, eps
        self._adds_one, self._own = adds_one, own
        self.refresh()

    @cached_property
    def eps_number(self) -> float:
        return self.eps.item()

    def refresh(self) -> None:
        """Updates the weight after the parameter was replaced."""
        weight = self._own_of(self.parameter.detach())
        self.weight = weight.float() + 1 if self._adds_one else weight

    def add_gradient(self, grad: Tensor, x: Tensor, inverse: Tensor) -> None:
        """Adds to the parameter's gradient, if it has one, given the gradient of the norm's output [..., size]."""
        if self.parameter.grad is not None:
            along = (grad * x).mul_(inverse).flatten(0, -1 - self.weight.dim()).sum(0)
            self._own_of(self.parameter.grad).add_(along)

    def _own_of(self, whole: Tensor) -> Tensor:
        return whole if self._own is None else whole[self._own]


@dataclass(frozen=True)
class Rotation:
    """Rotates the first 2 n features of heads, whose first half holds the real and second half the imaginary parts.

    cos [tokens, 1, 2 n], both halves equal; sin [tokens, 1, n]; float32. query_scale: factors of the queries, float32
    [tokens, 1, 1], None for 1.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None

    def apply(self, x: Tensor, sign: float = 1.0) -> Tensor:
        """Returns float32 [tokens, heads, size] rotated; sign -1 rotates back, and maps the gradient."""
        size = self.cos.shape[-1]
        if size < x.shape[-1]:
            return torch.cat((self.apply(x[..., :size], sign), x[..., size:]), dim=-1)
        out = x * self.cos
        (first, second), (out_first, out_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
        out_first.addcmul_(second, self.sin, value=-sign)
        out_second.addcmul_(first, self.sin, value=sign)
        return out

    def scaled(self, query: Tensor) -> Tensor:
        """Returns queries [tokens, heads, size] times their factors."""
        return query if self.query_scale is None else query * self.query_scale.to(query.dtype)


# By the name of a kind of rotations; None rotates nothing.
Rotations = Mapping[str | None, Rotation]


class RotaryTable:
    """Caches cosines and sines of all positions seen so far, computed in float32 as transformers does."""

    def __init__(
        self, inverse_frequencies: Tensor, scale: float, query_scale: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Takes a function from positions, int64 [tokens], to factors of their queries, float32 [tokens]."""
        self._frequencies = inverse_frequencies.float()
        self._scale, self._query_scale = scale, query_scale
        # One attribute for both tables: several threads may find them too short and replace them.
        self._tables = self._made(0)

    def at(self, positions: Tensor, longest: int) -> Rotation:
        """Returns the rotation of positions, int64 [tokens], all below `longest`."""
        cos, sin = self._tables
        if longest > len(cos):
            cos, sin = self._tables = self._made(max(longest, 2 * len(cos)))
        scale = None if self._query_scale is None else self._query_scale(positions)[:, None, None]
        return Rotation(cos.index_select(0, positions), sin.index_select(0, positions), scale)

    def _made(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self._frequencies.device)
        angles = positions[:, None, None].float() * self._frequencies
        cos = torch.cat((angles, angles), dim=-1).cos_().mul_(self._scale)
        return cos, angles.sin_().mul_(self._scale)


def rms_norm(x: Tensor, norm: RmsNorm) -> Tensor:
    """Returns the norm of x [tokens, size]."""
    return add_rms_norm(x, None, norm)[1]


def add_rms_norm(x: Tensor, update: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """Returns x + update, or x if there is none, and its norm; all [tokens, size]."""
    if torch.is_grad_enabled():
        sum_and_norm: Any = _AddRmsNorm.apply(x, update, norm)
        return (x, sum_and_norm[1]) if update is None else sum_and_norm
    if (kernels := device_kernels_for(x)) is not None:
        return kernels.add_rms_norm(x, update, norm.weight, norm.eps_number)
    total = x if update is None else x + update
    return total, _normalized(total, inverse_rms(total, norm.eps), norm).to(x.dtype)


def rotate_heads(x: Tensor, rotation: Rotation, norm: RmsNorm | None) -> Tensor:
    """Rotates the heads of x [tokens, heads, size], after normalizing each head if there is a norm."""
    if torch.is_grad_enabled():
        return _RotateHeads.apply(x, rotation, norm)  # pyright: ignore[reportReturnType]
    return _rotated(x, rotation, norm)[0]


def query_scales(positions: Tensor, rate: float, length: int, first: int) -> Tensor:
    """Returns float32 1 + rate * log(1 + floor((position + first) / length)) for int64 [tokens], by which queries may
    grow.

    Nakanishi, Scalable-Softmax (2025), https://arxiv.org/abs/2501.19399.
    """
    return 1 + rate * (1 + (positions + first) // length).float().log()


def pairs_apart(x: Tensor, size: int) -> Tensor:
    """Moves neighbours among the first `size` features of x [..., features] apart: even ones first, then odd ones.

    Rotated pairs of features are then where Rotation expects them. Products of queries and keys do not depend on the
    order.
    """
    apart = x[..., :size].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return apart if size == x.shape[-1] else torch.cat((apart, x[..., size:]), dim=-1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up: Shazeer, https://arxiv.org/abs/2002.05202."""
    if torch.is_grad_enabled():
        return _SwiGlu.apply(gate, up)  # pyright: ignore[reportReturnType]
    if (kernels := device_kernels_for(gate)) is not None:
        return kernels.swiglu(gate, up)
    return silu(gate).mul_(up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns gelu(gate) * up with the tanh approximation: Shazeer, https://arxiv.org/abs/2002.05202."""
    if torch.is_grad_enabled():
        return _GeGlu.apply(gate, up)  # pyright: ignore[reportReturnType]
    if (triton := triton_kernels_for(gate)) is not None:
        return triton.geglu(gate, up)
    return gelu(gate, approximate="tanh").mul_(up)


def log_softmax(logits: Tensor, out: Tensor) -> Tensor:
    """Returns, in `out`, which may be the logits, the logarithms of the softmax over each row; both [rows, n]."""
    if logits.is_contiguous() and (kernels := kernels_for(logits, out)) is not None:
        return kernels.log_softmax(logits, out)
    return torch.log_softmax(logits, dim=-1, out=out)


def scaled_exponentials(x: Tensor, factors: Tensor) -> Tensor:
    """Replaces x [rows, n] by exp(x) times the factor of each row, [rows]."""
    if x.is_contiguous() and (kernels := kernels_for(x, factors)) is not None:
        return kernels.scaled_exponentials(x, factors)
    return x.exp_().mul_(factors[:, None])


# Keyed by transformers' name of the activation.
GATES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"silu": swiglu, "gelu_pytorch_tanh": geglu}


class _AddRmsNorm(torch.autograd.Function):
    """Returns the sum and its norm, without an update the norm alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor | None, norm: RmsNorm) -> tuple[Tensor | None, Tensor]:
        ctx.norm, ctx.kernels = norm, (kernels := device_kernels_for(x))
        ctx.set_materialize_grads(False)
        if kernels is not None:
            inverse = None
            total, normalized = kernels.add_rms_norm(x, update, norm.weight, norm.eps_number)
        else:
            total = x if update is None else x + update
            inverse = inverse_rms(total, norm.eps)
            normalized = _normalized(total, inverse, norm).to(x.dtype)
        ctx.save_for_backward(x if update is None else total, inverse)
        return None if update is None else total, normalized

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (total, inverse), norm, (addend, grad) = ctx.saved_tensors, ctx.norm, grads
        if ctx.kernels is not None and norm.parameter.grad is None:
            gradient = ctx.kernels.rms_norm_gradient(grad, total, norm.weight, norm.eps_number, addend)
        else:
            wide, inverse = grad.float(), inverse_rms(total, norm.eps) if inverse is None else inverse
            norm.add_gradient(wide, total, inverse)
            gradient = norm_gradient(wide * norm.weight, total, inverse)
            gradient = (gradient if addend is None else gradient.add_(addend)).to(grad.dtype)
        return gradient, gradient if ctx.needs_input_grad[1] else None, None


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Rotation, norm: RmsNorm | None) -> Tensor:
        ctx.rotation, ctx.norm = rotation, norm
        out, inverse, ctx.kernels = _rotated(x, rotation, norm)
        ctx.save_for_backward(x if norm is not None else None, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, inverse = ctx.saved_tensors
        (grad,), rotation, norm = grads, ctx.rotation, ctx.norm
        if ctx.kernels is not None and (norm is None or norm.parameter.grad is None):
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps_number)
            return ctx.kernels.rotate_heads_gradient(grad, x, rotation.cos, rotation.sin, weight, eps), None, None
        gradient = rotation.apply(grad.float(), sign=-1.0)
        if norm is not None:
            inverse = inverse_rms(x, norm.eps) if inverse is None else inverse
            norm.add_gradient(gradient, x, inverse)
            gradient = norm_gradient(gradient.mul_(norm.weight), x, inverse)
        return gradient.to(grad.dtype), None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.kernels = device_kernels_for(gate)
        if ctx.kernels is not None:
            ctx.save_for_backward(gate, up, None)
            return ctx.kernels.swiglu(gate, up)
        active = silu(gate)
        ctx.save_for_backward(gate, up, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Overwrites the saved tensors, which nothing else reads, since backward runs once."""
        gate, up, active = ctx.saved_tensors
        (grad,) = grads
        if ctx.kernels is not None:
            return ctx.kernels.swiglu_gradient(grad, gate, up)
        grad_active = up.mul_(grad)
        grad_gate = torch.ops.aten.silu_backward.grad_input(grad_active, gate, grad_input=grad_active)
        return grad_gate, active.mul_(grad)


class _GeGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.triton = triton_kernels_for(gate)
        if ctx.triton is not None:
            ctx.save_for_backward(gate, up, None)
            return ctx.triton.geglu(gate, up)
        active = gelu(gate, approximate="tanh")
        ctx.save_for_backward(gate, up, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Overwrites the saved tensors, like _SwiGlu."""
        gate, up, active = ctx.saved_tensors
        (grad,) = grads
        if ctx.triton is not None:
            return ctx.triton.geglu_gradient(grad, gate, up)
        grad_gate = torch.ops.aten.gelu_backward(up.mul_(grad), gate, approximate="tanh")
        return grad_gate, active.mul_(grad)


def inverse_rms(x: Tensor, eps: Tensor) -> Tensor:
    """Returns 1 / sqrt(mean(x^2) + eps) over the last dimension, float32 [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()


def _normalized(x: Tensor, inverse: Tensor, norm: RmsNorm) -> Tensor:
    return (x * inverse).mul_(norm.weight)


def _rotated(
    x: Tensor, rotation: Rotation, norm: RmsNorm | None
) -> "tuple[Tensor, Tensor | None, Kernels | TritonKernels | None]":
    """Returns the heads rotated; their inverse norms, if torch computed them; and the kernels, if those did."""
    # Triton's kernels rotate whole heads only.
    kernels = device_kernels_for(x) if x.is_cpu or rotation.cos.shape[-1] == x.shape[-1] else None
    if kernels is not None:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps_number)
        return kernels.rotate_heads(x, rotation.cos, rotation.sin, weight, eps), None, kernels
    inverse = None if norm is None else inverse_rms(x, norm.eps)
    wide = x.float() if norm is None or inverse is None else _normalized(x, inverse, norm)
    return rotation.apply(wide).to(x.dtype), inverse, None


def norm_gradient(grad: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """Returns the gradient of x, given the gradient of x * inverse, float32 [..., size], which it overwrites."""
    wide = x.float()
    along = inverse.pow(3).mul_(torch.linalg.vecdot(grad, wide).unsqueeze(-1)).mul_(-1 / x.shape[-1])
    return grad.mul_(inverse).addcmul_(wide, along)
