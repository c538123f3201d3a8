"""Which rows hold a slot of the key/value cache, and how large that cache is made within its budget."""

from transformers import PreTrainedConfig

from ..attention import KeyValueCache
from .jobs import Row

# Capacity grows in steps of this many tokens.
_BLOCK = 64


class Slots:
    """rows[i] stands in slot i: the slots in use are the first ones, so that decoding reads the cache in place."""

    def __init__(self, config: PreTrainedConfig, bytes_per_value: int, budget_bytes: int, most_rows: int) -> None:
        heads, num_layers = config.num_attention_heads, config.num_hidden_layers
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.bytes_per_token = 2 * num_layers * kv_heads * head_dim * bytes_per_value
        self.budget_bytes = budget_bytes
        self.most_rows = most_rows
        self.rows: list[Row] = []
        self.cache = KeyValueCache(num_layers, num_slots=0, capacity=0)

    def fits(self, num_rows: int, length: int) -> bool:
        """Whether `num_rows` sequences of up to `length` tokens fit the budget."""
        return num_rows <= self.most_rows and num_rows * _blocks(length) * self.bytes_per_token <= self.budget_bytes

    def admits(self, row: Row) -> bool:
        """Whether the row fits beside the others, all with room to grow lest one be preempted at once."""
        if not self.rows:
            return self.fits(1, row.length + 1)
        soon = max(min(each.length + _BLOCK, each.longest_cached) for each in (*self.rows, row))
        return self.fits(len(self.rows) + 1, soon)

    def longest(self) -> int:
        return max((row.length for row in self.rows), default=0)

    def add(self, row: Row) -> int:
        """The row's slot, there once `reserve` is called."""
        self.rows.append(row)
        return len(self.rows) - 1

    def reserve(self, length: int) -> None:
        """Makes the cache hold `length` tokens of every row: generously where the budget allows, else exactly."""
        cache, num_rows = self.cache, len(self.rows)
        if num_rows <= cache.num_slots and length <= cache.capacity:
            return
        num_slots = max(cache.num_slots, min(1 << (num_rows - 1).bit_length(), self.most_rows))
        capacity = max(cache.capacity, _blocks(length + length // 2))
        if not self.fits(num_slots, capacity):
            num_slots, capacity = num_rows, _blocks(length)
        cache.resize(num_slots, capacity)

    def remove(self, row: Row) -> None:
        """The last row moves into the hole."""
        slot, last = self.rows.index(row), len(self.rows) - 1
        if slot != last:
            self.cache.copy_slot(last, [slot])
            self.rows[slot] = self.rows[last]
        self.rows.pop()


def _blocks(length: int) -> int:
    """length rounded up to a whole number of blocks"""
    return -(-length // _BLOCK) * _BLOCK
