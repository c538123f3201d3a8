"""Attention over packed sequences, for training, prefill and decoding alike, behind transformers' attention interface.

A forward runs one packed row [1, tokens]; `Packing` says which tokens belong together. Sequences never share an
attention row, so what is wrong in one (a NaN) cannot reach another.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "trainhouse_packed"


@dataclass(frozen=True)
class Group:
    """`count` consecutive sequences of one `length`, the first of them starting at token `start` of the packed row."""

    start: int
    count: int
    length: int


class KeyValueCache:
    """Keys and values of `num_slots` sequences: per layer two tensors [num_slots, kv_heads, capacity, head_dim].

    A slot in use is zero beyond its sequence's length: prefill clears what an earlier sequence left, which may be
    non-finite (0 * NaN is NaN, so a mask alone would not keep it out).
    """

    def __init__(self, num_layers: int, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers

    def of_layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The two tensors of a layer, made at its first use for keys like `like` [tokens, kv_heads, head_dim]."""
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            shape = (self.num_slots, like.shape[1], self.capacity, like.shape[2])
            keys = self.keys[layer] = like.new_zeros(shape)
            values = self.values[layer] = like.new_zeros(shape)
        return keys, values

    def copy_slot(self, source: int, targets: list[int]) -> None:
        for tensor in self._tensors():
            for target in targets:
                tensor[target].copy_(tensor[source])

    def resize(self, num_slots: int, capacity: int) -> None:
        """Keeps what fits of the old content, so the slots in use must be the first and short enough. Moves one
        tensor at a time, which bounds the memory held twice to that of half a layer."""
        slots, length = min(num_slots, self.num_slots), min(capacity, self.capacity)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                if old is None:
                    continue
                new = old.new_zeros((num_slots, old.shape[1], capacity, old.shape[3]))
                new[:slots, :, :length] = old[:slots, :, :length]
                tensors[layer] = new
        self.num_slots, self.capacity = num_slots, capacity

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in (*self.keys, *self.values) if tensor is not None]


@dataclass(frozen=True)
class DecodeStep:
    """One new token for each of n sequences, against slots 0 .. n - 1 of the cache.

    slots: int64 [n], the slot of each row, a permutation. row_of_slot: its inverse, None when slot i is row i.
    lengths: int64 [n], the cached tokens of each row; the new one is stored behind them and attends to itself too.
    span: the longest sequence, the new token included.
    """

    slots: Tensor
    row_of_slot: Tensor | None
    lengths: Tensor
    span: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def out_of_sight(self, window: int | None) -> Tensor:
        """bool [n, 1, 1, span] by slot: which keys are out of sight. Made once a step for each kind of layer."""
        if window not in self.masks:
            lengths = self.lengths if self.row_of_slot is None else self.lengths[self.row_of_slot]
            position = torch.arange(self.span, device=lengths.device)
            mask = position > lengths[:, None]
            if window:
                mask |= position <= lengths[:, None] - window
            self.masks[window] = mask[:, None, None, :]
        return self.masks[window]


@dataclass(frozen=True)
class Packing:
    """How the tokens of one packed row attend.

    groups: the row's sequences in order, consecutive equal lengths as one group (the prefill and training form).
    cache, slots: where prefill stores the keys and values of the sequences; slots is int64, one per sequence.
    step: the decode form: every token of the row is the next one of another cached sequence.
    """

    groups: tuple[Group, ...]
    cache: KeyValueCache | None = None
    slots: Tensor | None = None
    step: DecodeStep | None = None
    cumulative: dict[torch.device, Tensor] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, those in the cache included."""
        return self.step.span if self.step is not None else max(group.length for group in self.groups)

    def bounds(self, device: torch.device) -> Tensor:
        """int32 [sequences + 1]: where each sequence starts, and the end. Made once for all layers."""
        if device not in self.cumulative:
            lengths = [group.length for group in self.groups for _ in range(group.count)]
            self.cumulative[device] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return self.cumulative[device]


def pack_lengths(lengths: list[int]) -> tuple[Group, ...]:
    """Consecutive equal lengths become one group, attended as one batch."""
    groups: list[Group] = []
    start = 0
    for length in lengths:
        last = groups[-1] if groups else None
        if last and last.length == length:
            groups[-1] = Group(last.start, last.count + 1, length)
        else:
            groups.append(Group(start, 1, length))
        start += length
    return tuple(groups)


@dataclass(frozen=True)
class AttentionKind:
    """What sets a layer's attention apart. layer: its index, in the cache too.

    window: how many tokens it sees, itself included; None = all that came before.
    """

    layer: int
    scaling: float
    window: int | None = None

    def mask(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """[length, length], added to the scores; None where causal attention is all there is to it."""
        if not self.window or self.window >= length:
            return None
        position = torch.arange(length, device=device)
        distance = position[:, None] - position[None, :]
        hidden = (distance < 0) | (distance >= self.window)
        return torch.zeros(length, length, device=device, dtype=dtype).masked_fill_(hidden, float("-inf"))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, head_dim], key and value with kv_heads; returns [1, tokens, heads, head_dim].

    Signature of transformers' AttentionInterface; `packing` arrives through the model's keyword arguments.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, packing, AttentionKind(layer, scaling, sliding_window)).unsqueeze(0), None


def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing, kind: AttentionKind) -> Tensor:
    """query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim]; returns the shape of the query."""
    if packing.step is not None:
        return _decode(query, key, value, packing, packing.step, kind)
    if packing.cache is not None:
        _store_prefill(key, value, packing, kind.layer)
    if query.device.type == "cpu":
        if torch.is_grad_enabled():
            return _FlashOnCpu.apply(query, key, value, packing, kind)  # pyright: ignore[reportReturnType]
        return _flash_on_cpu(query, key, value, packing, kind)[0]
    if _fits_varlen(query):
        return _varlen(query, key, value, packing, kind)
    return _joined([_scaled_dot_product(query, key, value, group, kind) for group in packing.groups])


def _rows(x: Tensor, group: Group) -> Tensor:
    """[tokens, heads, head_dim] -> a view [count, heads, length, head_dim] of a group's sequences."""
    part = x[group.start : group.start + group.count * group.length]
    return part.unflatten(0, (group.count, group.length)).transpose(1, 2)


