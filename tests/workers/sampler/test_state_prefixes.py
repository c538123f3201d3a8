"""The prefix cache of a model with states, against a search among all sequences that were stored."""

from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
import torch
from trainhouse.workers.ops.attention import Packing, pack_lengths
from trainhouse.workers.ops.kv_cache import SlotTensors
from trainhouse.workers.sampler.cache.prefix_cache import BLOCK, PrefixCache, num_tokens_of, restore

from ..moving_sum import MovingSum

OP, LAYER, CPU = MovingSum(width=2), 4, torch.device("cpu")
CAPACITY = 6 * BLOCK


def filled(tokens: np.ndarray) -> SlotTensors:
    """Returns slots of which the second has these tokens: keys and values are the sums at each, the state is the
    last.
    """
    tensors = SlotTensors(CAPACITY)
    tensors.resize(2)
    inputs = [torch.from_numpy(tokens).float()[:, None].expand(-1, 2), torch.full((len(tokens), 1), 0.5)]
    sums, state = OP.scan(inputs, Packing(pack_lengths([len(tokens)])))
    for each in tensors.of_layer(LAYER, sums[:, None]):
        each[1, 0, : len(tokens)] = sums
    tensors.states(OP.state, CPU)[1] = state[0]
    return tensors


def store(cache: PrefixCache, tokens: np.ndarray, version: int = 0) -> None:
    cache.add(cache.missing(version, tokens), filled(tokens), 1)


def restored(cache: PrefixCache, tokens: np.ndarray, most: int, version: int = 0) -> int:
    """Returns the number of tokens found, after comparing keys, values and state with those of a whole pass."""
    found = cache.find(version, tokens, most)
    num = num_tokens_of(found)
    if num:
        target = filled(np.full(CAPACITY, 9))
        restore(found, target, 1)
        for mine, wanted in zip(target.tensors(), filled(tokens[:num]).tensors(), strict=True):
            torch.testing.assert_close(mine[1], wanted[1])
    return num


def longest_stored(stored: Sequence[np.ndarray], tokens: np.ndarray, most: int) -> int:
    fits = [len(each) for each in stored if len(each) <= most and (tokens[: len(each)] == each).all()]
    return max(fits, default=0)


@pytest.mark.parametrize("seed", range(3))
def test_the_longest_stored_beginning_is_found(seed: int) -> None:
    random, cache, stored = np.random.default_rng(seed), PrefixCache(count(), keeps_states=True), []
    sizes = set()
    for _ in range(60):
        before = stored[random.integers(len(stored))] if stored else np.zeros(0, np.int64)
        tokens = before[: random.integers(len(before) + 1)] if random.random() < 0.5 else before
        tokens = np.concatenate([tokens, random.integers(0, 2, random.integers(1, 50))])[: CAPACITY - 1]
        most = int(random.integers(len(tokens) - 5, len(tokens) + 1)) if len(tokens) > 5 else len(tokens)
        found = restored(cache, tokens, most)
        assert found == longest_stored(stored, tokens, most)
        assert not restored(cache, tokens, most, version=1)
        sizes.add(found % BLOCK)
        store(cache, tokens)
        stored.append(tokens)
        assert not cache.missing(0, tokens).end and restored(cache, tokens, len(tokens)) == len(tokens)
    assert len(sizes) > 10 and {0} < sizes


def test_dropped_tokens_are_not_found_and_leave_nothing() -> None:
    cache, tokens = PrefixCache(count(), keeps_states=True), np.arange(4 * BLOCK)
    for length in (50, 3 * BLOCK, 3 * BLOCK + 5):
        store(cache, tokens[:length])
    cache.drop_oldest()
    # Later blocks are of no use without the first one.
    assert restored(cache, tokens, len(tokens)) == 0
    store(cache, tokens[:40])
    assert restored(cache, tokens, len(tokens)) == 3 * BLOCK + 5
    sizes = []
    while cache.oldest is not None:
        sizes.append(sum(each.nbytes for each in cache.tensors()))
        assert cache.num_bytes == sizes[-1]
        cache.drop_oldest()
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 3
    assert not cache.num_bytes and not cache._ends and not cache._places


def test_a_beginning_without_a_state_is_known_but_not_found() -> None:
    cache, tokens = PrefixCache(count(), keeps_states=True), np.arange(4 * BLOCK)
    store(cache, tokens[: 2 * BLOCK + 9])
    assert restored(cache, tokens, 2 * BLOCK + 8) == 0
    assert num_tokens_of(cache.known_blocks(0, tokens[: 2 * BLOCK + 8])) == 2 * BLOCK
    missing = cache.missing(0, tokens[: 2 * BLOCK])
    assert missing.end and missing.start == missing.stop == 2 * BLOCK
    store(cache, tokens[: 2 * BLOCK])
    assert restored(cache, tokens, 2 * BLOCK + 8) == 2 * BLOCK
