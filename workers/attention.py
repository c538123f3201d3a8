"""Attention over packed sequences, for training, prefill and decoding alike, behind transformers' attention interface.

A forward runs one packed row [1, tokens]; `Packing` says which tokens belong together. Sequences never share an
attention row, so what is wrong in one (a NaN) cannot reach another.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
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
        """The two tensors of a layer, made at its first use with the heads, head size, dtype and device of `like`."""
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            shape = (self.num_slots, like.shape[1], self.capacity, like.shape[3])
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
    if packing.step is not None:
        return _decode(module, query, key, value, packing, packing.step, scaling, sliding_window), None
    if packing.cache is not None:
        _store_prefill(module, key, value, packing)
    outputs = [_causal(query, key, value, group, scaling, sliding_window) for group in packing.groups]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0), None


def _causal(query: Tensor, key: Tensor, value: Tensor, group: Group, scaling: float, window: int | None) -> Tensor:
    """Causal attention of one group; returns [count * length, heads, head_dim]."""

    def rows(x: Tensor) -> Tensor:
        part = x[0, :, group.start : group.start + group.count * group.length]
        return part.unflatten(1, (group.count, group.length)).transpose(0, 1)

    q, k, v = rows(query), rows(key), rows(value)
    mask = _window_mask(group.length, window, q.device) if window and window < group.length else None
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _store_prefill(module: nn.Module, key: Tensor, value: Tensor, packing: Packing) -> None:
    assert packing.cache is not None and packing.slots is not None
    keys, values = packing.cache.of_layer(_layer_index(module), key)
    sequence = 0
    for group in packing.groups:
        slots = packing.slots[sequence : sequence + group.count]
        stop = group.start + group.count * group.length
        for cached, new in ((keys, key), (values, value)):
            rows = new[0, :, group.start : stop].unflatten(1, (group.count, group.length)).transpose(0, 1)
            cached[slots, :, : group.length] = rows
            cached[slots, :, group.length :] = 0
        sequence += group.count


def _decode(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    step: DecodeStep,
    scaling: float,
    window: int | None,
) -> Tensor:
    """One new token per sequence against its slot of the cache; returns [1, sequences, heads, head_dim].

    Computed in the order of the slots: permuting the few queries is cheap, gathering the cache is not.
    """
    assert packing.cache is not None
    keys, values = packing.cache.of_layer(_layer_index(module), key)
    keys[step.slots, :, step.lengths] = key[0].transpose(0, 1)
    values[step.slots, :, step.lengths] = value[0].transpose(0, 1)
    q = query[0].transpose(0, 1)
    if step.row_of_slot is not None:
        q = q[step.row_of_slot]
    count, num_heads, kv_heads = q.shape[0], q.shape[1], keys.shape[1]
    k, v = keys[:count, :, : step.span], values[:count, :, : step.span]
    out = _attend_once(q.unflatten(1, (kv_heads, num_heads // kv_heads)), k, v, step.out_of_sight(window), scaling)
    out = out.flatten(1, 2)
    if step.row_of_slot is not None:
        out = out[step.slots]
    return out.unsqueeze(0)


def _attend_once(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scaling: float) -> Tensor:
    """q [n, kv_heads, queries, head_dim] against k and v [n, kv_heads, span, head_dim].

    Plain products take half the time of the fused kernel on the CPU, but would round scores to a low precision.
    """
    if q.dtype != torch.float32:
        return scaled_dot_product_attention(q, k, v, attn_mask=~hidden, scale=scaling)
    scores = torch.matmul(q * scaling, k.transpose(2, 3)).masked_fill_(hidden, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1), v)


def _layer_index(module: nn.Module) -> int:
    index = module.layer_idx
    assert isinstance(index, int)
    return index


# Registered without a mask function: transformers then builds no mask, and `Packing` says all there is to say.
AttentionInterface.register(ATTENTION, packed_attention)
