"""Keys, values and recurrent states of sequences in progress, in slots, and attention and recurrences over them.

Slots are contiguous, so that a decode step reads them in place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .attention import (
    AttentionKind,
    Packing,
    attend,
    attend_last_tokens,
    fits_flash_on_gpu,
    flash_of_last_queries,
    pack_lengths,
)
from .blockwise_attention import attend_to_copies
from .kernels import PrefixGroups, kernels_for, load_triton_kernels
from .libraries.latent_attention import FlashMla, LatentStep, flash_mla_for
from .linear import soft_capped
from .recurrence import Recurrence, StateKind
from .token_index import IndexKind, IndexQueries, choose_for_each, choose_for_last, choose_in_row

# The span of views is rounded up to a multiple of this, so that not every step needs new views.
_READ_TOKENS = 16

# Reading this many numbers takes longer than waking up other threads.
_WORTH_THREADS = 1 << 18

Key = TypeVar("Key")

# The window and the parts that decide what a mask hides.
Hiding = tuple[int | None, int | None]


@dataclass(frozen=True)
class CacheViews:
    """Views of a layer's cache.

    keys, values: all of it, [slots, kv_heads, capacity, head_dim]. first_keys [n * kv_heads, head_dim, span] and
    first_values [n * kv_heads, span, head_dim]: the part that a decode step reads.
    """

    keys: Tensor
    values: Tensor
    first_keys: Tensor
    first_values: Tensor


class SlotTensors:
    """Slots for sequences of up to `capacity` tokens: keys and values [slots, kv_heads, capacity, head_dim] of each
    layer with attention, and states [slots, *shape] of each recurrence.

    Keys and values of a slot in use are zero beyond its sequence. The code that fills it must clear what an earlier
    sequence left there, which may be non-finite (0 * NaN is NaN, so a mask alone would not keep it out).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_slots = self.num_resizes = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._states: dict[StateKind, Tensor] = {}
        self._reading: dict[int, CacheViews] = {}
        self._read = (0, 0)

    def views(self, kind: AttentionKind, like: Tensor, num_slots: int, span: int) -> "CacheViews":
        """Returns views of the first tokens, at least `span`, of the first slots.

        They are zero beyond a sequence's end.
        """
        span = min(self.capacity, -(-span // _READ_TOKENS) * _READ_TOKENS)
        if self._read != (num_slots, span):
            self._reading, self._read = {}, (num_slots, span)
        layer = kind.layer
        if layer not in self._reading:
            keys, values = self.of_layer(layer, like, kind.values_are_keys)
            first = keys[:num_slots, :, :span].flatten(0, 1).transpose(1, 2)
            self._reading[layer] = CacheViews(keys, values, first, values[:num_slots, :, :span].flatten(0, 1))
        return self._reading[layer]

    def of_layer(self, layer: int, like: Tensor, values_are_keys: bool = False) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a layer, the same tensor if `values_are_keys`.

        They are allocated at first use, for keys like `like` [tokens, kv_heads, head_dim].
        """
        keys = self._keys.get(layer)
        if keys is None:
            kv_heads, head_dim = like.shape[-2:]
            shape = self.num_slots, kv_heads, self.capacity, head_dim
            keys = self._keys[layer] = like.new_zeros(shape)
            if not values_are_keys:
                self._values[layer] = like.new_zeros(shape)
        return keys, self._values.get(layer, keys)

    def states(self, kind: StateKind, device: torch.device) -> Tensor:
        """Returns the states of a recurrence, [num_slots, *shape]. They are allocated at first use."""
        states = self._states.get(kind)
        if states is None:
            shape = self.num_slots, *kind.shape
            states = self._states[kind] = torch.zeros(shape, dtype=kind.dtype, device=device)
        return states

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors of all layers; none before the first forward pass."""
        for tensors in (self._keys, self._values, self._states):
            yield from tensors.values()

    def resize(self, num_slots: int) -> None:
        """Changes the number of slots, and keeps the first ones.

        Copies one tensor at a time, so that at most half a layer is held twice.
        """
        kept = min(num_slots, self.num_slots)
        self._reading = {}
        self.num_resizes += 1
        for of_layers in (self._keys, self._values):
            _resize(of_layers, kept, num_slots)
        _resize(self._states, kept, num_slots)
        self.num_slots = num_slots

    def copy_slot(self, slot: int, target: "SlotTensors", target_slot: int) -> None:
        """Copies states, and as many tokens as both slots can hold; clears the rest of the target."""
        length = min(self.capacity, target.capacity)
        for layer, keys in self._keys.items():
            own = self._stored(layer)
            others = target.of_layer(layer, keys[0].transpose(0, 1), len(own) == 1)
            for mine, other in zip(own, others[: len(own)], strict=True):
                other[target_slot, :, :length] = mine[slot, :, :length]
                other[target_slot, :, length:] = 0
        for kind, states in self._states.items():
            target.states(kind, states.device)[target_slot] = states[slot]

    def copies(self, slot: int, tokens: slice) -> Mapping[int, tuple[Tensor, ...]]:
        """Returns copies of each layer's keys, and of its values if they differ, [kv_heads, tokens, head_dim]."""
        return {layer: tuple(each[slot, :, tokens].clone() for each in self._stored(layer)) for layer in self._keys}

    def _stored(self, layer: int) -> tuple[Tensor, ...]:
        """Returns the layer's keys, and its values if they differ."""
        return tuple(tensors[layer] for tensors in (self._keys, self._values) if layer in tensors)

    def state_copies(self, slot: int) -> Mapping[StateKind, Tensor]:
        return {kind: states[slot].clone() for kind, states in self._states.items()}

    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors())


def _resize(tensors: dict[Key, Tensor], num_kept: int, num_slots: int) -> None:
    for key, old in tensors.items():
        resized = tensors[key] = old.new_zeros(num_slots, *old.shape[1:])
        resized[:num_kept] = old[:num_kept]


def _is_hidden(position: Tensor, mine: Tensor, kind: AttentionKind) -> Tensor:
    """Returns which tokens [..., tokens] at `position` [tokens] a token at `mine` [..., 1] does not see."""
    hidden = position > mine
    if kind.window:
        hidden |= position <= mine - kind.window
    if kind.part is not None:
        hidden |= position < mine - mine % kind.part
    return hidden


@dataclass(eq=False)
class DecodeStep:
    """One new token for each of n sequences with slots of the same length.

    rows: places of the tokens in the packed row. slots: int64 [n], the slot of each. in_order: whether the slots are 0
    to n - 1. lengths: int64 [n], the cached tokens of each; the new one is stored after them and attends to itself too.
    num_slots: the slots that are read, including those of all n. span: tokens of the longest sequence, including the
    new one. groups: sequences that share a prefix. num_threads: used if the step is large enough. last_span: the span
    of the last step of the same sequences, if known. is_steady: False once an operation depended on the span.
    """

    tensors: SlotTensors
    rows: slice | Tensor
    slots: Tensor
    in_order: bool
    lengths: Tensor
    num_slots: int
    span: int
    groups: PrefixGroups
    num_threads: int = 1
    last_span: int = 0
    is_steady: bool = True
    _masks: dict[Hiding, Tensor] = field(default_factory=dict)
    _latent_step: LatentStep | None = None

    @property
    def longest(self) -> int:
        """Tokens that no sequence exceeds in this step and those after it."""
        return max(self.span, self.last_span)

    def advance(self, by: Tensor | int = 1) -> None:
        """Moves to the next token of the same sequences, or of those where `by`, int64 [n], is 1 and not 0."""
        self.lengths += by
        self.span += 1
        self._latent_step = None
        mask = self._masks.get((None, None))
        self._masks = {}
        if mask is not None and self.span <= mask.shape[-1]:
            mask.view(self.num_slots, -1, mask.shape[-1])[self.slots, :, self.lengths] = 0
            self._masks[None, None] = mask

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Returns the attention output [n, heads, head_dim] for query, key and value of the packed row; for latent
        vectors perhaps only its first part, which is the value."""
        if kind.chosen is not None and self.span > kind.chosen.shape[1]:
            self.is_steady = False
            cached = self._store_keys(key[self.rows], kind)
            own = replace(kind, chosen=kind.chosen[self.rows])
            return attend_to_copies(query[self.rows], cached, self.slots, self.lengths, own)
        if not isinstance(self.rows, slice) or self.rows.stop - self.rows.start < query.shape[0]:
            query, key, value = query[self.rows], key[self.rows], value[self.rows]
        kind = kind.within(self.longest)
        if kind.is_latent and key.is_cuda and (flash_mla := flash_mla_for(key, self.tensors.capacity)) is not None:
            return self.attend_by(flash_mla, query, key, kind)
        kernels = kernels_for(key) if kind.part is None else None
        if kernels is not None:
            cached = (
                *self.tensors.of_layer(kind.layer, key, kind.values_are_keys),
                self.slots,
                self.lengths,
                self.groups,
            )
            num_threads = self.num_threads if self.longest * key.numel() > _WORTH_THREADS else 1
            return kernels.decode_attention(query, key, value, *cached, kind, num_threads)
        triton = load_triton_kernels(key.device) if key.is_cuda and kind.part is None else None
        if triton is not None:
            cached = (
                *self.tensors.of_layer(kind.layer, key, kind.values_are_keys),
                self.slots,
                self.lengths,
                self.longest,
            )
            return triton.decode_attention(query, key, value, *cached, kind)
        self.is_steady = False
        reading = self.tensors.views(kind, key, self.num_slots, self.span)
        if not kind.is_stored:
            reading.keys[self.slots, :, self.lengths] = key
            reading.values[self.slots, :, self.lengths] = value
        if not self.in_order:
            # By slot: moving the few queries is cheap, gathering the cache is not.
            query = query.new_zeros(self.num_slots, *query.shape[1:]).index_copy_(0, self.slots, query)
        hidden = self._mask(kind, reading.first_keys.shape[-1], key.shape[1], query.dtype)
        out = _attend_once(query, reading, hidden, kind)
        return out if self.in_order else out[self.slots]

    def attend_by(self, library: FlashMla, query: Tensor, key: Tensor, kind: AttentionKind) -> Tensor:
        """Computes `attend` for latent vectors, query and key of the sequences alone, by the library."""
        cached = self._store_keys(key, kind)
        if self._latent_step is None:
            self._latent_step = LatentStep.of(self.slots, self.lengths, self.tensors.capacity)
        return library.attend(query, cached, self._latent_step, kind.scaling)

    def choose(self, queries: IndexQueries | None, key: Tensor, kind: IndexKind) -> Tensor | None:
        """Computes `token_index.choose` for queries and keys of the packed row: int32 [n, most]."""
        cached = self._store_keys(key[self.rows], kind.keys)
        if queries is None or self.longest <= kind.most:
            return None
        self.is_steady = False
        if self.span <= kind.most:
            return None
        own = queries.rows(self.rows)
        return choose_for_each(own, cached[:, : self.span], self.slots, self.lengths, kind.most)

    def _store_keys(self, key: Tensor, kind: AttentionKind) -> Tensor:
        """Stores keys [n, 1, head_dim], which are values too. Returns those of all slots [slots, tokens, head_dim]."""
        keys, _ = self.tensors.of_layer(kind.layer, key, values_are_keys=True)
        keys[self.slots, :, self.lengths] = key
        return keys[:, 0]

    def recur(self, op: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Returns the output of a recurrence [n, ...] for inputs of the packed row, and updates its states."""
        if not isinstance(self.rows, slice) or self.rows.stop - self.rows.start < len(inputs[0]):
            inputs = [x[self.rows] for x in inputs]
        return op.step(inputs, self.tensors.states(op.state, inputs[0].device), self.slots)

    def _mask(self, kind: AttentionKind, span: int, kv_heads: int, dtype: torch.dtype) -> Tensor:
        """Returns the mask [num_slots * kv_heads, 1, span], by slot: minus infinity for hidden keys.

        It is built once per step for each kind of layer. A slot that takes no part sees its first key.
        """
        if (key := (kind.window, kind.part)) not in self._masks:
            lengths = self.lengths
            if not self.in_order:
                lengths = lengths.new_zeros(self.num_slots).index_copy_(0, self.slots, lengths)
            position = torch.arange(span, device=lengths.device)
            hidden = _is_hidden(position, lengths[:, None], kind)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask.repeat_interleave(kv_heads, dim=0)[:, None, :]
        return self._masks[key]


@dataclass(frozen=True, eq=False)
class ContinuationChunk:
    """Tokens start:stop of the packed row, which continue a sequence that has `cached` tokens in its slot.

    is_causal: whether tokens do not see those after them; if False, layers must not have a window.
    is_draft: whether its tokens after the first are draft tokens, some of which may be rejected.
    """

    start: int
    stop: int
    tensors: SlotTensors
    slot: int
    cached: int
    is_causal: bool = True
    is_draft: bool = False
    _masks: dict[Hiding, Tensor | None] = field(default_factory=dict)
    _bounds: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Returns the attention output [stop - start, heads, head_dim] for query, key and value of the packed row."""
        keys, values = self.store(key, value, kind)
        length = self.cached + self.stop - self.start
        kind = kind.within(length)
        if kind.chosen is not None and length > kind.chosen.shape[1]:
            own = replace(kind, chosen=kind.chosen[self.start : self.stop])
            positions = torch.arange(self.cached, length, device=query.device)
            slots = torch.full_like(positions, self.slot)
            return attend_to_copies(query[self.start : self.stop], keys[:, 0], slots, positions, own)
        if kind.part is None and fits_flash_on_gpu(query, kind):
            own = keys[self.slot, :, :length].transpose(0, 1), values[self.slot, :, :length].transpose(0, 1)
            longest = self.stop - self.start, length
            bounds = self._bounds_on(query.device)
            return flash_of_last_queries(
                query[self.start : self.stop], *own, bounds, longest, kind, is_causal=self.is_causal
            )[0]
        q = query[self.start : self.stop].transpose(0, 1).unsqueeze(0)
        k, v = keys[self.slot, None, :, :length].contiguous(), values[self.slot, None, :, :length]
        if (hiding := (kind.window, kind.part)) not in self._masks:
            self._masks[hiding] = self._mask(length, kind, q) if self.is_causal else None
        return attend_last_tokens(q, k, v, self._masks[hiding], kind)[0].transpose(0, 1)

    def choose(self, queries: IndexQueries | None, key: Tensor, kind: IndexKind) -> Tensor | None:
        """Computes `token_index.choose` for queries and keys of the packed row: int32 [stop - start, most]."""
        keys, _ = self.store(key, key, kind.keys)
        length = self.cached + self.stop - self.start
        if queries is None or length <= kind.most:
            return None
        return choose_for_last(queries.rows(slice(self.start, self.stop)), keys[self.slot, 0, :length], kind.most)

    def _bounds_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the bounds of queries and of keys for flash attention, computed once for all layers."""
        if not self._bounds:
            length = self.stop - self.start
            numbers = torch.tensor([[0, length], [0, self.cached + length]], dtype=torch.int32, device=device)
            self._bounds.append((numbers[0], numbers[1]))
        return self._bounds[0]

    def store(self, key: Tensor, value: Tensor, kind: AttentionKind) -> tuple[Tensor, Tensor]:
        """Stores key and value of the packed row. Returns the layer's, see SlotTensors.of_layer."""
        keys, values = self.tensors.of_layer(kind.layer, key, kind.values_are_keys)
        if kind.is_stored:
            return keys, values
        length = self.cached + self.stop - self.start
        keys[self.slot, :, self.cached : length] = key[self.start : self.stop].transpose(0, 1)
        values[self.slot, :, self.cached : length] = value[self.start : self.stop].transpose(0, 1)
        return keys, values

    def _mask(self, length: int, kind: AttentionKind, like: Tensor) -> Tensor:
        mine = torch.arange(self.cached, length, device=like.device)[:, None]
        hidden = _is_hidden(torch.arange(length, device=like.device), mine, kind)
        return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


@dataclass(frozen=True, eq=False)
class NewSequences:
    """Stores `count` new sequences of one `length`, from token `start` of the packed row, in slots int64 [count].

    number: the index of the first of them among the new sequences of the row.
    """

    start: int
    count: int
    length: int
    tensors: SlotTensors
    slots: Tensor
    number: int

    def store(self, key: Tensor, value: Tensor, kind: AttentionKind) -> None:
        if kind.is_stored:
            return
        tensors = self.tensors.of_layer(kind.layer, key, kind.values_are_keys)
        for cached, new in zip(tensors, (key, value), strict=True):
            part = new[self.start : self.start + self.count * self.length].unflatten(0, (self.count, self.length))
            cached[self.slots, :, : self.length] = part.transpose(1, 2)
            cached[self.slots, :, self.length :] = 0

    def store_states(self, kind: StateKind, states: Tensor) -> None:
        """Stores the states after all new sequences of the row, [sequences, *shape]."""
        of_slots = self.tensors.states(kind, states.device)
        of_slots[self.slots] = states[self.number : self.number + self.count]


@dataclass(frozen=True, eq=False)
class PendingInputs:
    """The inputs of a recurrence at the tokens of all chunks with draft tokens in a row, each [tokens, ...].

    The slots keep the states before these tokens until it is known how many are accepted.
    """

    op: Recurrence
    inputs: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class CachedRow:
    """A packed row of sequences in the cache: some take one token, some several, and some are new.

    chunks: adjacent in the row, in its order. fresh: the new ones, at the end of the row from token `fresh_start`.
    storing: the slots to store them in, if any. pending: of the recurrences that have run; empty without draft tokens.
    """

    steps: Sequence[DecodeStep]
    chunks: Sequence[ContinuationChunk]
    fresh: Packing | None
    fresh_start: int
    storing: Sequence[NewSequences]
    pending: list[PendingInputs] = field(default_factory=list)

    @property
    def longest(self) -> int:
        of_fresh = [self.fresh.longest] if self.fresh is not None else []
        chunks = (chunk.cached + chunk.stop - chunk.start for chunk in self.chunks)
        return max((*(step.longest for step in self.steps), *chunks, *of_fresh))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Computes `attention.attend` without gradients."""
        if len(self.steps) == 1 and not self.chunks and self.fresh is None:
            return self.steps[0].attend(query, key, value, kind)
        out = torch.empty_like(query)
        for step in self.steps:
            attended = step.attend(query, key, value, kind)
            out[step.rows, :, : attended.shape[-1]] = attended
        for chunk in self.chunks:
            out[chunk.start : chunk.stop] = chunk.attend(query, key, value, kind)
        for storing in self.storing:
            storing.store(key, value, kind)
        if self.fresh is not None:
            new = slice(self.fresh_start, None)
            own = kind.of_rows(new, self.fresh.longest)
            out[new] = attend(query[new], key[new], value[new], self.fresh, own)
        return out

    def choose(self, queries: IndexQueries | None, key: Tensor, kind: IndexKind) -> Tensor | None:
        """Computes `token_index.choose`, and stores the keys."""
        parts = [(step.rows, step.choose(queries, key, kind)) for step in self.steps]
        parts += [(slice(each.start, each.stop), each.choose(queries, key, kind)) for each in self.chunks]
        for storing in self.storing:
            storing.store(key, key, kind.keys)
        if self.fresh is not None and queries is not None and self.fresh.longest > kind.most:
            new = slice(self.fresh_start, len(key))
            parts.append((new, choose_in_row(queries.rows(new), key[new], self.fresh, 0, kind.most)))
        found = [(rows, part) for rows, part in parts if part is not None]
        if not found:
            return None
        chosen = torch.zeros(len(key), kind.most, dtype=torch.int32, device=key.device)
        for rows, part in found:
            chosen[rows] = part
        return chosen

    def recur(self, op: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Returns the output of a recurrence [tokens, ...] for inputs of the row, each [tokens, ...].

        Stores the states after the row, except those of chunks with draft tokens.
        """
        if len(self.steps) == 1 and not self.chunks and self.fresh is None:
            return self.steps[0].recur(op, inputs)
        parts = [(step.rows, step.recur(op, inputs)) for step in self.steps]
        if self.chunks:
            parts.append((slice(self.chunks[0].start, self.chunks[-1].stop), self._continue(op, inputs)))
        if self.fresh is not None:
            parts.append((slice(self.fresh_start, None), self._begin(op, inputs, self.fresh)))
        first = parts[0][1]
        out = first.new_empty(len(inputs[0]), *first.shape[1:])
        for rows, part in parts:
            out[rows] = part
        return out

    def _begin(self, op: Recurrence, inputs: Sequence[Tensor], fresh: Packing) -> Tensor:
        out, after = op.scan([x[self.fresh_start :] for x in inputs], fresh)
        for storing in self.storing:
            storing.store_states(op.state, after)
        return out

    def _continue(self, op: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        device, own = inputs[0].device, slice(self.chunks[0].start, self.chunks[-1].stop)
        places = [(run.tensors.states(op.state, device), run.slots.to(device)) for run in self._runs]
        initial = torch.cat([states[slots] for states, slots in places])
        out, after = op.scan([x[own] for x in inputs], self._continued, initial)
        for run, (states, slots) in zip(self._runs, places, strict=True):
            if not run.is_draft:
                states[slots] = after[run.number : run.number + len(slots)]
        if drafts := [run.tokens for run in self._runs if run.is_draft]:
            self.pending.append(PendingInputs(op, [torch.cat([x[tokens] for tokens in drafts]) for x in inputs]))
        return out

    @cached_property
    def _continued(self) -> Packing:
        return Packing(pack_lengths([chunk.stop - chunk.start for chunk in self.chunks]))

    @cached_property
    def _runs(self) -> list["_ChunkRun"]:
        runs: list[_ChunkRun] = []
        for _, group in groupby(enumerate(self.chunks), key=lambda pair: (id(pair[1].tensors), pair[1].is_draft)):
            numbers, chunks = zip(*group, strict=True)
            slots = torch.tensor([chunk.slot for chunk in chunks])
            tokens = slice(chunks[0].start, chunks[-1].stop)
            runs.append(_ChunkRun(chunks[0].tensors, slots, numbers[0], tokens, chunks[0].is_draft))
        return runs


@dataclass(frozen=True, eq=False)
class _ChunkRun:
    """Adjacent chunks in slots int64 [chunks] of the same tensors. number: of the first. tokens: of all, in the row."""

    tensors: SlotTensors
    slots: Tensor
    number: int
    tokens: slice
    is_draft: bool


def _attend_once(q: Tensor, reading: CacheViews, mask: Tensor, kind: AttentionKind) -> Tensor:
    """Returns the attention output, of the shape of q [n, heads, head_dim]. mask: [n * kv_heads, 1, span].

    In float32 plain products take half the time of torch's fused kernel on the CPU; in lower precision they would round
    the scores.
    """
    if q.dtype == torch.float32:
        return _attend_by_products(q, reading.first_keys, reading.first_values, mask, kind)
    if kind.sinks is not None or kind.cap is not None:
        # Torch's fused kernel has no cap, and does not return the sum of its weights.
        keys, values = reading.first_keys.float(), reading.first_values.float()
        return _attend_by_products(q.float(), keys, values, mask.float(), kind).to(q.dtype)
    (num_rows, num_heads, _), kv_heads = q.shape, mask.shape[0] // q.shape[0]
    k = reading.first_keys.transpose(1, 2).unflatten(0, (-1, kv_heads))
    v = reading.first_values.unflatten(0, (-1, kv_heads))
    # The heads that share keys become queries of one head: fused kernels take no mask together with shared heads.
    mask = mask.unflatten(0, (-1, kv_heads))[:, :1].expand(-1, 1, num_heads // kv_heads, -1)
    grouped = q.view(num_rows, kv_heads, -1, q.shape[-1])
    return scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=kind.scaling).reshape(q.shape)


def _attend_by_products(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, kind: AttentionKind) -> Tensor:
    grouped = q.reshape(mask.shape[0], -1, q.shape[-1])
    if kind.cap is None:
        scores = torch.baddbmm(mask, grouped, keys, alpha=kind.scaling)
    else:
        scores = soft_capped(torch.bmm(grouped, keys).mul_(kind.scaling), kind.cap).add_(mask)
    out = torch.bmm(torch.softmax(scores, dim=-1), values).view(q.shape)
    if kind.sinks is not None:
        kind.sinks.join(out.unsqueeze(2), scores.logsumexp(-1).view(*q.shape[:2], 1))
    return out
