"""Everything between the matrix products of a layer in few passes over memory: norms, rotation, gates.

Every function treats each token separately and has a hand-written gradient. The gradients of norm weights are added to
their `grad`, if they have one. `layer_kernels` decides what computes them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from .kernels import inverse_rms, layer_kernels, norm_gradient


class RmsNorm:
    """A root mean square norm: Zhang and Sennrich, https://arxiv.org/abs/1910.07467.

    weight: [size], or [heads, size] if each head has its own. eps: float32 scalar, on the weight's device.
    """

    weight: Tensor

    def __init__(self, parameter: Tensor, eps: Tensor, adds_one: bool = False, own: slice | None = None) -> None:
        """Uses the features `own` of the parameter (None for all), plus 1 if `adds_one`."""
        self.parameter, self.eps = parameter, eps
        self._adds_one, self._own = adds_one, own
        self.head_stride = parameter.shape[-1] if parameter.dim() > 1 else 0
        """Elements from the weight of a head to that of the next."""
        self.refresh()

    @cached_property
    def eps_number(self) -> float:
        return self.eps.item()

    def refresh(self) -> None:
        """Updates the weight after the parameter was replaced."""
        weight = self._own_of(self.parameter.detach())
        self.weight = weight.float() + 1 if self._adds_one else weight

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the norm of x [tokens, size]."""
        return self.add(x, None)[1]

    def add(self, x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns x + update, or x if there is none, and its norm; all [tokens, size]."""
        if not torch.is_grad_enabled():
            return layer_kernels(x).add_rms_norm(x, update, self)[:2]
        sum_and_norm: Any = _AddRmsNorm.apply(x, update, self)
        return (x, sum_and_norm[1]) if update is None else sum_and_norm

    def add_gradient(self, grad: Tensor, x: Tensor, inverse: Tensor) -> None:
        """Adds to the parameter's gradient, if it has one, given the gradient of the norm's output [..., size]."""
        if self.parameter.grad is not None:
            along = (grad * x).mul_(inverse).flatten(0, -1 - self.weight.dim()).sum(0)
            self._own_of(self.parameter.grad).add_(along)

    def _own_of(self, whole: Tensor) -> Tensor:
        return whole if self._own is None else whole[self._own]


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
        """Adds the bias's share of grad, the gradient of the output [..., size], if the bias is trained."""
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


def gated_group_norm(x: Tensor, gate: Tensor, norm: RmsNorm, gates_first: bool) -> Tensor:
    """Returns norm(x silu(gate)), or norm(x) silu(gate), computed in float32: Dao and Gu, Transformers are SSMs (2024),
    https://arxiv.org/abs/2405.21060.

    Args:
        x: [tokens, groups, size]; each group has a norm of its own. gate: of the same shape.
        norm: its weight is [groups * size].
    Returns:
        [tokens, groups * size].
    """
    return _GatedNorm.apply(x, gate, norm, gates_first)  # pyright: ignore[reportReturnType]


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


def rotate_heads(x: Tensor, rotation: Rotation, norm: RmsNorm | None) -> Tensor:
    """Rotates the heads of x [tokens, heads, size], after normalizing each head if there is a norm."""
    if torch.is_grad_enabled():
        return _RotateHeads.apply(x, rotation, norm)  # pyright: ignore[reportReturnType]
    return layer_kernels(x).rotate_heads(x, rotation, norm)[0]


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


@dataclass(frozen=True)
class GatedActivation:
    """The activation of a gated feed-forward part: Shazeer, https://arxiv.org/abs/2002.05202."""

    name: Literal["silu", "gelu", "clamped"]
    """silu(gate) * up; gelu(gate) * up with the tanh approximation; or gpt-oss's (up + 1) * gate * sigmoid(alpha *
    gate), where gate is at most `limit`, and up between -limit and limit: OpenAI, gpt-oss-120b and gpt-oss-20b Model
    Card (2025), https://arxiv.org/abs/2508.10925."""
    alpha: float = 1.0
    limit: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Gated.apply(gate, up, self)  # pyright: ignore[reportReturnType]
        return layer_kernels(gate).gated(gate, up, self)[0]

    def overwrite(self, grad: Tensor, gate: Tensor, up: Tensor) -> None:
        """Replaces gate and up, views of one tensor, by their gradients, given that of the output."""
        layer_kernels(gate).gated_gradient(grad, gate, up, self)

    def parts(self, features: Tensor) -> tuple[Tensor, ...]:
        """Returns views of gates and ups in features [rows, all columns], gates first."""
        return features.chunk(2, dim=-1)


class Relu2:
    """relu(up)^2, without gates: So et al., Primer (2021), https://arxiv.org/abs/2109.08668."""

    def __call__(self, up: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Relu2.apply(up)  # pyright: ignore[reportReturnType]
        return up.relu().square_()

    def overwrite(self, grad: Tensor, up: Tensor) -> None:
        """Replaces up by its gradient, given that of the output."""
        up.relu_().mul_(grad).mul_(2)

    def parts(self, features: Tensor) -> tuple[Tensor, ...]:
        return (features,)


Activation = GatedActivation | Relu2
"""An activation of features [rows, size], whose rows may be parts of wider ones."""

# All keyed by transformers' name of the activation.
GATES: Mapping[str, GatedActivation] = {"silu": GatedActivation("silu"), "gelu_pytorch_tanh": GatedActivation("gelu")}
UNGATED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu2": Relu2(),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}
EXPERT_ACTIVATIONS: Mapping[str, Activation] = {**GATES, "relu2": Relu2()}

swiglu = GATES["silu"]


class _AddRmsNorm(torch.autograd.Function):
    """Returns the sum and its norm, without an update the norm alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor | None, norm: RmsNorm) -> tuple[Tensor | None, Tensor]:
        ctx.norm, ctx.kernels = norm, layer_kernels(x)
        ctx.set_materialize_grads(False)
        total, normalized, inverse = ctx.kernels.add_rms_norm(x, update, norm)
        ctx.save_for_backward(x if update is None else total, inverse)
        return None if update is None else total, normalized

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (total, inverse), (addend, grad) = ctx.saved_tensors, grads
        gradient = ctx.kernels.rms_norm_gradient(grad, total, ctx.norm, addend, inverse)
        return gradient, gradient if ctx.needs_input_grad[1] else None, None


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


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Rotation, norm: RmsNorm | None) -> Tensor:
        ctx.rotation, ctx.norm, ctx.kernels = rotation, norm, layer_kernels(x)
        out, inverse = ctx.kernels.rotate_heads(x, rotation, norm)
        ctx.save_for_backward(x if norm is not None else None, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, inverse = ctx.saved_tensors
        return ctx.kernels.rotate_heads_gradient(grads[0], x, ctx.rotation, ctx.norm, inverse), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: GatedActivation) -> Tensor:
        ctx.kind, ctx.kernels = kind, layer_kernels(gate)
        out, active = ctx.kernels.gated(gate, up, kind, has_gradient=True)
        ctx.save_for_backward(gate, up, active)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Overwrites up and active, which nothing else reads, since backward runs once."""
        gate, up, active = ctx.saved_tensors
        return *ctx.kernels.gated_gradient(grads[0], gate, up, ctx.kind, active), None


class _Relu2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: Tensor) -> Tensor:
        ctx.save_for_backward(up)
        return up.relu().square_()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Overwrites the saved tensor, like _Gated."""
        (up,) = ctx.saved_tensors
        return up.relu_().mul_(grads[0]).mul_(2)


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