def _joined(parts: list[Tensor]) -> Tensor:
    """[count, heads, length, head_dim] of each group -> [tokens, heads, head_dim]."""
    tokens = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def _scaled_dot_product(query: Tensor, key: Tensor, value: Tensor, group: Group, kind: AttentionKind) -> Tensor:
    q, k, v = _rows(query, group), _rows(key, group), _rows(value, group)
    mask = kind.mask(group.length, q.device, q.dtype)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=kind.scaling, enable_gqa=q.shape[1] != k.shape[1]
    )


def _fits_varlen(query: Tensor) -> bool:
    """What flash attention takes: 16 bit, heads of a multiple of 8 up to 256, a GPU no older than Ampere."""
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _varlen(query: Tensor, key: Tensor, value: Tensor, packing: Packing, kind: AttentionKind) -> Tensor:
    """All sequences in one kernel. No machine with a GPU has run this yet."""
    bounds, longest = packing.bounds(query.device), packing.longest
    out = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=kind.scaling,
        window_size=(kind.window - 1 if kind.window else -1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def _flash_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, kind: AttentionKind
) -> tuple[Tensor, list[Tensor]]:
    """Attention, and per group the logarithm of the sum of its scores' exponentials, which backward needs."""
    outs, log_sums = [], []
    for group in packing.groups:
        q, k, v = _rows(query, group), _rows(key, group), _rows(value, group)
        mask = kind.mask(group.length, q.device, q.dtype)
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=kind.scaling
        )
        outs.append(out)
        log_sums.append(log_sum)
    return _joined(outs), log_sums


class _FlashOnCpu(torch.autograd.Function):
    """torch's own kernels with the groups inside: autograd would make a zero tensor of all tokens for each group."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, kind: AttentionKind) -> Tensor:
        out, log_sums = _flash_on_cpu(query, key, value, packing, kind)
        ctx.save_for_backward(query, key, value, out, *log_sums)
        ctx.packing, ctx.kind = packing, kind
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *log_sums = ctx.saved_tensors
        (grad,) = grads
        parts = []
        for group, log_sum in zip(ctx.packing.groups, log_sums, strict=True):
            g, q, k, v, o = (_rows(x, group) for x in (grad, query, key, value, out))
            mask = ctx.kind.mask(group.length, q.device, q.dtype)
            backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            parts.append(backward(g, q, k, v, o, log_sum, 0.0, mask is None, attn_mask=mask, scale=ctx.kind.scaling))
        gradients = [_joined(list(of_groups)) for of_groups in zip(*parts, strict=True)]
        return (*gradients, None, None)


def _store_prefill(key: Tensor, value: Tensor, packing: Packing, layer: int) -> None:
    assert packing.cache is not None and packing.slots is not None
    keys, values = packing.cache.of_layer(layer, key)
    sequence = 0
    for group in packing.groups:
        slots = packing.slots[sequence : sequence + group.count]
        for cached, new in ((keys, key), (values, value)):
            cached[slots, :, : group.length] = _rows(new, group)
            cached[slots, :, group.length :] = 0
        sequence += group.count


def _decode(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, step: DecodeStep, kind: AttentionKind
) -> Tensor:
    """One new token per sequence against its slot of the cache; returns [sequences, heads, head_dim].

    Computed in the order of the slots: permuting the few queries is cheap, gathering the cache is not.
    """
    assert packing.cache is not None
    keys, values = packing.cache.of_layer(kind.layer, key)
    keys[step.slots, :, step.lengths] = key
    values[step.slots, :, step.lengths] = value
    q = query if step.row_of_slot is None else query[step.row_of_slot]
    count, num_heads, kv_heads = q.shape[0], q.shape[1], keys.shape[1]
    k, v = keys[:count, :, : step.span], values[:count, :, : step.span]
    hidden = step.out_of_sight(kind.window)
    out = _attend_once(q.unflatten(1, (kv_heads, num_heads // kv_heads)), k, v, hidden, kind.scaling).flatten(1, 2)
    return out if step.row_of_slot is None else out[step.slots]


def _attend_once(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scaling: float) -> Tensor:
    """q [n, kv_heads, queries, head_dim] against k and v [n, kv_heads, span, head_dim].

    Plain products take half the time of the fused kernel on the CPU, but would round scores to a low precision.
    """
    if q.dtype != torch.float32:
        return scaled_dot_product_attention(q, k, v, attn_mask=~hidden, scale=scaling)
    scores = torch.matmul(q * scaling, k.transpose(2, 3)).masked_fill_(hidden, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1), v)


# Registered without a mask function: transformers then builds no mask, and `Packing` says all there is to say.
AttentionInterface.register(ATTENTION, packed_attention)
