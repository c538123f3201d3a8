"""Triton kernels for what lies between the matrix products of a layer, on a GPU: norms, rotations and gates, with their
gradients, and the attention of decode steps.

Each takes the place of three to ten of torch's operations, computes in float32, and rounds once, at the end. Triton is
imported here: import this module through `load_triton_kernels`.
"""
# pyright: reportMissingImports=false

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_kind import AttentionKind
from .fused import GatedActivation, RmsNorm, Rotation
from .kernels import TorchKernels, with_rows

# Triton 3.9 warns if this is not set, and 3.10 will not fuse multiplications with additions by default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# A program of attention reads this many bytes of keys at a time: three such tiles of keys and of values fit into the
# shared memory of any GPU. Fewer programs than _MIN_PROGRAMS leave a GPU idle, so long sequences are divided among
# several, each with at least _MIN_KEYS.
_TILE_BYTES = 1 << 14
_MIN_PROGRAMS = 256
_MIN_KEYS = 256

# A program handles a tile of heads, or a block of features, with this many numbers.
_TILE = 1024
_BLOCK = 1024


class TritonKernels(TorchKernels):
    """Launches the kernels on tensors of a GPU. The numbers of a row must be contiguous; else a copy is made."""

    def add_rms_norm(self, x: Tensor, update: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor, None]:
        x, out, size = x.contiguous(), x.new_empty(x.shape), x.shape[1]
        total, added = (x, x) if update is None else (x.new_empty(x.shape), update.contiguous())
        tensors = out, total, x, added, norm.weight
        launch(_add_rms_norm, x.shape[:1], *tensors, norm.eps_number, size, update is not None, **_of_row(size))
        return total, out, None

    def rms_norm_gradient(
        self, grad: Tensor, x: Tensor, norm: RmsNorm, addend: Tensor | None, inverse: Tensor | None = None
    ) -> Tensor:
        if norm.parameter.grad is not None:
            return super().rms_norm_gradient(grad, x, norm, addend, inverse)
        grad, x = grad.contiguous(), x.contiguous()
        added = grad if addend is None else addend.contiguous()
        out = grad.new_empty(grad.shape)
        tensors, size = (out, grad, added, x, norm.weight), x.shape[1]
        launch(_rms_norm_gradient, x.shape[:1], *tensors, norm.eps_number, size, addend is not None, **_of_row(size))
        return out

    def rotate_heads(self, x: Tensor, rotation: Rotation, norm: RmsNorm | None) -> tuple[Tensor, Tensor | None]:
        if rotation.cos.shape[-1] != x.shape[-1]:
            return super().rotate_heads(x, rotation, norm)
        x = with_rows(x)
        out, (grid, sizes) = x.new_empty(x.shape), _of_heads(x)
        weight, eps, stride = _of_norm(norm, x)
        tensors = out, x, rotation.cos, rotation.sin, weight
        launch(_rotate_heads, grid, *tensors, eps, x.stride(0), stride, norm is not None, *x.shape[1:], **sizes)
        return out, None

    def rotate_heads_gradient(
        self, grad: Tensor, x: Tensor | None, rotation: Rotation, norm: RmsNorm | None, inverse: Tensor | None = None
    ) -> Tensor:
        has_gradient = norm is not None and norm.parameter.grad is not None
        if has_gradient or rotation.cos.shape[-1] != grad.shape[-1]:
            return super().rotate_heads_gradient(grad, x, rotation, norm, inverse)
        grad, x = with_rows(grad), grad if x is None else with_rows(x)
        out, (grid, sizes) = grad.new_empty(grad.shape), _of_heads(grad)
        weight, eps, stride = _of_norm(norm, x)
        tensors, strides = (out, grad, x, rotation.cos, rotation.sin, weight), (grad.stride(0), x.stride(0), stride)
        launch(_rotate_heads_gradient, grid, *tensors, eps, *strides, norm is not None, *x.shape[1:], **sizes)
        return out

    def gated(
        self, gate: Tensor, up: Tensor, kind: GatedActivation, has_gradient: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        gate, up = with_rows(gate), with_rows(up)
        out, sizes = gate.new_empty(gate.shape), (gate.stride(0), up.stride(0), gate.shape[1])
        launch(_gate, _of_blocks(gate), out, gate, up, *sizes, kind.alpha, kind.limit, kind.name, _BLOCK)
        return out, None

    def gated_gradient(
        self, grad: Tensor, gate: Tensor, up: Tensor, kind: GatedActivation, active: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        grad, gate, up = with_rows(grad), with_rows(gate), with_rows(up)
        sizes = grad.stride(0), gate.stride(0), up.stride(0), gate.shape[1]
        launch(_gate_gradient, _of_blocks(gate), grad, gate, up, *sizes, kind.alpha, kind.limit, kind.name, _BLOCK)
        return gate, up

    def decode_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        lengths: Tensor,
        span: int,
        kind: AttentionKind,
    ) -> Tensor:
        """Runs the attention of a decode step, and stores the new keys and values. Returns the query's shape.

        Args:
            query: [rows, heads, size].
            key: [rows, kv_heads, size], like `value`.
            keys: the cache, contiguous [slots, kv_heads, capacity, size], like `values`.
            slots: the slot of each row's sequence, int64 [rows].
            lengths: its tokens so far, int64 [rows].
            span: tokens of the longest sequence, including the new one.
        """
        query, key, value = with_rows(query), with_rows(key), with_rows(value)
        (rows, heads, size), kv_heads, capacity = query.shape, key.shape[1], keys.shape[2]
        parts = _num_parts(rows * kv_heads, min(span, kind.window or span))
        out = query.new_empty(query.shape)
        sums = out if parts == 1 else query.new_empty(parts, rows, heads, size + 2, dtype=torch.float32)
        # A product of matrices takes at least 16 rows and columns.
        group, block = (max(triton.next_power_of_2(number), 16) for number in (heads // kv_heads, size))
        num_keys = max(16, min(64, _TILE_BYTES // (block * keys.element_size())))
        launch(
            _decode_attention,
            (rows, kv_heads, parts),
            *(out, sums, query, key, value, keys, values, slots, lengths),
            *(lengths if kind.sinks is None else kind.sinks.scores, kind.scaling, kind.cap or 1.0),
            *(query.stride(0), key.stride(0), value.stride(0), rows, heads, kv_heads, capacity, size, kind.window or 0),
            SINKS=kind.sinks is not None,
            CAPPED=kind.cap is not None,
            DIVIDED=parts > 1,
            KEYS=num_keys,
            GROUP=group,
            BLOCK=block,
        )
        if parts > 1:
            numbers = parts, rows * heads, heads, size, triton.next_power_of_2(parts), block
            launch(_join_parts, (rows, heads), out, sums, *numbers)
        return out


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
    """Launches on the device of the first tensor, which need not be this thread's current one."""
    with torch.cuda.device_of(arguments[0]):
        kernel[tuple(grid)](*arguments, **constants)


def _num_parts(num_programs: int, num_keys: int) -> int:
    """Returns among how many programs the keys of a sequence are divided."""
    return max(1, min(-(-_MIN_PROGRAMS // num_programs), -(-num_keys // _MIN_KEYS)))


def _of_row(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


def _of_heads(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Returns the grid, a program for each token and tile of heads, and the tile's size."""
    block = triton.next_power_of_2(x.shape[2] // 2)
    heads = min(max(_TILE // block, 1), triton.next_power_of_2(x.shape[1]))
    return (x.shape[0], triton.cdiv(x.shape[1], heads)), {"HEADS": heads, "BLOCK": block}


def _of_norm(norm: RmsNorm | None, x: Tensor) -> tuple[Tensor, float, int]:
    """Returns the weight of a norm of heads, or x where there is none, eps, and the stride from a head's weight to the
    next."""
    if norm is None:
        return x, 0.0, 0
    return norm.weight, norm.eps_number, norm.head_stride


def _of_blocks(x: Tensor) -> tuple[int, int]:
    return x.shape[0], triton.cdiv(x.shape[1], _BLOCK)


@triton.jit
def _add_rms_norm(out, total, x, update, weight, eps, size, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < size
    place = tl.program_id(0).to(tl.int64) * size + column
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    if ADDS:
        value += tl.load(update + place, inside, 0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + place, rounded, inside)
        value = rounded.to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(value * value) / size + eps)
    weights = tl.load(weight + column, inside, 0.0).to(tl.float32)
    tl.store(out + place, (value * inverse * weights).to(out.dtype.element_ty), inside)


@triton.jit
def _rms_norm_gradient(out, grad, addend, x, weight, eps, size, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < size
    place = tl.program_id(0).to(tl.int64) * size + column
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    wide = tl.load(grad + place, inside, 0.0).to(tl.float32) * tl.load(weight + column, inside, 0.0).to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(value * value) / size + eps)
    wide = wide * inverse - value * (inverse * inverse * inverse * tl.sum(wide * value) / size)
    if ADDS:
        wide += tl.load(addend + place, inside, 0.0).to(tl.float32)
    tl.store(out + place, wide.to(out.dtype.element_ty), inside)


@triton.jit
def _rotate_heads(
    out, x, cos, sin, weight, eps, x_stride, weight_stride, NORMS: tl.constexpr, heads, size,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, half = tl.program_id(0).to(tl.int64), size // 2
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (column < half)
    place = head * size + column
    first = tl.load(x + token * x_stride + place, inside, 0.0).to(tl.float32)
    second = tl.load(x + token * x_stride + place + half, inside, 0.0).to(tl.float32)
    if NORMS:
        inverse = 1 / tl.sqrt(tl.sum(first * first + second * second, 1) / size + eps)[:, None]
        of_head = weight + head * weight_stride + column
        first *= inverse * tl.load(of_head, inside, 0.0).to(tl.float32)
        second *= inverse * tl.load(of_head + half, inside, 0.0).to(tl.float32)
    c = tl.load(cos + token * size + column, column < half, 0.0)
    s = tl.load(sin + token * half + column, column < half, 0.0)
    rotated = out + token * heads * size + place
    tl.store(rotated, (first * c - second * s).to(out.dtype.element_ty), inside)
    tl.store(rotated + half, (second * c + first * s).to(out.dtype.element_ty), inside)


@triton.jit
def _rotate_heads_gradient(
    out, grad, x, cos, sin, weight, eps, grad_stride, x_stride, weight_stride, NORMS: tl.constexpr, heads, size,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, half = tl.program_id(0).to(tl.int64), size // 2
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (column < half)
    place = head * size + column
    grad_first = tl.load(grad + token * grad_stride + place, inside, 0.0).to(tl.float32)
    grad_second = tl.load(grad + token * grad_stride + place + half, inside, 0.0).to(tl.float32)
    c = tl.load(cos + token * size + column, column < half, 0.0)
    s = tl.load(sin + token * half + column, column < half, 0.0)
    back_first = grad_first * c + grad_second * s
    back_second = grad_second * c - grad_first * s
    if NORMS:
        first = tl.load(x + token * x_stride + place, inside, 0.0).to(tl.float32)
        second = tl.load(x + token * x_stride + place + half, inside, 0.0).to(tl.float32)
        of_head = weight + head * weight_stride + column
        back_first *= tl.load(of_head, inside, 0.0).to(tl.float32)
        back_second *= tl.load(of_head + half, inside, 0.0).to(tl.float32)
        inverse = 1 / tl.sqrt(tl.sum(first * first + second * second, 1) / size + eps)[:, None]
        along = tl.sum(back_first * first + back_second * second, 1)[:, None] * inverse * inverse * inverse / size
        back_first = back_first * inverse - first * along
        back_second = back_second * inverse - second * along
    rotated = out + token * heads * size + place
    tl.store(rotated, back_first.to(out.dtype.element_ty), inside)
    tl.store(rotated + half, back_second.to(out.dtype.element_ty), inside)


@triton.jit
def _activation(gate, alpha, limit, KIND: tl.constexpr):
    """Returns the activation and its derivative."""
    if KIND == "gelu":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * gate * gate)
        return 0.5 * gate * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * slope
    if KIND == "clamped":
        clamped = tl.where(gate > limit, limit, gate)
        sigmoid = tl.sigmoid(alpha * clamped)
        derivative = tl.where(gate > limit, 0.0, sigmoid * (1 + alpha * gate * (1 - sigmoid)))
        return clamped * sigmoid, derivative
    sigmoid = tl.sigmoid(gate)
    return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))


@triton.jit
def _factor(up, limit, KIND: tl.constexpr):
    """Returns the factor of the activation, and its derivative."""
    # Triton compiles both of two returns, which must then be of one type.
    if KIND == "clamped":
        factor = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1
        slope = tl.where((up <= limit) & (up >= -limit), 1.0, 0.0)
    else:
        factor, slope = up, 1.0
    return factor, slope


@triton.jit
def _gate(out, gate, up, gate_stride, up_stride, size, alpha, limit, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    of_gate = tl.load(gate + row * gate_stride + column, inside, 0.0).to(tl.float32)
    active, _ = _activation(of_gate, alpha, limit, KIND)
    factor, _ = _factor(tl.load(up + row * up_stride + column, inside, 0.0).to(tl.float32), limit, KIND)
    tl.store(out + row * size + column, (active * factor).to(out.dtype.element_ty), inside)


@triton.jit
def _gate_gradient(
    grad, gate, up, grad_stride, gate_stride, up_stride, size, alpha, limit, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Overwrites gate and up with their gradients."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    of_gate, of_up = gate + row * gate_stride + column, up + row * up_stride + column
    active, slope = _activation(tl.load(of_gate, inside, 0.0).to(tl.float32), alpha, limit, KIND)
    factor, factor_slope = _factor(tl.load(of_up, inside, 0.0).to(tl.float32), limit, KIND)
    wide = tl.load(grad + row * grad_stride + column, inside, 0.0).to(tl.float32)
    tl.store(of_gate, (wide * factor * slope).to(gate.dtype.element_ty), inside)
    tl.store(of_up, (wide * active * factor_slope).to(up.dtype.element_ty), inside)


@triton.jit
def _soft_capped(scores, cap):
    return cap * (2 * tl.sigmoid(2 * scores / cap) - 1)


# Numbers that differ from step to step; for each new multiple of 16 among them, Triton would compile another kernel.
@triton.jit(do_not_specialize=["rows", "capacity", "window"])
def _decode_attention(
    out, sums, query, key, value, keys, values, slots, lengths, sinks, scaling, cap,
    query_stride, key_stride, value_stride, rows, heads, kv_heads, capacity, size, window,
    SINKS: tl.constexpr, CAPPED: tl.constexpr, DIVIDED: tl.constexpr,
    KEYS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attends one row's queries of one key head to a part of its keys; the first part has the new key too,
    and the sinks, float32 [heads], if there are any.

    sums: of each part, float32 [parts, rows, heads, size + 2]: the weighted sum of values, the greatest score, and the
    sum of weights.
    """
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group = heads // kv_heads
    member, column = tl.arange(0, GROUP), tl.arange(0, BLOCK)
    head, in_group, in_size = kv_head * group + member, member < group, column < size
    place = head[:, None] * size + column[None, :]
    q = tl.load(query + row * query_stride + place, in_group[:, None] & in_size[None, :], 0.0)
    length = tl.load(lengths + row)
    start = (tl.load(slots + row) * kv_heads + kv_head) * capacity

    greatest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, BLOCK], tl.float32)
    if part == 0:
        of_head = kv_head * size + column
        new_key = tl.load(key + row * key_stride + of_head, in_size, 0.0)
        new_value = tl.load(value + row * value_stride + of_head, in_size, 0.0)
        tl.store(keys + (start + length) * size + column, new_key, in_size)
        tl.store(values + (start + length) * size + column, new_value, in_size)
        greatest = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scaling
        if CAPPED:
            greatest = _soft_capped(greatest, cap)
        total += 1.0
        acc += new_value.to(tl.float32)[None, :]
        if SINKS:
            sink = tl.load(sinks + head, in_group, 0.0)
            highest = tl.maximum(greatest, sink)
            total = tl.exp(greatest - highest)
            acc *= total[:, None]
            total += tl.exp(sink - highest)
            greatest = highest

    first = tl.maximum(length + 1 - window, 0) if window > 0 else length * 0
    each = tl.cdiv(tl.cdiv(length - first, tl.num_programs(2)), KEYS) * KEYS
    first += part * each
    last = tl.minimum(first + each, length)
    for begin in range(first, last, KEYS):
        token = begin + tl.arange(0, KEYS)
        seen = token < last
        cached = (start + token)[:, None] * size + column[None, :]
        inside = seen[:, None] & in_size[None, :]
        k = tl.load(keys + cached, inside, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if CAPPED:
            scores = _soft_capped(scores, cap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(greatest, tl.max(scores, 1))
        weights = tl.exp(scores - highest[:, None])
        shrink = tl.exp(greatest - highest)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + cached, inside, 0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        greatest = highest

    written = in_group[:, None] & in_size[None, :]
    if DIVIDED:
        of_part = sums + ((part * rows + row) * heads + head) * (size + 2)
        tl.store(of_part[:, None] + column[None, :], acc, written)
        tl.store(of_part + size, greatest, in_group)
        tl.store(of_part + size + 1, total, in_group)
    else:
        tl.store(out + row * heads * size + place, (acc / total[:, None]).to(out.dtype.element_ty), written)


@triton.jit(do_not_specialize=["parts", "num_heads"])
def _join_parts(out, sums, parts, num_heads, heads, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Joins the parts of one head of one row. num_heads: of all rows."""
    head = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    part, column = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    of_part = sums + (part * num_heads + head) * (size + 2)
    greatest = tl.load(of_part + size, part < parts, float("-inf"))
    shares = tl.exp(greatest - tl.max(greatest))
    total = tl.sum(shares * tl.load(of_part + size + 1, part < parts, 0.0))
    inside = (part < parts)[:, None] & (column < size)[None, :]
    acc = tl.sum(tl.load(of_part[:, None] + column[None, :], inside, 0.0) * shares[:, None], 0)
    tl.store(out + head * size + column, (acc / total).to(out.dtype.element_ty), column < size)
