"""Calls the functions of training.c on tensors, by ctypes."""

import ctypes

import torch
from torch import Tensor

from ..attention_kind import AttentionKind
from ..fused import GatedActivation, RmsNorm, Rotation
from ..kernels import Kernels, with_rows
from .library import CompiledLibrary

# With fewer numbers than this, waking up other threads does not pay.
_WORTH_THREADS = 65536

_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "rms_norm_gradient": [*[_POINTER] * 5, _FLOAT, *[_SIZE] * 2, _INT],
    "rotate_heads_gradient": [
        *[_POINTER, *[_POINTER, _SIZE] * 3, _FLOAT],
        *[_POINTER] * 2,
        *[_SIZE] * 4,
        _INT,
    ],
    "swiglu_gradient": [_POINTER, _SIZE, *[_POINTER] * 2, *[_SIZE] * 3, _INT],
    "log_softmax": [*[_POINTER] * 2, *[_SIZE] * 2, _INT],
    "scaled_exponentials": [*[_POINTER] * 2, *[_SIZE] * 2, _INT],
    "combine_pairs_gradient": [*[_POINTER] * 6, *[_SIZE] * 3, _INT],
    "attention": [*[_POINTER] * 6, _SIZE, _POINTER, _INT],
    "attention_gradient": [*[_POINTER] * 10, _SIZE, _POINTER, _INT],
}

_FALLIBLE = ("attention", "attention_gradient")


class _Attention(ctypes.Structure):
    """The struct attention of training.c."""

    _names = ("q_stride", "k_stride", "v_stride", "grad_stride", "heads", "kv_heads", "size", "value_size", "window")
    _fields_ = (*((name, _SIZE) for name in _names), ("scaling", _FLOAT))


class CpuTrainingKernels(Kernels):
    """The kernels of training in C, on as many threads as torch's operations on this thread."""

    def __init__(self, library: CompiledLibrary) -> None:
        library.declare(_ARGUMENTS, _FALLIBLE)
        self.library = library

    def rms_norm_gradient(
        self, grad: Tensor, x: Tensor, norm: RmsNorm, addend: Tensor | None, inverse: Tensor | None = None
    ) -> Tensor:
        if norm.parameter.grad is not None:
            return super().rms_norm_gradient(grad, x, norm, addend, inverse)
        grad, x, out = grad.contiguous(), x.contiguous(), x.new_empty(x.shape)
        addend = None if addend is None else addend.contiguous()
        self.library.rms_norm_gradient(out, grad, addend, x, norm.weight, norm.eps_number, *x.shape, threads_for(x))
        return out

    def rotate_heads_gradient(
        self, grad: Tensor, x: Tensor | None, rotation: Rotation, norm: RmsNorm | None, inverse: Tensor | None = None
    ) -> Tensor:
        if norm is not None and norm.parameter.grad is not None:
            return super().rotate_heads_gradient(grad, x, rotation, norm, inverse)
        (tokens, heads, size), cos = grad.shape, rotation.cos
        grad, out = with_rows(grad), grad.new_empty(grad.shape)
        x = grad if x is None else with_rows(x)
        weights = (None, 0, 0.0) if norm is None else (norm.weight, norm.head_stride, norm.eps_number)
        inputs = grad, grad.stride(0), x, x.stride(0), *weights, cos, rotation.sin
        self.library.rotate_heads_gradient(out, *inputs, tokens, heads, size, cos.shape[-1], threads_for(grad))
        return out

    def gated_gradient(
        self, grad: Tensor, gate: Tensor, up: Tensor, kind: GatedActivation, active: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if kind.name != "silu":
            return super().gated_gradient(grad, gate, up, kind, active)
        grad, gate, up = with_rows(grad), with_rows(gate), with_rows(up)
        if gate.stride(0) != up.stride(0):
            gate, up = gate.contiguous(), up.contiguous()
        self.library.swiglu_gradient(grad, grad.stride(0), gate, up, gate.stride(0), *gate.shape, threads_for(gate))
        return gate, up

    def log_softmax(self, x: Tensor, out: Tensor) -> Tensor:
        if not x.is_contiguous():
            return super().log_softmax(x, out)
        self.library.log_softmax(out, x, *x.shape, threads_for(x))
        return out

    def scaled_exponentials(self, x: Tensor, factors: Tensor) -> Tensor:
        if not x.is_contiguous():
            return super().scaled_exponentials(x, factors)
        self.library.scaled_exponentials(x, factors.contiguous(), *x.shape, threads_for(x))
        return x

    def combine_pairs_gradient(self, grad: Tensor, x: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        grad, x, weights, (num_tokens, of_each) = grad.contiguous(), x.contiguous(), weights.contiguous(), weights.shape
        grad_x, grad_weights = torch.empty_like(x), torch.empty_like(weights)
        sizes = num_tokens, of_each, x.shape[1], threads_for(x)
        self.library.combine_pairs_gradient(grad_x, grad_weights, grad, x, places, weights, *sizes)
        return grad_x, grad_weights

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, kind: AttentionKind
    ) -> tuple[Tensor, Tensor]:
        (tokens, heads, _), value_size = query.shape, value.shape[2]
        query, key, value = (with_rows(x) for x in (query, key, value))
        out, log_sums = query.new_empty(tokens, heads, value_size), query.new_empty(heads, tokens)
        of = ctypes.byref(_described(query, key, value, out, kind))
        self.library.attention(out, log_sums, query, key, value, bounds, len(bounds) - 1, of, torch.get_num_threads())
        return out, log_sums

    def attention_gradient(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        log_sums: Tensor,
        bounds: Tensor,
        kind: AttentionKind,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, query, key, value = (with_rows(x) for x in (grad, query, key, value))
        found = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
        tensors = *found, grad, query, key, value, out.contiguous(), log_sums.contiguous(), bounds
        of = ctypes.byref(_described(query, key, value, grad, kind))
        self.library.attention_gradient(*tensors, len(bounds) - 1, of, torch.get_num_threads())
        return found


def threads_for(x: Tensor) -> int:
    """Returns the number of threads that should share an operation on x: at most those of torch on this thread."""
    return torch.get_num_threads() if x.numel() > _WORTH_THREADS else 1


def _described(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, kind: AttentionKind) -> _Attention:
    strides = (x.stride(0) for x in (query, key, value, grad))
    sizes = query.shape[1], key.shape[1], query.shape[2], value.shape[2], kind.window or 0
    return _Attention(*strides, *sizes, kind.scaling)
