"""The prefix cache: keys and values of earlier sequences, found by their tokens.

Tokens are cached in blocks. The key of a block is a hash of its tokens and of all tokens before it. Blocks that were
stored together are dropped together.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

import numpy as np
from torch import Tensor

from ...ops.kv_cache import SlotTensors

BLOCK = 32


@dataclass(frozen=True, eq=False)
class StoredBlocks:
    """Consecutive blocks. layers: keys and values by layer, [kv_heads, blocks * BLOCK, head_dim]."""

    digests: Sequence[bytes]
    layers: Mapping[int, tuple[Tensor, Tensor]]

    def tensors(self) -> Iterator[Tensor]:
        for keys_and_values in self.layers.values():
            yield from keys_and_values

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors())


@dataclass(frozen=True)
class BlockRange:
    """Blocks first:stop of those that were stored together."""

    stored: StoredBlocks
    first: int
    stop: int


class PrefixCache:
    """Drops the least recently used blocks first.

    weight_version: the version of the weights that computed the keys and values.
    """

    def __init__(self, clock: Iterator[int], num_ahead: int = 0) -> None:
        """Creates an empty cache.

        Args:
            clock: counts uses, also those of other caches.
            num_ahead: how many of the next tokens an entry depends on; a block's hash includes these.
        """
        self.num_bytes = 0
        self._clock, self._num_ahead = clock, num_ahead
        # The clock's value at the last use of each, least recently used first.
        self._stored: OrderedDict[StoredBlocks, int] = OrderedDict()
        self._places: dict[bytes, tuple[StoredBlocks, int]] = {}

    def tensors(self) -> Iterator[Tensor]:
        for stored in self._stored:
            yield from stored.tensors()

    def find(self, weight_version: int, tokens: np.ndarray, most: int) -> list[BlockRange]:
        """Returns the longest cached prefix of `tokens`, at most `most` tokens long.

        Args:
            tokens: int64, [n].
        """
        places = []
        for digest in self._block_hashes(weight_version, tokens[: most + self._num_ahead]):
            place = self._places.get(digest)
            if place is None:
                break
            places.append(place)
        block_ranges = [
            BlockRange(stored, members[0][1], members[-1][1] + 1)
            for stored, members in ((stored, list(m)) for stored, m in groupby(places, key=lambda place: place[0]))
        ]
        # The beginning is useful without the rest, so it must stay longer.
        for block_range in reversed(block_ranges):
            self._stored[block_range.stored] = next(self._clock)
            self._stored.move_to_end(block_range.stored)
        return block_ranges

    def missing(self, weight_version: int, tokens: np.ndarray) -> tuple[int, list[bytes]]:
        """Returns the number of the first block that is not cached, and the hashes of the whole blocks from there.

        Args:
            tokens: int64, [n].
        """
        digests = list(self._block_hashes(weight_version, tokens))
        first = next((number for number, digest in enumerate(digests) if digest not in self._places), len(digests))
        return first, digests[first:]

    def add(self, digests: Sequence[bytes], tensors: SlotTensors, slot: int, first_block: int) -> None:
        """Copies the blocks from a slot."""
        part = slice(first_block * BLOCK, (first_block + len(digests)) * BLOCK)
        stored = StoredBlocks(tuple(digests), tensors.copies(slot, part))
        self._stored[stored] = next(self._clock)
        self.num_bytes += stored.num_bytes
        self._places |= {digest: (stored, number) for number, digest in enumerate(digests)}

    @property
    def oldest(self) -> int | None:
        """The clock's value at the last use of the blocks that are dropped next; None if there are none."""
        return next(iter(self._stored.values()), None)

    def drop_oldest(self) -> None:
        stored, _ = self._stored.popitem(last=False)
        self.num_bytes -= stored.num_bytes
        for digest in stored.digests:
            if self._places[digest][0] is stored:
                del self._places[digest]

    def _block_hashes(self, weight_version: int, tokens: np.ndarray) -> Iterator[bytes]:
        """Yields the hash of each whole block."""
        digest, length = weight_version.to_bytes(8, "little"), BLOCK + self._num_ahead
        for start in range(0, len(tokens) - length + 1, BLOCK):
            digest = blake2b(digest + tokens[start : start + length].tobytes(), digest_size=16).digest()
            yield digest


def num_tokens_of(block_ranges: Sequence[BlockRange]) -> int:
    """Returns the number of tokens."""
    return BLOCK * sum(block_range.stop - block_range.first for block_range in block_ranges)


def truncate(block_ranges: Sequence[BlockRange], num_tokens: int) -> list[BlockRange]:
    """Returns the first `num_tokens` tokens, rounded down to whole blocks."""
    found, left = [], num_tokens // BLOCK
    for block_range in block_ranges:
        num = min(left, block_range.stop - block_range.first)
        found += [BlockRange(block_range.stored, block_range.first, block_range.first + num)] if num else []
        left -= num
    return found


def restore(block_ranges: Sequence[BlockRange], tensors: SlotTensors, slot: int) -> None:
    """Copies the blocks to the start of the slot, and clears the rest of it."""
    for layer, (first_keys, _) in block_ranges[0].stored.layers.items():
        for kind, cached in enumerate(tensors.of_layer(layer, first_keys.transpose(0, 1))):
            stop = 0
            for block_range in block_ranges:
                part = block_range.stored.layers[layer][kind][:, block_range.first * BLOCK : block_range.stop * BLOCK]
                cached[slot, :, stop : stop + part.shape[1]] = part
                stop += part.shape[1]
            cached[slot, :, stop:] = 0
