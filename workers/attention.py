"""Attention over packed sequences, for training, prefill and decoding alike, behind transformers' attention interface.

A forward runs one packed row [1, tokens]; `Packing` says which tokens belong together. Sequences never share an
attention row, so what is wrong in one (a NaN) cannot reach another.
"""

from dataclasses import dataclass

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
    """Keys and values of `num_slots` sequences: per layer two tensors [num_slots, kv_heads, capacity, head_dim]."""

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


@dataclass(frozen=True)
class Packing:
    """How the tokens of one packed row attend.

    groups: the row's sequences in order, consecutive equal lengths as one group (the prefill and training form).
    cache, slots: where the keys and values of the sequences are stored (prefill) or stand (decoding); slots is one
        per sequence. With cached_lengths (int64 [sequences]) each sequence is one new token that attends to that many
        cached ones and itself: a decode step.
    """

    groups: tuple[Group, ...]
    cache: KeyValueCache | None = None
    slots: Tensor | None = None
    cached_lengths: Tensor | None = None


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
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, head_dim], key and value with kv_heads; returns [1, tokens, heads, head_dim].

    Signature of transformers' AttentionInterface; `packing` arrives through the model's keyword arguments.
    """
    if packing.cached_lengths is not None:
        return _decode(module, query, key, value, packing, scaling, sliding_window), None
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
        sequence += group.count


def _decode(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float, window: int | None
) -> Tensor:
    """One new token per sequence against its slot of the cache; returns [1, sequences, heads, head_dim]."""
    assert packing.cache is not None and packing.slots is not None and packing.cached_lengths is not None
    keys, values = packing.cache.of_layer(_layer_index(module), key)
    slots, lengths = packing.slots, packing.cached_lengths
    keys[slots, :, lengths] = key[0].transpose(0, 1)
    values[slots, :, lengths] = value[0].transpose(0, 1)
    span = int(lengths.max()) + 1
    position = torch.arange(span, device=query.device)
    mask = position <= lengths[:, None]
    if window:
        mask &= position > lengths[:, None] - window
    # Slots are reused: what an earlier sequence left beyond the mask may be non-finite, and 0 * NaN is NaN.
    k = keys[slots, :, :span].masked_fill(~mask[:, None, :, None], 0)
    v = values[slots, :, :span].masked_fill(~mask[:, None, :, None], 0)
    q = query[0].transpose(0, 1).unsqueeze(2)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask[:, None, None, :], scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.squeeze(2).unsqueeze(0)


def _layer_index(module: nn.Module) -> int:
    index = module.layer_idx
    assert isinstance(index, int)
    return index


# Registered without a mask function: transformers then builds no mask, and `Packing` says all there is to say.
AttentionInterface.register(ATTENTION, packed_attention)
