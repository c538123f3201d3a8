"""Calls the functions of kernels.c and training.c on tensors, by ctypes."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...resources.threads import WORTH_ALL, lane_threads
from ..attention_kind import AttentionKind
from ..fused import GatedActivation, RmsNorm, Rotation
from ..kernels import ExpertFactors, Kernels, PrefixGroups, with_rows
from .library import CompiledLibrary, load_library
from .step_tape import StepTape

_WIDE_REGISTER = 16

# With fewer numbers than this, waking up other threads does not pay.
_WORTH_THREADS = 65536

_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
# Where the rows of a single group begin, and end.
_Bounds = _SIZE * 2
_ARGUMENTS = {
    # of kernels.c
    "add_rms_norm": [*[_POINTER] * 5, _FLOAT, *[_SIZE] * 2, _INT],
    "rotate_heads": [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _FLOAT, _POINTER, _POINTER, *[_SIZE] * 4, _INT],
    "swiglu": [*[_POINTER] * 3, *[_SIZE] * 3, _INT],
    "decode_attention": [_POINTER, *[_POINTER, _SIZE] * 3, *[_POINTER] * 8, *[_SIZE] * 6, _FLOAT, _FLOAT, _INT],
    "grouped_matmul": [*[_POINTER, _SIZE] * 2, _POINTER, *[_SIZE] * 2, _INT, _POINTER, *[_SIZE] * 4, _INT, _INT],
    "register_size": [],
    "add_low_rank": [*[_POINTER, _SIZE] * 4, *[_SIZE] * 4],
    "sort_pairs": [*[_POINTER] * 4, *[_SIZE] * 4],
    "combine_pairs": [*[_POINTER] * 4, *[_SIZE] * 3],
    "run_experts": [*[_POINTER] * 8, *[_SIZE] * 6, _INT],
    "convolve_step": [_POINTER, _POINTER, _SIZE, *[_POINTER] * 4, *[_SIZE] * 3, _INT, _INT],
    "delta_step": [_POINTER, *[_POINTER, _SIZE] * 3, *[_POINTER] * 4, *[_SIZE] * 5, _INT],
    "choose": [*[_POINTER] * 5, *[_SIZE] * 2, _INT],
    # of training.c
    "rms_norm_gradient": [*[_POINTER] * 5, _FLOAT, *[_SIZE] * 2, _INT],
    "rotate_heads_gradient": [*[_POINTER, *[_POINTER, _SIZE] * 3, _FLOAT], *[_POINTER] * 2, *[_SIZE] * 4, _INT],
    "swiglu_gradient": [_POINTER, _SIZE, *[_POINTER] * 2, *[_SIZE] * 3, _INT],
    "log_softmax": [*[_POINTER] * 2, *[_SIZE] * 2, _INT],
    "scaled_exponentials": [*[_POINTER] * 2, *[_SIZE] * 2, _INT],
    "combine_pairs_gradient": [*[_POINTER] * 6, *[_SIZE] * 3, _INT],
    "attention": [*[_POINTER] * 6, _SIZE, _POINTER, _INT],
    "attention_gradient": [*[_POINTER] * 10, _SIZE, _POINTER, _INT],
}

# Return 1 if they get no memory for what they compute on the way.
_FALLIBLE = (
    *("decode_attention", "add_low_rank", "sort_pairs", "run_experts", "delta_step"),
    *("attention", "attention_gradient"),
)


class _Matrices(ctypes.Structure):
    """The struct matrices of kernels.c."""

    _fields_ = [("numbers", _POINTER), ("group_stride", _SIZE), ("row_stride", _SIZE), ("transposed", _INT)]

    @staticmethod
    def of(matrices: Tensor) -> "_Matrices":
        """Describes [groups, p, q], of whose last two dimensions one is contiguous."""
        transposed = matrices.stride(2) != 1
        return _Matrices(matrices.data_ptr(), matrices.stride(0), matrices.stride(2 if transposed else 1), transposed)


class _ExpertTerms(ctypes.Structure):
    """The struct expert_terms of kernels.c."""

    _fields_ = [
        *((name, _POINTER) for name in ("reduced", "gate", "up", "down")),
        *((name, _SIZE) for name in ("width", "rank", "adapters")),
    ]


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


class CpuKernels(CpuTrainingKernels):
    """All kernels in C. Tensors whose rows are not contiguous are copied."""

    def __init__(self, library: CompiledLibrary) -> None:
        super().__init__(library)
        self._most_threads = torch.get_num_threads()
        # On registers of 16 numbers (AVX-512) torch's products are as fast, and faster if all dimensions are large.
        self.outdo_torch = library.register_size() < _WIDE_REGISTER

    def add_rms_norm(self, x: Tensor, update: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor, None]:
        x, out = x.contiguous(), x.new_empty(x.shape)
        update = None if update is None else update.contiguous()
        total = None if update is None else x.new_empty(x.shape)
        self.library.add_rms_norm(*(out, total, x, update, norm.weight, norm.eps_number), *x.shape, threads_for(x))
        return x if total is None else total, out, None

    def rotate_heads(self, x: Tensor, rotation: Rotation, norm: RmsNorm | None) -> tuple[Tensor, Tensor | None]:
        (tokens, heads, size), cos = x.shape, rotation.cos
        x, out = with_rows(x), x.new_empty(x.shape)
        weights = (None, 0, 0.0) if norm is None else (norm.weight, norm.head_stride, norm.eps_number)
        inputs = x, x.stride(0), *weights, cos, rotation.sin
        self.library.rotate_heads(out, *inputs, tokens, heads, size, cos.shape[-1], threads_for(x))
        return out, None

    def gated(
        self, gate: Tensor, up: Tensor, kind: GatedActivation, has_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if kind.name != "silu":
            return super().gated(gate, up, kind, has_gradient)
        gate, up = with_rows(gate), with_rows(up)
        if gate.stride(0) != up.stride(0):
            gate, up = gate.contiguous(), up.contiguous()
        out = gate.new_empty(gate.shape)
        self.library.swiglu(out, gate, up, gate.stride(0), *gate.shape, threads_for(gate))
        return out, None

    def decode_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        lengths: Tensor,
        groups: PrefixGroups,
        kind: AttentionKind,
        num_threads: int,
    ) -> Tensor:
        query, key, value, out = with_rows(query), with_rows(key), with_rows(value), query.new_empty(query.shape)
        new = query, query.stride(0), key, key.stride(0), value, value.stride(0)
        where = slots, lengths, groups.order, groups.bounds, groups.num_shared
        sizes = len(groups.num_shared), query.shape[1], key.shape[1], query.shape[2], keys.shape[2], kind.window or 0
        sinks, cap = None if kind.sinks is None else kind.sinks.scores, kind.cap or 0.0
        self.library.decode_attention(out, *new, keys, values, sinks, *where, *sizes, kind.scaling, cap, num_threads)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
        columns, inner = weight.shape
        x = x if x.stride(1) == 1 else x.contiguous()
        if addend is not None and addend.stride(1) != 1:
            addend = addend.contiguous()
        y = x.new_empty(len(x), columns) if addend is None else addend
        if bias is not None:
            y = y.copy_(bias.expand_as(y)) if addend is None else y.add_(bias)
        transposed, adds = weight.stride(1) == 1, addend is not None or bias is not None
        matrix = weight, 0, weight.stride(0 if transposed else 1), transposed
        rows = _Bounds(0, len(x)), len(x)
        threads = torch.get_num_threads() if y.numel() * inner > WORTH_ALL else 1
        self.library.grouped_matmul(y, y.stride(0), x, x.stride(0), *matrix, *rows, 1, inner, columns, adds, threads)
        return y

    def grouped_matmul(self, y: Tensor, x: Tensor, matrices: Tensor, bounds: Tensor, adds: bool) -> None:
        x, (groups, inner, columns) = with_rows(x), matrices.shape
        transposed = matrices.stride(2) != 1
        stacked = matrices, matrices.stride(0), matrices.stride(2 if transposed else 1), transposed
        threads = self._threads_for_product(len(x) * inner * columns)
        self.library.grouped_matmul(
            y, y.stride(0), x, x.stride(0), *stacked, bounds, len(x), groups, inner, columns, adds, threads
        )

    def add_low_rank(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        x, a, b = with_rows(x), with_rows(a), with_rows(b)
        factors = a, a.stride(0), b, b.stride(0)
        self.library.add_low_rank(y, y.stride(0), x, x.stride(0), *factors, *x.shape, *b.shape)

    def _threads_for_product(self, num_multiplications: int) -> int:
        return (lane_threads() or self._most_threads) if num_multiplications > WORTH_ALL else 1

    def sort_pairs(self, keys: Tensor, first: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
        keys, num_pairs = keys.contiguous(), keys.numel()
        tokens, places, counts = (keys.new_empty(size) for size in (num_pairs, num_pairs, num_groups))
        self.library.sort_pairs(tokens, places, counts, keys, first, num_pairs, keys.shape[1], num_groups)
        return tokens, places, counts

    def combine_pairs(self, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        x, weights, (num_tokens, of_each) = x.contiguous(), weights.contiguous(), weights.shape
        out = x.new_empty(num_tokens, x.shape[1])
        self.library.combine_pairs(out, x, places, weights, num_tokens, of_each, x.shape[1])
        return out

    def run_experts(
        self,
        x: Tensor,
        keys: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        first: int,
        factors: ExpertFactors | None,
    ) -> tuple[Tensor, Tensor | None]:
        x, keys, weights = x.contiguous(), keys.contiguous(), weights.expand(keys.shape).contiguous()
        (num_tokens, hidden), (experts, features, _) = x.shape, down.shape
        out, between, terms = torch.empty_like(x), None, None
        if factors is not None:
            width, rank = factors.reduced.shape[1] // 2, factors.gate.shape[1]
            between = x.new_empty(num_tokens, width)
            pointers = (each.data_ptr() for each in (factors.reduced, factors.gate, factors.up, factors.down))
            terms = ctypes.byref(_ExpertTerms(*pointers, width, rank, len(factors.gate) // experts))
        threads = self._threads_for_product(keys.numel() * hidden * 3 * features)
        matrices = (ctypes.byref(_Matrices.of(each)) for each in (gate_up, down))
        sizes = first, num_tokens, keys.shape[1], experts, hidden, features
        self.library.run_experts(out, between, x, keys, weights, *matrices, terms, *sizes, threads)
        return out, between

    def convolve_step(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, is_silu: bool
    ) -> Tensor:
        x, weight, out = with_rows(x), weight.contiguous(), x.new_empty(x.shape)
        sizes = *x.shape, weight.shape[1], is_silu, torch.get_num_threads()
        self.library.convolve_step(out, x, x.stride(0), states, slots, weight, bias, *sizes)
        return out

    def delta_step(self, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor:
        q, k, v = (with_rows(x) for x in inputs[:3])
        g, beta = (x.contiguous() for x in inputs[3:])
        out = v.new_empty(v.shape)
        rows = q, q.stride(0), k, k.stride(0), v, v.stride(0)
        sizes = len(q), q.shape[1], v.shape[1], q.shape[2], v.shape[2]
        self.library.delta_step(out, *rows, g, beta, states, slots, *sizes, torch.get_num_threads())
        return out

    def sample(self, logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        rows, vocab = logits.shape
        logits = logits.contiguous()
        tokens, logprobs = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows)
        self.library.choose(tokens, logprobs, logits, temperature, uniform, rows, vocab, threads_for(logits))
        return tokens, logprobs

    def new_tape(self) -> StepTape:
        """Returns a tape that records a decode step, the calls of kernels among its operations."""
        return StepTape(self.library)


def threads_for(x: Tensor) -> int:
    """Returns the number of threads that should share an operation on x: at most those of torch on this thread."""
    return torch.get_num_threads() if x.numel() > _WORTH_THREADS else 1


def _described(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, kind: AttentionKind) -> _Attention:
    strides = (x.stride(0) for x in (query, key, value, grad))
    sizes = query.shape[1], key.shape[1], query.shape[2], value.shape[2], kind.window or 0
    return _Attention(*strides, *sizes, kind.scaling)


def load() -> CpuKernels | None:
    """Returns the kernels, compiled if no earlier process has; None, with a warning, if they do not compile here."""
    return None if (library := load_library()) is None else CpuKernels(library)


KERNELS = {"cpu": load}
"""The row of ../kernels.py."""
