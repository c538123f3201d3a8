"""The prefix cache: keys, values and recurrent states of earlier sequences, found by their tokens.

Tokens are cached in blocks. The key of a block is a hash of its tokens and of all tokens before it. Keys and values can
be reused up to the end of any block, states only where they were copied: so a sequence of a model with states is stored
with the tokens after its last whole block, its tail, and is found only as far as it was stored. What was stored
together is dropped together.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

import numpy as np
from torch import Tensor

from ...ops.kv_cache import SlotTensors
from ...ops.recurrence import StateKind
from ...shapes.cache_size import CacheSize

BLOCK = 32


@dataclass(frozen=True)
class PrefixEnd:
    """The end of a stored prefix: the hash up to its last whole block, and its tail, int64 tokens as bytes."""

    digest: bytes
    tail: bytes


@dataclass(frozen=True)
class MissingTokens:
    """The tokens start:stop of a sequence, which a prefix cache lacks: whole blocks, and perhaps a tail.

    digests: of the blocks. end: None if the cache keeps no states, or has those after these tokens.
    """

    start: int
    stop: int
    digests: Sequence[bytes]
    end: PrefixEnd | None

    def num_bytes(self, size: CacheSize) -> int:
        """Returns the bytes that they need in the cache, 0 if nothing is missing."""
        return (self.stop - self.start) * size.bytes_per_token + (size.bytes_per_sequence if self.end else 0)


@dataclass(frozen=True, eq=False)
class StoredTokens:
    """Consecutive tokens of a sequence.

    layers: keys, and values if they differ, by layer, [kv_heads, tokens, head_dim]. states: those after the last token,
    each [*shape].
    """

    missing: MissingTokens
    layers: Mapping[int, tuple[Tensor, ...]]
    states: Mapping[StateKind, Tensor]

    @property
    def num_tokens(self) -> int:
        return self.missing.stop - self.missing.start

    def tensors(self) -> Iterator[Tensor]:
        for keys_and_values in self.layers.values():
            yield from keys_and_values
        yield from self.states.values()

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors())


@dataclass(frozen=True)
class StoredRange:
    """Tokens first:stop of those that were stored together."""

    stored: StoredTokens
    first: int
    stop: int


class PrefixCache:
    """Keeps the keys, values and states of stored tokens by prefix, and drops the least recently used first.

    weight_version: the version of the weights that computed the keys, values and states.
    """

    def __init__(self, clock: Iterator[int], num_ahead: int = 0, keeps_states: bool = False) -> None:
        """Creates an empty cache.

        Args:
            clock: counts uses, also those of other caches.
            num_ahead: how many of the next tokens an entry depends on; a block's hash includes these. 0 with states.
            keeps_states: whether the model has recurrent states.
        """
        self.num_bytes = 0
        self._clock, self._num_ahead, self._keeps_states = clock, num_ahead, keeps_states
        # The clock's value at the last use of each, least recently used first.
        self._stored: OrderedDict[StoredTokens, int] = OrderedDict()
        self._places: dict[bytes, tuple[StoredTokens, int]] = {}
        # By the hash up to the last whole block, and by tail.
        self._ends: dict[bytes, dict[bytes, StoredTokens]] = {}

    def tensors(self) -> Iterator[Tensor]:
        for stored in self._stored:
            yield from stored.tensors()

    def find(self, weight_version: int, tokens: np.ndarray, most: int) -> list[StoredRange]:
        """Returns the longest cached prefix of `tokens` that can be continued, at most `most` tokens long.

        Args:
            tokens: int64, [n].
        """
        if self._keeps_states:
            return self._touched(self._longest_end(weight_version, tokens[:most]))
        return self.known_blocks(weight_version, tokens[: most + self._num_ahead])

    def known_blocks(self, weight_version: int, tokens: np.ndarray) -> list[StoredRange]:
        """Returns the cached blocks at the start of `tokens`, int64 [n], whether or not there are states after them."""
        return self._touched(_ranges([place for _, place in self._blocks(weight_version, tokens)]))

    def missing(self, weight_version: int, tokens: np.ndarray) -> MissingTokens:
        """Returns what must be stored so that all of `tokens`, int64 [n], are cached, as far as this cache can."""
        digests = list(self._block_hashes(weight_version, tokens))
        first = next((number for number, digest in enumerate(digests) if digest not in self._places), len(digests))
        stop, new = len(digests) * BLOCK, digests[first:]
        if not self._keeps_states:
            return MissingTokens(first * BLOCK, stop, new, None)
        end = PrefixEnd(digests[-1] if digests else _root(weight_version), tokens[stop:].tobytes())
        if not new and end.tail in self._ends.get(end.digest, ()):
            return MissingTokens(stop, stop, (), None)
        return MissingTokens(first * BLOCK, len(tokens), new, end)

    def add(self, missing: MissingTokens, tensors: SlotTensors, slot: int) -> None:
        """Copies the tokens from a slot, whose states must be those after the last of them."""
        copies = tensors.copies(slot, slice(missing.start, missing.stop))
        stored = StoredTokens(missing, copies, tensors.state_copies(slot) if missing.end else {})
        self._stored[stored] = next(self._clock)
        self.num_bytes += stored.num_bytes
        self._places |= {digest: (stored, number) for number, digest in enumerate(missing.digests)}
        if missing.end:
            self._ends.setdefault(missing.end.digest, {})[missing.end.tail] = stored

    @property
    def oldest(self) -> int | None:
        """The clock's value at the last use of the tokens that are dropped next; None if there are none."""
        return next(iter(self._stored.values()), None)

    def drop_oldest(self) -> None:
        stored, _ = self._stored.popitem(last=False)
        self.num_bytes -= stored.num_bytes
        for digest in stored.missing.digests:
            if self._places[digest][0] is stored:
                del self._places[digest]
        end = stored.missing.end
        if end and (tails := self._ends[end.digest])[end.tail] is stored:
            del tails[end.tail]
            if not tails:
                del self._ends[end.digest]

    def _touched(self, ranges: list[StoredRange]) -> list[StoredRange]:
        # The beginning is useful without the rest, so it must stay longer.
        for each in reversed(ranges):
            self._stored[each.stored] = next(self._clock)
            self._stored.move_to_end(each.stored)
        return ranges

    def _longest_end(self, weight_version: int, tokens: np.ndarray) -> list[StoredRange]:
        """Returns the longest cached prefix that ends where states were stored."""
        blocks = self._blocks(weight_version, tokens)
        digests = [_root(weight_version), *(digest for digest, _ in blocks)]
        for number in range(len(blocks), -1, -1):
            tail = self._longest_tail(digests[number], tokens[number * BLOCK : (number + 1) * BLOCK - 1])
            if tail is not None:
                return [*_ranges([place for _, place in blocks[:number]]), tail]
        return []

    def _longest_tail(self, digest: bytes, following: np.ndarray) -> StoredRange | None:
        """Returns the longest tail at the start of `following`, the tokens after the blocks of this hash."""
        tails = self._ends.get(digest)
        if tails is None:
            return None
        for length in range(len(following), -1, -1):
            if (stored := tails.get(following[:length].tobytes())) is not None:
                return StoredRange(stored, stored.num_tokens - length, stored.num_tokens)
        return None

    def _blocks(self, weight_version: int, tokens: np.ndarray) -> list[tuple[bytes, tuple[StoredTokens, int]]]:
        """Returns the hashes and places of the cached blocks at the start of `tokens`."""
        found = []
        for digest in self._block_hashes(weight_version, tokens):
            place = self._places.get(digest)
            if place is None:
                break
            found.append((digest, place))
        return found

    def _block_hashes(self, weight_version: int, tokens: np.ndarray) -> Iterator[bytes]:
        """Yields the hash of each whole block."""
        digest, length = _root(weight_version), BLOCK + self._num_ahead
        for start in range(0, len(tokens) - length + 1, BLOCK):
            digest = blake2b(digest + tokens[start : start + length].tobytes(), digest_size=16).digest()
            yield digest


