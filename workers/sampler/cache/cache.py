"""The cache of all sequences in flight of one model, keys, values and states, within a budget of bytes.

Slots have a few fixed lengths, with one pool for each. A sequence that outgrows its slot moves to a longer one. The
rest of the budget keeps prefixes for later requests.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from ...models.model import BaseModel
from ...ops.kv_cache import SlotTensors
from ...protocol.worker_config import DEFAULT_KV_CACHE_BYTES, WorkerConfig
from ...shapes.cache_size import CacheSize
from ...shapes.model_shape import ModelShape
from ..requests.jobs import SequenceState
from .prefix_cache import PrefixCache, StoredRange, restore

# Slots hold this many tokens or a larger power of two; from _FINE on also the lengths half way between these.
SHORTEST = 64
_FINE = 512


@dataclass(eq=False)
class SlotPool:
    """Slots of equal length. The first ones are in use by `occupants`, in this order."""

    tensors: SlotTensors
    occupants: list[SequenceState] = field(default_factory=list)

    @property
    def num_free(self) -> int:
        return self.tensors.num_slots - len(self.occupants)


@dataclass(frozen=True)
class CacheSlot:
    """A slot in use. Its index may change when another sequence leaves the pool."""

    pool: SlotPool
    index: int

    @property
    def tensors(self) -> SlotTensors:
        return self.pool.tensors

    @property
    def capacity(self) -> int:
        return self.pool.tensors.capacity


class CacheBudget:
    """Shares `num_bytes` among the caches that joined. Holds them weakly: a cache leaves when its owner drops it.

    clock: orders the uses of prefixes over all caches.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.clock, self._numbers = count(), count()
        # In the order of joining, so that ranks that sample together drop the same prefixes.
        self._spenders: WeakValueDictionary[int, KVCache] = WeakValueDictionary()

    def join(self, spender: "KVCache") -> None:
        self._spenders[next(self._numbers)] = spender

    def used_bytes(self) -> int:
        return sum(each.num_bytes() for each in self._all())

    def slot_bytes(self) -> int:
        return sum(each.slot_bytes() for each in self._all())

    def held_bytes(self) -> int:
        return sum(each.held_bytes() for each in self._all())

    def free_bytes(self) -> int:
        return self.num_bytes - self.used_bytes()

    def drop_prefixes(self, num_bytes: int) -> None:
        """Drops the least recently used prefixes of all caches until `num_bytes` are free or none is left."""
        while self.free_bytes() < num_bytes:
            by_age = [(age, each) for each in self._all() if (age := each.prefixes.oldest) is not None]
            if not by_age:
                return
            min(by_age, key=itemgetter(0))[1].prefixes.drop_oldest()

    def shrink(self, num_bytes: int) -> None:
        """Frees unused slots until `num_bytes` are free."""
        for each in self._all():
            if self.free_bytes() >= num_bytes:
                return
            each.free_unused_slots()

    def tensors(self) -> Iterator[Tensor]:
        for each in self._all():
            yield from each.tensors()

    def _all(self) -> "list[KVCache]":
        return list(self._spenders.values())


