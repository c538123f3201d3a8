"""Cache: where the keys and values of every sample under way are, of one model, within a budget of bytes.

Slots come in few lengths, one shelf each; a sample that outgrows its slot moves to a longer one. What is left of the
budget keeps prefixes for later requests.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from ...models.model import BaseModel
from ...ops.kv_cache import Shelf
from ...protocol.config import KV_CACHE_BYTES, WorkerConfig
from ..requests.jobs import Row
from .budget import Budget
from .prefixes import BLOCK, Prefixes, Stretch, restore

# Slots have this many tokens and the powers of two above, from _FINE on those half way between them too.
SHORTEST = 64
_FINE = 512


@dataclass(eq=False)
class Seats:
    """A shelf and who sits in its first slots."""

    shelf: Shelf
    taken: list[Row] = field(default_factory=list)

    @property
    def num_free(self) -> int:
        return self.shelf.num_slots - len(self.taken)


@dataclass(frozen=True)
class Seat:
    """A slot in use. Its number may change when another row leaves."""

    seats: Seats
    slot: int

    @property
    def shelf(self) -> Shelf:
        return self.seats.shelf

    @property
    def capacity(self) -> int:
        return self.seats.shelf.capacity


class Cache:
    """budget: of the slots, used or not, and the prefixes together, and of other caches' with it. num_ranks: those that
    share out the heads. num_ahead: see Prefixes.

    num_moves: how often a row has come to another slot because some other left its own, which may be another sampler's.
    """

    def __init__(
        self, config: PreTrainedConfig, bytes_per_value: int, budget: Budget, num_ranks: int = 1, num_ahead: int = 0
    ) -> None:
        heads, self._num_layers = config.num_attention_heads, config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self._numbers_per_token = 2 * kv_heads * head_dim // num_ranks  # of a layer
        self.bytes_per_token = self._numbers_per_token * self._num_layers * bytes_per_value
        self.budget = budget
        self.num_moves = 0
        self._num_ahead = num_ahead
        self.prefixes = Prefixes(budget.clock, num_ahead)
        self._seats: dict[int, Seats] = {}
        self._seat_of: dict[Row, Seat] = {}
        budget.join(self)

    @staticmethod
    def of(base: BaseModel, config: WorkerConfig) -> "Cache":
        budget = Budget(config.kv_cache_bytes or KV_CACHE_BYTES)
        return Cache(base.config, base.dtype.itemsize, budget, base.spec.tp_of("self_attn"))

    @property
    def budget_bytes(self) -> int:
        return self.budget.num_bytes

    def num_bytes(self) -> int:
        return self.slot_bytes() + self.prefixes.num_bytes

    def slot_bytes(self) -> int:
        return sum(seats.shelf.num_slots * self._bytes(seats) for seats in self._seats.values())

    def held_bytes(self) -> int:
        """Of the slots in use."""
        return sum(len(seats.taken) * self._bytes(seats) for seats in self._seats.values())

    def numbers_per_layer(self) -> int:
        """In the slots in use."""
        return self._numbers_per_token * self.held_bytes() // self.bytes_per_token

    def tensors(self) -> Iterator[Tensor]:
        """All there are. Shelves that nobody uses are given up before; to shrink another one may want memory."""
        for seats in self._seats.values():
            if not seats.taken:
                seats.shelf.resize(0)
            for keys, values in seats.shelf.layers():
                yield from (keys, values)
        for keys, values in self.prefixes.layers():
            yield from (keys, values)

    def clear(self) -> None:
        self.prefixes = Prefixes(self.budget.clock, self._num_ahead)
        self._seats = {}
        self._seat_of = {}

    def num_bytes_for(self, length: int) -> int:
        """Of a slot for so many tokens; more than the budget where there is none so long."""
        return max(length, self._capacity(length)) * self.bytes_per_token

    def fits_alone(self, length: int) -> bool:
        """Whether a sequence of `length` tokens would fit if there were no other."""
        return length <= self.budget_bytes // self.bytes_per_token

    def seat(self, row: Row) -> Seat | None:
        return self._seat_of.get(row)

    def place(self, row: Row, length: int) -> bool:
        """Gives it a slot for `length` tokens, whose content means nothing yet, where one fits the budget."""
        if not self.fits_alone(length):
            return False
        seats = self._seats_for(length)
        if not seats.num_free and not self._add_slots(seats):
            return False
        self._seat_of[row] = Seat(seats, len(seats.taken))
        seats.taken.append(row)
        return True

    def grow(self, row: Row, length: int) -> bool:
        """Moves it to a slot for `length` tokens, with all it has, where one fits the budget beside its own."""
        before = self._seat_of[row]
        if not self.place(row, length):
            return False
        after = self._seat_of[row]
        before.shelf.copy_slot(before.slot, after.shelf, after.slot)
        self._leave(before)
        return True

    def fork(self, source: Row, others: Sequence[Row]) -> None:
        """The others' slots get what the source's holds."""
        seat = self._seat_of[source]
        for other in others:
            target = self._seat_of[other]
            seat.shelf.copy_slot(seat.slot, target.shelf, target.slot)

    def remove(self, row: Row) -> None:
        """Rows without a slot are ignored."""
        if seat := self._seat_of.pop(row, None):
            self._leave(seat)

    def from_the_back(self, rows: Iterable[Row]) -> list[Row]:
        """In the order in which they leave with the least moving of others."""
        return sorted(rows, key=lambda row: self._seat_of[row].slot if row in self._seat_of else -1, reverse=True)

    def restore(self, row: Row, stretches: Sequence[Stretch]) -> None:
        """Fills its slot with the beginning of a sequence."""
        seat = self._seat_of[row]
        restore(stretches, seat.shelf, seat.slot)

    def keep(self, row: Row, namespace: int, tokens: np.ndarray) -> None:
        """Keeps the whole blocks of `tokens` int64 [n], which its slot holds, as prefixes, where the budget has room.

        Older ones go for it; slots only when most of the budget is slots that nobody uses.
        """
        known = self.prefixes.find(namespace, tokens, len(tokens))
        first, digests = self.prefixes.missing(namespace, tokens)
        num_bytes = len(digests) * BLOCK * self.bytes_per_token
        if not digests or num_bytes > self.budget_bytes // 2:
            return
        if self.budget.free_bytes() < num_bytes and 2 * (self.slot_bytes() - self.held_bytes()) > self.budget_bytes:
            self.shrink()
        of_known = sum(stored.num_bytes for stored in {stretch.stored for stretch in known})
        if self.budget_bytes - self.budget.slot_bytes() - of_known >= num_bytes:
            self.budget.drop_prefixes(num_bytes)
            self.prefixes.add(digests, self._seat_of[row].shelf, self._seat_of[row].slot, first)

    def oldest_prefix(self) -> int | None:
        return self.prefixes.oldest

    def drop_oldest_prefix(self) -> None:
        self.prefixes.drop_oldest()

    def shrink(self) -> None:
        """Gives up slots that nobody uses."""
        for seats in self._seats.values():
            if seats.num_free:
                seats.shelf.resize(len(seats.taken))

    def _leave(self, seat: Seat) -> None:
        """The last one moves into the hole."""
        taken = seat.seats.taken
        last = taken.pop()
        if seat.slot < len(taken):
            seat.shelf.copy_slot(len(taken), seat.shelf, seat.slot)
            taken[seat.slot] = last
            self._seat_of[last] = seat
            self.num_moves += 1

    def _seats_for(self, length: int) -> Seats:
        capacity = self._capacity(length)
        if capacity not in self._seats:
            self._seats[capacity] = Seats(Shelf(self._num_layers, capacity))
        return self._seats[capacity]

    def _capacity(self, length: int) -> int:
        """The longest slot is as long as the budget allows."""
        capacity = SHORTEST
        while capacity < length:
            capacity *= 2
        if capacity > _FINE and length <= capacity * 3 // 4:
            capacity = capacity * 3 // 4
        return min(capacity, self.budget_bytes // self.bytes_per_token)

    def _add_slots(self, seats: Seats) -> bool:
        """Twice as many where there is room; at least one, if prefixes and what others do not use make room for it."""
        one, wanted = self._bytes(seats), max(1, seats.shelf.num_slots)
        num_added = min(wanted, self.budget.free_bytes() // one)
        if not num_added:
            self.budget.drop_prefixes(-(-wanted // 4) * one)
            num_added = self.budget.free_bytes() // one
        if not num_added:
            # This shelf has none.
            self.budget.shrink(one)
            num_added = min(1, self.budget.free_bytes() // one)
        if num_added:
            seats.shelf.resize(seats.shelf.num_slots + min(wanted, num_added))
        return num_added > 0

    def _bytes(self, seats: Seats) -> int:
        """Of one of its slots."""
        return seats.shelf.capacity * self.bytes_per_token