def _root(weight_version: int) -> bytes:
    return weight_version.to_bytes(8, "little")


def _ranges(places: Sequence[tuple[StoredTokens, int]]) -> list[StoredRange]:
    """Joins consecutive blocks that were stored together."""
    grouped = ((stored, list(members)) for stored, members in groupby(places, key=lambda place: place[0]))
    return [StoredRange(each, blocks[0][1] * BLOCK, (blocks[-1][1] + 1) * BLOCK) for each, blocks in grouped]


def num_tokens_of(ranges: Sequence[StoredRange]) -> int:
    return sum(each.stop - each.first for each in ranges)


def truncate(ranges: Sequence[StoredRange], num_tokens: int) -> list[StoredRange]:
    """Returns the first `num_tokens` tokens, of a model without states."""
    found, left = [], num_tokens
    for each in ranges:
        num = min(left, each.stop - each.first)
        found += [StoredRange(each.stored, each.first, each.first + num)] if num else []
        left -= num
    return found


def restore(ranges: Sequence[StoredRange], tensors: SlotTensors, slot: int) -> None:
    """Copies the tokens to the start of the slot, and clears the rest of it. States are those after the last one."""
    for layer, stored in ranges[0].stored.layers.items():
        own = tensors.of_layer(layer, stored[0].transpose(0, 1), len(stored) == 1)[: len(stored)]
        for kind, cached in enumerate(own):
            stop = 0
            for each in ranges:
                part = each.stored.layers[layer][kind][:, each.first : each.stop]
                cached[slot, :, stop : stop + part.shape[1]] = part
                stop += part.shape[1]
            cached[slot, :, stop:] = 0
    for kind, state in ranges[-1].stored.states.items():
        tensors.states(kind, state.device)[slot] = state
