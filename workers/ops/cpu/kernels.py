"""Calls the functions of kernels.c on tensors, by ctypes."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...resources.lanes import lane_threads
from ...resources.threads import WORTH_ALL
from ..attention_kind import AttentionKind
from ..kernels import ExpertFactors, PrefixGroups, with_rows
from .library import CompiledLibrary, load_library
from .step_tape import StepTape
from .training_kernels import CpuTrainingKernels, threads_for

_WIDE_REGISTER = 16

_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
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
}

# Return 1 if they get no memory for what they compute on the way.
_FALLIBLE = ("decode_attention", "add_low_rank", "sort_pairs", "run_experts", "delta_step")


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


class CpuKernels(CpuTrainingKernels):
    """`Kernels` in C. Tensors whose rows are not contiguous are copied."""

    def __init__(self, library: CompiledLibrary) -> None:
        super().__init__(library)
        library.declare(_ARGUMENTS, _FALLIBLE)
        self._most_threads = torch.get_num_threads()
        # On registers of 16 numbers (AVX-512) torch's products are as fast, and faster if all dimensions are large.
        self.outdo_torch = library.register_size() < _WIDE_REGISTER

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, out = x.contiguous(), x.new_empty(x.shape)
        self.library.add_rms_norm(
            out.data_ptr(), None, x.data_ptr(), None, weight.data_ptr(), eps, *x.shape, threads_for(x)
        )
        return out

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, update = x.contiguous(), update.contiguous()
        total, out = x.new_empty(x.shape), x.new_empty(x.shape)
        pointers = (tensor.data_ptr() for tensor in (out, total, x, update, weight))
        self.library.add_rms_norm(*pointers, eps, *x.shape, threads_for(x))
        return total, out

    def rotate_heads(self, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        tokens, heads, size = x.shape
        x, out = with_rows(x), x.new_empty(x.shape)
        pointer, stride = (None, 0) if weight is None else (weight.data_ptr(), size if weight.dim() > 1 else 0)
        inputs = x.data_ptr(), x.stride(0), pointer, stride, eps, cos.data_ptr(), sin.data_ptr()
        self.library.rotate_heads(out.data_ptr(), *inputs, tokens, heads, size, cos.shape[-1], threads_for(x))
        return out

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = with_rows(gate), with_rows(up)
        if gate.stride(0) != up.stride(0):
            gate, up = gate.contiguous(), up.contiguous()
        out = gate.new_empty(gate.shape)
        self.library.swiglu(
            out.data_ptr(), gate.data_ptr(), up.data_ptr(), gate.stride(0), *gate.shape, threads_for(gate)
        )
        return out

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
        new = (part for tensor in (query, key, value) for part in (tensor.data_ptr(), tensor.stride(0)))
        where = (tensor.data_ptr() for tensor in (slots, lengths, groups.order, groups.bounds, groups.num_shared))
        sizes = len(groups.num_shared), query.shape[1], key.shape[1], query.shape[2], keys.shape[2], kind.window or 0
        sinks = None if kind.sinks is None else kind.sinks.scores
        cache = keys.data_ptr(), values.data_ptr(), None if sinks is None else sinks.data_ptr()
        scales = kind.scaling, kind.cap or 0.0
        self.library.decode_attention(out.data_ptr(), *new, *cache, *where, *sizes, *scales, num_threads)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
        columns, inner = weight.shape
        x = x if x.stride(1) == 1 else x.contiguous()
        if addend is not None and addend.stride(1) != 1:
            addend = addend.contiguous()
        y = x.new_empty(len(x), columns) if addend is None else addend
        if bias is not None:
            y = y.copy_(bias.expand_as(y)) if addend is None else y.add_(bias)
        transposed = weight.stride(1) == 1
        pointers = y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), weight.data_ptr()
        rows = 0, weight.stride(0 if transposed else 1), transposed, (_SIZE * 2)(0, len(x)), len(x)
        adds, threads = addend is not None or bias is not None, torch.get_num_threads()
        threads = threads if y.numel() * inner > WORTH_ALL else 1
        self.library.grouped_matmul(*pointers, *rows, 1, inner, columns, adds, threads)
        return y

    def grouped_matmul(self, y: Tensor, x: Tensor, matrices: Tensor, bounds: Tensor, adds: bool) -> None:
        x, (groups, inner, columns) = with_rows(x), matrices.shape
        transposed = matrices.stride(2) != 1
        apart = matrices.stride(0), matrices.stride(2 if transposed else 1)
        threads = self._threads_for_product(len(x) * inner * columns)
        pointers = y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), matrices.data_ptr()
        rows = *apart, transposed, bounds.data_ptr(), len(x)
        self.library.grouped_matmul(*pointers, *rows, groups, inner, columns, adds, threads)

    def add_low_rank(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> None:
        x, a, b = with_rows(x), with_rows(a), with_rows(b)
        pointers = (part for tensor in (y, x, a, b) for part in (tensor.data_ptr(), tensor.stride(0)))
        self.library.add_low_rank(*pointers, *x.shape, *b.shape)

    def _threads_for_product(self, num_multiplications: int) -> int:
        return (lane_threads() or self._most_threads) if num_multiplications > WORTH_ALL else 1

    def sort_pairs(self, keys: Tensor, first: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
        keys, num_pairs = keys.contiguous(), keys.numel()
        tokens, places, counts = (keys.new_empty(size) for size in (num_pairs, num_pairs, num_groups))
        pointers = (x.data_ptr() for x in (tokens, places, counts, keys))
        self.library.sort_pairs(*pointers, first, num_pairs, keys.shape[1], num_groups)
        return tokens, places, counts

    def combine_pairs(self, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        x, weights, (num_tokens, of_each) = x.contiguous(), weights.contiguous(), weights.shape
        out = x.new_empty(num_tokens, x.shape[1])
        pointers = (tensor.data_ptr() for tensor in (out, x, places, weights))
        self.library.combine_pairs(*pointers, num_tokens, of_each, x.shape[1])
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
        pointers = (None if each is None else each.data_ptr() for each in (out, between, x, keys, weights))
        matrices = (ctypes.byref(_Matrices.of(each)) for each in (gate_up, down))
        sizes = first, num_tokens, keys.shape[1], experts, hidden, features
        self.library.run_experts(*pointers, *matrices, terms, *sizes, threads)
        return out, between

    def convolve_step(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, is_silu: bool
    ) -> Tensor:
        x, weight, out = with_rows(x), weight.contiguous(), x.new_empty(x.shape)
        where = states.data_ptr(), slots.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr()
        sizes = *x.shape, weight.shape[1], is_silu, torch.get_num_threads()
        self.library.convolve_step(out.data_ptr(), x.data_ptr(), x.stride(0), *where, *sizes)
        return out

    def delta_step(self, inputs: Sequence[Tensor], states: Tensor, slots: Tensor) -> Tensor:
        q, k, v = (with_rows(x) for x in inputs[:3])
        g, beta = (x.contiguous() for x in inputs[3:])
        out = v.new_empty(v.shape)
        pointers = (part for x in (q, k, v) for part in (x.data_ptr(), x.stride(0)))
        others = (x.data_ptr() for x in (g, beta, states, slots))
        sizes = len(q), q.shape[1], v.shape[1], q.shape[2], v.shape[2]
        self.library.delta_step(out.data_ptr(), *pointers, *others, *sizes, torch.get_num_threads())
        return out

    def sample(self, logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        rows, vocab = logits.shape
        logits = logits.contiguous()
        tokens, logprobs = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows)
        pointers = (tensor.data_ptr() for tensor in (tokens, logprobs, logits, temperature, uniform))
        self.library.choose(*pointers, rows, vocab, threads_for(logits))
        return tokens, logprobs

    def new_tape(self) -> StepTape:
        """Returns a tape that records a decode step, the calls of kernels among its operations."""
        return StepTape(self.library)


def load() -> CpuKernels | None:
    """Returns the kernels, compiled if no earlier process has; None, with a warning, if they do not compile here."""
    return None if (library := load_library()) is None else CpuKernels(library)


KERNELS = {"cpu": load}
"""The row of ../kernels.py."""
