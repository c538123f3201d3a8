"""The KV cache of all sequences in flight of one model, within a budget of bytes.

Slots have a few fixed lengths, with one pool for each. A sequence that outgrows its slot moves to a longer one. The
rest of the budget keeps prefixes for later requests.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from ...models.model import BaseModel
from ...ops.kv_cache import CacheShelf
from ...protocol.worker_config import DEFAULT_KV_CACHE_BYTES, WorkerConfig
from ..requests.jobs import SequenceState
from .cache_budget import CacheBudget
from .prefix_cache import BLOCK, BlockRange, PrefixCache, restore

# Slots hold this many tokens or a larger power of two; from _FINE on also the lengths half way between these.
SHORTEST = 64
_FINE = 512


@dataclass(eq=False)
class SlotPool:
    """A slot pool, whose first slots are in use by the sequences `taken`, in this order."""

    shelf: CacheShelf
    occupants: list[SequenceState] = field(default_factory=list)

    @property
    def num_free(self) -> int:
        return self.shelf.num_slots - len(self.occupants)


@dataclass(frozen=True)
class CacheSlot:
    """Holds a slot in use. Its number may change when another sequence leaves the pool."""

    seats: SlotPool
    slot: int

    @property
    def shelf(self) -> CacheShelf:
        return self.seats.shelf

    @property
    def capacity(self) -> int:
        return self.seats.shelf.capacity


class KVCache:
    """The slots and the prefix cache of one model.

    budget: bounds used slots, free slots and prefixes, together with other caches that joined it.
    num_ranks: ranks that share the heads.
    num_ahead: see PrefixCache.
    num_moves: how often a sequence has moved because another one, perhaps of another sampler, left its slot.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        bytes_per_value: int,
        budget: CacheBudget,
        num_ranks: int = 1,
        num_ahead: int = 0,
    ) -> None:
        heads, self._num_layers = config.num_attention_heads, config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self._numbers_per_token = 2 * kv_heads * head_dim // num_ranks  # in one layer
        self.bytes_per_token = self._numbers_per_token * self._num_layers * bytes_per_value
        self.budget = budget
        self.num_moves = 0
        self._num_ahead = num_ahead
        self.prefixes = PrefixCache(budget.clock, num_ahead)
        self._seats: dict[int, SlotPool] = {}
        self._seat_of: dict[SequenceState, CacheSlot] = {}
        budget.join(self)

    @staticmethod
    def of(base: BaseModel, config: WorkerConfig) -> "KVCache":
        budget = CacheBudget(config.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES)
        return KVCache(base.config, base.dtype.itemsize, budget, base.spec.tp_size_of("self_attn"))

    @property
    def budget_bytes(self) -> int:
        return self.budget.num_bytes

    def num_bytes(self) -> int:
        return self.slot_bytes() + self.prefixes.num_bytes

    def slot_bytes(self) -> int:
        return sum(seats.shelf.num_slots * self._bytes(seats) for seats in self._seats.values())

    def held_bytes(self) -> int:
        """Returns the bytes of the slots in use."""
        return sum(len(seats.occupants) * self._bytes(seats) for seats in self._seats.values())

    def values_per_layer(self) -> int:
        """Returns how many numbers one layer has in the slots in use."""
        return self._numbers_per_token * self.held_bytes() // self.bytes_per_token

    def tensors(self) -> Iterator[Tensor]:
        """Yields all keys and values. Empty pools are freed first; the others are not shrunk, which may need memory."""
        for seats in self._seats.values():
            if not seats.occupants:
                seats.shelf.resize(0)
            for keys, values in seats.shelf.layers():
                yield from (keys, values)
        for keys, values in self.prefixes.layers():
            yield from (keys, values)

    def clear(self) -> None:
        self.prefixes = PrefixCache(self.budget.clock, self._num_ahead)
        self._seats = {}
        self._seat_of = {}

    def num_bytes_for(self, length: int) -> int:
        """Returns the bytes of a slot for `length` tokens; more than the budget if no slot can be so long."""
        return max(length, self._capacity(length)) * self.bytes_per_token

    def fits_alone(self, length: int) -> bool:
        """True if a sequence of `length` tokens fits into an otherwise empty cache."""
        return length <= self.budget_bytes // self.bytes_per_token

    def slot_of(self, sequence: SequenceState) -> CacheSlot | None:
        return self._seat_of.get(sequence)

    def allocate(self, sequence: SequenceState, length: int) -> bool:
        """Gives the sequence a slot for `length` tokens, with undefined content; False if the budget has no room."""
        if not self.fits_alone(length):
            return False
        seats = self._seats_for(length)
        if not seats.num_free and not self._add_slots(seats):
            return False
        self._seat_of[sequence] = CacheSlot(seats, len(seats.occupants))
        seats.occupants.append(sequence)
        return True

    def grow(self, sequence: SequenceState, length: int) -> bool:
        """Moves the sequence with its content to a slot for `length` tokens.

        Both slots exist during the move: returns False if the budget has no room for the second one.
        """
        before = self._seat_of[sequence]
        if not self.allocate(sequence, length):
            return False
        after = self._seat_of[sequence]
        before.shelf.copy_slot(before.slot, after.shelf, after.slot)
        self._leave(before)
        return True

    def fork(self, source: SequenceState, others: Sequence[SequenceState]) -> None:
        """Copies the slot of `source` to the slots of the others."""
        seat = self._seat_of[source]
        for other in others:
            target = self._seat_of[other]
            seat.shelf.copy_slot(seat.slot, target.shelf, target.slot)

    def free(self, sequence: SequenceState) -> None:
        """Frees the sequence's slot, if it has one."""
        if seat := self._seat_of.pop(sequence, None):
            self._leave(seat)

    def in_removal_order(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """Sorts the sequences so that removing them in this order moves the fewest others."""
        return sorted(
            sequences,
            key=lambda sequence: self._seat_of[sequence].slot if sequence in self._seat_of else -1,
            reverse=True,
        )

    def load_prefix(self, sequence: SequenceState, stretches: Sequence[BlockRange]) -> None:
        """Fills the sequence's slot with a cached prefix."""
        seat = self._seat_of[sequence]
        restore(stretches, seat.shelf, seat.slot)

    def store_prefix(self, sequence: SequenceState, namespace: int, tokens: np.ndarray) -> None:
        """Stores the whole blocks of `tokens` from the sequence's slot in the prefix cache, if the budget has room.

        Drops older prefixes to make room; frees slots only if unused ones take most of the budget.

        Args:
            tokens: int64, [n].
        """
        known = self.prefixes.find(namespace, tokens, len(tokens))
        first, digests = self.prefixes.missing(namespace, tokens)
        num_bytes = len(digests) * BLOCK * self.bytes_per_token
        if not digests or num_bytes > self.budget_bytes // 2:
            return
        if self.budget.free_bytes() < num_bytes and 2 * (self.slot_bytes() - self.held_bytes()) > self.budget_bytes:
            self.free_unused_slots()
        of_known = sum(stored.num_bytes for stored in {stretch.stored for stretch in known})
        if self.budget_bytes - self.budget.slot_bytes() - of_known >= num_bytes:
            self.budget.drop_prefixes(num_bytes)
            self.prefixes.add(digests, self._seat_of[sequence].shelf, self._seat_of[sequence].slot, first)

    def oldest_prefix(self) -> int | None:
        return self.prefixes.oldest

    def drop_oldest_prefix(self) -> None:
        self.prefixes.drop_oldest()

    def free_unused_slots(self) -> None:
        """Frees unused slots."""
        for seats in self._seats.values():
            if seats.num_free:
                seats.shelf.resize(len(seats.occupants))

    def _leave(self, seat: CacheSlot) -> None:
        """Frees the slot. The pool's last sequence moves into the gap."""
        taken = seat.seats.occupants
        last = taken.pop()
        if seat.slot < len(taken):
            seat.shelf.copy_slot(len(taken), seat.shelf, seat.slot)
            taken[seat.slot] = last
            self._seat_of[last] = seat
            self.num_moves += 1

    def _seats_for(self, length: int) -> SlotPool:
        capacity = self._capacity(length)
        if capacity not in self._seats:
            self._seats[capacity] = SlotPool(CacheShelf(self._num_layers, capacity))
        return self._seats[capacity]

    def _capacity(self, length: int) -> int:
        """Rounds the length up to a slot length, at most what the whole budget holds."""
        capacity = SHORTEST
        while capacity < length:
            capacity *= 2
        if capacity > _FINE and length <= capacity * 3 // 4:
            capacity = capacity * 3 // 4
        return min(capacity, self.budget_bytes // self.bytes_per_token)

    def _add_slots(self, seats: SlotPool) -> bool:
        """Doubles the pool if there is room; else drops prefixes and frees unused slots to add some."""
        one, wanted = self._bytes(seats), max(1, seats.shelf.num_slots)
        num_added = min(wanted, self.budget.free_bytes() // one)
        if not num_added:
            self.budget.drop_prefixes(-(-wanted // 4) * one)
            num_added = self.budget.free_bytes() // one
        if not num_added:
            # The unused slots are those of other pools: this one has none.
            self.budget.shrink(one)
            num_added = min(1, self.budget.free_bytes() // one)
        if num_added:
            seats.shelf.resize(seats.shelf.num_slots + min(wanted, num_added))
        return num_added > 0

    def _bytes(self, seats: SlotPool) -> int:
        """Returns the bytes of one slot."""
        return seats.shelf.capacity * self.bytes_per_token