class KVCache:
    """The slots and the prefix cache of one model.

    size: of a sequence.
    budget: bounds used slots, free slots and prefixes, together with other caches that joined it.
    num_ahead: see PrefixCache.
    num_moves: how often a sequence has moved because another one, perhaps of another sampler, left its slot.
    """

    def __init__(self, size: CacheSize, budget: CacheBudget, num_ahead: int = 0) -> None:
        self.size, self.budget = size, budget
        self.num_moves = 0
        self._num_ahead = num_ahead
        self.prefixes = self._new_prefixes()
        self._pools: dict[int, SlotPool] = {}
        self._slots: dict[SequenceState, CacheSlot] = {}
        budget.join(self)

    @staticmethod
    def of(base: BaseModel, config: WorkerConfig) -> "KVCache":
        budget = CacheBudget(config.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES)
        if isinstance(base.shape, ModelShape):
            return KVCache(base.shape.cache_size(base.spec, base.dtype.itemsize), budget)
        return KVCache(size_of_config(base.config, base.dtype.itemsize), budget)

    @property
    def has_states(self) -> bool:
        return self.size.bytes_per_sequence > 0

    @property
    def budget_bytes(self) -> int:
        return self.budget.num_bytes

    def num_bytes(self) -> int:
        return self.slot_bytes() + self.prefixes.num_bytes

    def slot_bytes(self) -> int:
        return sum(pool.tensors.num_slots * self._bytes(pool) for pool in self._pools.values())

    def held_bytes(self) -> int:
        return sum(len(pool.occupants) * self._bytes(pool) for pool in self._pools.values())

    def values_per_layer(self) -> int:
        """Returns how many numbers one layer has in the slots in use."""
        num_tokens = sum(len(pool.occupants) * pool.tensors.capacity for pool in self._pools.values())
        return num_tokens * self.size.values_per_token

    def tensors(self) -> Iterator[Tensor]:
        """Yields all tensors. Empty pools are freed first; the others are not shrunk, which may need memory."""
        for pool in self._pools.values():
            if not pool.occupants:
                pool.tensors.resize(0)
            yield from pool.tensors.tensors()
        yield from self.prefixes.tensors()

    def clear(self) -> None:
        self.prefixes = self._new_prefixes()
        self._pools = {}
        self._slots = {}

    def num_bytes_for(self, length: int) -> int:
        """Returns the bytes of a slot for `length` tokens; more than the budget if no slot can be so long."""
        return self.size.bytes_of(max(length, self._capacity(length)))

    def fits_alone(self, length: int) -> bool:
        """True if a sequence of `length` tokens fits into an otherwise empty cache."""
        return length <= self.size.longest_within(self.budget_bytes)

    def has_slot(self, sequence: SequenceState) -> bool:
        return sequence in self._slots

    def slot_of(self, sequence: SequenceState) -> CacheSlot:
        return self._slots[sequence]

    def allocate(self, sequence: SequenceState, length: int) -> bool:
        """Gives the sequence a slot for `length` tokens, with undefined content; False if the budget has no room."""
        if not self.fits_alone(length):
            return False
        pool = self._pool_for(length)
        if not pool.num_free and not self._add_slots(pool):
            return False
        self._slots[sequence] = CacheSlot(pool, len(pool.occupants))
        pool.occupants.append(sequence)
        return True

    def grow(self, sequence: SequenceState, length: int) -> bool:
        """Moves the sequence with its content to a slot for `length` tokens.

        Both slots exist during the move: returns False if the budget has no room for the second one.
        """
        before = self._slots[sequence]
        if not self.allocate(sequence, length):
            return False
        after = self._slots[sequence]
        before.tensors.copy_slot(before.index, after.tensors, after.index)
        self._leave(before)
        return True

    def fork(self, source: SequenceState, others: Sequence[SequenceState]) -> None:
        """Copies the slot of `source` to the slots of the others."""
        slot = self._slots[source]
        for other in others:
            target = self._slots[other]
            slot.tensors.copy_slot(slot.index, target.tensors, target.index)

    def free(self, sequence: SequenceState) -> None:
        if slot := self._slots.pop(sequence, None):
            self._leave(slot)

    def in_removal_order(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """Sorts the sequences so that removing them in this order moves the fewest others."""
        return sorted(
            sequences,
            key=lambda sequence: self._slots[sequence].index if sequence in self._slots else -1,
            reverse=True,
        )

    def load_prefix(self, sequence: SequenceState, ranges: Sequence[StoredRange]) -> None:
        slot = self._slots[sequence]
        restore(ranges, slot.tensors, slot.index)

    def store_prefix(self, sequence: SequenceState, weight_version: int, tokens: np.ndarray) -> None:
        """Stores `tokens` from the sequence's slot in the prefix cache, if the budget has room.

        Of a model without states it stores whole blocks; else all tokens, and the slot's states must be those after
        them. Drops older prefixes to make room; frees slots only if unused ones take most of the budget.

        Args:
            tokens: int64, [n].
        """
        known = self.prefixes.known_blocks(weight_version, tokens)
        missing = self.prefixes.missing(weight_version, tokens)
        num_bytes = missing.num_bytes(self.size)
        if not num_bytes or num_bytes > self.budget_bytes // 2:
            return
        if self.budget.free_bytes() < num_bytes and 2 * (self.slot_bytes() - self.held_bytes()) > self.budget_bytes:
            self.free_unused_slots()
        of_known = sum(stored.num_bytes for stored in {each.stored for each in known})
        if self.budget_bytes - self.budget.slot_bytes() - of_known >= num_bytes:
            self.budget.drop_prefixes(num_bytes)
            self.prefixes.add(missing, self._slots[sequence].tensors, self._slots[sequence].index)

    def free_unused_slots(self) -> None:
        for pool in self._pools.values():
            if pool.num_free:
                pool.tensors.resize(len(pool.occupants))

    def _new_prefixes(self) -> PrefixCache:
        return PrefixCache(self.budget.clock, self._num_ahead, self.has_states)

    def _leave(self, slot: CacheSlot) -> None:
        """Frees the slot. The pool's last sequence moves into the gap."""
        occupants = slot.pool.occupants
        last = occupants.pop()
        if slot.index < len(occupants):
            slot.tensors.copy_slot(len(occupants), slot.tensors, slot.index)
            occupants[slot.index] = last
            self._slots[last] = slot
            self.num_moves += 1

    def _pool_for(self, length: int) -> SlotPool:
        capacity = self._capacity(length)
        if capacity not in self._pools:
            self._pools[capacity] = SlotPool(SlotTensors(capacity))
        return self._pools[capacity]

    def _capacity(self, length: int) -> int:
        """Rounds the length up to a slot length, at most what the whole budget holds."""
        capacity = SHORTEST
        while capacity < length:
            capacity *= 2
        if capacity > _FINE and length <= capacity * 3 // 4:
            capacity = capacity * 3 // 4
        return min(capacity, self.size.longest_within(self.budget_bytes))

    def _add_slots(self, pool: SlotPool) -> bool:
        """Doubles the pool if there is room; else drops prefixes and frees unused slots to add some."""
        one, wanted = self._bytes(pool), max(1, pool.tensors.num_slots)
        num_added = min(wanted, self.budget.free_bytes() // one)
        if not num_added:
            self.budget.drop_prefixes(-(-wanted // 4) * one)
            num_added = self.budget.free_bytes() // one
        if not num_added:
            # The unused slots are those of other pools: this one has none.
            self.budget.shrink(one)
            num_added = min(1, self.budget.free_bytes() // one)
        if num_added:
            pool.tensors.resize(pool.tensors.num_slots + min(wanted, num_added))
        return num_added > 0

    def _bytes(self, pool: SlotPool) -> int:
        return self.size.bytes_of(pool.tensors.capacity)


def size_of_config(config: PreTrainedConfig, bytes_per_value: int, num_ranks: int = 1) -> CacheSize:
    """Returns the size of the cache of a model whose layers all have softmax attention, perhaps of different shapes.

    Args:
        config: of the model, or of one that has it as its text part.
        num_ranks: ranks that share the heads.
    """
    text = config.get_text_config()
    layers = [text.per_layer_config[layer] for layer in range(text.num_hidden_layers)]
    values = sum(map(_values_per_token, layers)) // num_ranks
    return CacheSize(values * bytes_per_value, 0, values // len(layers))


def _values_per_token(layer: Any) -> int:
    """Returns how many numbers the keys and values of a token have in one layer."""
    heads = layer.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return 2 * (getattr(layer, "num_key_value_heads", None) or heads) * head_dim
